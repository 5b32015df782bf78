"""Kafka topics read in a consumer group, through your own Kafka client; all partitions of a consumer form one stream.

Each partition has a window. Its commit is the offset after its floor, with the window's snapshot as metadata, so the
partition's next reader skips what is done above the floor. Things that could go wrong, and did elsewhere:

* Metadata over the broker's limit stops consumption (parallel-consumer #647). The snapshot is shortened to fit, and the
  rest replays.
* A partition is revoked while its records are being handled, and a late ack moves the new owner's offset (Redpanda
  Connect #4477). The window is closed first, and refuses late acks.
* Handlers are slow, so the consumer does not poll, and the group reassigns its partitions. A separate thread polls, and
  pauses the partitions while enough records are buffered.
"""

from __future__ import annotations

import base64
import itertools
import logging
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from lastbit.errors import InvalidArgument
from lastbit.streams._awaited import Awaited
from lastbit.streams.errors import CorruptSnapshot, WindowClosed, WindowFull
from lastbit.streams.snapshot import MIN_BYTES, Snapshot
from lastbit.streams.sources.session import Done, Session
from lastbit.streams.sources.unsettled import Unsettled
from lastbit.streams.window import AckWindow

log = logging.getLogger("lastbit.streams")

METADATA_LIMIT = 4096
"""Bytes of a commit's metadata: the default of offset.metadata.max.bytes."""
CAPACITY = 8192
"""Maximum records handed out, from the first unfinished one."""
AHEAD = 1000
"""Maximum records buffered before they are handed out; beyond that, the partitions are paused."""
POLL = 0.1
"""Seconds that a poll waits for records; a commit may wait this long for it."""


class Place(NamedTuple):
    topic: str
    partition: int


class Position(NamedTuple):
    """`offset` is the next to read; -1 for none."""

    place: Place
    offset: int
    metadata: str


Listener = Callable[[Sequence[Place]], None]


class KafkaClient(Protocol):
    """The consumer methods that a source needs, always called from one thread. `Confluent` and `KafkaPython` adapt two
    clients."""

    def subscribe(self, topics: Sequence[str], assigned: Listener, revoked: Listener, lost: Listener) -> None:
        """`poll` and `close` call the three listeners: partitions are assigned, about to be revoked, or already
        lost."""

    def poll(self, seconds: float) -> Iterable[Any]:
        """Records, with topic, partition and offset as attributes or methods."""

    def committed(self, places: Sequence[Place]) -> Iterable[Position]: ...

    def commit(self, positions: Sequence[Position]) -> bool:
        """Whether the commit took effect. False: a rebalance is in progress, and `poll` will report it."""

    def pause(self) -> None:
        """Pause all assigned partitions."""

    def resume(self) -> None: ...

    def close(self) -> None: ...


class Confluent:
    """A `confluent_kafka.Consumer`, with `enable.auto.commit` off."""

    def __init__(self, consumer: Any) -> None:
        import confluent_kafka

        self._consumer = consumer
        self._kafka = confluent_kafka
        errors = confluent_kafka.KafkaError
        self._moved_on = {errors.REBALANCE_IN_PROGRESS, errors.ILLEGAL_GENERATION, errors.UNKNOWN_MEMBER_ID}

    def subscribe(self, topics: Sequence[str], assigned: Listener, revoked: Listener, lost: Listener) -> None:
        def with_places(listener: Listener) -> Callable[[Any, Any], None]:
            return lambda _, partitions: listener(
                [Place(partition.topic, partition.partition) for partition in partitions]
            )

        self._consumer.subscribe(
            list(topics),
            on_assign=with_places(assigned),
            on_revoke=with_places(revoked),
            on_lost=with_places(lost),
        )

    def poll(self, seconds: float) -> Iterable[Any]:
        message = self._consumer.poll(seconds)
        if message is None:
            return ()
        error = message.error()
        if error is None:
            return (message,)
        if error.code() == self._kafka.KafkaError._PARTITION_EOF:
            return ()
        raise self._kafka.KafkaException(error)

    def committed(self, places: Sequence[Place]) -> Iterable[Position]:
        for position in self._consumer.committed([self._kafka.TopicPartition(*place) for place in places]):
            if position.error is not None:
                raise self._kafka.KafkaException(position.error)
            yield Position(Place(position.topic, position.partition), max(position.offset, -1), position.metadata or "")

    def commit(self, positions: Sequence[Position]) -> bool:
        offsets = [self._kafka.TopicPartition(*place, offset, metadata) for place, offset, metadata in positions]
        try:
            for position in self._consumer.commit(offsets=offsets, asynchronous=False):
                if position.error is not None:
                    raise self._kafka.KafkaException(position.error)
        except self._kafka.KafkaException as failure:
            if failure.args[0].code() in self._moved_on:
                return False
            raise
        return True

    def pause(self) -> None:
        self._consumer.pause(self._consumer.assignment())

    def resume(self) -> None:
        self._consumer.resume(self._consumer.assignment())

    def close(self) -> None:
        self._consumer.close()


class KafkaPython:
    """A `kafka.KafkaConsumer` of kafka-python, with `enable_auto_commit` off."""

    def __init__(self, consumer: Any) -> None:
        import kafka
        import kafka.errors

        self._consumer = consumer
        self._kafka = kafka
        self._moved_on = (kafka.errors.RebalanceInProgressError, kafka.errors.CommitFailedError)

    def subscribe(self, topics: Sequence[str], assigned: Listener, revoked: Listener, lost: Listener) -> None:
        def places(partitions: Iterable[Any]) -> list[Place]:
            return [Place(partition.topic, partition.partition) for partition in partitions]

        class RebalanceListener(self._kafka.ConsumerRebalanceListener):  # type: ignore[misc, name-defined]
            def on_partitions_assigned(self, partitions: Iterable[Any]) -> None:
                assigned(places(partitions))

            def on_partitions_revoked(self, partitions: Iterable[Any]) -> None:
                revoked(places(partitions))

            def on_partitions_lost(self, partitions: Iterable[Any]) -> None:
                lost(places(partitions))

        self._consumer.subscribe(topics=list(topics), listener=RebalanceListener())

    def poll(self, seconds: float) -> Iterable[Any]:
        return itertools.chain.from_iterable(self._consumer.poll(timeout_ms=int(1000 * seconds)).values())

    def committed(self, places: Sequence[Place]) -> Iterable[Position]:
        for place in places:
            position = self._consumer.committed(self._kafka.TopicPartition(*place), metadata=True)
            yield (
                Position(place, -1, "")
                if position is None
                else Position(place, position.offset, position.metadata or "")
            )

    def commit(self, positions: Sequence[Position]) -> bool:
        offsets = {
            self._kafka.TopicPartition(*place): self._kafka.OffsetAndMetadata(offset, metadata, -1)
            for place, offset, metadata in positions
        }
        try:
            self._consumer.commit(offsets)
        except self._moved_on:
            return False
        return True

    def pause(self) -> None:
        self._consumer.pause(*self._consumer.assignment())

    def resume(self) -> None:
        self._consumer.resume(*self._consumer.assignment())

    def close(self) -> None:
        self._consumer.close(autocommit=False)


class _Partition:
    """A partition from its assignment until it is revoked."""

    def __init__(self, position: Position) -> None:
        self.place = position.place
        self.window = _restored(position)
        self.awaited = Awaited(self.window)
        self.committed_acks = 0
        """The window's ack count at the last commit."""


def _restored(position: Position) -> AckWindow:
    try:
        snapshot = Snapshot.decode(base64.b64decode(position.metadata, validate=True))
    except (CorruptSnapshot, ValueError):  # other software's metadata, or none
        return AckWindow()
    # If the floor does not match, another program has changed the offset since. Then only the offset is valid.
    return AckWindow.restore(snapshot) if snapshot.floor + 1 == position.offset else AckWindow()


class _HandedOut(AckWindow):
    """The window of all records that were handed out. Those whose partition was revoked while they waited are not
    begun: its new owner handles them."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity=capacity)
        self.unsettled: Unsettled[tuple[_Partition, int]] = Unsettled(self)

    def begins(self, offset: int) -> bool:
        origin = self.unsettled.at_broker(offset)
        return super().begins(offset) and (origin is None or not origin[0].window.closed)


class KafkaTopics(Session[tuple[_Partition, int, Any]]):
    """Records of topics, as (sequence number, the client's own record). Pass its `window` and `commit` to
    `run_ordered`:

        with KafkaTopics(Confluent(consumer), ["orders"]) as orders:
            run_ordered(orders, handle, key=lambda record: record.key(), commit=orders.commit, window=orders.window)

    The source takes over the consumer and closes it. At most `capacity` records are handed out, from the first
    unfinished one. `metadata_limit`: bytes, the broker's offset.metadata.max.bytes. `refused` counts acks that came
    after their partition was revoked. Iterating raises `SessionEnded` when the client fails.
    """

    def __init__(
        self,
        client: KafkaClient,
        topics: Sequence[str],
        *,
        capacity: int = CAPACITY,
        metadata_limit: int = METADATA_LIMIT,
    ) -> None:
        self._snapshot_limit = metadata_limit // 4 * 3  # in Base64
        if self._snapshot_limit < MIN_BYTES:
            raise InvalidArgument(f"a snapshot does not fit into {metadata_limit} bytes of metadata")
        super().__init__(f"Kafka topics {', '.join(topics)}")
        self.refused = 0
        self._client = client
        self._unsettled = _HandedOut(capacity).unsettled
        self._numbers = itertools.count()
        self._floor = -1
        self._ours: dict[Place, _Partition] = {}
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending = False
        client.subscribe(topics, self._assigned, self._revoked, self._lost)
        try:
            self._thread.start()
        except RuntimeError:  # partitions that nobody polls would be withheld from the others of the group
            client.close()
            raise

    @property
    def window(self) -> AckWindow:
        return self._unsettled.window

    def __iter__(self) -> Iterator[tuple[int, Any] | None]:
        for delivery in self._received():
            if delivery is None:
                yield None
                continue
            partition, offset, record = delivery
            while (is_new := self._track(partition, offset)) is None:
                yield None
            if is_new:
                number = next(self._numbers)
                self._unsettled.hand_out(number, (partition, offset))
                yield number, record

    def _track(self, partition: _Partition, offset: int) -> bool | None:
        """Whether to handle the record; None if its window is full."""
        try:
            partition.awaited.pass_to(offset)
            return partition.window.track(offset)
        except WindowClosed:
            return False  # revoked after it was read and before it was handled
        except WindowFull:
            # The window receives acks only at commits. Pass on those since the last commit.
            self._take_in()
            partition.window.wait_for_room(POLL)
            return None

    def _take_in(self) -> None:
        """Pass acks on to the partitions' windows."""
        resolved = self._unsettled.resolved(self._floor)
        for partition, offset in resolved.values():
            try:
                partition.window.ack(offset)
            except WindowClosed:
                self.refused += 1
        self._unsettled.settle(resolved)

    def commit(self, floor: int) -> None:
        """Commit each partition with new acks. Raises `SessionEnded`, or the Kafka client's error."""
        self._floor = max(self._floor, floor)
        self._take_in()
        # In the session's thread, because partitions are revoked only there.
        self._ask(self._commit_all)

    def _commit_all(self, on_done: Done) -> None:
        self._commit(self._ours.values())
        on_done()

    def _commit(self, partitions: Iterable[_Partition]) -> None:
        windows = [(part, part.window.acks) for part in partitions]
        changes = [(part, acks) for part, acks in windows if acks != part.committed_acks]
        if changes and self._client.commit([self._position(part) for part, _ in changes]):
            for part, acks in changes:
                part.committed_acks = acks

    def _position(self, partition: _Partition) -> Position:
        snapshot = partition.window.snapshot(self._snapshot_limit)
        floor = Snapshot.decode(snapshot).floor
        return Position(partition.place, floor + 1, base64.b64encode(snapshot).decode())

    def _assigned(self, places: Sequence[Place]) -> None:
        for position in self._client.committed(places):
            self._ours[position.place] = _Partition(position)

    def _revoked(self, places: Sequence[Place]) -> None:
        """Commit finished work: the partitions are still assigned until this returns."""
        leaving = [self._ours[place] for place in places if place in self._ours]
        self._take_in()
        try:
            self._commit(leaving)
        except Exception:
            log.warning("finished records of %s will replay: they could not be committed", places, exc_info=True)
        self._lost(places)

    def _lost(self, places: Sequence[Place]) -> None:
        for place in places:
            partition = self._ours.pop(place, None)
            if partition is not None:
                partition.window.close()

    def _talk(self) -> None:
        is_paused = False
        try:
            while not self._ending:
                while not self._requests.empty():
                    self._requests.get()()
                full = self._inbox.qsize() >= AHEAD
                if full:
                    self._client.pause()  # each time, because new partitions may have been assigned
                elif is_paused:
                    self._client.resume()
                is_paused = full
                for record in self._client.poll(POLL):
                    place = Place(_of(record, "topic"), _of(record, "partition"))
                    self._inbox.put((self._ours[place], _of(record, "offset"), record))
        finally:
            self._client.close()
            self._lost(list(self._ours))

    def _hand_over(self, work: Callable[[], None]) -> None:
        self._requests.put(work)

    def _end(self, on_done: Done) -> None:
        self._ending = True
        on_done()


def _of(record: Any, name: str) -> Any:
    """A record's field: confluent-kafka has methods where kafka-python has attributes."""
    value = getattr(record, name)
    return value() if callable(value) else value
