"""The offset that is safe to commit, while records are handled in parallel and finish in any order.

An `AckWindow` stores the tracked offsets and which of them are outstanding. Its floor is the offset before the first
outstanding one, so everything up to the floor is done. The floor never goes back. Things that could go wrong:

* The floor is computed from the offsets that were *read*, when nothing is outstanding: a record that was read and not
  yet tracked would be skipped. The floor never exceeds the last tracked offset.
* One offset is never acked. The window holds at most `capacity` positions, from the first outstanding to the last
  tracked one, then accepts no more; `oldest` and `oldest_age` identify the offset.
* Offsets have gaps: compacted logs, transaction markers, records of other consumers. Only tracked offsets hold the
  floor.
* An ack arrives after the stream got another owner. A closed window refuses it, and its later snapshots show the state
  at closing.
* A signal handler interrupts a call by an exception, such as a KeyboardInterrupt or the time limit of a task queue.
  Then `track` has registered its offset completely or not at all, and the floor is right.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable
from itertools import compress
from typing import Final, Self

from lastbit.streams.errors import OffsetOutOfOrder, UnknownOffset, WindowClosed, WindowFull
from lastbit.streams.snapshot import MAX_OFFSET, MAX_OUTSTANDING, Snapshot
from lastbit.watermark import first_unresolved

log = logging.getLogger("lastbit.streams")

_TRIM: Final = 1024
"""Keep at least this many resolved positions in front before the arrays are trimmed."""
_FLIP: Final = bytes([1, 0]) + bytes(254)
"""A table for bytes.translate that swaps resolved and outstanding."""


class AckWindow:
    """The outstanding offsets of one stream, and the floor below them. Thread-safe.

    It starts at the first tracked offset. `capacity`: maximum positions, up to 65,536. `clock` returns monotonic
    seconds.
    """

    def __init__(self, *, capacity: int = MAX_OUTSTANDING, clock: Callable[[], float] = time.monotonic) -> None:
        if not 1 <= capacity <= MAX_OUTSTANDING:
            raise ValueError(f"capacity is 1 to {MAX_OUTSTANDING}, not {capacity!r}")
        self._capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._waiting = 0
        self._closed = False
        # One entry per position, ascending: the offset, when it was tracked, and a byte that is 1 when it is resolved.
        # All positions before `_first` are resolved.
        self._offsets = array("q")
        self._since = array("d")
        self._resolved = bytearray()
        self._first = 0
        self._start: int | None = None  # offsets below it are unknown; None: all are
        self._last = -1  # the last offset tracked by this window
        self._restored = -1  # the snapshot's `high`: up to here the snapshot is complete
        self._high = -1
        self._acks = 0
        self._cut = False

    @classmethod
    def restore(
        cls,
        snapshot: bytes | Snapshot,
        *,
        capacity: int = MAX_OUTSTANDING,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Make a window from a snapshot. Outstanding offsets can be acked at once, and tracked again when the source
        delivers them again. Raises `CorruptSnapshot`."""
        state = snapshot if isinstance(snapshot, Snapshot) else Snapshot.decode(snapshot)
        window = cls(capacity=capacity, clock=clock)
        window._high = window._restored = state.high
        window._start = None if state.high < 0 else 0
        window._offsets.extend(state.outstanding)
        window._since.extend([clock()] * len(state.outstanding))
        window._resolved.extend(bytes(len(state.outstanding)))
        return window

    def track(self, offset: int, timeout: float | None = 0.0) -> bool:
        """Register an offset before it is handled. Returns False if it was done before this window was restored: skip
        it.

        Offsets must ascend, gaps are allowed; otherwise raises `OffsetOutOfOrder`. If the window is full, waits up to
        `timeout` seconds for room (None: without limit), then raises `WindowFull`. Raises `WindowClosed`, and
        `ValueError` for an offset outside 0 to 2^63 - 1.
        """
        if not 0 <= offset <= MAX_OFFSET:
            raise ValueError(f"an offset is 0 to 2^63 - 1, not {offset!r}")
        until = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                if self._closed:
                    raise WindowClosed
                if offset <= self._last:
                    raise OffsetOutOfOrder(offset, self._last)
                if offset <= self._restored:
                    return self._track_again(offset)
                if len(self._offsets) - self._first < self._capacity:
                    break
                if not self._wait(until):
                    raise WindowFull(self._offsets[self._first])
            places = len(self._offsets)
            try:
                self._offsets.append(offset)
                self._since.append(self._clock())
                self._resolved.append(0)
                self._high = self._last = offset
                if self._start is None:
                    self._start = offset
            except BaseException:
                del self._offsets[places:], self._since[places:], self._resolved[places:]
                raise
            return True

    def _track_again(self, offset: int) -> bool:
        self._last = offset
        place = self._place(offset)
        if place is None or self._resolved[place]:
            return False
        self._since[place] = self._clock()
        return True

    def wait_for_room(self, timeout: float | None = None) -> bool:
        """Wait until a new offset can be tracked or the window is closed. Returns False after `timeout` seconds."""
        with self._lock:
            return self._wait(None if timeout is None else time.monotonic() + timeout)

    def _wait(self, until: float | None) -> bool:
        while len(self._offsets) - self._first >= self._capacity and not self._closed:
            seconds = None if until is None else until - time.monotonic()
            if seconds is not None and seconds <= 0:
                return False
            self._waiting += 1
            try:
                self._room.wait(seconds)
            finally:
                self._waiting -= 1
        return True

    def begins(self, offset: int) -> bool:
        """Whether a record that was tracked, and has waited since then, is still to be handled: not if the stream got
        another owner meanwhile."""
        return not self._closed

    def ack(self, offset: int) -> bool:
        """Mark an offset as done. Returns whether it was outstanding; False: it was acked before. Raises
        `UnknownOffset` if it was never tracked, and `WindowClosed`."""
        with self._lock:
            if self._closed:
                raise WindowClosed
            place = self._place(offset)
            if place is None:
                if self._start is not None and self._start <= offset <= max(self._floor(), self._restored):
                    return False
                raise UnknownOffset(offset)
            if self._resolved[place]:
                return False
            self._resolved[place] = 1
            self._acks += 1
            if place == self._first:
                try:
                    self._advance()
                except BaseException:
                    self._advance()  # no later ack would move the floor past this offset
                    raise
            return True

    def _place(self, offset: int) -> int | None:
        """The index of an offset in the arrays; None if it is not there."""
        place = bisect_left(self._offsets, offset, self._first)
        return place if place < len(self._offsets) and self._offsets[place] == offset else None

    def _advance(self) -> None:
        places = len(self._resolved)
        self._first = first_unresolved(self._first, ((0, places, self._resolved),), places)
        if self._first >= _TRIM and self._first * 2 >= places:
            del self._offsets[: self._first], self._since[: self._first], self._resolved[: self._first]
            self._first = 0
        if self._waiting:
            self._room.notify_all()

    def _floor(self) -> int:
        return self._offsets[self._first] - 1 if self._first < len(self._offsets) else self._high

    @property
    def floor(self) -> int:
        """The offset that is safe to commit: all offsets up to it are done. -1 before the first is tracked; never
        decreases."""
        with self._lock:
            return self._floor()

    @property
    def high(self) -> int:
        """The last tracked offset, including those in the snapshot; -1 before the first."""
        with self._lock:
            return self._high

    @property
    def acks(self) -> int:
        """The number of offsets acked in this window. A change means that there is something new to commit."""
        with self._lock:
            return self._acks

    @property
    def positions(self) -> int:
        """The number of positions, outstanding or not, from the first outstanding one on; at most `capacity`."""
        with self._lock:
            return len(self._offsets) - self._first

    @property
    def outstanding(self) -> tuple[int, ...]:
        """The offsets that were tracked or restored and not acked, ascending."""
        with self._lock:
            offsets, resolved = self._offsets[self._first :], self._resolved[self._first :]
        return tuple(compress(offsets, resolved.translate(_FLIP)))

    @property
    def oldest(self) -> int | None:
        """The first outstanding offset, which holds the floor; None if nothing is outstanding."""
        return self.held_by()[0]

    @property
    def oldest_age(self) -> float:
        """Seconds since `oldest` was tracked; 0 if there is none."""
        return self.held_by()[1]

    def held_by(self) -> tuple[int | None, float]:
        """`oldest` and `oldest_age`, read atomically."""
        with self._lock:
            if self._first == len(self._offsets):
                return None, 0.0
            return self._offsets[self._first], self._clock() - self._since[self._first]

    def snapshot(self, limit: int | None = None) -> bytes:
        """The state as bytes, for `restore`. `limit`: maximum bytes; see `Snapshot.within`."""
        with self._lock:
            high, floor = self._high, self._floor()
            offsets, resolved = self._offsets[self._first :], self._resolved[self._first :]
        complete = Snapshot(floor, high, tuple(compress(offsets, resolved.translate(_FLIP))))
        if limit is not None:
            shortened = complete.within(limit)
            self._tell_if_cut(complete, shortened, limit)
            complete = shortened
        return complete.encode()

    def _tell_if_cut(self, complete: Snapshot, shortened: Snapshot, limit: int) -> None:
        """Log, once, that a restart would forget acks (pulsar #25540)."""
        is_cut = shortened.high < complete.high
        if is_cut and not self._cut:
            log.warning(
                "%d bytes hold %d of %d outstanding offsets: after a restart, what lies above offset %d is replayed",
                limit,
                len(shortened.outstanding),
                len(complete.outstanding),
                shortened.high,
            )
        self._cut = is_cut

    def close(self) -> None:
        """Close the window because the stream has another owner: `track` and `ack` raise `WindowClosed` from now on.
        Idempotent."""
        with self._lock:
            self._closed = True
            self._room.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed
