"""Consumes topics: the session of `lastbit.streams.sources.kafka` reads and commits, workers handle and ack.

Things that could go wrong, and why they can't:

* An offset is committed and an item below it stays pending. A record is acked in the window only after its item's ack
  was committed, and the committed offset is the one after the window's floor.
* A record that always fails blocks its partition. Kafka can't requeue a record, so it is handled again here, a limited
  number of times, and then its item fails.
* Lastbit is away, or handlers are slow, and the group takes the partitions away. A thread of the session polls
  throughout. At most `capacity` records are held beyond the first unfinished one.
* The partition has another owner. Its window is closed, late acks don't move its offset, and its records are handled
  there again; their items count once. Records that were not begun, or wait for another attempt, are left to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from lastbit.errors import InvalidArgument
from lastbit.integrations import Failed, Skipped
from lastbit.integrations._current import again, current_batch_ended
from lastbit.integrations._delayed import DelayedCalls
from lastbit.integrations._reasons import reason_of
from lastbit.integrations._untracked import NO_ITEM, WhenUntracked
from lastbit.integrations._workers import LeftToRedelivery, Outcome, Workers
from lastbit.integrations.kafka._records import item_of
from lastbit.streams.errors import CommitFailed, SessionEnded, WindowFull
from lastbit.streams.sources.kafka import KafkaClient, KafkaTopics
from lastbit.streams.window import AckWindow

log = logging.getLogger("lastbit.kafka")

LOOK: Final = 0.1
"""Seconds between checks for a stop while the window is full."""
COMMIT_TRIES: Final = 5
"""The number of failed commits in a row that ends the consumer."""
LONGEST_PAUSE: Final = 30.0
"""Maximum seconds between two attempts to handle a record."""

Handler = Callable[[Any], object]
DeadLetter = Callable[[Any, Exception], object]


@dataclass(frozen=True, slots=True)
class Options:
    """See `consume`."""

    workers: int
    attempts: int | None
    retry_delay: float
    every: float
    capacity: int
    dead_letter: DeadLetter | None
    skip_ended: bool = True
    untracked: WhenUntracked = "handle"

    def __post_init__(self) -> None:
        if self.attempts is not None and (not isinstance(self.attempts, int) or self.attempts < 1):
            raise InvalidArgument(f"attempts is at least 1, or None for no limit, not {self.attempts!r}")
        if not 0 <= self.retry_delay <= LONGEST_PAUSE:
            raise InvalidArgument(f"retry_delay is 0 to {LONGEST_PAUSE:g} seconds, not {self.retry_delay!r}")
        if not self.every > 0:
            raise InvalidArgument(f"every is more than 0 seconds, not {self.every!r}")
        if self.untracked == "refuse" and self.dead_letter is None:
            raise InvalidArgument(
                "untracked='refuse' needs dead_letter, which gets the records: Kafka can't reject one"
            )

    def give_up(self, record: Any, error: Exception) -> None:
        if self.dead_letter is not None:
            self.dead_letter(record, error)


class Stopped(LeftToRedelivery):
    """A record is not handled here now, as the consumer stops, the partition has another owner, or the batch has
    ended."""


class Attempts:
    """A handler that tries again, and gives up after `options.attempts`."""

    def __init__(self, handle: Handler, options: Options, over: threading.Event) -> None:
        self._handle = handle
        self._options = options
        self._over = over

    def __call__(self, delivery: Delivery) -> None:
        record = delivery.record
        attempt = 1
        while True:
            try:
                with again():  # each attempt numbers its fan-outs from 0
                    self._handle(record)
                return
            except Failed as failure:
                self._options.give_up(record, failure)
                raise
            except Skipped:
                raise
            except Exception as error:
                if attempt == self._options.attempts:
                    self._options.give_up(record, error)
                    raise Failed(reason_of(error)) from error
                log.warning("attempt %d to handle %s has failed", attempt, _name(record), exc_info=True)
            pause = min(self._options.retry_delay * 2 ** min(attempt - 1, 30), LONGEST_PAUSE)
            if self._over.wait(pause) or delivery.is_stale or current_batch_ended():
                raise Stopped(_name(record))
            attempt += 1


class Delivery:
    """A record that was read and is not settled yet."""

    __slots__ = ("_consumer", "_number", "item", "received", "record")

    def __init__(self, consumer: Consumer, number: int, record: Any) -> None:
        self._consumer = consumer
        self._number = number
        self.record = record
        self.item = item_of(record)
        self.received = time.monotonic()

    @property
    def message(self) -> Delivery:
        """For `Attempts`."""
        return self

    @property
    def is_stale(self) -> bool:
        return not self._consumer.window.begins(self._number)

    def settle(self, outcome: Outcome) -> None:
        if outcome is Outcome.ERROR or (outcome is Outcome.REFUSED and not self._consumer.has_refused(self.record)):
            self._consumer.handle_again(self)
        else:
            # The window of a partition that has another owner refuses the ack. The consumer's own window must get it,
            # or the record would count towards its capacity forever.
            self._consumer.window.ack(self._number)


class Consumer:
    """Runs until `stop` is set."""

    def __init__(self, source: KafkaTopics, options: Options, stop: threading.Event) -> None:
        self.window: AckWindow = source.window
        self._source = source
        self._options = options
        self._stop = stop
        self.over = threading.Event()
        self._workers: Workers[Delivery] | None = None
        self._again = DelayedCalls("lastbit-kafka-again", options.retry_delay)
        """Records to handle again."""
        self._next_commit = 0.0
        self._failed_commits = 0

    def handle_again(self, delivery: Delivery) -> None:
        if self._workers is not None:
            self._again.add(partial(self._workers.put, delivery))

    def has_refused(self, record: Any) -> bool:
        """Pass a record without an item to the dead letters. False if they don't take it now."""
        try:
            self._options.give_up(record, LookupError(NO_ITEM))
        except Exception:
            log.exception("%s has no item, and comes again, as the dead letters don't take it", _name(record))
            return False
        return True

    def run(self, workers: Workers[Delivery]) -> None:
        """Consume; then close the workers and commit what they have done. Raises `SessionEnded`, `CommitFailed`, and
        the error of the workers."""
        self._workers = workers
        try:
            self._again.start()
            for entry in self._source:
                if entry is not None and self._track(entry[0]):
                    workers.put(Delivery(self, *entry))
                self._commit_if_due()
                if self._is_over():
                    self._source.stop()
        finally:
            self.over.set()
            self._again.close()
            workers.close()
        self._source.commit(self.window.floor)
        if workers.failure is not None:
            raise workers.failure

    def _is_over(self) -> bool:
        return self._stop.is_set() or (self._workers is not None and self._workers.failure is not None)

    def _track(self, number: int) -> bool:
        """Whether the record may be handled; False if the consumer stops while the window is full."""
        while not self._is_over():
            try:
                return self.window.track(number)
            except WindowFull:
                self.window.wait_for_room(LOOK)
                self._commit_if_due()
        return False

    def _commit_if_due(self) -> None:
        if time.monotonic() < self._next_commit:
            return
        self._next_commit = time.monotonic() + self._options.every
        try:
            self._source.commit(self.window.floor)
        except SessionEnded:
            raise
        except Exception as error:
            self._failed_commits += 1
            if self._failed_commits >= COMMIT_TRIES:
                raise CommitFailed(self.window.floor) from error
            log.warning("offsets could not be committed; this is tried again: %r", error)
        else:
            self._failed_commits = 0


def run(
    client: KafkaClient,
    topics: Sequence[str],
    handle: Handler,
    options: Options,
    stop: threading.Event,
    make_workers: Callable[[Handler], Workers[Delivery]],
) -> None:
    """Consume until `stop` is set. The client is closed in the end."""
    with KafkaTopics(client, topics, capacity=options.capacity) as source:
        consumer = Consumer(source, options, stop)
        consumer.run(make_workers(Attempts(handle, options, consumer.over)))


def _name(record: Any) -> str:
    parts = [getattr(record, name) for name in ("topic", "partition", "offset")]
    return "/".join(str(part() if callable(part) else part) for part in parts)
