"""Random logs, services that republish them, and consumers that count them, with everything that can go wrong.

A `World` has root logs (topics, partitions, generations; offsets with gaps), a chain of republishers, and consumers
that send the last stage's messages to a tally. Its keys are its own, so that many worlds can share a tally and its
calls. It keeps the order that a tally needs: the messages of a root partition reach a key in order. A stage reads each
partition in order and routes by key; a stage only appends a letter to a key, so that each key has one route; and when a
stage restarts with another number of partitions, its old ones are drained first.

Everything else is random. A stage turns a message into up to three, dies between two of them or later, restarts at an
old position and publishes again. A consumer gathers a random number of messages, loses answers, sends the messages
again in different chunks, dies, restarts at an old position, and keeps running next to its successor.

`truth` depends on the root logs and the stages' functions alone.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lastbit.chains import SourceChain
from lastbit.tallies.buffer import Gatherer, Message, entries_of, message
from lastbit.tallies.ranges import Addition, Counting, Order, additions

STAGES = 3


class Record(NamedTuple):
    offset: int
    key: str
    number: int
    header: str | None


@dataclass
class Log:
    """One partition of a topic."""

    topic: str
    partition: int
    generation: int
    records: list[Record] = field(default_factory=list)


Epoch = list[Log]
"""The partitions of a topic, for as long as their number stays the same."""


@dataclass(frozen=True)
class RangesCall:
    """What a consumer that counts by ranges sends."""

    counting: Counting
    additions: list[Addition]


class World:
    """`by_range`: its consumers count by ranges, and no stage gets other partitions while it has work to repeat."""

    def __init__(self, seed: int, *, by_range: bool = False) -> None:
        self.name = f"w{seed}"
        self.by_range = by_range
        self.dice = random.Random(seed)
        self._passes = [self.dice.random() < 0.25 for _ in range(self.dice.randint(0, STAGES))]
        """For each stage, whether it turns a message into exactly one."""
        self.roots = list(self._root_logs())
        epochs: list[Epoch] = [self.roots]
        for stage in range(len(self._passes)):
            epochs = self._republished(stage, epochs)
        self._epochs = epochs
        self._committed: dict[int, int] = {}
        """By the id of a log: how many of its records the broker counts as committed."""

    def _root_logs(self) -> Iterator[Log]:
        for topic in ("fastened", "loosened")[: self.dice.randint(1, 2)]:
            for generation in range(self.dice.randint(1, 2)):
                for partition in range(self.dice.randint(1, 2)):
                    log = Log(topic, partition, generation)
                    offset = self.dice.choice((0, 0, 5))
                    for _ in range(self.dice.randint(1, 6)):
                        key = f"{self.name}/{self.dice.choice('ab')}"
                        log.records.append(Record(offset, key, self.dice.randrange(10**6), None))
                        offset += self.dice.choice((1, 1, 1, 3))
                    yield log

    def _made_of(self, stage: int, record: Record) -> list[tuple[str, int]]:
        """The keys and numbers that a stage makes of a record; the same on every call."""
        if self._passes[stage]:
            return [(record.key, record.number)]
        dice = random.Random(f"{self.name}:{stage}:{record.key}:{record.number}")
        return [(record.key + dice.choice("xy"), record.number * 7 + n) for n in range(dice.choice((0, 1, 2, 2, 3)))]

    @staticmethod
    def deltas(record: Record) -> dict[str, int]:
        """The deltas, for two keys, that a record of the last stage brings."""
        return {record.key: record.number % 9 - 3, f"{record.key}#": 1}

    def truth(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        records = [record for log in self.roots for record in log.records]
        for stage in range(len(self._passes)):
            records = [Record(0, *values, None) for record in records for values in self._made_of(stage, record)]
        for record in records:
            for key, delta in self.deltas(record).items():
                totals[key] = totals.get(key, 0) + delta
        return totals

    def _republished(self, stage: int, sources: list[Epoch]) -> list[Epoch]:
        """The records that a stage publishes over all of its lives."""
        epochs: list[Epoch] = [self._topic(stage)]
        offsets: dict[int, int] = {}
        for life in range(self.dice.randint(0, 3), -1, -1):
            if life and self.dice.random() < 0.3 and epochs[-1] and not self.by_range:
                epochs.append(self._topic(stage))
            steps = self.dice.randint(1, 8) if life else None  # it dies after this many steps; the last life ends
            self._live(stage, sources, epochs[-1], offsets, steps)
        return epochs

    def _topic(self, stage: int) -> Epoch:
        return [Log(f"stage-{stage}", partition, 0) for partition in range(self.dice.randint(1, 3))]

    def _live(
        self, stage: int, sources: list[Epoch], target: Epoch, offsets: dict[int, int], steps: int | None
    ) -> None:
        for epoch in sources:
            read = {id(log): offsets.get(id(log), 0) for log in epoch}
            while unread := [log for log in epoch if read[id(log)] < len(log.records)]:
                log = self.dice.choice(unread)
                record = log.records[read[id(log)]]
                products = self._made_of(stage, record)
                dies = steps == 0
                for child, (key, number) in enumerate(
                    products[: self.dice.randint(0, len(products))] if dies else products
                ):
                    chain = SourceChain.decode(record.header).hop(
                        log.topic,
                        log.partition,
                        record.offset,
                        None if self._passes[stage] else child,
                        generation=log.generation,
                    )
                    partition = target[zlib.crc32(key.encode()) % len(target)].records
                    partition.append(Record(len(partition), key, number, chain.encode()))
                if dies:
                    return
                steps = None if steps is None else steps - 1
                read[id(log)] += 1
                if self.dice.random() < 0.3:
                    offsets[id(log)] = read[id(log)]
            # Finish this epoch before the next one starts.
            offsets.update(read)

    def consumed(self) -> Iterator[list[Any]]:
        """The calls of all consumers, in the order in which they reach the service; each is applied."""
        consumers = [self._consumer(dies=self.dice.random() < 0.6)]
        successors = self.dice.randint(0, 2)
        while consumers:
            consumer = self.dice.choice(consumers)
            if (call := next(consumer, None)) is None:
                consumers.remove(consumer)
            elif call:
                yield call
            if successors and self.dice.random() < 0.15:
                successors -= 1
                consumers.append(self._consumer(dies=self.dice.random() < 0.6))
        yield from filter(None, self._consumer(dies=False))

    def _consumer(self, *, dies: bool) -> Iterator[list[Any]]:
        """The calls of one consumer's life, with an empty list for each step in which no call reaches the service."""
        dice = self.dice
        counting, order = Counting(), Order()
        remaining = dice.randint(0, 12) if dies else None
        for epoch in self._epochs:
            read = {id(log): self._committed.get(id(log), 0) for log in epoch}
            acked = dict(read)
            pending: list[Message] = []
            gatherer = Gatherer(dice.randint(1, 12))
            while gatherer or pending or any(read[id(log)] < len(log.records) for log in epoch):
                if remaining is not None:
                    remaining -= 1
                    if remaining < 0:
                        return
                if pending:
                    # Send the messages again, in different chunks and with more messages after them.
                    gatherer = Gatherer(dice.randint(1, 12))
                    for message in pending:
                        gatherer.put(message)
                    pending = []
                for _ in range(dice.randint(0, 6)):
                    readable = [log for log in epoch if read[id(log)] < len(log.records)]
                    if not readable:
                        break
                    gatherer.put(self._read(dice.choice(readable), read, acked, order))
                yield []
                messages = [*gatherer._messages]
                call = gatherer.take()
                if call is None:
                    continue
                reaches, is_answered = dice.random() < 0.9, dice.random() < 0.8
                if reaches and call.entries and self.by_range:
                    # A consumer that gets no answer learns nothing from it.
                    yield [RangesCall(counting if is_answered else copy.deepcopy(counting), call.entries)]
                elif reaches and call.entries:
                    yield call.entries
                if reaches and is_answered:
                    for ack in call.acks:
                        ack()
                    for log in epoch:
                        if dice.random() < 0.5:
                            before = self._committed.get(id(log), 0)
                            self._committed[id(log)] = max(before, acked[id(log)])
                else:
                    pending = messages
            for log in epoch:
                self._committed[id(log)] = len(log.records)

    def _read(self, log: Log, read: dict[int, int], acked: dict[int, int], order: Order) -> Message:
        record = log.records[read[id(log)]]
        read[id(log)] += 1
        place = read[id(log)]
        chain = SourceChain.decode(record.header).hop(
            log.topic, log.partition, record.offset, generation=log.generation
        )

        class Window:
            def ack(self, offset: int) -> None:
                assert offset == record.offset
                # Calls keep the order in which messages were read.
                assert acked[id(log)] in (place - 1, place)
                acked[id(log)] = place

        if self.by_range:
            message_parts = additions(self.deltas(record), chain)
            order.check(message_parts)
            return message(message_parts, chain, Window())
        return message(entries_of(self.deltas(record), chain), chain, Window())
