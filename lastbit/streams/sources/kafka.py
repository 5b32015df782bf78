"""Kafka, through the client that you have: topics of a consumer group, all partitions of one consumer as one stream.

Each partition has a window of its own. What is committed for it is the offset after its floor, and, as the commit's
metadata, its snapshot: whoever reads the partition next skips what is done above the floor. What could go wrong, and
did elsewhere:

* Metadata over the broker's limit stops consumption (parallel-consumer #647): the snapshot is made to fit, and what is
  left out replays.
* A partition is taken away while its records are in hand, and a late ack moves its new owner's offset (Redpanda Connect
  #4477): its window is closed first, and all that comes later is refused.
* Handlers are slow, so nobody polls, so the group gives the partitions away: a thread of its own polls, and pauses the
  partitions while enough is read.
"""

from __future__ import annotations

import base64
import itertools
import logging
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from lastbit.errors import InvalidArgument
from lastbit.streams.errors import CorruptSnapshot, WindowClosed, WindowFull
from lastbit.streams.snapshot import MIN_BYTES, Snapshot
from lastbit.streams.sources.session import Done, Session
from lastbit.streams.sources.unsettled import Unsettled
from lastbit.streams.window import AckWindow

log = logging.getLogger("lastbit.streams")

METADATA_LIMIT = 4096
"""Bytes of a commit's metadata: the default of offset.metadata.max.bytes."""
CAPACITY = 8192
"""Records that are handed out, from the first that is not done on."""
AHEAD = 1000
"""Records that are read before the first of them is handed out; with more, the partitions are paused."""
POLL = 0.1
"""Seconds that a poll waits for records; so long may a commit wait for it."""


class Place(NamedTuple):
    topic: str
    partition: int


class Position(NamedTuple):
    """`offset` is the next to be read; -1 for none."""

    place: Place
    offset: int
    metadata: str


Told = Callable[[Sequence[Place]], None]


class KafkaClient(Protocol):
    """What of a consumer is used, always from one thread. `Confluent` and `KafkaPython` are this for theirs."""

    def subscribe(self, topics: Sequence[str], assigned: Told, revoked: Told, lost: Told) -> None:
        """The three are called by `poll` and `close`: partitions are ours, soon not, and not any more."""

    def poll(self, seconds: float) -> Iterable[Any]:
        """Records, with topic, partition and offset as attributes or methods."""

    def committed(self, places: Sequence[Place]) -> Iterable[Position]: ...

    def commit(self, positions: Sequence[Position]) -> bool:
        """Whether they are in force. False: a rebalance is under way, and `poll` will tell."""

    def pause(self) -> None:
        """All partitions that are assigned."""

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

    def subscribe(self, topics: Sequence[str], assigned: Told, revoked: Told, lost: Told) -> None:
        def telling(told: Told) -> Callable[[Any, Any], None]:
            return lambda _, partitions: told([Place(each.topic, each.partition) for each in partitions])

        self._consumer.subscribe(
            list(topics), on_assign=telling(assigned), on_revoke=telling(revoked), on_lost=telling(lost)
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
        for each in self._consumer.committed([self._kafka.TopicPartition(*place) for place in places]):
            if each.error is not None:
                raise self._kafka.KafkaException(each.error)
            yield Position(Place(each.topic, each.partition), max(each.offset, -1), each.metadata or "")

    def commit(self, positions: Sequence[Position]) -> bool:
        offsets = [self._kafka.TopicPartition(*place, offset, metadata) for place, offset, metadata in positions]
        try:
            for each in self._consumer.commit(offsets=offsets, asynchronous=False):
                if each.error is not None:
                    raise self._kafka.KafkaException(each.error)
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

    def subscribe(self, topics: Sequence[str], assigned: Told, revoked: Told, lost: Told) -> None:
        def places(partitions: Iterable[Any]) -> list[Place]:
            return [Place(each.topic, each.partition) for each in partitions]

        class Listener(self._kafka.ConsumerRebalanceListener):  # type: ignore[misc, name-defined]
            def on_partitions_assigned(self, assigned_now: Iterable[Any]) -> None:
                assigned(places(assigned_now))

            def on_partitions_revoked(self, revoked_now: Iterable[Any]) -> None:
                revoked(places(revoked_now))

            def on_partitions_lost(self, lost_now: Iterable[Any]) -> None:
                lost(places(lost_now))

        self._consumer.subscribe(topics=list(topics), listener=Listener())

    def poll(self, seconds: float) -> Iterable[Any]:
        return itertools.chain.from_iterable(self._consumer.poll(timeout_ms=int(1000 * seconds)).values())

    def committed(self, places: Sequence[Place]) -> Iterable[Position]:
        for place in places:
            found = self._consumer.committed(self._kafka.TopicPartition(*place), metadata=True)
            yield Position(place, -1, "") if found is None else Position(place, found.offset, found.metadata or "")

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
    """From when it is assigned to when it is taken away."""

    def __init__(self, position: Position) -> None:
        self.place = position.place
        self.window = _restored(position)
        self.told = 0
        """The acks of the window that the last commit knew."""


def _restored(position: Position) -> AckWindow:
    try:
        known = Snapshot.decode(base64.b64decode(position.metadata, validate=True))
    except (CorruptSnapshot, ValueError):  # another's metadata, or none
        return AckWindow()
    # Else somebody has moved the offset since: it is what counts.
    return AckWindow.restore(known) if known.floor + 1 == position.offset else AckWindow()


class KafkaTopics(Session[tuple[_Partition, int, Any]]):
    """Records of topics, as (a number of this reading, the client's own record). Give its `window` and its `commit` to
    `run_ordered`:

        with KafkaTopics(Confluent(consumer), ["orders"]) as orders:
            run_ordered(orders, handle, key=lambda record: record.key(), commit=orders.commit, window=orders.window)

    The consumer is the source's from here on, and closed with it. At most `capacity` records are handed out from the
    first on that is not done. `metadata_limit`: bytes, the broker's
    offset.metadata.max.bytes. `refused` counts acks that came after their partition was taken away. Iterating raises
    `SessionEnded` when the client fails.
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
        self._unsettled: Unsettled[tuple[_Partition, int]] = Unsettled(AckWindow(capacity=capacity))
        self._numbers = itertools.count()
        self._floor = -1
        self._ours: dict[Place, _Partition] = {}
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending = False
        client.subscribe(topics, self._assigned, self._revoked, self._lost)
        self._thread.start()

    @property
    def window(self) -> AckWindow:
        return self._unsettled.window

    def __iter__(self) -> Iterator[tuple[int, Any] | None]:
        for received in self._received():
            if received is None:
                yield None
                continue
            partition, offset, record = received
            while (wanted := self._track(partition, offset)) is None:
                yield None
            if wanted:
                number = next(self._numbers)
                self._unsettled.hand_out(number, (partition, offset))
                yield number, record

    def _track(self, partition: _Partition, offset: int) -> bool | None:
        """Whether it is to be handled; None: its window is full."""
        try:
            return partition.window.track(offset)
        except WindowClosed:
            return False  # read, and taken away before anybody began with it
        except WindowFull:
            # It hears of acks at commits; there may be some since the last.
            self._take_in()
            partition.window.wait_for_room(POLL)
            return None

    def _take_in(self) -> None:
        """Tell the partitions' windows what is done."""
        resolved = self._unsettled.resolved(self._floor)
        for partition, offset in resolved.values():
            try:
                partition.window.ack(offset)
            except WindowClosed:
                self.refused += 1
        self._unsettled.settle(resolved)

    def commit(self, floor: int) -> None:
        """Commit each partition that has moved. Raises `SessionEnded`, or what the client raised."""
        self._floor = max(self._floor, floor)
        self._take_in()
        # There, since only there nothing can be taken away in between.
        self._ask(self._commit_all)

    def _commit_all(self, done: Done) -> None:
        self._commit(self._ours.values())
        done()

    def _commit(self, partitions: Iterable[_Partition]) -> None:
        moved = [(each, each.window.acks) for each in partitions if each.window.acks != each.told]
        if moved and self._client.commit([self._position(each) for each, _ in moved]):
            for partition, acks in moved:
                partition.told = acks

    def _position(self, partition: _Partition) -> Position:
        snapshot = partition.window.snapshot(self._snapshot_limit)
        floor = Snapshot.decode(snapshot).floor
        return Position(partition.place, floor + 1, base64.b64encode(snapshot).decode())

    def _assigned(self, places: Sequence[Place]) -> None:
        for position in self._client.committed(places):
            self._ours[position.place] = _Partition(position)

    def _revoked(self, places: Sequence[Place]) -> None:
        """Still ours until this returns: what is done is committed."""
        leaving = [self._ours[place] for place in places if place in self._ours]
        self._take_in()
        try:
            self._commit(leaving)
        except Exception:
            log.warning("what was done of %s replays: it could not be committed", places, exc_info=True)
        self._lost(places)

    def _lost(self, places: Sequence[Place]) -> None:
        for place in places:
            partition = self._ours.pop(place, None)
            if partition is not None:
                partition.window.close()

    def _talk(self) -> None:
        paused = False
        try:
            while not self._ending:
                while not self._requests.empty():
                    self._requests.get()()
                full = self._inbox.qsize() >= AHEAD
                if full:
                    self._client.pause()  # again, since partitions may have come
                elif paused:
                    self._client.resume()
                paused = full
                for record in self._client.poll(POLL):
                    place = Place(_of(record, "topic"), _of(record, "partition"))
                    self._inbox.put((self._ours[place], _of(record, "offset"), record))
        finally:
            self._client.close()
            self._lost(list(self._ours))

    def _hand_over(self, work: Callable[[], None]) -> None:
        self._requests.put(work)

    def _end(self, done: Done) -> None:
        self._ending = True
        done()


def _of(record: Any, name: str) -> Any:
    """confluent-kafka has methods where kafka-python has attributes."""
    found = getattr(record, name)
    return found() if callable(found) else found
