"""Batches that have ended without their pending items, as they were cancelled, have expired or were deleted. Their
messages need no handling any more.

A process learns of them from rejections, and from one long poll of the feed, however many workers it has. What could go
wrong, and why it can't:

*A message is dropped although its batch goes on*, because the batch was reopened a moment ago. What was learned only
raises a suspicion. Before a message is dropped, the service is asked for the batch's state. Messages share an answer if
the question was sent after they had come to this process, and lately.

*The service is away for a moment* after the cancel, as it is restarted. Its acks wait too, so a question is asked again
for up to `PATIENCE` seconds. Only then messages are handled, as without this module.

*The feed can't be read*, as the token may not, or the service is away. Rejections are enough then: a worker handles one
message of such a batch, and no more.

*A process forks.* Threads don't survive that. A child process sees in shared memory what its parent learns, so the
children of a pool, and work-horses, need no poll of their own.

*Memory.* The last `MOST` batches are remembered.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lastbit import _calls, errors
from lastbit._drivers import AsyncDriver, Driver
from lastbit._forks import is_forked
from lastbit._protocol import Flow, Service
from lastbit.ids import InvalidItemId, ItemId
from lastbit.models import Batch, Event, Rejected
from lastbit.retry import Retry

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("lastbit.integrations")

MOST: Final = 1024
PAUSE: Final = 1.0
"""Seconds until the feed is read again after an error."""
FRESH: Final = 5.0
"""Seconds for which an answer is shared."""
PATIENCE: Final = 5.0
"""Seconds for a question that a worker waits for. After them it isn't asked again."""
ENDINGS: Final = frozenset({"cancelled", "expired", "unknown_batch"})
"""Reasons of rejections that concern all pending items of a batch."""
REOPENED: Final = "batch.reopened"
TYPES: Final = ("batch.cancelled", "batch.expired", REOPENED)


class EndedBatches:
    """The ids of up to `MOST` batches, in memory that this process shares with those that it forks later."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 8 * (MOST + 1))).cast("Q")
        """The number of places in use, then the places. A free one has 0, which is no batch's id."""
        self._added = 0

    def __contains__(self, batch: int) -> bool:
        count = self._numbers[0]
        return bool(count) and batch in self._numbers[1 : count + 1].tolist()

    def add(self, batch: int) -> bool:
        """Returns whether it is new."""
        if batch in self:
            return False
        self._numbers[1 + self._added % MOST] = batch
        self._added += 1
        self._numbers[0] = min(self._added, MOST)
        return True

    def discard(self, batch: int) -> None:
        places = self._numbers[1 : self._numbers[0] + 1].tolist()
        if batch in places:
            self._numbers[1 + places.index(batch)] = 0


class Watch:
    """What the processes of one worker know of a service's batches. `watch_of` makes it."""

    def __init__(self) -> None:
        self.batches = EndedBatches()
        self._users: list[Driver] = []
        """Drivers of running workers."""
        self._reader: Driver | None = None
        self._position: int | None = None
        self._dropped: dict[int, int] = {}
        """The number of dropped messages, by batch."""
        self._after_fork()

    def _after_fork(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._answers: dict[int, tuple[float, bool]] = {}
        """When the last question was sent, and whether the batch has ended; it has not if there was no answer."""

    def join(self, driver: Driver) -> None:
        """A worker begins. The feed is read through the driver of one worker."""
        with self._lock:
            self._users.append(driver)
            if self._reader is None:
                self._read_through(driver)

    def leave(self, driver: Driver) -> None:
        """A worker ends, and may close its client."""
        with self._lock:
            if driver in self._users:
                self._users.remove(driver)
            if self._reader is driver and driver not in self._users:
                self._reader = None
                if self._users:
                    self._read_through(self._users[0])
            if self._dropped and not self._users:
                log.info("%d messages of ended batches were not handled", sum(self._dropped.values()))

    def _read_through(self, driver: Driver) -> None:
        """In a thread that ends after a poll of its own when another one reads. The position is found before the worker
        takes a message, so that no end of a batch that it works for is missed."""
        self._reader = driver
        if self._position is None:
            with suppress(errors.LastbitError):  # the thread reports it
                self._position = driver.run(_end_of_feed)
        try:
            threading.Thread(target=self._follow, args=(driver,), name="lastbit-ended", daemon=True).start()
        except RuntimeError as error:
            self._reader = None
            log.warning("the feed is not followed, as no thread can be started: %s", error)

    def learn(self, rejection: Rejected | errors.ItemRejected) -> bool:
        """Whether the rejection tells nothing new: the end of the batch is known."""
        batch = _batch_of(rejection.item or "")
        return batch is not None and rejection.reason in ENDINGS and not self.batches.add(batch)

    def is_ended(
        self, driver: Driver, item: str, received: float | None = None, waits_since: float | None = None
    ) -> bool:
        """Whether a message of this item need not be handled. `received`: when it had come; `waits_since`: since when
        its worker waits for an answer. Both by `time.monotonic`, and by default now."""
        batch = _batch_of(item)
        if batch is None or batch not in self.batches:
            return False
        if is_forked(self._process):
            self._after_fork()
        waits_since = time.monotonic() if waits_since is None else waits_since
        received = waits_since if received is None else received
        with self._asking:
            known = self._known(batch, received, waits_since)
            if known is not None:
                return known
            moment = time.monotonic()
            try:
                info = driver.run(_state, batch)
            except errors.LastbitError as error:
                return self._answered(batch, error, moment)
            return self._answered(batch, info, moment)

    async def is_ended_async(self, driver: AsyncDriver, item: str, asking: asyncio.Lock) -> bool:
        """`is_ended`, awaited. The message has come now. `asking`: that of the event loop."""
        batch = _batch_of(item)
        if batch is None or batch not in self.batches:
            return False
        received = time.monotonic()
        async with asking:
            known = self._known(batch, received, received)
            if known is not None:
                return known
            moment = time.monotonic()
            try:
                info = await driver.run(_state, batch)
            except errors.LastbitError as error:
                return self._answered(batch, error, moment)
            return self._answered(batch, info, moment)

    def _known(self, batch: int, received: float, waits_since: float) -> bool | None:
        """The last answer, if it holds for a message that had come before the question; None if the service must be
        asked. That the service is away is an answer only for those who have waited for it."""
        moment, is_ended = self._answers.get(batch, (-math.inf, False))
        if is_ended and moment >= max(received, time.monotonic() - FRESH):
            return True
        return is_ended if moment >= waits_since else None

    def _answered(self, batch: int, answer: Batch | errors.LastbitError, moment: float) -> bool:
        if isinstance(answer, Batch) and (answer.complete or not answer.ended):
            self.batches.discard(batch)
            return False
        if len(self._answers) >= MOST:
            self._answers.clear()
        is_ended = isinstance(answer, Batch | errors.BatchNotFound)
        self._answers[batch] = moment, is_ended
        return is_ended

    def note(self, item: str) -> None:
        """A message was dropped: one line for each batch."""
        batch = _batch_of(item) or 0
        with self._lock:
            count = self._dropped[batch] = self._dropped.get(batch, 0) + 1
        if count == 1:
            log.warning("batch %d has ended, and its other messages are removed without being handled", batch)

    def _follow(self, driver: Driver) -> None:
        types: Sequence[str] | None = TYPES
        while types is not None and self._reader is driver:
            try:
                for poll in driver.iterate(_calls.changes, self._position, types):
                    if self._reader is not driver:
                        return
                    self._take(poll)
            except errors.LastbitError as error:
                if self._reader is driver:
                    types = self._types_after(error, types)
                    time.sleep(PAUSE)  # a daemon's thread, for which nobody waits

    async def follow(self, driver: AsyncDriver) -> None:
        """Follow the feed in a task of an event loop, until it is cancelled."""
        import asyncio

        types: Sequence[str] | None = TYPES
        while types is not None:
            try:
                async for poll in driver.iterate(_calls.changes, self._position, types):
                    self._take(poll)
            except errors.LastbitError as error:
                types = self._types_after(error, types)
                await asyncio.sleep(PAUSE)

    def _take(self, poll: _calls.Poll) -> None:
        events: Sequence[Event] = poll.elements
        for event in events:
            if event.batch is not None:
                (self.batches.discard if event.type == REOPENED else self.batches.add)(event.batch)
        self._position = poll.next

    def _types_after(self, error: errors.LastbitError, types: Sequence[str]) -> Sequence[str] | None:
        """The types to read from now on; None if the feed can't be read."""
        if isinstance(error, errors.PositionTrimmed):
            self._position = None
        elif isinstance(error, errors.InvalidRequest) and REOPENED in types:
            return TYPES[:-1]  # a service of an earlier release, which reopens nothing
        elif not error.is_temporary:
            log.info("the feed is not read, so workers learn of ended batches from rejections alone: %s", error)
            return None
        return types


_watches: dict[tuple[str, str | None], Watch] = {}


def watch_of(service: Service) -> Watch:
    """That of the service, in this process and its children."""
    return _watches.setdefault((service.url, service.token), Watch())


def _state(service: Service, batch: int) -> Flow[Batch]:
    retry = Retry(attempts=100, deadline=PATIENCE, cap=0.5)
    return _calls.get(replace(service, retry=retry, timeout=min(service.timeout, PATIENCE)), batch)


def _end_of_feed(service: Service) -> Flow[int]:
    """Its last position, without retries: the worker waits for the answer."""
    once = replace(service, retry=Retry(attempts=1), timeout=min(service.timeout, PATIENCE))
    return (yield from _calls.events(once, None, (), None, limit=1)).last


def _batch_of(item: str) -> int | None:
    try:
        return ItemId.parse(item).batch
    except InvalidItemId:
        return None
