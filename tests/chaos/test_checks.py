"""The checks of the chaos run are checked: with known evidence, some of which they must accept and some reject."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.chaos.checks import Checks
from tests.chaos.evidence import Ask, Evidence, Group, Stored
from tests.chaos.plans import Fate
from tests.chaos.record import ENLISTED
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
        {
            batch: _row(batch, items=3, acked=ACKED[batch], state=state, sealed_at=1.0 if state == "sealed" else None)
            for batch, state in STATES.items()
        },
        {(batch, 0): Group((1 << acked) - 1, 0) for batch, acked in ACKED.items()},
        _feed(feed),
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


def messages_of_nested(
    *, applied: int, shown: int, owing: Sequence[int] = (), left_to_the_sweep: Sequence[int] = ()
) -> set[str]:
    """The messages of the checks for a batch whose only item stands for a nested one, which the failure of its only
    item has cancelled. That failure was `applied` or rejected. After its answer, a read of the parent has `shown` this
    number of failed items."""
    parent, child = 1, 2
    rejected = [] if applied else [{"item": f"{child}:0:0", "reason": "cancelled"}]
    answer = {"applied": applied, "repeated": 0, "rejected": rejected, "completed": []}
    read = _ask(9, f"/v1/batches/{parent}", "r", None, _shown(parent, "open", 0, items=1, failed=shown))
    asks = [
        *(_ask(batch, "/v1/batches", str(batch), None, _shown(batch, "open", 0, items=1)) for batch in (parent, child)),
        _ask(5, "/v1/failures", "f", {"items": [f"{child}:0:0"]}, answer),
        dataclasses.replace(read, method="GET"),
    ]
    nested = {"state": "cancelled", "parent_batch": parent, "on_exceeded": "cancel", "exceeded": 1}
    feed = [(parent, "opened"), (child, "opened"), (child, "failures_exceeded"), (child, "cancelled")]
    stored = Stored(
        {parent: _row(parent, items=1, failed=1, state="open"), child: _row(child, items=1, failed=1, **nested)},
        {(parent, 0): Group(1, 1), (child, 0): Group(1, 1)},
        _feed(feed),
    )
    plans: list[Any] = [
        SimpleNamespace(key="1", fate=Fate.CANCELLED, items=1, do=lambda _: None),
        SimpleNamespace(key="2", fate=Fate.EXCEEDED, items=1, do=lambda _: "fail"),
    ]
    verification = {"ok": True, "batches": 2}
    evidence = Evidence(
        asks,
        stored,
        plans,
        got=[],
        webhook_from=len(feed),
        verified=verification,
        owing=owing,
        left_to_the_sweep=left_to_the_sweep,
    )
    return {violation.message for violation in Checks(evidence).violations} - {OPEN}


OPEN = "cancelled was planned; it is open, 0 items are pending"
"""The parent stays open, as nothing seals it."""


def _ask(time: float, path: str, key: str, body: Any, answer: Any) -> Ask:
    """A request that is answered half a second later."""
    return Ask("somebody", f"record:{time}", time, "POST", path, key, body, 200, answer, time + 0.5)


def _shown(batch: int, state: str, acked: int, *, items: int = 3, failed: int = 0) -> dict[str, Any]:
    issued = {"start": 0, "count": items} if state == "open" else {}
    counts = {"items": items, "acked": acked, "failed": failed}
    return {"id": batch, "key": str(batch), "state": state, "complete": False, "succeeded": False, **counts, **issued}


def _row(batch: int, **columns: Any) -> Any:
    usual = {"id": batch, "batch_key": str(batch), "group_size": 64, "acked": 0, "failed": 0, "journal_next": 0}
    usual |= {"sealed_at": None, "on_exceeded": "continue", "tolerated_failures": 0, "exceeded": 0}
    return SimpleNamespace(**{**usual, "parent_batch": None, "parent_number": 0, **columns})


def _feed(events: Iterable[tuple[int, str]]) -> list[Any]:
    return [
        SimpleNamespace(position=position, batch_id=batch, event_id=f"{batch}:{event}")
        for position, (batch, event) in enumerate(events, 1)
    ]


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


def test_a_failure_that_cancels_its_batch_is_applied_and_pays_the_parent() -> None:
    assert messages_of_nested(applied=1, shown=1) == set()


def test_a_failure_that_cancelled_its_batch_is_not_rejected() -> None:
    assert "1 items were rejected, but 1 of them had been resolved" in messages_of_nested(applied=0, shown=1)


def test_a_parent_is_paid_before_the_answer() -> None:
    message = "the answer shows 0 resolved items; 1 were before, and 1 had been requested"
    assert messages_of_nested(applied=1, shown=0) == {message}


def test_a_debt_is_left_to_the_sweep_only_if_the_service_says_so() -> None:
    assert "it owed its parent in the end, and no worker said so" in messages_of_nested(applied=1, shown=0, owing=[2])
    assert messages_of_nested(applied=1, shown=0, owing=[2], left_to_the_sweep=[2]) == set()


def messages_of_effects(
    *,
    applied: int,
    effects: Sequence[str] = (),
    state: str = "acked",
    by_service: bool = False,
    failed: bool = False,
    shown: int | None = None,
) -> set[str]:
    """The messages of the checks for the only item of a batch, which is in this state in the end. One call named it: of
    the service, or in a transaction of a caller, whose effect may have `failed`. `effects`: the calls that left one.
    `shown`: the acked items that a later read has shown."""
    batch, item = 1, "1:0:0"
    key = "k" if by_service else CALL
    answer = {"applied": applied, "repeated": 1 - applied, "rejected": [], "completed": []}
    call = _ask(5, "/v1/acks", key, {"items": [item]}, answer)
    if failed:
        call = dataclasses.replace(call, status=None, answer=None, answered_at=float("inf"), lost="EffectFailed()")
    is_acked = state == "acked"
    read = _ask(9, "/v1/batches/1", "r", None, _shown(batch, "open", is_acked if shown is None else shown, items=1))
    evidence = Evidence(
        [
            _ask(batch, "/v1/batches", "1", None, _shown(batch, "open", 0, items=1)),
            call,
            dataclasses.replace(read, method="GET"),
        ],
        Stored(
            {batch: _row(batch, items=1, acked=int(is_acked), state="open")},
            {(batch, 0): Group(int(is_acked), 0)},
            _feed([(batch, "opened")]),
        ),
        [SimpleNamespace(key="1", fate=Fate.CANCELLED, items=1, do=lambda _: "ack")],  # type: ignore[list-item]
        got=[],
        webhook_from=1,
        verified={"ok": True, "batches": 1},
        effects=[(item, attempt) for attempt in effects],
    )
    return {violation.message for violation in Checks(evidence).violations} - {OPEN, PENDING}


CALL = f"{ENLISTED}call"
"""The key of a call in a transaction of a caller."""
PENDING = OPEN.replace("0 items", "1 items")
UNDUE = "this call left an effect that it should not have"


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        ({"applied": 1, "effects": [CALL]}, None),
        ({"applied": 1, "by_service": True}, None),
        ({"applied": 1}, "it was acked with its effect, but has the effects []"),
        ({"applied": 1, "effects": [CALL, CALL]}, "it has 2 effects"),
        ({"applied": 1, "effects": [CALL], "state": "pending"}, "it has an effect, but no ack"),
        ({"applied": 0, "effects": [CALL]}, UNDUE),
        ({"applied": 0}, "only calls in transactions can have acked it, but it has no effect"),
        ({"applied": 1, "effects": [CALL], "by_service": True}, "the service acked it, but it has an effect"),
        ({"applied": 1, "effects": [CALL], "shown": 0}, None),  # the count waits in the outbox
        (
            {"applied": 1, "by_service": True, "shown": 0},
            "the answer shows 0 resolved items; 1 were before, and 1 had been requested",
        ),
        ({"applied": 0, "failed": True, "state": "pending"}, None),
        ({"applied": 0, "failed": True, "effects": [CALL]}, UNDUE),
    ],
)
def test_an_effect_belongs_to_the_call_that_was_applied(evidence: Any, message: str | None) -> None:
    messages = messages_of_effects(**evidence)
    assert message in messages if message else not messages


def test_an_incomplete_webhook_does_not_count() -> None:
    """A dispatcher may be killed between head and body: that isn't a webhook with a bad signature."""
    with receiving() as receiver:
        target = urlsplit(receiver.url)
        with socket.create_connection((target.hostname, target.port)) as sender:
            sender.sendall(b"POST /hook HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\nhalf")
            sender.shutdown(socket.SHUT_WR)
            assert sender.recv(1) == b""  # the request is over by then
        assert receiver.got == []
