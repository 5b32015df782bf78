"""Kafka as its clients present it: a recorded log, a group's committed offsets, and rebalances when the test triggers
them."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastbit.streams.sources.kafka import METADATA_LIMIT, Listener, Place, Position

LOG = [json.loads(line) for line in Path(__file__).with_name("kafka_log.jsonl").read_text().splitlines()]
"""Six entities with eight steps each, on three partitions, with gaps; offsets from 0, around 2^53, and up to 2^63."""
PLACES = sorted({Place(each["topic"], each["partition"]) for each in LOG})


@dataclass(frozen=True)
class Attributes:
    """A record in the shape that kafka-python returns."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes


class Methods:
    """A record in the shape that confluent-kafka returns."""

    def __init__(self, record: Attributes) -> None:
        self._record = record

    def topic(self) -> str:
        return self._record.topic

    def partition(self) -> int:
        return self._record.partition

    def offset(self) -> int:
        return self._record.offset

    def key(self) -> bytes:
        return self._record.key

    def value(self) -> bytes:
        return self._record.value


class OffsetMetadataTooLarge(Exception):
    """A broker's error for metadata over its limit."""


@dataclass
class Broker:
    """The state that outlives a consumer."""

    records: list[Attributes] = field(
        default_factory=lambda: [
            Attributes(r["topic"], r["partition"], r["offset"], r["key"].encode(), str(r["value"]).encode())
            for r in LOG
        ]
    )
    committed: dict[Place, Position] = field(default_factory=dict)
    limit: int = METADATA_LIMIT


class RecordedClient:
    """A `KafkaClient` on such a broker. `rebalance` makes the next poll call back as in a rebalance, and waits for
    it."""

    def __init__(self, broker: Broker, *, methods: bool = False, assigned: Iterable[Place] = PLACES) -> None:
        self.broker = broker
        self.commits: list[Sequence[Position]] = []
        self.rebalancing = False
        self.paused = threading.Event()
        self.closed = False
        self._methods = methods
        self._next: dict[Place, int] = {}
        self._events: queue.SimpleQueue[tuple[str, list[Place], threading.Event]] = queue.SimpleQueue()
        self._first = list(assigned)
        self._told: dict[str, Listener] = {}
        self._thread: int | None = None
        self._idle = threading.Event()

    def rebalance(self, event: str, places: Iterable[Place] = ()) -> None:
        finished = threading.Event()
        self._events.put((event, list(places), finished))
        assert finished.wait(10)

    def subscribe(self, topics: Sequence[str], assigned: Listener, revoked: Listener, lost: Listener) -> None:
        self._told = {"assigned": assigned, "revoked": revoked, "lost": lost}

    def poll(self, seconds: float) -> Iterable[Any]:
        assert self._thread in (None, threading.get_ident()), "clients are used from one thread"
        self._thread = threading.get_ident()
        if self._first:
            places, self._first = self._first, []
            self._rebalance("assigned", places)
        try:
            event, places, finished = self._events.get_nowait()
        except queue.Empty:
            record = None if self.paused.is_set() else self._next_record()
            if record is None:
                self._idle.wait(min(seconds, 0.01))
                return ()
            return (Methods(record) if self._methods else record,)
        if event == "broken":
            finished.set()
            raise ConnectionError("all brokers are down")
        self._rebalance(event, places)
        finished.set()
        return ()

    def _rebalance(self, event: str, places: list[Place]) -> None:
        self._told[event](places)
        for place in places:
            if event == "assigned":
                position = self.broker.committed.get(place)
                self._next[place] = -1 if position is None else position.offset
            else:
                self._next.pop(place, None)

    def _next_record(self) -> Attributes | None:
        for record in self.broker.records:
            place = Place(record.topic, record.partition)
            if place in self._next and record.offset >= self._next[place]:
                self._next[place] = record.offset + 1
                return record
        return None

    def committed(self, places: Sequence[Place]) -> Iterable[Position]:
        return [self.broker.committed.get(place, Position(place, -1, "")) for place in places]

    def commit(self, positions: Sequence[Position]) -> bool:
        if self.rebalancing:
            return False
        if any(len(position.metadata.encode()) > self.broker.limit for position in positions):
            raise OffsetMetadataTooLarge
        self.commits.append(positions)
        self.broker.committed.update({position.place: position for position in positions})
        return True

    def pause(self) -> None:
        self.paused.set()

    def resume(self) -> None:
        self.paused.clear()

    def close(self) -> None:
        self.closed = True
