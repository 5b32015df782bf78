"""A process dies at each point of each transaction; a retry brings the model's result every time.

A request runs in a separate process that exits before or after one of its statements, before its COMMIT, or after its
COMMIT and before its answer. Then it is sent again with the same Idempotency-Key. If the COMMIT was done, the model
applies the request twice, else once; the retry's answer and everything that can be read must match the model.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from core.acks import parents
from core.batches import descendants, nesting
from core.commits.combiner import Inline
from core.service import Service
from core.storage import schema, tables
from core.storage.database import Database
from tests.guarantees.drivers import journaled
from tests.guarantees.models.service import Model, Request, assert_equal, bits, perform
from tests.guarantees.programs.dying import Mortals, Written, mortals
from tests.mutants import mutant
from tests.support.servers import ServiceProcess

GROUP = 64
numbers = itertools.count()


@pytest.fixture(scope="module")
def dying() -> Iterator[Mortals]:
    with mortals() as server:
        yield server


@dataclass
class Ground:
    """A service with its model; both get the same requests."""

    service: Service
    model: Model

    def do(self, request: Request) -> dict[str, object]:
        """Perform the request on both; their answers must be equal."""
        answer = perform(self.service, request)
        assert answer == self.model.perform(request, answer.get("batch"))
        return answer

    def batch(self, items: int = 2 * GROUP + 10, *, sealed: bool = False, **opening: object) -> int:
        opening_answer = self.do(
            {"verb": "open", "opening": {"group_size": GROUP, "items": items, "sealed": sealed, **opening}}
        )
        return int(opening_answer["batch"])  # type: ignore[call-overload]

    def ack(self, batch: int, *numbers: int, verb: str = "ack", reason: str | None = None) -> None:
        items = [[batch, *divmod(number, GROUP)] for number in numbers]
        self.do({"verb": verb, "items": items, "reason": reason} if verb != "ack" else {"verb": verb, "items": items})


def opens_a_batch(ground: Ground) -> Request:
    opening = {"key": "catalog", "labels": {"team": "search"}, "group_size": GROUP, "items": 7, "sealed": True}
    return {"verb": "open", "opening": opening, "key": f"open-{next(numbers)}"}


def opens_a_batch_that_is_complete_at_once(ground: Ground) -> Request:
    opening = {"key": "empty", "sealed": True}
    return {"verb": "open", "opening": opening, "key": f"open-{next(numbers)}"}


def opens_a_batch_with_a_callback(ground: Ground) -> Request:
    opening = {"key": "called", "items": 7, "callback": ["https://receiver.example/hook", ["batch.completed"]]}
    return {"verb": "open", "opening": opening, "key": f"open-{next(numbers)}"}


def extends(ground: Ground) -> Request:
    extension = {"verb": "extend", "batch": ground.batch(GROUP - 3), "count": 2 * GROUP, "key": "chunk-1"}
    return {**extension, "digest": "9f2c1d60"}


def extends_until_it_seals_itself(ground: Ground) -> Request:
    return {"verb": "extend", "batch": ground.batch(3, seal_at=7), "count": 4, "key": "chunk-1"}


def extends_a_child_until_its_seal_cancels_it(ground: Ground) -> Request:
    opening = {
        "tolerated_failure_percentage": 10,
        "on_exceeded": "cancel",
        "parent": [ground.batch(1, sealed=True), 0, 0],
    }
    batch = ground.batch(3, seal_at=7, **opening)
    ground.ack(batch, 0, verb="fail")
    return {"verb": "extend", "batch": batch, "count": 4, "key": "chunk-1"}


def extends_on_behalf_of_an_item(ground: Ground) -> Request:
    batch = ground.batch(GROUP - 3, sealed=True)
    ground.ack(batch, 0, 1)
    extension = {"verb": "extend", "batch": batch, "count": 2 * GROUP, "key": "links"}
    return {**extension, "by": [batch, 0, 2]}


def seals(ground: Ground) -> Request:
    return {"verb": "seal", "batch": ground.batch(), "key": "seal-1"}


def seals_and_completes(ground: Ground) -> Request:
    batch = ground.batch(3)
    ground.ack(batch, 0, 1, 2)
    return {"verb": "seal", "batch": batch, "key": "seal-1"}


def updates(ground: Ground) -> Request:
    batch = ground.batch(4, labels={"team": "search"}, tolerated_failures=2)
    ground.ack(batch, 0, 1, verb="fail")
    patch = {"labels": {"team": None, "run": "2"}, "tolerated_failures": 1, "deadline": "2099-01-01T00:00:00+00:00"}
    return {"verb": "update", "batch": batch, "patch": patch, "key": "update-1"}


def updates_a_child_which_is_cancelled(ground: Ground) -> Request:
    child = ground.batch(4, parent=[ground.batch(1, sealed=True), 0, 0], tolerated_failures=2)
    ground.ack(child, 0, 1, verb="fail")
    patch = {"tolerated_failures": 1, "on_exceeded": "cancel"}
    return {"verb": "update", "batch": child, "patch": patch, "key": "update-1"}


def redrives_by_reason(ground: Ground) -> Request:
    batch = ground.batch()
    ground.ack(batch, 1, 2, 70, verb="fail", reason="no parser")
    ground.ack(batch, 3, verb="fail")
    return {"verb": "redrive", "batch": batch, "reason": "no parser", "key": "redrive-1"}


def redrives_what_is_pending(ground: Ground) -> Request:
    batch = ground.batch()
    ground.ack(batch, 1, 2, 70)
    ground.batch(1, parent=[batch, 0, 5])
    return {"verb": "redrive", "batch": batch, "pending": True, "key": "redrive-1"}


def cancels(ground: Ground) -> Request:
    batch = ground.batch()
    ground.ack(batch, 1, 2)
    return {"verb": "cancel", "batch": batch}


def acks_into_new_groups(ground: Ground) -> Request:
    batch = ground.batch()
    return {"verb": "ack", "items": [[batch, 0, 0], [batch, 0, 5], [batch, 2, 9], [batch, 2, 10]], "key": "delivery"}


def acks_into_groups_that_have_a_row(ground: Ground) -> Request:
    batch = ground.batch(sealed=True)
    ground.ack(batch, 3, 70, 71)
    return {"verb": "ack", "masks": [[batch, 0, bits({1, 2, 3})], [batch, 1, bits({5, 6, 7, 60})]], "key": "delivery"}


def completes_the_batch(ground: Ground) -> Request:
    batch = ground.batch(GROUP + 2, sealed=True)
    ground.ack(batch, *range(3, GROUP))
    return {
        "verb": "ack",
        "items": [[batch, 0, index] for index in range(3)] + [[batch, 1, 0], [batch, 1, 1]],
        "key": "d",
    }


def fails_with_a_reason_and_completes(ground: Ground) -> Request:
    batch = ground.batch(4, sealed=True)
    ground.ack(batch, 0, 1)
    return {"verb": "fail", "items": [[batch, 0, 1], [batch, 0, 2], [batch, 0, 3]], "reason": "no parser", "key": "d"}


def skips_with_a_reason_and_completes(ground: Ground) -> Request:
    """Of the three items, two are pending, and one has failed for another reason."""
    batch = ground.batch(GROUP + 4, sealed=True)
    ground.ack(batch, *range(3, GROUP + 3))
    ground.ack(batch, 1, verb="fail", reason="no parser")
    ground.ack(batch, 2, verb="skip", reason="a duplicate")
    items = [[batch, 0, 0], [batch, 0, 1], [batch, 0, 2], [batch, 1, 3]]
    return {"verb": "skip", "items": items, "reason": "not needed", "key": "d"}


def skips_the_last_failed_items_of_a_child(ground: Ground) -> Request:
    child = _child(ground)
    ground.ack(child, 0, 1, verb="fail", reason="no parser")
    return {"verb": "skip", "masks": [[child, 0, bits({0, 1})]], "key": "skip"}


def acks_skipped_items(ground: Ground) -> Request:
    batch = ground.batch(4, sealed=True)
    ground.ack(batch, 0, 1, 2, verb="skip", reason="not needed")
    return {"verb": "ack", "items": [[batch, 0, 1], [batch, 0, 2], [batch, 0, 3]], "key": "d"}


def passes_the_tolerance(ground: Ground) -> Request:
    batch = ground.batch(4, sealed=True, tolerated_failures=1, tolerated_failure_percentage=50)
    ground.ack(batch, 0, verb="fail")
    return {"verb": "fail", "items": [[batch, 0, 1], [batch, 0, 2]], "key": "d"}


def is_redriven_within_the_tolerance(ground: Ground) -> Request:
    batch = ground.batch(4, sealed=True, tolerated_failures=1)
    ground.ack(batch, 0, 1, verb="fail")
    ground.ack(batch, 2, 3)
    return {"verb": "ack", "items": [[batch, 0, 1]], "key": "redrive"}


def redrives_the_last_failed_items(ground: Ground) -> Request:
    batch = ground.batch(4, sealed=True)
    ground.ack(batch, 0, 1)
    ground.ack(batch, 2, 3, verb="fail", reason="no parser")
    return {"verb": "ack", "masks": [[batch, 0, bits({2, 3})]], "key": "redrive"}


def completes_two_batches_in_one_transaction(ground: Ground) -> Request:
    first, other = ground.batch(3, sealed=True), ground.batch(GROUP + 1, sealed=True)
    ground.ack(first, 0)
    ground.ack(other, *range(GROUP))
    return {"verb": "ack", "items": [[other, 1, 0], [first, 0, 1], [first, 0, 2]], "key": "both"}


def _child(ground: Ground, parent: int | None = None, *, sealed: bool = True) -> int:
    """A child of its parent's only item: its success is also the parent's."""
    if parent is None:
        parent = ground.batch(1, sealed=True)
    return ground.batch(2, sealed=sealed, parent=[parent, 0, 0])


def completes_a_child(ground: Ground) -> Request:
    root = ground.batch(1, sealed=True)
    child = _child(ground, ground.batch(1, sealed=True, parent=[root, 0, 0]))
    ground.ack(child, 0)
    return {"verb": "ack", "items": [[child, 0, 1]], "key": "delivery"}


def seals_a_child_and_completes_it(ground: Ground) -> Request:
    child = _child(ground, sealed=False)
    ground.ack(child, 0)
    ground.ack(child, 1, verb="fail")
    return {"verb": "seal", "batch": child, "key": "seal-1"}


def redrives_a_child(ground: Ground) -> Request:
    child = _child(ground)
    ground.ack(child, 0)
    ground.ack(child, 1, verb="fail", reason="no parser")
    return {"verb": "ack", "items": [[child, 0, 1]], "key": "redrive"}


def passes_the_tolerance_of_a_child_which_is_cancelled(ground: Ground) -> Request:
    child = ground.batch(4, parent=[ground.batch(1, sealed=True), 0, 0], tolerated_failures=1, on_exceeded="cancel")
    ground.ack(child, 0, verb="fail")
    return {"verb": "fail", "items": [[child, 0, 1]]}


def seals_a_child_beyond_its_tolerance(ground: Ground) -> Request:
    parent = ground.batch(1, sealed=True)
    child = ground.batch(4, parent=[parent, 0, 0], tolerated_failure_percentage=49, on_exceeded="cancel")
    ground.ack(child, 0, 1, verb="fail")
    return {"verb": "seal", "batch": child, "key": "seal-1"}


def cancels_a_child(ground: Ground) -> Request:
    return {"verb": "cancel", "batch": _child(ground)}


def cancels_all_below(ground: Ground) -> Request:
    root = ground.batch(2, sealed=True)
    child = ground.batch(2, sealed=True, parent=[root, 0, 0])
    ground.batch(1, parent=[child, 0, 1])
    return {"verb": "cancel", "batch": root, "children": True, "reason": "the wrong catalog"}


def cancels_all_below_by_a_failure(ground: Ground) -> Request:
    root = ground.batch(4, sealed=True, tolerated_failures=1, on_exceeded="cancel")
    ground.ack(root, 1, verb="fail")
    _child(ground, root)
    return {"verb": "fail", "items": [[root, 0, 2]]}


def reopens(ground: Ground) -> Request:
    batch = ground.batch(tolerated_failures=1, on_exceeded="cancel")
    ground.ack(batch, 1, 2, verb="fail", reason="no parser")
    return {"verb": "reopen", "batch": batch, "reason": "a mistake", "key": "reopen-1"}


def reopens_a_parent_and_child(ground: Ground) -> Request:
    root = ground.batch(3, sealed=True)
    parent = ground.batch(2, sealed=True, parent=[root, 0, 0])
    child = ground.batch(1, sealed=True, parent=[parent, 0, 0])
    ground.do({"verb": "cancel", "batch": parent})
    ground.ack(child, 0)
    return {"verb": "reopen", "batch": parent, "key": "reopen-1"}


def opens_a_child_that_is_complete_at_once(ground: Ground) -> Request:
    parent = ground.batch(1, sealed=True)
    return {"verb": "open", "opening": {"sealed": True, "parent": [parent, 0, 0]}, "key": f"open-{next(numbers)}"}


def opens_a_live_child(ground: Ground) -> Request:
    parent = ground.batch(1, sealed=True)
    return {"verb": "open", "opening": {"items": 1, "parent": [parent, 0, 0]}, "key": f"open-{next(numbers)}"}


def acks_held_items_and_others(ground: Ground) -> Request:
    parent = ground.batch(GROUP + 4, sealed=True)
    for number in (2, GROUP + 1):
        ground.batch(1, parent=[parent, *divmod(number, GROUP)])
    return {"verb": "ack", "masks": [[parent, 0, bits({1, 2, 3})]], "items": [[parent, 1, 1]], "key": "delivery"}


def expires_idle_batches(ground: Ground) -> Request:
    for sealed in (False, True):
        batch = ground.batch(5, sealed=sealed)
        ground.ack(batch, 1)
        ground.model.time_passes(ground.service, batch)
    return {"verb": "janitor"}


def expires_overdue_batches(ground: Ground) -> Request:
    child = _child(ground)
    batch = ground.batch(5, sealed=True)
    ground.ack(batch, 1)
    parent = ground.batch(1, sealed=True)
    _child(ground, parent)
    for overdue in (child, batch, parent):
        ground.model.deadline_passes(ground.service, overdue)
    return {"verb": "deadlines"}


def _large(ground: Ground) -> int:
    """A batch whose purge takes several chunks of each table."""
    batch = ground.batch(3 * GROUP)
    ground.do({"verb": "extend", "batch": batch, "count": 3, "key": "chunk-1"})
    ground.ack(batch, 1, GROUP + 1, 2 * GROUP + 1)
    ground.ack(batch, 2, 3, 4, verb="fail", reason="no parser")
    ground.ack(batch, 5, 6, 7, verb="skip", reason="not needed")
    return batch


def deletes(ground: Ground) -> Request:
    return {"verb": "delete", "batch": _large(ground)}


def removes_what_ended_long_ago(ground: Ground) -> Request:
    batch = _large(ground)
    ground.do({"verb": "cancel", "batch": batch})
    ground.model.time_passes(ground.service, batch)
    return {"verb": "janitor"}


SCENARIOS: list[Callable[[Ground], Request]] = [
    *(
        opens_a_batch,
        opens_a_batch_with_a_callback,
        opens_a_batch_that_is_complete_at_once,
        extends,
        extends_until_it_seals_itself,
        extends_on_behalf_of_an_item,
        seals,
        seals_and_completes,
        cancels,
        reopens,
    ),
    *(updates, redrives_by_reason, redrives_what_is_pending),
    *(acks_into_new_groups, acks_into_groups_that_have_a_row, completes_the_batch, fails_with_a_reason_and_completes),
    *(redrives_the_last_failed_items, completes_two_batches_in_one_transaction),
    *(skips_with_a_reason_and_completes, acks_skipped_items),
    *(passes_the_tolerance, is_redriven_within_the_tolerance),
    completes_a_child,
]
OF_CHILDREN: list[Callable[[Ground], Request]] = [
    extends_a_child_until_its_seal_cancels_it,
    *(seals_a_child_and_completes_it, redrives_a_child, cancels_a_child, updates_a_child_which_is_cancelled),
    *(opens_a_child_that_is_complete_at_once, passes_the_tolerance_of_a_child_which_is_cancelled),
    *(seals_a_child_beyond_its_tolerance, opens_a_live_child, acks_held_items_and_others),
    skips_the_last_failed_items_of_a_child,
    *(cancels_all_below, cancels_all_below_by_a_failure, reopens_a_parent_and_child),
]
JOURNALED = [
    extends_on_behalf_of_an_item,
    *(acks_into_new_groups, acks_into_groups_that_have_a_row, completes_the_batch, fails_with_a_reason_and_completes),
    *(redrives_the_last_failed_items, completes_two_batches_in_one_transaction, completes_a_child),
    *(skips_with_a_reason_and_completes, acks_skipped_items),
    *(passes_the_tolerance_of_a_child_which_is_cancelled, acks_held_items_and_others),
]
FEWEST_POINTS = 4
"""A first read, a write, before and after the COMMIT: fewer would mean that points are not counted."""


def _ground(database: Database) -> Ground:
    return Ground(Service(database, combiner=Inline, sender=Written(Path(os.devnull))), Model())


@mutant(
    "an-ack-commits-its-bits-before-its-counts",
    "core.acks.flush:flush",
    "pipeline = Pipeline(tx)",
    "tx.commit()\npipeline = Pipeline(tx)",
)
@mutant(
    "an-extend-commits-its-numbers-before-its-key",
    "core.batches.writing:BatchWrites._change",
    "keys = [dialect.row(row) for row in issued]",
    """
self.pipeline.flush()
self.pipeline.tx.commit()
keys = [dialect.row(row) for row in issued]
""",
)
@mutant(
    "a-seal-that-completes-does-not-keep-its-key",
    "core.batches.batch:settled",
    'columns["completed_by"] = by',
    "pass",
)
@pytest.mark.parametrize(
    "scenario",
    [*SCENARIOS, *(pytest.param(scenario, marks=pytest.mark.slow) for scenario in OF_CHILDREN)],
    ids=lambda scenario: scenario.__name__,
)
def test_a_retry_after_a_crash_at_any_point_matches_the_model(
    database: Database, dying: Mortals, scenario: Callable[[Ground], Request]
) -> None:
    """Killed before each statement, before the commit or after it, the request is sent again and has its effect
    once."""
    _die_everywhere(database, dying, scenario, with_journal=False)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", JOURNALED, ids=lambda scenario: scenario.__name__)
def test_a_retry_after_a_crash_at_any_point_matches_the_model_for_a_journaled_batch(
    database: Database, dying: Mortals, scenario: Callable[[Ground], Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for batches whose acks are journal entries, and for those that fold the journal."""
    journaled.everything(monkeypatch)
    _die_everywhere(database, dying, scenario, with_journal=True)


def _die_everywhere(
    database: Database, dying: Mortals, scenario: Callable[[Ground], Request], *, with_journal: bool
) -> None:
    url = database.url.render_as_string(hide_password=False)
    deaths: list[str] = []
    while True:
        ground = _ground(database)
        request = scenario(ground)
        death = dying.run(url, request, len(deaths), with_combiner=True, with_journal=with_journal)
        if death is None or death.commits:
            # It was committed, but not answered.
            ground.model.perform(request, _newest(database))
        answer = ground.do(request)
        if scenario.__name__.endswith(("completes", "completes_the_batch", "complete_at_once")):
            completed = answer.get("completed", {0: answer})
            assert all(entry["newly"] for entry in completed.values())  # type: ignore[attr-defined]
        # The server may take a moment to notice that the dead process's session is gone, and its locks with it.
        while descendants.sweep(database).left or database.read(nesting.debts):
            parents.sweep(database)
        assert_equal(ground.service, ground.model)
        if death is None:
            break
        deaths.append(death.where)
        assert len(deaths) < 200
    with database.engine.connect() as tx:  # each callback came and went with its batch
        batch_ids = sa.select(tables.batches.c.id)
        assert not tx.scalar(
            sa.select(sa.func.count()).select_from(tables.webhooks).where(tables.webhooks.c.batch_id.not_in(batch_ids))
        )
    assert len(deaths) >= FEWEST_POINTS, deaths
    assert deaths[-1] == "after COMMIT"


@mutant("a-purge-forgets-the-reasons", "core.batches.purge:remove_chunk", "_BY_BATCH", "_BY_BATCH[:-1]")
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(expires_idle_batches, marks=pytest.mark.slow),
        deletes,
        pytest.param(expires_overdue_batches, marks=pytest.mark.slow),
        pytest.param(removes_what_ended_long_ago, marks=pytest.mark.slow),
    ],
)
def test_the_janitor_finishes_what_a_crash_left_half_done(
    database: Database, dying: Mortals, scenario: Callable[[Ground], Request]
) -> None:
    """An expiry or a deletion is killed at any point; the next pass finishes it and leaves nothing behind."""
    url = database.url.render_as_string(hide_password=False)
    deaths: list[str] = []
    while True:
        ground = _ground(database)
        request = scenario(ground)
        death = dying.run(url, request, len(deaths))
        if request["verb"] == "delete":
            if death is None or death.commits:
                ground.model.perform(request)
            ground.do(request)
            ids = {*ground.model.batches, *ground.model.deleted}
            perform(ground.service, {"verb": "janitor"})
        else:
            ids = {*ground.model.batches}
            perform(ground.service, request)
            ground.model.perform(request)
        assert_equal(ground.service, ground.model)
        if not ground.model.batches:
            assert _rows(database, ids) == 0
        else:
            ground.do({"verb": "delete", "batch": min(ids)})
            ground.do({"verb": "delete", "batch": max(ids)})
        if death is None:
            break
        deaths.append(death.where)
        assert len(deaths) < 300
    assert len(deaths) >= 2 * FEWEST_POINTS, deaths


def _newest(database: Database) -> int | None:
    with database.engine.connect() as tx:
        newest: int | None = tx.scalar(sa.select(sa.func.max(tables.batches.c.id)))
        return newest


def _rows(database: Database, ids: set[int]) -> int:
    with database.engine.connect() as tx:
        count = tx.scalar(sa.select(sa.func.count()).where(tables.batches.c.id.in_(ids)))
        for table in (tables.item_groups, tables.ack_journal, tables.extends, tables.failures):
            count += tx.scalar(sa.select(sa.func.count()).where(table.c.batch_id.in_(ids)))
        return int(count)


@pytest.mark.parametrize("verb", ["ack", "seal"])
def test_a_retry_gets_newly_after_the_service_died_between_commit_and_answer(database_url: str, verb: str) -> None:
    """A real service exits between its commit and its answer; once it is restarted, the retry gets the result of the
    first request."""
    with Database(database_url) as database:
        schema.migrate(database)
    dying = ServiceProcess(
        database_url, module="tests.guarantees.programs.dying_api", environment={"LASTBIT_DIE_AFTER": verb}
    ).start()
    headers = {"Idempotency-Key": "delivery-1"}
    try:
        with httpx.Client(base_url=dying.url, timeout=60) as client:
            opening = {"key": "catalog-42", "items": 2, "sealed": verb == "ack"}
            batch = client.post("/v1/batches", json=opening).json()["id"]
            first, second = ([f"{batch}:0:{index}"] for index in range(2))
            assert client.post("/v1/acks", json={"items": first}).json()["applied"] == 1
            if verb == "ack":
                path, body = "/v1/acks", {"items": second}
            else:
                assert client.post("/v1/acks", json={"items": second}).json()["applied"] == 1
                path, body = f"/v1/batches/{batch}/seal", {}
            with pytest.raises(httpx.TransportError):
                client.post(path, json=body, headers=headers)
        assert dying.stop() == 9
    finally:
        dying.stop()
    new_service = ServiceProcess(database_url).start()
    try:
        with httpx.Client(base_url=new_service.url, timeout=60) as client:
            assert client.get(f"/v1/batches/{batch}").json()["state"] == "complete"
            stranger, reply = (client.post(path, json=body, headers=header_set).json() for header_set in ({}, headers))
            if verb == "ack":
                assert (reply["applied"], reply["repeated"]) == (0, 1)
                stranger, reply = stranger["completed"][0], reply["completed"][0]
            assert (reply["newly"], reply["newly_succeeded"]) == (True, True)
            assert (stranger["newly"], stranger["newly_succeeded"]) == (False, False)
    finally:
        new_service.stop()
