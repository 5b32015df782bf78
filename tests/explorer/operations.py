"""The operations of sessions. To add one, add a line to `OPERATIONS`; it becomes part of all pairs and triples."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy.engine import Connection

from core import feed, janitor, tallies, writes
from core.acks import parents
from core.acks.call import Call
from core.batches import expiry
from core.batches.batch import Opening
from core.batches.callbacks import Callback
from core.batches.lifecycle import Verb
from core.batches.redrive import Wish
from core.batches.tolerance import OnExceeded
from core.batches.update import Patch
from core.batches.writing import Extend
from core.commits import operation as calls
from core.consumer_groups import leases, positions
from core.enlisted import acks
from core.enlisted import writes as caller_writes
from core.errors import Contended, CoreError
from core.feed import Append
from core.processes import definitions, instances, outbox, retention, timers
from core.processes.handling import handle_of
from core.service.batches import opening_of, seal_of
from core.service.consumer_groups import commits_of
from core.service.tallies import apply_of, apply_ranges_of
from core.service.writes import KINDS
from core.webhooks import deliveries
from core.webhooks.backoff import Backoff
from core.webhooks.sender import SendResult
from lastbit.ids import ItemId
from lastbit.streams.snapshot import Snapshot
from tests.explorer.scene import GROUP, PROCESS, SIZE, TALLY
from tests.explorer.sessions import Session, normalized
from tests.guarantees.enlisted import callers

Operation = Callable[[Session], Any]
MANY: Final = [(2, 0, index) for index in range(SIZE)] + [(2, 1, index) for index in range(60)]
"""Enough ids for a large call; some of them aren't issued yet."""
_DAYS = timedelta(days=7)
_POLICY: Final = expiry.Policy(_DAYS, _DAYS, _DAYS, _DAYS)


def ack(*items: tuple[int, int, int], verb: Verb = Verb.ACK, reason: str | None = None, key: str) -> Operation:
    return lambda session: session.service.acks.ack(
        Call.of(verb, list(items), reason=reason, idempotency_key=key)
    ).result()


def enlisted(*items: tuple[int, int, int], verb: Verb = Verb.ACK, reason: str | None = None) -> Operation:
    """Resolve the items in a transaction of a caller, after whatever it needs was prepared; then move what it left."""

    def resolve(session: Session) -> Any:
        call = Call.of(verb, list(items), reason=reason, idempotency_key="enlisted")
        groups = acks.groups_of(call)
        session.database.write(acks.prepare, groups)
        resolved = session.database.write(lambda tx: acks.resolve(callers.over(tx), call))
        answer = session.service.enlisted.settled(call, resolved)
        session.service.enlisted.move(groups)
        return answer

    return resolve


def enlisted_open(session: Session) -> Any:
    """Open a batch in a transaction of a caller, and do all that can be done with it there: at last an extend, which
    locks the row of a batch that exists already. The caller repeats its transaction when it is told to."""

    def write(connection: Connection) -> Any:
        tx = callers.over(connection)
        opened = caller_writes.apply(tx, opening_of(Opening(items=2), "enlisted-open"))
        call = Call.of(Verb.ACK, [ItemId(opened.batch.id, 0, index) for index in (0, 1)])
        acks.prepare(tx, acks.groups_of(call))
        resolved = acks.resolve(tx, call)
        extended = caller_writes.apply(tx, Extend(batch=opened.batch.id, count=1, idempotency_key="more"))
        caller_writes.seal(tx, opened.batch.id)
        return opened, extended, resolved.answer

    try:
        opened, extended, answer = session.database.write(write)
    except Contended:
        opened, extended, answer = session.database.write(write)
    session.service.enlisted.move([opened.batch.id])
    # Not the states: at READ COMMITTED, two reads of one transaction may see different ones.
    return opened.batch.id, opened.replayed, extended.start, extended.replayed, answer


def enlisted_seal(session: Session) -> Any:
    session.database.write(lambda connection: caller_writes.seal(callers.over(connection), 2))
    session.service.enlisted.move([2])


def mask(verb: Verb, new: int = 0, reason: str | None = None) -> Operation:
    """All items of batch 2, and this many bytes of items that it has only after an extend."""
    masks = [(2, 0, b"\xff" * 8), (2, 1, b"\xff" * (1 + new))]
    return lambda session: session.service.acks.ack(
        Call.of(verb, masks=masks, reason=reason, idempotency_key=f"mask-{verb}")
    ).result()


def extend_and_ack(session: Session) -> Any:
    extension = session.service.batches.extend(2, 20, "new")
    return extension, ack((2, 1, 20), (2, 1, 22), key="new")(session)


def extend_by(item: ItemId) -> Operation:
    return lambda session: session.service.batches.extend(2, 20, "links", by=item)


def look(session: Session) -> Any:
    """Read as clients do, each read from one snapshot."""
    service = session.service
    _, pending = service.batches.ranges(2, "pending", 0, 100)
    _, watermark = service.batches.watermark(2)
    return service.batches.verify(2), pending, watermark


def cancel_and_reopen(session: Session) -> Any:
    cancelled = session.service.batches.cancel(2, "cancel")
    return cancelled, session.service.batches.reopen(2, "reopen", deadline=None)


def expire(session: Session) -> Any:
    return janitor._expire(session.database, 2, _POLICY, parents.Stuck())


def expire_overdue(session: Session) -> Any:
    return janitor._expire(session.database, 1, _POLICY, parents.Stuck())


def remove_ended(session: Session) -> Any:
    return expiry.remove(session.database, 3, _POLICY)


def update(batch: int, patch: Patch) -> Operation:
    return lambda session: session.service.batches.update(batch, patch, "update")


def open_with_callback() -> calls.Operation:
    """It has a parent, whose lock orders it and other opens: the ids of new batches alone need not be in the order of
    the commits."""
    opening = Opening(parent=ItemId(2, 0, 63), callback=Callback("http://127.0.0.1/"))
    return dataclasses.replace(opening_of(opening, "called"), secret="whsec_")


def share(operations: Callable[[], Sequence[calls.Operation]]) -> Operation:
    """Several operations in one transaction."""
    return lambda session: [
        (outcome.value, outcome.error) for outcome in writes.commit(session.database, operations(), KINDS, lock_waits=0)
    ]


def merge(session: Session) -> Any:
    """Calls that share a flush: a failure, an ack of the same batch, and one of a batch that may be its child."""
    calls = [
        Call.of(Verb.FAIL, [(2, 0, 63)], reason="late", idempotency_key="merged-fail"),
        Call.of(Verb.ACK, [(2, 1, 6), (2, 0, 3)], idempotency_key="merged-ack"),
        Call.of(Verb.ACK, [(3, 0, 0), (1, 0, 7)], idempotency_key="merged-repeat"),
    ]
    units = [unit for call in calls for unit in call.chunks()]
    outcomes = session.service.acks._commit(units, lock_waits=1)
    return [(outcome.applied, outcome.repeated, outcome.rejected, outcome.completed) for outcome in outcomes]


def claim(session: Session) -> Any:
    """Claim until nothing is due. A claim skips what is locked, and has no effect on it; so, as in a later round, it is
    claimed once it is free."""
    ids: set[int] = set()
    dead_count = 0
    while True:
        claims, dead = session.database.write(deliveries.claim, timedelta(minutes=1), 4, {}, 4)
        ids |= {claim.delivery for claim in claims}
        dead_count += dead
        if not session.database.read(deliveries.is_due):
            return sorted(ids), dead_count
        session.database.write(deliveries._lock, (1, 2))


def record(session: Session) -> Any:
    """Two results in one transaction. The first delivery was claimed with another token, or never."""
    event = feed.Event(2, "e2", "paid", None, "o1", None, datetime(2026, 1, 1, tzinfo=UTC))
    records = [
        deliveries.Record(
            claim=deliveries.Claim(
                delivery, b"claimed-claimed-", 1, "http://127.0.0.1/", ("whsec_",), event, event.at, 1
            ),
            answer=SendResult(200, None, 1),
            chance=0.5,
        )
        for delivery in (2, 1)
    ]
    return session.database.write(deliveries.record, records, Backoff())


def handling_of(
    event: int, version: int = 1, *, instance: str = "o1", finish: bool = False, error: str | None = None
) -> instances.Handling:
    command = outbox.NewCommand("step", "ship", once=True)
    return instances.Handling(
        PROCESS, instance, f"e{event}", event, "w1", 1, version, "{}", () if error else (command,), (), finish, error
    )


def handle(handling: instances.Handling) -> Operation:
    return lambda session: session.service.processes.handle(handling)


def retry_strict(session: Session) -> Any:
    """The parked event comes again, is handled, and brings back what waits behind it."""
    session.service.processes.retry_parked(PROCESS, "o1")
    return session.service.processes.handle(dataclasses.replace(handling_of(1), strict=True))


def entries(*offsets: int) -> list[tallies.Entry]:
    return [tallies.Entry(key, 1, "parts", 0, 0, offset, 0) for offset in offsets for key in ("m4", "m5")]


def ranges(*points: str | None, topic: str = "bolts") -> list[tallies.Range]:
    """Ranges between these positions of a source, which follow one another."""
    return [
        tallies.Range(topic, 0, 0, after, upto or "", {"m4": 1, "m5": 1}) for after, upto in itertools.pairwise(points)
    ]


def sync(worker: str, session_name: str, drained: tuple[Any, ...] = ()) -> Operation:
    caller = leases.Caller(worker, session_name, drained=drained)
    return lambda session: session.service.consumer_groups.sync(GROUP, caller)


_FENCE: Final = positions.Fence(GROUP, 0, "w1", 1)

OPERATIONS: Final[Mapping[str, Operation]] = {
    # Batches.
    "ack-few": ack((2, 0, 63), (2, 0, 3), key="few"),
    "ack-other-group": ack((2, 1, 6), key="other"),
    "ack-new": extend_and_ack,
    "ack-many": ack(*MANY, key="many"),
    "ack-mask": mask(Verb.ACK),
    "fail-few": ack((2, 0, 63), (2, 1, 6), verb=Verb.FAIL, key="fail"),
    "fail-with-reason": ack((2, 1, 6), (2, 1, 7), verb=Verb.FAIL, reason="late", key="reason"),
    "fail-mask": mask(Verb.FAIL, new=2, reason="late"),
    "fail-beyond": ack((2, 0, 63), (2, 1, 6), (2, 1, 20), verb=Verb.FAIL, reason="late", key="beyond"),
    "skip": ack((2, 0, 9), (2, 0, 63), (2, 1, 6), verb=Verb.SKIP, reason="not needed", key="skip"),
    "merge": merge,
    "override": ack((2, 0, 9), key="override"),
    "redrive": lambda session: session.service.batches.redrive(2, Wish(), "redrive"),
    "redrive-reason": lambda session: session.service.batches.redrive(2, Wish("broken"), "reason"),
    "redrive-pending": lambda session: session.service.batches.redrive(2, Wish(pending=True), "pending"),
    "redrive-unchanged": lambda session: session.service.batches.redrive(
        2, Wish(pending=True, unchanged_for=60), "unchanged"
    ),
    "update": update(2, Patch(tolerated_failures=1, on_exceeded=OnExceeded.CANCEL, labels={"run": "2"})),
    "update-overdue": update(1, Patch(deadline=datetime(2099, 1, 1, tzinfo=UTC))),
    "extend": lambda session: session.service.batches.extend(2, 20, "more"),
    "extend-far": lambda session: session.service.batches.extend(2, 70, "far"),
    "extend-by": extend_by(ItemId(2, 0, 63)),
    "extend-by-other": extend_by(ItemId(2, 1, 6)),
    "seal": lambda session: session.service.batches.seal(2, "seal"),
    "open-child": lambda session: session.service.batches.open(
        Opening(items=0, sealed=True, parent=ItemId(2, 0, 63)), "child"
    ),
    "open-live-child": lambda session: session.service.batches.open(
        Opening(items=1, parent=ItemId(2, 0, 63)), "live-child"
    ),
    "open-other-child": lambda session: session.service.batches.open(
        Opening(items=1, parent=ItemId(2, 1, 6)), "other-child"
    ),
    "ack-held": ack((1, 0, 5), key="held"),
    "fail-held": ack((1, 0, 5), verb=Verb.FAIL, reason="late", key="fail-held"),
    "skip-held": ack((1, 0, 5), verb=Verb.SKIP, key="skip-held"),
    "open-with-callback": share(lambda: [open_with_callback()]),
    "share": share(
        lambda: [
            Extend(batch=1, count=1),
            Extend(batch=2, count=20, idempotency_key="more"),
            opening_of(Opening(items=1), "shared"),
            Append(events=[feed.NewEvent("mine", "paid", "o1")]),
        ]
    ),
    "share-seal": share(
        lambda: [
            Extend(batch=2, count=20),
            seal_of(2, "seal"),
            Extend(batch=2, count=5, by=ItemId(2, 1, 6), idempotency_key="links"),
            seal_of(3, "other"),
        ]
    ),
    "enlisted-ack": enlisted((2, 0, 63), (2, 0, 3)),
    "enlisted-ack-held": enlisted((1, 0, 5)),
    "enlisted-fail": enlisted((2, 0, 63), (2, 1, 6), verb=Verb.FAIL, reason="late"),
    "enlisted-skip": enlisted((2, 0, 9), (2, 1, 7), verb=Verb.SKIP, reason="not needed"),
    "enlisted-open": enlisted_open,
    "enlisted-seal": enlisted_seal,
    "cancel": lambda session: session.service.batches.cancel(2),
    "cancel-and-reopen": cancel_and_reopen,
    "cancel-above": lambda session: session.service.batches.cancel(1, reason="wrong", children=True),
    "expire": expire,
    "expire-overdue": expire_overdue,
    "delete": lambda session: session.service.batches.delete(2),
    "pay-parents": lambda session: parents.sweep(session.database),
    "remove-ended": remove_ended,
    "janitor": lambda session: janitor.run_once(session.database, _POLICY),
    "look": look,
    # Companions.
    "apply": lambda session: session.service.tallies.apply(TALLY, entries(11, 12), _FENCE),
    "apply-again": lambda session: session.service.tallies.apply(TALLY, entries(12, 13)),
    "apply-ranges": lambda session: session.service.tallies.apply_ranges(TALLY, ranges("9", "11", "13"), _FENCE),
    "apply-ranges-again": lambda session: session.service.tallies.apply_ranges(TALLY, ranges("11", "13", "15")),
    "apply-new-range": lambda session: session.service.tallies.apply_ranges(TALLY, ranges(None, "1", topic="nuts")),
    "share-apply": share(
        lambda: [
            apply_of(TALLY, entries(11, 12), _FENCE),
            apply_of(TALLY, entries(12, 13)),
            apply_ranges_of(TALLY, [*ranges("9", "11"), *ranges(None, "1", topic="nuts")], _FENCE),
            commits_of([positions.Commit(_FENCE, Snapshot(2, 4, (3,))), positions.Commit(_FENCE, Snapshot(5, 5))]),
            Append(events=[feed.NewEvent("mine", "paid", "o1")]),
        ]
    ),
    "sync": sync("w1", "s1"),
    "sync-newcomer": sync("w2", "s2"),
    "leave": lambda session: session.service.consumer_groups.leave(GROUP, "w1", "s1"),
    "commit-position": lambda session: session.service.consumer_groups.commit(_FENCE, Snapshot(2, 4, (3,))),
    "handle": handle(handling_of(2)),
    "handle-next": handle(handling_of(3, finish=True)),
    "handle-late": handle(handling_of(3, 0, instance="o9")),
    "share-handle": share(
        lambda: [
            handle_of(handling_of(2)),
            handle_of(handling_of(2, 0, instance="o2")),
            handle_of(handling_of(3, 2, finish=True)),
            Append(events=[feed.NewEvent("mine", "paid", "o1")]),
        ]
    ),
    "handle-parked": handle(handling_of(2, error="broken")),
    "handle-strict": handle(dataclasses.replace(handling_of(2), strict=True)),
    "retry-strict": retry_strict,
    "retry-parked": lambda session: session.service.processes.retry_parked(PROCESS, "o1"),
    "forget": lambda session: retention.forget(session.database, timedelta()),
    "fire-timers": lambda session: timers.fire(session.database),
    "append": lambda session: session.service.feed.append(
        [feed.NewEvent("mine", "paid", "o1"), feed.NewEvent("e3", "paid")]
    ),
    "append-fenced": lambda session: session.service.feed.append([feed.NewEvent("mine", "paid", "o1")], _FENCE),
    "trim": lambda session: feed.trim(session.database, _DAYS, needed=janitor.needed),
    "prune": lambda session: definitions.prune(session.database, 0),
    "plan": lambda session: session.database.write(deliveries.plan, 1),
    "claim": claim,
    "record": record,
}

RARE: Final = frozenset(
    {
        *("redrive", "redrive-reason", "redrive-pending", "redrive-unchanged"),
        *("update", "update-overdue", "open-with-callback", "open-other-child"),
        *("extend-by", "extend-by-other", "skip-held"),
        *("handle-strict", "retry-strict"),
        *("enlisted-ack", "enlisted-ack-held", "enlisted-fail", "enlisted-skip", "enlisted-open", "enlisted-seal"),
    }
)
"""Operations whose pairs only the tests of each night run."""
LONG: Final = frozenset({"janitor"})
"""A sequence of transactions that share only ids; triples use its parts instead."""
MANIFOLD: Final = LONG | {"delete", "pay-parents"}
"""Operations whose transactions all conflict with others: each pair has hundreds of schedules."""


def shown(result: Any) -> str:
    """The result of an operation in one line, without times."""
    return normalized(repr(_plain(result)))


def _plain(value: Any) -> Any:
    if isinstance(value, CoreError):
        return type(value).__name__, str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(element) for element in value]
    return value
