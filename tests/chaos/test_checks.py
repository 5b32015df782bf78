"""The checks of the chaos run are checked: with known evidence, some of which they must accept and some reject."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.checks import Checks
from tests.chaos.evidence import Ask, Evidence, Group, Stored
from tests.chaos.plans import Fate
from tests.support.receivers import receiving

EARLY, LATE, WITHHELD = 1, 2, 3
"""Batches of three items: one cancelled before Spark's report was requested, one cancelled after it was answered, and
one sealed."""
STATES = {EARLY: "cancelled", LATE: "cancelled", WITHHELD: "sealed"}
ACKED = {EARLY: 0, LATE: 2, WITHHELD: 2}


def messages_of_checks(*, applied: int, repeats: int, cancelled: int) -> set[str]:
    """The messages of the checks for a report of two items of each batch, one of which had been acked before."""
    first = {"applied": 1, "repeated": 0, "rejected": [], "completed": []}
    report = {
        "applied": applied,
        "repeated": repeats,
        "rejected": [{"reason": "cancelled", "count": cancelled}],
        "completed": [],
    }
    items = [f"{batch}:0:{index}" for batch in STATES for index in range(2)]
    asks = [
        *(_ask(batch, "/v1/batches", str(batch), None, _shown(batch, "open", 0)) for batch in STATES),
        _ask(5, f"/v1/batches/{EARLY}/cancel", "c", None, _shown(EARLY, "cancelled", 0)),
        _ask(6, "/v1/acks", "first", {"items": [f"{WITHHELD}:0:0"]}, first),
        _ask(10, "/v1/acks", "report", {"items": items, "failed": []}, report),
        _ask(12, f"/v1/batches/{LATE}/cancel", "d", None, _shown(LATE, "cancelled", 2)),
    ]
    feed = [(batch, event) for batch, state in STATES.items() for event in ("opened", state)]
    database_state = Stored(
        {batch: _row(batch) for batch in STATES},
        {(batch, 0): Group((1 << acked) - 1, 0) for batch, acked in ACKED.items()},
        [
            SimpleNamespace(position=position, batch_id=batch, event_id=f"{batch}:{event}")
            for position, (batch, event) in enumerate(feed, 1)
        ],
    )
    plans: list[Any] = [
        SimpleNamespace(
            key=str(batch),
            fate=Fate.CANCELLED if state == "cancelled" else Fate.WITHHELD,
            items=3,
            do=lambda number: "ack" if number < 2 else None,
        )
        for batch, state in STATES.items()
    ]
    verification = {"ok": True, "batches": len(STATES)}
    evidence = Evidence(asks, database_state, plans, got=[], webhook_from=len(feed), verified=verification)
    return {violation.message for violation in Checks(evidence).violations}


def _ask(time: float, path: str, key: str, body: Any, answer: Any) -> Ask:
    """A request that is answered half a second later."""
    return Ask("somebody", f"record:{time}", time, "POST", path, key, body, 200, answer, time + 0.5)


def _shown(batch: int, state: str, acked: int) -> dict[str, Any]:
    issued = {"start": 0, "count": 3} if state == "open" else {}
    counts = {"items": 3, "acked": acked, "failed": 0}
    return {"id": batch, "key": str(batch), "state": state, "complete": False, "succeeded": False, **counts, **issued}


def _row(batch: int) -> Any:
    sealed_at = 1.0 if STATES[batch] == "sealed" else None
    counts = {"items": 3, "acked": ACKED[batch], "failed": 0, "journal_next": 0}
    columns = {"id": batch, "batch_key": str(batch), "state": STATES[batch], "group_size": 64}
    return SimpleNamespace(**columns, **counts, sealed_at=sealed_at)


def test_a_correct_report_passes() -> None:
    assert messages_of_checks(applied=3, repeats=1, cancelled=2) == set()


def test_an_item_acked_before_is_not_applied_again() -> None:
    """As if the database had lost the first ack."""
    assert "4 items were answered as applied, but only 3 could be new" in messages_of_checks(
        applied=4, repeats=0, cancelled=2
    )


def test_no_more_items_are_rejected_than_were_cancelled() -> None:
    says = messages_of_checks(applied=1, repeats=1, cancelled=4)
    assert "4 items were rejected as cancelled; at least 2 and at most 2 were" in says


def test_each_item_is_accounted_for() -> None:
    says = messages_of_checks(applied=3, repeats=0, cancelled=2)
    assert "6 items were sent, but the answer accounts for another number" in says


def test_an_incomplete_webhook_does_not_count() -> None:
    """A dispatcher may be killed between head and body: that isn't a webhook with a bad signature."""
    with receiving() as receiver:
        target = urlsplit(receiver.url)
        with socket.create_connection((target.hostname, target.port)) as sender:
            sender.sendall(b"POST /hook HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\nhalf")
            sender.shutdown(socket.SHUT_WR)
            assert sender.recv(1) == b""  # the request is over by then
        assert receiver.got == []
