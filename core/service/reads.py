"""Reads that share a transaction. Reads that arrive during one wait, and the next one serves them all.

Each read is as fresh as if it were alone: the transaction that serves it starts after it has arrived. Equal reads get
the same value. Each kind of read has a queue and a thread, so that a slow kind doesn't delay the others.

Only reads whose work is bounded are shared. A page with a filter may scan the whole feed, so it has a transaction of
its own (see `FeedService.read`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from sqlalchemy.engine import Connection

from core import errors, feed, threads
from core.batches import batch as batches
from core.batches import ranges
from core.batches.batch import Batch
from core.storage.database import Database

MAX_WAITING: Final = 2000
"""Reads of each kind that may wait before callers are refused."""
WATERMARKS: Final = 256
"""Maximum watermarks of one snapshot."""
PAGES: Final = 64
"""Maximum pages of one snapshot. They are in memory at the same time."""

Question = TypeVar("Question", bound=Hashable)
Value = TypeVar("Value")


class Read(Generic[Question, Value]):
    """One read. When it is finished, it has either a `value` or an `error`."""

    __slots__ = ("error", "question", "to", "value")

    def __init__(self, question: Question, receiver: Any) -> None:
        self.question = question
        self.to = receiver
        """The receiver of the result; opaque here."""
        self.value: Value | None = None
        self.error: Exception | None = None


Deliver = Callable[[Sequence[Read[Any, Any]]], None]
"""Receives finished reads. Called in the thread that has read; it must not block or raise."""


class SharedReads(Generic[Question, Value]):
    """One thread reads for all callers. `answer` returns the value of each question, or the error that the question has
    by itself."""

    def __init__(
        self,
        kind: str,
        answer: Callable[[Collection[Question]], Mapping[Question, Value | errors.CoreError]],
        *,
        at_once: int,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._kind = kind
        self._answer = answer
        self._at_once = at_once
        self._max_waiting = max_waiting
        self._wake = threading.Condition()
        self._waiting: list[tuple[Read[Question, Value], Deliver]] = []
        self._stopping = False
        self._thread: threading.Thread | None = None

    def get(self, question: Question) -> Value:
        """Read in this thread, shared with nobody. Raises the error of the question, `errors.Unavailable`."""
        value = self._answer({question})[question]
        if isinstance(value, errors.CoreError):
            raise value
        return value

    def submit(self, read: Read[Question, Value], deliver: Deliver) -> None:
        """Queue the read; `deliver` is called when it is finished, perhaps with others. Raises `errors.Overloaded` and
        `errors.Unavailable`."""
        with self._wake:
            if self._stopping:
                raise errors.Unavailable("the service is stopping")
            if len(self._waiting) >= self._max_waiting:
                raise errors.Overloaded("too many requests are waiting")
            if self._thread is None:
                self._thread = threads.start(self._run, name=f"reads-{self._kind}")
            self._waiting.append((read, deliver))
            if len(self._waiting) == 1:
                self._wake.notify()

    def stop(self) -> None:
        """Finish the waiting reads, and accept no more."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._stopping)
                part, self._waiting = self._waiting[: self._at_once], self._waiting[self._at_once :]
            if not part:
                return
            self._read([read for read, _ in part])
            threads.deliver((deliver, read) for read, deliver in part)

    def _read(self, reads: Sequence[Read[Question, Value]]) -> None:
        questions = list({read.question for read in reads})
        try:
            values = self._answer(questions)
        except Exception as error:  # noqa: BLE001  # it is passed to the callers
            if len(questions) > 1 and not isinstance(error, errors.Unavailable):
                # Perhaps a single question fails, such as that for a damaged row: the others are answered without it.
                half = set(questions[: len(questions) // 2])
                for is_first in (True, False):
                    self._read([read for read in reads if (read.question in half) is is_first])
                return
            for read in reads:
                read.error = errors.copy_of(error)
            return
        for read in reads:
            value = values[read.question]
            if isinstance(value, errors.CoreError):
                read.error = errors.copy_of(value)
            else:
                read.value = value


class ReadService:
    """The shared reads: batches by their ids, their watermarks, and plain pages of the feed."""

    def __init__(self, database: Database, max_waiting: int = MAX_WAITING) -> None:
        self._database = database
        self.batches = SharedReads("batches", self._batches, at_once=max_waiting, max_waiting=max_waiting)
        """Raises `errors.BatchNotFound`."""
        self.watermarks = SharedReads("watermarks", self._watermarks, at_once=WATERMARKS, max_waiting=max_waiting)
        """The batch, and its smallest pending number; without pending items, the number of its items. Raises
        `errors.BatchNotFound`."""
        self.pages = SharedReads("pages", self._pages, at_once=PAGES, max_waiting=max_waiting)
        """Raises `errors.PositionTrimmed`; `InvalidRequest` for a position from the future."""

    def stop(self) -> None:
        """Finish the waiting reads, and accept no more."""
        for kind in (self.batches, self.watermarks, self.pages):
            kind.stop()

    def _batches(self, ids: Collection[int]) -> dict[int, Batch | errors.CoreError]:
        states = self._database.read(lambda tx: batches.by_id(tx, ids, is_all=True))
        return {id: states.get(id) or errors.BatchNotFound(id) for id in ids}

    def _watermarks(self, ids: Collection[int]) -> dict[int, tuple[Batch, int] | errors.CoreError]:
        def read(tx: Connection) -> dict[int, tuple[Batch, int] | errors.CoreError]:
            states = batches.by_id(tx, ids)
            numbers = ranges.watermarks(tx, states.values())
            return {id: (states[id], numbers[id]) if id in states else errors.BatchNotFound(id) for id in ids}

        return self._database.snapshot(read)

    def _pages(self, spans: Collection[feed.Span]) -> dict[feed.Span, feed.EventPage | errors.CoreError]:
        return self._database.read(feed.pages, spans)
