"""Explanations of why a batch is not done: each reason, on each kind of database, and with few reads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors, janitor
from core.acks.call import Call
from core.batches import batch as batches
from core.batches import expiry
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.batches.tolerance import OnExceeded
from core.explain import CHILDREN, COUNTED, SCAN, Explanation, Reason
from core.service import Service
from core.storage import tables
from core.webhooks import deliveries, subscriptions
from lastbit.ids import ItemId
from tests.support import plans

SIZE = 64


def resolve(service: Service, verb: Verb, batch: int, *numbers: int, reason: str | None = None) -> None:
    items = [ItemId(batch, *divmod(number, SIZE)) for number in numbers]
    service.acks.ack(Call.of(verb, items, reason=reason)).result(30)


def opened(service: Service, items: int, **options: Any) -> int:
    return service.batches.open(Opening(group_size=SIZE, items=items, **options)).batch.id


def codes(explanation: Explanation) -> list[str]:
    return [reason.code for reason in explanation.reasons]


def reason(explanation: Explanation, code: str) -> Reason:
    (match,) = [candidate for candidate in explanation.reasons if candidate.code == code]
    assert match.text[0].isupper() or match.text[0].isdigit()
    assert match.text.endswith(".")
    return match


def age(service: Service, batch: int, span: timedelta) -> None:
    """Move the batch's last change back by this span."""

    def back(tx: Any) -> None:
        now = tx.scalar(sa.select(tables.utc_now()))
        batches.update(tx, batch, updated_at=now - span, seen_updated_at=now - span)

    service.database.write(back)


def test_an_open_batch_is_not_sealed_and_its_idle_time_is_given(service: Service) -> None:
    """And the time at which it expires, if any."""
    empty = service.batches.explain(opened(service, 0))
    assert codes(empty) == ["not_sealed"]
    assert "expires_at" not in reason(empty, "not_sealed").facts
    batch = opened(service, 3, expires_in=3600)
    age(service, batch, timedelta(minutes=20))
    explanation = service.batches.explain(batch)
    assert codes(explanation) == ["not_sealed", "pending", "oldest_untouched_group"]
    detail = reason(explanation, "not_sealed")
    assert 1200 <= detail.facts["idle_seconds"] <= 1260
    assert 2340 <= detail.facts["expires_after_seconds"] <= 2400
    assert detail.facts["expires_at"] - detail.facts["idle_since"] == timedelta(hours=1)
    assert "20 min" in detail.text
    assert "expires in 39 min" in detail.text
    age(service, batch, timedelta(days=2))
    assert "about to expire" in reason(service.batches.explain(batch), "not_sealed").text


def test_pending_items_are_named_as_ranges(service: Service) -> None:
    """The first few by their ends, the rest as a number."""
    batch = opened(service, 3 * SIZE, sealed=True)
    resolve(service, Verb.ACK, batch, *range(0, 130, 10))
    detail = reason(service.batches.explain(batch), "pending")
    assert detail.facts["pending"] == 192 - 13
    assert detail.facts["ranges"][0] == {"first": f"{batch}:0:1", "last": f"{batch}:0:9", "count": 9}
    assert len(detail.facts["ranges"]) == 5
    assert (detail.facts["more_ranges"], detail.facts["all_counted"]) == (8, True)
    assert f"179 of 192 items are pending: {batch}:0:1 to {batch}:0:9, " in detail.text
    assert " and 8 more ranges (nothing has changed since " in detail.text
    resolve(service, Verb.ACK, batch, *range(191))
    last = reason(service.batches.explain(batch), "pending")
    assert last.facts["ranges"] == [{"first": f"{batch}:2:63", "last": f"{batch}:2:63", "count": 1}]
    assert f"1 of 192 items is pending: {batch}:2:63 (" in last.text


def test_the_lowest_group_without_anything_resolved_is_named(service: Service) -> None:
    """With the first pending item, which may be in an earlier group; if every group was touched, the reason is
    absent."""
    batch = opened(service, 4 * SIZE + 10, sealed=True)
    resolve(service, Verb.ACK, batch, *range(SIZE), SIZE, 3 * SIZE)
    detail = reason(service.batches.explain(batch), "oldest_untouched_group")
    assert detail.facts == {
        "group": 2,
        "first": f"{batch}:2:0",
        "last": f"{batch}:2:63",
        "first_pending": f"{batch}:1:1",
    }
    assert f"the first pending item is {batch}:1:1" in detail.text
    resolve(service, Verb.FAIL, batch, 2 * SIZE)
    short = reason(service.batches.explain(batch), "oldest_untouched_group")
    assert (short.facts["group"], short.facts["last"]) == (4, f"{batch}:4:9")
    resolve(service, Verb.ACK, batch, 4 * SIZE)
    assert codes(service.batches.explain(batch)) == ["pending", "failed"]


def test_live_and_unpaid_children_are_named(service: Service) -> None:
    """With the number of their pending items; children that have ended and paid are no reason."""
    parent = opened(service, 5, sealed=True)
    running = service.batches.open(Opening(items=7, parent=ItemId(parent, 0, 3), key="stage")).batch.id
    ended_child = service.batches.open(Opening(items=1, parent=ItemId(parent, 0, 0), sealed=True)).batch.id
    resolve(service, Verb.ACK, ended_child, 0)
    silent = service.batches.open(Opening(items=1, parent=ItemId(parent, 0, 4))).batch.id
    # As after a crash between the child's commit and the parent's ack.
    service.database.write(batches.cancel, silent, b"")
    detail = reason(service.batches.explain(parent), "waiting_for_children")
    assert detail.facts["more_children"] is False
    assert detail.facts["children"] == [
        {
            "batch": running,
            "key": "stage",
            "item": f"{parent}:0:3",
            "state": "open",
            "pending": 7,
            "parent_due": None,
        },
        {
            "batch": silent,
            "key": None,
            "item": f"{parent}:0:4",
            "state": "cancelled",
            "pending": 1,
            "parent_due": "fail",
        },
    ]
    assert f"batches {running} (open, 7 pending), {silent} (cancelled, 1 pending; it ended" in detail.text

    unpaid = service.batches.explain(silent)
    assert codes(unpaid) == ["ended", "parent_not_told"]
    assert reason(unpaid, "parent_not_told").facts == {"parent": f"{parent}:0:4", "parent_due": "fail"}
    assert f"item {parent}:0:4" in reason(unpaid, "parent_not_told").text
    janitor.run_once(service.database, expiry.Policy())
    assert codes(service.batches.explain(silent)) == ["ended"]
    assert [
        child["batch"] for child in reason(service.batches.explain(parent), "waiting_for_children").facts["children"]
    ] == [running]


def test_a_long_list_of_children_is_shortened(service: Service) -> None:
    """Twenty are named, and the text says that there are more."""
    parent = opened(service, SIZE, sealed=True)
    for number in range(CHILDREN + 1):
        service.batches.open(Opening(items=1, parent=ItemId(parent, 0, number)))
    detail = reason(service.batches.explain(parent), "waiting_for_children")
    assert len(detail.facts["children"]) == CHILDREN
    assert detail.facts["more_children"] is True
    assert detail.text.endswith(" and others.")


def test_a_batch_that_did_not_succeed_gives_the_reasons_of_its_failures(service: Service) -> None:
    """The most frequent reasons first; after a redrive there are none."""
    batch = opened(service, 10, sealed=True)
    resolve(service, Verb.FAIL, batch, 0, 1, reason="no picture")
    resolve(service, Verb.FAIL, batch, 2, reason="x" * 300)
    resolve(service, Verb.FAIL, batch, 3)
    resolve(service, Verb.ACK, batch, *range(4, 10))
    explanation = service.batches.explain(batch)
    assert explanation.batch.complete
    assert codes(explanation) == ["failed"]
    detail = reason(explanation, "failed")
    assert detail.facts == {
        "failed": 4,
        "reasons": [{"reason": "no picture", "count": 2}, {"reason": "x" * 300, "count": 1}],
        "looked_at": 4,
    }
    assert "4 of its 10 items failed; the most frequent reason is 'no picture'" in detail.text
    resolve(service, Verb.ACK, batch, 0, 1, 2, 3)
    succeeded = service.batches.explain(batch)
    assert codes(succeeded) == ["complete"]
    assert "all 10 items are acked" in reason(succeeded, "complete").text


@pytest.mark.parametrize(
    ("items", "words"), [(0, "it has no items"), (1, "its only item is acked"), (3, "all 3 items are acked")]
)
def test_a_batch_that_succeeded_is_complete(service: Service, items: int, words: str) -> None:
    """Whatever its number of items; other reasons may follow, so the sentence doesn't say that all is well."""
    batch = opened(service, items, sealed=True)
    resolve(service, Verb.ACK, batch, *range(items))
    text = reason(service.batches.explain(batch), "complete").text
    assert text.startswith(f"The batch is complete: {words}. It was completed at ")


def test_failures_without_reasons_and_failures_of_a_live_batch(service: Service) -> None:
    """Failures without a reason; and a live batch gives the reasons of those so far, after what it waits for."""
    live = opened(service, 5, sealed=True)
    resolve(service, Verb.FAIL, live, 0, reason="no picture")
    explanation = service.batches.explain(live)
    assert codes(explanation) == ["pending", "failed"]
    detail = reason(explanation, "failed")
    assert detail.text == "1 item has failed so far: 'no picture'."
    assert detail.facts == {"failed": 1, "reasons": [{"reason": "no picture", "count": 1}], "looked_at": 1}
    resolve(service, Verb.FAIL, live, 1, 2, reason="no disk")
    detail = reason(service.batches.explain(live), "failed")
    assert detail.text == "3 items have failed so far; the most frequent reason is 'no disk'."
    resolve(service, Verb.ACK, live, 0, 1, 2)
    assert codes(service.batches.explain(live)) == ["pending"]

    batch = opened(service, 2, sealed=True)
    resolve(service, Verb.FAIL, batch, 0)
    assert reason(service.batches.explain(batch), "failed").text == "1 item has failed so far."
    resolve(service, Verb.FAIL, batch, 1)
    detail = reason(service.batches.explain(batch), "failed")
    assert detail.facts["reasons"] == []
    assert "most frequent" not in detail.text


def test_an_ended_batch_has_its_end_as_the_reason(service: Service) -> None:
    """Cancelled or expired, with the time and the number of pending items. The reasons of its failures follow."""
    cancelled = opened(service, 3)
    service.batches.cancel(cancelled)
    expired = opened(service, 1, expires_in=60)
    age(service, expired, timedelta(minutes=2))
    janitor.run_once(service.database, expiry.Policy())
    for batch, word, pending in ((cancelled, "cancelled", 3), (expired, "expired", 1)):
        explanation = service.batches.explain(batch)
        assert codes(explanation) == ["ended"]
        assert not explanation.batch.complete
        detail = reason(explanation, "ended")
        assert word in detail.text
        assert detail.facts == {
            "ended_at": explanation.batch.ended_at,
            "pending": pending,
            "ended_by": None,
            "reason": None,
        }
    strict = opened(service, 3, tolerated_failures=1, on_exceeded=OnExceeded.CANCEL)
    resolve(service, Verb.FAIL, strict, 0, 1, reason="no disk")
    explanation = service.batches.explain(strict)
    assert codes(explanation) == ["ended", "failures_exceeded", "failed"]
    detail = reason(explanation, "failed")
    assert detail.text == "2 items have failed: 'no disk'."
    assert detail.facts["reasons"] == [{"reason": "no disk", "count": 2}]


def test_an_unknown_batch_is_refused(service: Service) -> None:
    """As everywhere."""
    with pytest.raises(errors.BatchNotFound):
        service.batches.explain(4711)


@pytest.mark.parametrize("touched_items", [0, SCAN + 10], ids=["untouched", "touched"])
def test_a_billion_items_are_explained_by_a_few_statements(service: Service, touched_items: int) -> None:
    """Whether nothing was resolved, or something in so many groups that not all of them are read."""
    batch = opened(service, 10**9, sealed=True)
    rows = [
        {
            "batch_id": batch,
            "group_no": group,
            "resolved": None,
            "failed": None,
            "resolved_count": 1 if group > 9 else SIZE,
            "failed_count": 0,
        }
        for group in range(touched_items)
    ]

    def fill(tx: Any) -> None:
        if rows:
            tx.execute(sa.insert(tables.item_groups), rows)
            batches.update(tx, batch, acked=sum(row["resolved_count"] for row in rows))

    service.database.write(fill)
    with plans.executions(service.database) as executions:
        explanation = service.batches.explain(batch)
    assert len([text for text, _ in executions if "SELECT" in text]) <= 10
    pending = reason(explanation, "pending").facts
    if touched_items:
        # The items between the touched ones are one range for each group.
        assert (pending["more_ranges"], pending["all_counted"]) == (COUNTED - 5, False)
        assert "and at least 995 more ranges" in reason(explanation, "pending").text
        assert codes(explanation) == ["pending"]
    else:
        assert pending["ranges"] == [{"first": f"{batch}:0:0", "last": f"{batch}:15624999:63", "count": 10**9}]
        assert reason(explanation, "oldest_untouched_group").facts["group"] == 0


def test_pending_ranges_are_not_guessed_if_only_full_groups_were_read(service: Service) -> None:
    """A full-prefix hint that lags far behind: more full rows than are read."""
    batch = opened(service, 10**9, sealed=True)
    groups = range(SCAN + 300)
    rows = [{"batch_id": batch, "group_no": group, "resolved_count": SIZE, "failed_count": 0} for group in groups]

    def fill(tx: Any) -> None:
        tx.execute(sa.insert(tables.item_groups), rows)
        batches.update(tx, batch, acked=SIZE * len(rows))

    service.database.write(fill)
    explanation = service.batches.explain(batch)
    pending = reason(explanation, "pending")
    assert (pending.facts["ranges"], pending.facts["more_ranges"], pending.facts["all_counted"]) == ([], 0, False)
    assert f"{explanation.batch.pending:,} of 1,000,000,000 items are pending (nothing" in pending.text
    assert reason(explanation, "oldest_untouched_group").facts["first_pending"] is None


def test_an_undelivered_webhook_is_named_with_its_last_answer(service: Service) -> None:
    """The newest event of each webhook; delivered events are no reason."""
    database = service.database
    hook = database.write(
        lambda tx: subscriptions.create(tx, "https://example.com", None, None, subscriptions.new_secret())
    )
    batch = service.batches.open(Opening(sealed=True)).batch.id
    while database.write(deliveries.plan, hook.webhook.id):
        pass
    explanation = service.batches.explain(batch)
    assert codes(explanation) == ["complete", "webhook_not_delivered"]
    facts = reason(explanation, "webhook_not_delivered").facts
    assert (facts["event"], facts["delivery"], facts["attempts"]) == (f"batch:{batch}:succeeded", "pending", 0)
    assert "there was no attempt yet; the next attempt is due at" in reason(explanation, "webhook_not_delivered").text

    columns = tables.deliveries.c
    newest = database.read(lambda tx: tx.scalar(sa.select(sa.func.max(columns.id))))

    def give_up(tx: Any) -> None:
        tx.execute(sa.update(tables.deliveries).values(state="delivered"))
        tx.execute(
            sa.update(tables.deliveries).where(columns.id == newest).values(state="dead", due_at=None, attempts=1)
        )
        attempt = {"delivery_id": newest, "status": 500, "error": None, "milliseconds": 12}
        tx.execute(sa.insert(tables.delivery_attempts).values(**attempt, attempted_at=tables.utc_now()))

    database.write(give_up)
    detail = reason(service.batches.explain(batch), "webhook_not_delivered")
    assert "the last result was 500; no further attempt will be made: redeliver it." in detail.text
    assert detail.facts["disabled"] is False
    # The service refuses to redeliver to a disabled webhook.
    database.write(lambda tx: tx.execute(sa.update(tables.webhooks).values(state="disabled")))
    detail = reason(service.batches.explain(batch), "webhook_not_delivered")
    assert detail.text.endswith("; the webhook is disabled, so no further attempt will be made: create another one.")
    assert detail.facts["disabled"] is True
    database.write(lambda tx: tx.execute(sa.update(tables.deliveries).values(state="delivered")))
    assert codes(service.batches.explain(batch)) == ["complete"]
