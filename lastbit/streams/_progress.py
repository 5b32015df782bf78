"""State shared by the threaded and the asyncio runner: positions of the source's offsets, the resolved offsets, and the
next commit.

It uses no threads and no event loop. A source's offset is either an integer, its number in a log, or opaque, such as a
string or a tuple. Opaque offsets are counted as they arrive, and the count is the position in the window. The source's
own offset is kept for positions above the floor and for the floor itself.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from lastbit.errors import InvalidArgument
from lastbit.streams._awaited import Awaited
from lastbit.streams.errors import CommitFailed, RecordFailed, WindowClosed
from lastbit.streams.window import AckWindow

log = logging.getLogger("lastbit.streams")

CAPACITY: Final = 8192
"""Capacity of the window that is made if the caller passes none."""
EVERY: Final = 1.0
"""Seconds between two commits."""
HANDLERS: Final = 32
"""The default of `handlers` of a consumer group's worker: enough for handlers that wait for other services."""
NAME: Final = "stream"
"""The name of a stream in the metrics, unless it has another one."""
COMMIT_TRIES: Final = 5
"""The number of failed commits in a row, one interval apart, that ends the stream."""
LAST_TRIES: Final = 3
"""Attempts at the last commit."""
LAST_PAUSE: Final = 0.2
"""Seconds between those attempts, or the commit interval if that is shorter."""
LOOK: Final = 0.1
"""Seconds between a waiting reader's checks whether the stream has ended."""

R = TypeVar("R")


class Due(NamedTuple):
    """A commit to make; `acks` is the window's ack count when the commit was computed."""

    acks: int
    floor: int
    offset: Any


class Options(NamedTuple, Generic[R]):
    """The caller's options; see `run_ordered`. `partition`: that of a consumer group, whose name is the `name`."""

    key: Callable[[R], Hashable] | None
    lanes: int = 8
    ordered: bool = True
    batch: int | None = None
    linger: float = 0.0
    retry: Callable[[Exception, int], float | None] | None = None
    every: float = EVERY
    wanted: Callable[[R], bool] | None = None
    stuck_after: float = 60.0
    on_stuck: Callable[[Any, float], object] | None = None
    grace: float = 30.0
    name: str = NAME
    partition: int | None = None

    def checked(self, name_of_lanes: str = "lanes") -> Options[R]:
        """`name_of_lanes`: the caller's name for them."""
        if self.key is None and self.ordered:
            raise InvalidArgument("order needs a key; pass key=…, or ordered=False")
        if self.lanes < 1:
            raise InvalidArgument(f"{name_of_lanes} must be at least 1, not {self.lanes!r}")
        if self.batch is not None and self.batch < 1:
            raise InvalidArgument(f"batch must be at least 1 record, not {self.batch!r}")
        if not self.linger >= 0:
            raise InvalidArgument(f"linger must be at least 0 seconds, not {self.linger!r}")
        if self.linger and self.batch is None:
            raise InvalidArgument("linger needs a batch: records wait for others to come into it")
        for name, value in (("every", self.every), ("stuck_after", self.stuck_after), ("grace", self.grace)):
            if not value > 0:
                raise InvalidArgument(f"{name} must be more than 0 seconds, not {value!r}")
        return self


class Progress(Generic[R]):
    """The window of a run, addressed by the source's own offsets. Only the reader tracks, lanes ack, and commits are
    made one at a time."""

    def __init__(self, window: AckWindow | None, options: Options[R]) -> None:
        self.window = AckWindow(capacity=CAPACITY) if window is None else window
        self._options = options
        # A caller that passes a window stores more than the floor, so it gets a commit for every change.
        self._floor_alone = window is None
        self._awaited = Awaited(self.window)
        self._opaque: bool | None = None
        self._names: deque[tuple[int, Any]] = deque()
        self._at_floor: tuple[int, Any] | None = None  # the floor and the source's offset there
        self._names_lock = threading.Lock()
        self._acks = self.window.acks
        self._floor: int | None = None
        self._told: int | None = None
        self._commits_failed = 0

    # The reader.

    def position_of(self, offset: Any) -> int:
        """The position of a source's offset. Call it once for each opaque offset."""
        if self._opaque is None:
            self._opaque = not isinstance(offset, int)
            if self._opaque and self.window.high >= 0:
                raise InvalidArgument(
                    "with opaque offsets the window must start empty: only their floor can be restored"
                )
        if not self._opaque:
            if not isinstance(offset, int):
                raise InvalidArgument(f"offset {offset!r} came after integers")
            return offset
        return self.window.high + 1

    def track(self, position: int, offset: Any) -> bool:
        """`AckWindow.track`, without waiting. Restored offsets that the source skips are acked (see `Awaited`)."""
        self._awaited.pass_to(position)
        is_new = self.window.track(position)
        if self._opaque:
            with self._names_lock:
                self._names.append((position, offset))
                self._settle_names()
        if self._floor is None:
            self._floor = self.window.floor
        return is_new

    # The committer.

    def due(self) -> Due | None:
        """The next commit; None if there is nothing to commit."""
        # Read the acks first: an ack between the two reads is in the floor, and makes another commit due.
        acks, floor = self.window.acks, self.window.floor
        offset: Any = floor
        if self._opaque:
            with self._names_lock:
                self._settle_names()
                if self._at_floor is None:
                    return None
                # The floor may have advanced since it was read. This floor belongs to the offset.
                floor, offset = self._at_floor
        if acks == self._acks or self._floor is None or (self._floor_alone and floor <= self._floor):
            return None
        return Due(acks, floor, offset)

    def committed(self, due: Due) -> None:
        self._acks, self._floor = due.acks, due.floor
        self._commits_failed = 0

    def commit_failed(self, due: Due, error: Exception) -> None:
        """Raises the error that ends the stream; returns if the commit should be retried."""
        if self.window.closed:
            raise WindowClosed from error
        self._commits_failed += 1
        if self._commits_failed >= COMMIT_TRIES:
            raise CommitFailed(due.offset) from error
        log.warning("offset %r could not be committed; the commit will be retried: %r", due.offset, error)

    def report_if_stuck(self) -> None:
        """Report, once, an offset that has held the floor for too long."""
        position, age = self.window.held_by()
        if position is None or age < self._options.stuck_after or position == self._told:
            return
        self._told = position
        offset: Any = position
        if self._opaque:
            with self._names_lock:
                offset = next((name for place, name in self._names if place == position), position)
        if self._options.on_stuck is not None:
            self._options.on_stuck(offset, age)
        else:
            log.warning("offset %r has been outstanding for %.0f seconds and holds the floor", offset, age)

    def _settle_names(self) -> None:
        floor = self.window.floor
        while self._names and self._names[0][0] <= floor:
            self._at_floor = self._names.popleft()


def uncommitted(failure: BaseException | None, due: Due, error: Exception) -> BaseException:
    """The error of a stream whose last commit failed, combined with its earlier failure."""
    if failure is None:
        failure = CommitFailed(due.offset)
        failure.__cause__ = error
    else:
        failure.add_note(f"and offset {due.offset!r} could not be committed: {error!r}")
    return failure


def failed(offset: Any, error: BaseException) -> RecordFailed:
    failure = RecordFailed(offset)
    failure.__cause__ = error
    return failure
