"""The judgement of a batch's end, change by change."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from core.batches.lifecycle import Duty, State, Verb
from core.batches.settle import Standing, settle
from core.batches.tolerance import NONE, OnExceeded, Tolerance

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ONE = Tolerance(1)
HALF = Tolerance(percentage=50)
NEW = Standing(State.OPEN, 4, 0, 0, 0, NONE, OnExceeded.CONTINUE, exceeded=False)
SEALED = NEW._replace(state=State.SEALED)
COMPLETE = NEW._replace(state=State.COMPLETE, acked=4)
FAILED = COMPLETE._replace(acked=3, failed=1)
CANCELLING = SEALED._replace(tolerance=ONE, on_exceeded=OnExceeded.CANCEL)


@pytest.mark.parametrize(
    ("before", "change", "state", "events", "debt"),
    [
        (NEW, {"acked": 4}, State.OPEN, [], None),
        (NEW, {"state": State.SEALED}, State.SEALED, [], None),
        (NEW._replace(acked=4), {"state": State.SEALED}, State.COMPLETE, ["completed", "succeeded"], Verb.ACK),
        (NEW._replace(items=0), {"state": State.SEALED}, State.COMPLETE, ["completed", "succeeded"], Verb.ACK),
        (SEALED, {"acked": 3}, State.SEALED, [], None),
        (SEALED, {"acked": 3, "skipped": 1}, State.COMPLETE, ["completed", "succeeded"], Verb.ACK),
        (FAILED, {"failed": 0, "skipped": 1}, State.COMPLETE, ["succeeded"], Verb.ACK),
        (SEALED, {"acked": 3, "failed": 1}, State.COMPLETE, ["completed"], Verb.FAIL),
        (
            SEALED._replace(tolerance=ONE),
            {"acked": 3, "failed": 1},
            State.COMPLETE,
            ["completed", "succeeded"],
            Verb.ACK,
        ),
        (FAILED, {"acked": 4, "failed": 0}, State.COMPLETE, ["succeeded"], Verb.ACK),
        (COMPLETE, {}, State.COMPLETE, [], None),
        (COMPLETE, {"acked": 3, "failed": 1}, State.COMPLETE, [], Verb.FAIL),
        (COMPLETE, {"state": State.SEALED, "acked": 3}, State.SEALED, [], None),
        (SEALED._replace(tolerance=ONE), {"failed": 2}, State.SEALED, ["failures_exceeded"], None),
        (SEALED._replace(tolerance=ONE, exceeded=True), {"failed": 3}, State.SEALED, [], None),
        (CANCELLING, {"failed": 2}, State.CANCELLED, ["failures_exceeded", "cancelled"], Verb.FAIL),
        (CANCELLING, {"acked": 2, "failed": 2}, State.COMPLETE, ["failures_exceeded", "completed"], Verb.FAIL),
        (NEW._replace(tolerance=HALF), {"failed": 3}, State.OPEN, [], None),
        (NEW._replace(tolerance=HALF, failed=3), {"state": State.SEALED}, State.SEALED, ["failures_exceeded"], None),
        (NEW._replace(failed=2), {"tolerance": ONE}, State.OPEN, ["failures_exceeded"], None),
        (CANCELLING, {"state": State.CANCELLED}, State.CANCELLED, ["cancelled"], Verb.FAIL),
        (SEALED._replace(tolerance=ONE, failed=2), {"state": State.EXPIRED}, State.EXPIRED, ["expired"], Verb.FAIL),
    ],
)
def test_a_change_is_judged(
    before: Standing, change: dict[str, Any], state: State, events: list[str], debt: Verb | None
) -> None:
    transition = settle(before, before._replace(**change))
    assert (transition.after.state, transition.events(), transition.debt()) == (state, events, debt)
    assert transition.after.exceeded is (before.exceeded or "failures_exceeded" in events)


def test_only_what_changes_is_written() -> None:
    def columns(
        before: Standing, change: Standing, *, is_nested: bool = False, has_children: bool = False
    ) -> dict[str, Any]:
        return settle(before, change).columns(NOW, is_nested=is_nested, has_children=has_children)

    assert columns(SEALED, SEALED._replace(acked=1)) == {}
    assert columns(CANCELLING, CANCELLING._replace(failed=2), is_nested=True) == {
        "state": State.CANCELLED,
        "ended_at": NOW,
        "exceeded": True,
        "parent_due": Verb.FAIL,
    }
    assert columns(SEALED, SEALED._replace(state=State.EXPIRED), has_children=True) == {
        "state": State.EXPIRED,
        "ended_at": NOW,
        "children_due": Duty.END,
        "children_told": 0,
    }
    reopened = columns(COMPLETE, SEALED._replace(acked=3), is_nested=True)
    unset = dict.fromkeys(("ended_at", "completed_by", "succeeded_by", "parent_due"))
    assert reopened == unset | {"state": State.SEALED}
    assert columns(COMPLETE, FAILED) == {"succeeded_by": None}
