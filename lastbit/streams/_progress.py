"""What the two runners share: which position an offset of the source has, what is done, and what is to be committed.

It knows no thread and no event loop. What a source calls an offset is a number of a log, or opaque: a string, a tuple.
Opaque ones are counted as they come, and that count is the position in the window; of those above the floor, and of the
one at it, the source's own is kept.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from lastbit.errors import InvalidArgument
from lastbit.streams.errors import CommitFailed, RecordFailed, WindowClosed
from lastbit.streams.window import AckWindow

log = logging.getLogger("lastbit.streams")

CAPACITY: Final = 8192
"""Positions of the window that is made where the caller gives none."""
COMMIT_TRIES: Final = 5
"""A commit that fails so often in a row, an interval apart, ends the stream."""
LAST_TRIES: Final = 3
"""How often the last commit is tried."""
LAST_PAUSE: Final = 0.2
"""Seconds between these, or the interval where that is shorter."""
LOOK: Final = 0.1
"""Seconds after which a reader that waits for room looks whether the stream has ended."""

R = TypeVar("R")


class Entry(NamedTuple, Generic[R]):
    """A record on its way through a lane."""

    position: int
    offset: Any
    record: R


class Due(NamedTuple):
    """A commit that is to be made; `acks` says of which moment."""

    acks: int
    floor: int
    offset: Any


class Options(NamedTuple, Generic[R]):
    """What a caller asked for; see `run_ordered`."""

    key: Callable[[R], Hashable]
    lanes: int
    every: float
    wanted: Callable[[R], bool] | None
    stuck_after: float
    on_stuck: Callable[[Any, float], object] | None
    grace: float

    def checked(self) -> Options[R]:
        if self.lanes < 1:
            raise InvalidArgument(f"there is at least 1 lane, not {self.lanes!r}")
        for name, value in (("every", self.every), ("stuck_after", self.stuck_after), ("grace", self.grace)):
            if not value > 0:
                raise InvalidArgument(f"{name} is more than 0 seconds, not {value!r}")
        return self


class Progress(Generic[R]):
    """The window of a run, by the source's own offsets. The reader alone tracks, lanes ack, one at a time commits."""

    def __init__(self, window: AckWindow | None, options: Options[R]) -> None:
        self.window = AckWindow(capacity=CAPACITY) if window is None else window
        self._options = options
        # Whoever brings a window keeps more than the floor, and wants to hear of each change.
        self._floor_alone = window is None
        self._awaited = deque(self.window.outstanding)  # restored; the source is expected to bring them again
        self._opaque: bool | None = None
        self._names: deque[tuple[int, Any]] = deque()
        self._at_floor: tuple[Any] | None = None
        self._names_lock = threading.Lock()
        self._acks = self.window.acks
        self._floor: int | None = None
        self._told: int | None = None
        self._commits_failed = 0

    # The reader.

    def position_of(self, offset: Any) -> int:
        """The position that an offset of the source gets. Of an opaque one only once."""
        if self._opaque is None:
            self._opaque = not isinstance(offset, int)
            if self._opaque and self.window.high >= 0:
                raise InvalidArgument("of opaque offsets a window starts empty: their floor alone can be restored")
        if not self._opaque:
            if not isinstance(offset, int):
                raise InvalidArgument(f"offset {offset!r} came after integers")
            return offset
        return self.window.high + 1

    def track(self, position: int, offset: Any) -> bool:
        """`AckWindow.track`, without waiting. A restored offset that the source passes over is not in its log any more
        (retention, compaction), and must not hold the floor for ever."""
        while self._awaited and self._awaited[0] <= position:
            gone = self._awaited.popleft()
            if gone < position and self.window.ack(gone):
                log.warning("the source passed over offset %d, which was outstanding: it is gone from its log", gone)
        wanted = self.window.track(position)
        if self._opaque:
            with self._names_lock:
                self._names.append((position, offset))
                self._settle_names()
        if self._floor is None:
            self._floor = self.window.floor
        return wanted

    def lane_of(self, record: R) -> int | None:
        """None: it is not wanted."""
        if self._options.wanted is not None and not self._options.wanted(record):
            return None
        return hash(self._options.key(record)) % self._options.lanes

    # The committer.

    def due(self) -> Due | None:
        """What has not been committed yet."""
        # Acks first: what is acked between the two is part of the floor, and due once more.
        acks, floor = self.window.acks, self.window.floor
        if acks == self._acks or self._floor is None or (self._floor_alone and floor <= self._floor):
            return None
        if not self._opaque:
            return Due(acks, floor, floor)
        with self._names_lock:
            self._settle_names()
            return None if self._at_floor is None else Due(acks, floor, self._at_floor[0])

    def committed(self, due: Due) -> None:
        self._acks, self._floor = due.acks, due.floor
        self._commits_failed = 0

    def commit_failed(self, due: Due, error: Exception) -> None:
        """Raises what ends the stream; returns where the commit is to be tried again."""
        if self.window.closed:
            raise WindowClosed from error
        self._commits_failed += 1
        if self._commits_failed >= COMMIT_TRIES:
            raise CommitFailed(due.offset) from error
        log.warning("offset %r could not be committed, and is tried again: %r", due.offset, error)

    def tell_if_stuck(self) -> None:
        """Name the offset that has held the floor for too long, once."""
        position, age = self.window.held_by()
        if position is None or age < self._options.stuck_after or position == self._told:
            return
        self._told = position
        offset: Any = position
        if self._opaque:
            with self._names_lock:
                offset = next((name for at, name in self._names if at == position), position)
        if self._options.on_stuck is not None:
            self._options.on_stuck(offset, age)
        else:
            log.warning("offset %r has been outstanding for %.0f seconds and holds the floor", offset, age)

    def _settle_names(self) -> None:
        floor = self.window.floor
        while self._names and self._names[0][0] <= floor:
            self._at_floor = (self._names.popleft()[1],)


def uncommitted(failure: BaseException | None, due: Due, error: Exception) -> BaseException:
    """What a stream raises whose last commit failed, beside the failure that it had."""
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
