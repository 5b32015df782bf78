"""Reads that share a transaction. Reads that arrive during one wait, and the next one serves them all.

Each read is as fresh as if it were alone: the transaction that serves it starts after it has arrived. Equal reads get
the same value. Each kind of read has a queue and a thread, so that a slow kind doesn't delay the others.

Only reads whose work is bounded are shared. A page with a filter may scan the whole feed, so it has a transaction of
its own (see `FeedService.read`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from sqlalchemy.engine import Connection

from core import errors, feed
from core.batches import batch as batches
from core.batches import ranges
from core.batches.batch import Batch
from core.commits import apart
from core.commits.pending import HERE, Mailbox, Pending, Receiver, deliver
from core.storage.database import Database
from core.threads import QueueThread

MAX_WAITING: Final = 2000
"""Reads of each kind that may wait before callers are refused."""
WATERMARKS: Final = 256
"""Maximum watermarks of one snapshot."""
PAGES: Final = 64
"""Maximum pages of one snapshot. They are in memory at the same time."""

Question = TypeVar("Question", bound=Hashable)
Value = TypeVar("Value")


class SharedReads(QueueThread, Generic[Question, Value]):
    """One thread reads for all callers. `answers` returns the value of each question, or the error that the question
    has by itself."""

    def __init__(
        self,
        kind: str,
        answers: Callable[[Collection[Question]], Mapping[Question, Value | errors.CoreError]],
        *,
        at_once: int,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        super().__init__(f"reads-{kind}")
        self._answers = answers
        self._at_once = at_once
        self._max_waiting = max_waiting
        self._waiting: list[Pending[Any]] = []
        """Each `call` is a question."""

    def get(self, question: Question) -> Value:
        """Read in this thread, shared with nobody. Raises the error of the question, `errors.Unavailable`."""
        value = self._answers({question})[question]
        if isinstance(value, errors.CoreError):
            raise value
        return value

    def submit(self, question: Question, receiver: Receiver[Value], mailbox: Mailbox = HERE) -> None:
        """Queue the question. When it is answered, the read is put into the mailbox, perhaps with others. Raises
        `errors.Overloaded` and `errors.Unavailable`."""
        with self.wake:
            if self.stopping:
                raise errors.Unavailable("the service is stopping")
            if len(self._waiting) >= self._max_waiting:
                raise errors.Overloaded("too many requests are waiting")
            self.start()
            self._waiting.append(Pending(question, None, 1, receiver, mailbox))
            if len(self._waiting) == 1:
                self.wake.notify()

    def _serve(self) -> None:
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self._waiting or self.stopping)
                reads, self._waiting = self._waiting[: self._at_once], self._waiting[self._at_once :]
            if not reads:
                return
            # Perhaps a single question fails, such as that for a damaged row: the others are answered without it.
            for failed_reads, error in apart.attempt(self._attempt, reads, attrgetter("call")):
                for read in failed_reads:
                    read.error = errors.copy_of(error)
            deliver(reads)

    def _attempt(self, reads: Sequence[Pending[Any]]) -> Exception | None:
        try:
            values = self._answers({read.call for read in reads})
        except Exception as error:  # noqa: BLE001  # it is passed to the callers
            return error
        for read in reads:
            value = values[read.call]
            if isinstance(value, errors.CoreError):
                read.error = errors.copy_of(value)
            else:
                read.answer = value
        return None


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
