"""The number of round trips to MariaDB that each verb makes, alone and when sixty-four callers share a transaction.

A round trip is a packet to the server and its response: one statement, several in one packet, or the last writes with
the COMMIT. A change that needs fewer of them lowers its number here. `pytest -s` prints the table with the first words
of each packet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pymysql
import pytest

from core import writes
from core.acks.call import Call
from core.batches import batch as batches
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.batches.writing import Extend
from core.commits.combiner import Inline
from core.commits.operation import Operation
from core.consumer_groups import positions
from core.consumer_groups.leases import Caller
from core.consumer_groups.positions import Commit, Fence
from core.feed import Append, NewEvent, Span
from core.processes.handling import handle_of
from core.processes.instances import Handling
from core.processes.outbox import NewCommand
from core.service import Service
from core.service.batches import opening_of, seal_of
from core.service.consumer_groups import commits_of
from core.service.reads import SharedReads
from core.service.tallies import apply_of
from core.service.writes import KINDS
from core.storage.database import Database
from core.tallies import Entry, Range
from core.webhooks import deliveries
from core.webhooks.backoff import Backoff
from core.webhooks.sender import SendResult
from lastbit.ids import ItemId
from lastbit.streams.partitions import partition_of
from lastbit.streams.snapshot import Snapshot

ROUND_TRIPS = {
    "open, 10 items, sealed": 2,
    "open with an Idempotency-Key": 3,
    "extend": 2,
    "extend on behalf of an item": 2,
    "seal": 3,
    "seal again": 2,
    "status": 1,
    "watermark": 4,
    "a page of 50 events": 1,
    "append one event": 2,
    "one tally entry": 3,
    "one tally range": 3,
    "one position": 2,
    "ack, the first of its group": 2,
    "ack": 2,
    "ack that writes a point of the history": 2,
    "ack that completes": 3,
    "process event": 3,
    "process event that finishes": 4,
    "claim a delivery": 4,
    "record a delivery": 2,
}

_names = (f"name-{number}" for number in itertools.count())


class _Sender:
    """Webhooks can only be created if there is a sender; this one never sends."""

    def check(self, url: str) -> None: ...

    def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        raise NotImplementedError


@pytest.fixture
def service(mariadb_database: Database) -> Iterator[Service]:
    service_ = Service(mariadb_database, combiner=Inline, sender=_Sender())
    yield service_
    service_.stop()


def _batch(service: Service, *, sealed: bool = False, acked: int = 0) -> int:
    batch = service.batches.open(Opening(items=10, sealed=sealed)).batch.id
    for number in range(acked):
        service.acks.ack(Call.of(Verb.ACK, [(batch, 0, number)])).result()
    return batch


def _events(service: Service, count: int) -> int:
    """Append events; returns the position of the first."""
    events = [NewEvent(next(_names), "robot.moved", "key", '{"x": 1}') for _ in range(count)]
    return service.feed.append(events)[0].position


Measured = Callable[[], Any]
"""The call whose round trips are counted; everything that it needs is prepared before."""


def _open(service: Service, key: str | None = None) -> Measured:
    return lambda: service.batches.open(Opening(items=10, sealed=True), key)


def _extend(service: Service) -> Measured:
    batch = _batch(service)
    return lambda: service.batches.extend(batch, 10)


def _extend_by(service: Service) -> Measured:
    batch = _batch(service, sealed=True, acked=5)
    return lambda: service.batches.extend(batch, 10, by=ItemId(batch, 0, 5))


def _seal(service: Service, *, again: bool = False) -> Measured:
    batch = _batch(service, sealed=again)
    return lambda: service.batches.seal(batch)


def _ack(service: Service, *, before: int) -> Measured:
    batch = _batch(service, sealed=True, acked=before)
    return lambda: service.acks.ack(Call.of(Verb.ACK, [(batch, 0, before)])).result()


def _ack_with_a_point(service: Service) -> Measured:
    batch = _batch(service, sealed=True, acked=1)
    service.database.write(lambda tx: batches.update(tx, batch, history=b"\0\0\0\1\0"))

    def ack() -> None:
        service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 1)])).result()

    return ack


def _look(service: Service, *, watermark: bool = False) -> Measured:
    batch = _batch(service, sealed=True, acked=5)
    return lambda: service.batches.watermark(batch) if watermark else service.batches.get(batch)


def _page(service: Service) -> Measured:
    first = _events(service, 60)
    return lambda: service.feed.read(first - 1, 50)


def _append(service: Service) -> Measured:
    return lambda: _events(service, 1)


def _tally(service: Service) -> Measured:
    tally = next(_names)
    service.tallies.apply(tally, [Entry("key", 1, "moves", 0, 0, 0, 0)])
    return lambda: service.tallies.apply(tally, [Entry("key", 1, "moves", 0, 0, 1, 0)])


def _range(service: Service) -> Measured:
    tally = next(_names)
    service.tallies.apply_ranges(tally, [Range("moves", 0, 0, None, "0", {"key": 1})])
    return lambda: service.tallies.apply_ranges(tally, [Range("moves", 0, 0, "0", "1", {"key": 1})])


def _position(service: Service) -> Measured:
    group = next(_names)
    service.consumer_groups.put(group, 1)
    [lease] = service.consumer_groups.sync(group, Caller("w", "s")).assigned
    return lambda: service.consumer_groups.commit(Fence(group, 0, "w", lease.epoch), Snapshot(7, 7))


def _handle(service: Service, *, finish: bool) -> Measured:
    process = next(_names)
    service.processes.define(process, partitions=1)
    [lease] = service.consumer_groups.sync(f"process.{process}", Caller("w", "s")).assigned

    def handle(version: int, *, finish: bool) -> None:
        event = next(_names)
        position = service.feed.append([NewEvent(event, "robot.moved", "i")])[0].position
        commands = [NewCommand("done", "done")] if finish else []
        handlings.append(
            Handling(process, "i", event, position, "w", lease.epoch, version, "{}", commands, finish=finish)
        )

    handlings: list[Handling] = []
    handle(0, finish=False)
    if finish:
        service.processes.handle(handlings.pop())
        handle(1, finish=True)
    return lambda: service.processes.handle(handlings[0])


def _due(service: Service, count: int = 1) -> None:
    """This many due deliveries, and no other."""
    url = "https://example.com/hook"
    for webhook in service.webhooks.page(None, 100)[0]:
        service.webhooks.delete(webhook.id)
    webhook = service.webhooks.create(url, ["robot.moved"], None).webhook.id
    _events(service, count)
    service.database.write_in_chunks(deliveries.plan, webhook)


def _claim_of(service: Service, count: int = 1) -> list[deliveries.Claim]:
    return service.database.write(deliveries.claim, timedelta(minutes=1), count, {}, count)[0]


def _claim(service: Service) -> Measured:
    _due(service)
    return lambda: _claim_of(service)


def _sent(claim: deliveries.Claim) -> deliveries.Record:
    return deliveries.Record(claim=claim, answer=SendResult(204, None, 1), chance=0.5)


def _record(service: Service) -> Measured:
    _due(service)
    [claim] = _claim_of(service)
    return lambda: service.database.write(deliveries.record, [_sent(claim)], Backoff())


VERBS: dict[str, Callable[[Service], Measured]] = {
    "open, 10 items, sealed": _open,
    "open with an Idempotency-Key": lambda service: _open(service, next(_names)),
    "extend": _extend,
    "extend on behalf of an item": _extend_by,
    "seal": _seal,
    "seal again": lambda service: _seal(service, again=True),
    "status": _look,
    "watermark": lambda service: _look(service, watermark=True),
    "a page of 50 events": _page,
    "append one event": _append,
    "one tally entry": _tally,
    "one tally range": _range,
    "one position": _position,
    "ack, the first of its group": lambda service: _ack(service, before=0),
    "ack": lambda service: _ack(service, before=1),
    "ack that writes a point of the history": _ack_with_a_point,
    "ack that completes": lambda service: _ack(service, before=9),
    "process event": lambda service: _handle(service, finish=False),
    "process event that finishes": lambda service: _handle(service, finish=True),
    "claim a delivery": _claim,
    "record a delivery": _record,
}


class _Wire:
    """Records the packets that are sent to one database."""

    def __init__(self, patches: pytest.MonkeyPatch, database: Database) -> None:
        self.packets: list[str] = []
        original = pymysql.connections.Connection._execute_command
        name = str(database.url.database).encode()

        def execute(connection: Any, command: int, sql: Any) -> None:
            if connection.db == name:
                self.packets.append(sql.decode(errors="replace") if isinstance(sql, bytes | bytearray) else sql)
            original(connection, command, sql)

        patches.setattr(pymysql.connections.Connection, "_execute_command", execute)


def test_each_verb_makes_the_round_trips_of_the_table(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = _Wire(monkeypatch, service.database)
    round_trips = {}
    for name, prepare in VERBS.items():
        prepare(service)()  # the first call of a process fills caches
        measured = prepare(service)
        wire.packets.clear()
        measured()
        round_trips[name] = len(wire.packets)
        print(
            f"{name}: {len(wire.packets)}",
            *(f"  {' '.join(packet.split())[:100]}" for packet in wire.packets),
            sep="\n",
        )
        if name == "ack that writes a point of the history":
            assert any("history = " in packet for packet in wire.packets)
    assert round_trips == ROUND_TRIPS


CALLERS = 64


def _handlings(service: Service, *, finish: bool = False) -> list[Handling]:
    """A handling for each of some instances, in several partitions."""
    process = next(_names)
    service.processes.define(process, partitions=4)
    epochs = {
        lease.partition: lease.epoch
        for lease in service.consumer_groups.sync(f"process.{process}", Caller("w", "s")).assigned
    }
    events = [next(_names) for _ in range(CALLERS)]
    first = service.feed.append([NewEvent(event, "robot.moved") for event in events])[0].position
    commands = [NewCommand("done", "done")] if finish else []
    return [
        Handling(
            *(process, f"i{number}", event, first + number, "w", epochs[partition_of(f"i{number}", 4)], 0, "{}"),
            *(commands, (), finish),
        )
        for number, event in enumerate(events)
    ]


def _commits(service: Service) -> list[positions.CommitPositions]:
    group = next(_names)
    service.consumer_groups.put(group, CALLERS)
    leases = service.consumer_groups.sync(group, Caller("w", "s")).assigned
    fences = [Fence(group, lease.partition, "w", lease.epoch) for lease in leases]
    return [commits_of([Commit(fence, Snapshot(7, 7))]) for fence in fences]


MERGED: Mapping[str, Callable[[Service], Sequence[Operation]]] = {
    "open, 10 items, sealed": lambda service: [opening_of(Opening(items=10, sealed=True)) for _ in range(CALLERS)],
    "open with an Idempotency-Key": lambda service: [opening_of(Opening(), next(_names)) for _ in range(CALLERS)],
    "extend one batch": lambda service: [Extend(batch=batch, count=1) for batch in [_batch(service)] * CALLERS],
    "extend a batch each": lambda service: [Extend(batch=_batch(service), count=1) for _ in range(CALLERS)],
    "extend on behalf of items": lambda service: [
        Extend(batch=batch, count=1, by=ItemId(batch, 0, number % 10))
        for batch in [_batch(service, sealed=True)]
        for number in range(CALLERS)
    ],
    "seal": lambda service: [seal_of(_batch(service)) for _ in range(CALLERS)],
    "append one event": lambda service: [Append(events=[NewEvent(next(_names), "x")]) for _ in range(CALLERS)],
    "one tally entry": lambda service: [
        apply_of(tally, [Entry(next(_names), 1, "moves", 0, 0, 1, 0)]) for tally in [next(_names)] * CALLERS
    ],
    "one position": lambda service: _commits(service),
    "process event": lambda service: [handle_of(handling) for handling in _handlings(service)],
    "process event that finishes": lambda service: [handle_of(one) for one in _handlings(service, finish=True)],
}
MERGED_ROUND_TRIPS = {
    "open, 10 items, sealed": 2,
    "open with an Idempotency-Key": 3,
    "extend one batch": 2,
    "extend a batch each": 2,
    "extend on behalf of items": 2,
    "seal": 3,
    "append one event": 2,
    "claim deliveries": 4,
    "record deliveries": 2,
    "one tally entry": 3,
    "one position": 2,
    "process event": 3,
    "process event that finishes": 4,
    "status": 1,
    "watermark": 4,
    "a page of 50 events": 1,
}


def test_many_callers_make_the_round_trips_of_one(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of sixty-four callers in one transaction, and reads in one statement."""
    wire = _Wire(monkeypatch, service.database)
    round_trips = {}
    _batch(service)  # connect
    for name, prepare in MERGED.items():
        operations = prepare(service)
        wire.packets.clear()
        outcomes = writes.commit(service.database, operations, KINDS)
        round_trips[name] = len(wire.packets)
        assert all(outcome.error is None for outcome in outcomes)
        print(f"{name}, {CALLERS} callers: {round_trips[name]}")
    _due(service, CALLERS)
    wire.packets.clear()
    claims = _claim_of(service, CALLERS)
    round_trips["claim deliveries"] = len(wire.packets)
    wire.packets.clear()
    service.database.write(deliveries.record, [_sent(claim) for claim in claims], Backoff())
    round_trips["record deliveries"] = len(wire.packets)
    assert len(claims) == CALLERS
    ids = {_batch(service, sealed=True, acked=place % 3) for place in range(CALLERS)}
    first = _events(service, 2 * CALLERS)
    reads: dict[str, tuple[SharedReads[Any, Any], set[Any]]] = {
        "status": (service.reads.batches, ids),
        "watermark": (service.reads.watermarks, ids),
        "a page of 50 events": (service.reads.pages, {Span(first + place, 50) for place in range(CALLERS)}),
    }
    for name, (kind, questions) in reads.items():
        wire.packets.clear()
        values = kind._answers(questions)
        round_trips[name] = len(wire.packets)
        assert values.keys() == questions
        assert not any(isinstance(value, Exception) for value in values.values())
    assert round_trips == MERGED_ROUND_TRIPS
