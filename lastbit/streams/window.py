"""Which offset is safe to commit, while records are handled in parallel and come back in any order?

An `AckWindow` knows the offsets that were tracked and which of them are still out. Its floor is the offset before the
first that is out, so everything up to the floor is done, and it never goes back. What could go wrong:

* The floor is taken from what was *read*, at a moment when nothing is out: a record that was read and not yet tracked
  would be skipped. The floor never exceeds the last offset that was tracked.
* One offset is never acked. The window holds at most `capacity` positions from the first that is out to the last that
  was tracked, then takes no more; `oldest` and `oldest_age` say which one it is.
* Offsets have gaps: compacted logs, transaction markers, records of others. What was never tracked never holds the
  floor.
* An ack comes after the stream was given to somebody else. A closed window refuses it, and the snapshot that it still
  gives is as of its closing.
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
"""Resolved positions in front that are kept until it is worth moving the rest."""
_FLIP: Final = bytes([1, 0]) + bytes(254)
"""Resolved to outstanding and back, for bytes.translate."""


class AckWindow:
    """The offsets of one stream that are out, and the floor below them. Any thread may call it.

    It begins at the first offset that is tracked. `capacity`: positions at the most, up to 65,536. `clock` gives
    seconds that never go back.
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
        # A position each, ascending: its offset, when it was tracked, and a byte that is 1 when it is resolved. Those
        # before `_first` are all resolved.
        self._offsets = array("q")
        self._since = array("d")
        self._resolved = bytearray()
        self._first = 0
        self._start: int | None = None  # offsets below it are unknown; None: all are
        self._last = -1  # the last that was tracked since this window was made
        self._restored = -1  # the snapshot's `high`: up to there the snapshot knows what is done
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
        """A window that knows what the snapshot knows. What it says is outstanding can be acked at once, and tracked
        again when the source brings it again. Raises `CorruptSnapshot`."""
        known = snapshot if isinstance(snapshot, Snapshot) else Snapshot.decode(snapshot)
        window = cls(capacity=capacity, clock=clock)
        window._high = window._restored = known.high
        window._start = None if known.high < 0 else 0
        window._offsets.extend(known.outstanding)
        window._since.extend([clock()] * len(known.outstanding))
        window._resolved.extend(bytes(len(known.outstanding)))
        return window

    def track(self, offset: int, timeout: float | None = 0.0) -> bool:
        """An offset is about to be handled: True. False: it was done before this window was restored, so skip it.

        Offsets ascend, with gaps if need be; else `OffsetOutOfOrder`. When the window is full, waits up to `timeout`
        seconds for room (None: as long as it takes), then raises `WindowFull`. Raises `WindowClosed`.
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
            self._offsets.append(offset)
            self._since.append(self._clock())
            self._resolved.append(0)
            self._high = self._last = offset
            if self._start is None:
                self._start = offset
            return True

    def _track_again(self, offset: int) -> bool:
        self._last = offset
        place = self._place(offset)
        if place is None or self._resolved[place]:
            return False
        self._since[place] = self._clock()
        return True

    def wait_for_room(self, timeout: float | None = None) -> bool:
        """Until a new offset can be tracked, or the window is closed: False after so many seconds."""
        with self._lock:
            return self._wait(None if timeout is None else time.monotonic() + timeout)

    def _wait(self, until: float | None) -> bool:
        while len(self._offsets) - self._first >= self._capacity and not self._closed:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._waiting += 1
            try:
                self._room.wait(left)
            finally:
                self._waiting -= 1
        return True

    def ack(self, offset: int) -> bool:
        """An offset is done, or is not wanted: whether it was outstanding. False: it was acked before. Raises
        `UnknownOffset` for one that was never tracked, and `WindowClosed`."""
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
                self._advance()
            return True

    def _place(self, offset: int) -> int | None:
        """Where an offset stands among those that are kept; None for all others."""
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
        """The offset that is safe to commit: all up to it is done. -1 before the first is tracked; never goes back."""
        with self._lock:
            return self._floor()

    @property
    def high(self) -> int:
        """The last offset that was tracked, here or before the snapshot; -1 before the first."""
        with self._lock:
            return self._high

    @property
    def acks(self) -> int:
        """How many offsets were resolved since this window was made: it has moved when this has."""
        with self._lock:
            return self._acks

    @property
    def positions(self) -> int:
        """How many there are, outstanding or not, from the first that is outstanding on; `capacity` bounds it."""
        with self._lock:
            return len(self._offsets) - self._first

    @property
    def outstanding(self) -> tuple[int, ...]:
        """The offsets that are tracked, or restored, and not acked; ascending."""
        with self._lock:
            offsets, resolved = self._offsets[self._first :], self._resolved[self._first :]
        return tuple(compress(offsets, resolved.translate(_FLIP)))

    @property
    def oldest(self) -> int | None:
        """The offset that holds the floor; None where none does."""
        return self.held_by()[0]

    @property
    def oldest_age(self) -> float:
        """Seconds since that one was tracked; 0 where there is none."""
        return self.held_by()[1]

    def held_by(self) -> tuple[int | None, float]:
        """`oldest` and `oldest_age` of one moment."""
        with self._lock:
            if self._first == len(self._offsets):
                return None, 0.0
            return self._offsets[self._first], self._clock() - self._since[self._first]

    def snapshot(self, limit: int | None = None) -> bytes:
        """What this window knows, for `restore`; see `Snapshot.encode` for `limit`."""
        with self._lock:
            high, floor = self._high, self._floor()
            offsets, resolved = self._offsets[self._first :], self._resolved[self._first :]
        known = Snapshot(floor, high, tuple(compress(offsets, resolved.translate(_FLIP))))
        if limit is not None:
            kept = known.within(limit)
            self._tell_if_cut(known, kept, limit)
            known = kept
        return known.encode()

    def _tell_if_cut(self, known: Snapshot, kept: Snapshot, limit: int) -> None:
        """Acks that a restart would forget are nothing to be silent about (pulsar #25540); once is enough."""
        cut = kept.high < known.high
        if cut and not self._cut:
            log.warning(
                "%d bytes hold %d of %d outstanding offsets: after a restart, what lies above offset %d is replayed",
                *(limit, len(kept.outstanding), len(known.outstanding), kept.high),
            )
        self._cut = cut

    def close(self) -> None:
        """The stream is not ours any more: from now on `track` and `ack` raise `WindowClosed`. Again: no effect."""
        with self._lock:
            self._closed = True
            self._room.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed
