"""Tasks that run in the caller's process: their items are resolved when the call returns."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain
from celery.exceptions import Ignore, Reject, Retry

import lastbit.integrations
from lastbit import Client, ItemIds
from lastbit.batch import BatchHandle
from lastbit.integrations import current_item
from lastbit.integrations.celery import Lastbit, Skipped


class Eager:
    """An app with eager tasks, and a batch of one item."""

    def __init__(self, url: str, **options: Any) -> None:
        self.app = Celery("eager", set_as_current=False)
        self.app.conf.task_always_eager = True
        self.lastbit = Lastbit(self.app, url, **options)
        app = self.app

        @app.task(name="end", bind=True, max_retries=1)
        def end(task: Any, how: str, *args: Any) -> str:
            if how == "retry":
                raise task.retry(countdown=0)
            if how == "retry once" and task.request.retries == 0:
                raise task.retry(countdown=0)
            if how == "replace":
                return task.replace(app.signature("end", ("fail",)))  # type: ignore[no-any-return]
            if how == "ignore":
                raise Ignore
            if how == "skip":
                raise Skipped("not in the catalog any more")
            if how == "skip as elsewhere":
                raise lastbit.integrations.Skipped("not in the catalog any more")
            if how == "reject":
                raise Reject("unreadable")
            if how == "fail":
                raise ValueError("no such product")
            return "succeed"

        self.end = end


def opened(client: Client, items: int = 1) -> tuple[BatchHandle, ItemIds]:
    batch = client.open(items=items, sealed=True)
    assert batch.ids is not None
    return batch, batch.ids


def failures(batch: BatchHandle) -> list[str]:
    """The reasons, once the batch is complete: without waiting."""
    assert batch.refresh().complete
    return [reason for failed in batch.failed() for reason in failed.reasons.values()]


def test_a_task_knows_its_item_also_around_another_one(client: Client) -> None:
    """One that isn't tracked knows none, even within one that is."""
    eager = Eager(client.url)
    notes: list[tuple[str, str | None]] = []

    @eager.app.task(name="note")
    def note(name: str, *args: Any) -> None:
        notes.append((name, current_item(None)))
        if name == "outer":
            note.apply(("untracked",))
            notes.append(("outer again", current_item(None)))

    batch, (one, other) = opened(client, 2)
    note.apply_async(("outer",), task_id=one)
    chain(note.si("earlier"), note.si("last"), app=eager.app).apply_async(task_id=other)
    assert notes == [
        ("outer", one),
        ("untracked", None),
        ("outer again", one),
        ("earlier", other),
        ("last", other),
    ]
    assert current_item(None) is None
    assert batch.refresh().succeeded


@pytest.mark.parametrize(
    ("how", "reasons"),
    [
        ("succeed", []),
        ("retry once", []),
        ("retry", ["MaxRetriesExceededError: Can't retry end"]),
        ("fail", ["ValueError: no such product"]),
        ("ignore", []),
        ("reject", ["Reject: "]),
        ("replace", ["ValueError: no such product"]),
    ],
)
@pytest.mark.parametrize("call", ["apply", "apply_async"])
def test_the_outcome_resolves_the_item(
    client: Client, celery_service: str, how: str, reasons: list[str], call: str
) -> None:
    eager = Eager(celery_service)
    batch, ids = opened(client)
    getattr(eager.end, call)((how,), task_id=ids[0])
    failed_items = failures(batch)
    assert [reason[: len(start)] for reason, start in zip(failed_items, reasons, strict=True)] == reasons


@pytest.mark.parametrize(
    ("how", "error", "reason"),
    [("fail", ValueError, "ValueError: no such product"), ("retry", Retry, "Retry: Retry in 0s")],
)
def test_an_exception_that_propagates_is_the_outcome(
    client: Client, celery_service: str, how: str, error: type[Exception], reason: str
) -> None:
    """Celery doesn't run such a retry."""
    eager = Eager(celery_service)
    batch, ids = opened(client)
    with pytest.raises(error):
        eager.end.apply((how,), task_id=ids[0], throw=True)
    assert failures(batch) == [reason]


def test_an_ignored_task_fails_if_the_option_says_so(client: Client, celery_service: str) -> None:
    eager = Eager(celery_service, when_ignored="fail")
    batch, ids = opened(client)
    eager.end.apply(("ignore",), task_id=ids[0])
    assert failures(batch) == ["ignored"]


def test_an_ignored_task_is_skipped_if_the_option_says_so(client: Client, celery_service: str) -> None:
    eager = Eager(celery_service, when_ignored="skip")
    batch, ids = opened(client)
    eager.end.apply(("ignore",), task_id=ids[0])
    assert [span.reasons for span in batch.skipped()] == [{ids[0]: "ignored"}]


@pytest.mark.parametrize("how", ["skip", "skip as elsewhere"])
def test_a_task_skips_its_item(client: Client, celery_service: str, how: str) -> None:
    eager = Eager(celery_service)
    batch, ids = opened(client)
    eager.end.apply((how,), task_id=ids[0])
    assert batch.refresh().succeeded
    assert [span.reasons for span in batch.skipped()] == [{ids[0]: "not in the catalog any more"}]


def test_a_fan_out_of_eager_tasks_is_complete_when_it_returns(celery_service: str) -> None:
    eager = Eager(celery_service)
    end = eager.end
    batch = eager.lastbit.fan_out(
        [end.s("succeed"), end.s("fail"), chain(end.s("succeed"), end.si("retry once")), chain(end.s("fail"), end.s())]
    )
    assert failures(batch) == ["ValueError: no such product"] * 2


def test_other_apps_and_other_ids_are_untouched(client: Client, celery_service: str) -> None:
    Eager(celery_service)
    other = Celery("other", set_as_current=False)

    @other.task
    def untracked() -> str:
        return "done"

    batch, ids = opened(client)
    assert untracked.apply(task_id=ids[0]).get() == "done"
    assert batch.refresh().pending == 1
