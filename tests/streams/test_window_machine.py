"""Random tracks, acks, duplicates, unknown offsets, restarts and losses against a model: a plain set of outstanding
offsets.

The stream has gaps. A restart keeps the content of a snapshot, perhaps cut to a few bytes or damaged, and the stream
continues from some offset at or below the floor, as with a broker.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lastbit.streams import AckWindow, OffsetOutOfOrder, Snapshot, UnknownOffset, WindowFull
from lastbit.streams.snapshot import MAX_OFFSET, MIN_BYTES
from tests import mutants
from tests.mutants import mutant

CAPACITY = 6
SETTINGS = hypothesis.settings(
    hypothesis.settings.get_profile("lastbit"),
    max_examples=150 * (20 if os.environ.get("LASTBIT_SOAK") == "1" else 1),
    stateful_step_count=40,
)
if mutants.VARIABLE in os.environ:
    SETTINGS = hypothesis.settings(SETTINGS, phases=[hypothesis.Phase.generate])


class WindowMachine(RuleBasedStateMachine):
    """`existing` is the log: the existing offsets, as far as they were read. `handled` are the offsets whose ack was
    answered, in any life. For the current life: `out` are the offsets that the window must report as outstanding,
    `positions` those that were tracked, `known` the highest one in its snapshot, `tracked` the last one tracked, and
    `read` the log's position."""

    @initialize(start=st.sampled_from([0, 1, 1000, 2**31 - 5, 2**32 - 5, 2**53 - 5, MAX_OFFSET - 5000]))
    def begin(self, start: int) -> None:
        self.window = AckWindow(capacity=CAPACITY)
        self.next = start
        self.existing: list[int] = []
        self.handled: set[int] = set()
        self.out: set[int] = set()
        self.positions: set[int] = set()
        self.known = self.tracked = self.read = self.floor = -1

    def filled(self) -> int:
        return sum(offset >= min(self.out) for offset in self.positions) if self.out else 0

    @rule(gap=st.sampled_from([0, 0, 0, 0, 1, 2, 7, 100]))
    def track_the_next(self, gap: int) -> None:
        behind = [offset for offset in self.existing if offset > self.read]
        if behind:
            self.track_again(behind[0])
            return
        offset = self.next + gap
        if self.track_new(offset):
            self.existing.append(offset)
            self.next = offset + 1

    def track_new(self, offset: int) -> bool:
        if self.filled() == CAPACITY:
            with pytest.raises(WindowFull) as error_info:
                self.window.track(offset)
            assert error_info.value.oldest == min(self.out)
            return False
        assert self.window.track(offset) is True
        self.positions.add(offset)
        self.out.add(offset)
        self.read = self.tracked = offset
        return True

    def track_again(self, offset: int) -> None:
        """Track an offset that an earlier life has read."""
        if offset > self.known:
            self.track_new(offset)
            return
        is_tracked = self.window.track(offset)
        assert is_tracked == (offset in self.out)
        assert is_tracked or offset in self.handled, "a record that was not handled was skipped"
        self.read = self.tracked = offset

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def ack_one(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.out)))
        assert self.window.ack(offset) is True
        self.out.remove(offset)
        self.handled.add(offset)

    @precondition(lambda self: self.resolved())
    @rule(data=st.data())
    def ack_one_again(self, data: st.DataObject) -> None:
        assert self.window.ack(data.draw(st.sampled_from(self.resolved()))) is False

    def resolved(self) -> list[int]:
        """The offsets that this life has as done."""
        return [offset for offset in sorted(self.handled - self.out) if offset <= max(self.known, self.tracked)]

    @rule(beyond=st.integers(1, 2**64))
    def ack_a_stranger(self, beyond: int) -> None:
        offset = max(self.known, self.tracked) + beyond
        with pytest.raises(UnknownOffset):
            self.window.ack(offset)

    @precondition(lambda self: self.tracked >= 0)
    @rule(back=st.integers(0, 5))
    def track_out_of_order(self, back: int) -> None:
        with pytest.raises(OffsetOutOfOrder):
            self.window.track(max(self.tracked - back, 0))

    @precondition(lambda self: self.existing)
    @rule(
        limit=st.none() | st.integers(MIN_BYTES, 40),
        damage=st.none() | st.tuples(st.integers(0, 100), st.integers(1, 255)),
        back=st.integers(0, 5),
    )
    def restart(self, limit: int | None, damage: tuple[int, int] | None, back: int) -> None:
        data = bytearray(self.window.snapshot(limit))
        assert limit is None or len(data) <= limit
        if damage is not None and len(data) > MIN_BYTES:
            data[MIN_BYTES + damage[0] % (len(data) - MIN_BYTES)] ^= damage[1]
        snapshot = Snapshot.decode(bytes(data))
        self.window = AckWindow.restore(bytes(data), capacity=CAPACITY)
        assert self.window.floor == snapshot.floor == self.floor
        assert all(offset in self.handled or not snapshot.done(offset) for offset in self.existing)
        self.known = snapshot.high
        self.out = {offset for offset in self.existing if offset <= snapshot.high and not snapshot.done(offset)}
        self.positions = set(self.out)
        self.tracked = -1
        # A broker continues after the floor, or from an earlier offset.
        candidates = [-1] * (back + 1) + [offset for offset in self.existing if offset <= snapshot.floor]
        self.read = candidates[-1 - back]

    @rule()
    def compare(self) -> None:
        assert self.window.outstanding == tuple(sorted(self.out))
        snapshot = Snapshot.decode(self.window.snapshot())
        assert (snapshot.floor, snapshot.outstanding) == (self.window.floor, self.window.outstanding)
        assert snapshot.high == self.window.high

    @invariant()
    def the_floor_is_before_the_first_outstanding(self) -> None:
        floor = self.window.floor
        assert floor >= self.floor, "the floor went back"
        assert floor == (min(self.out) - 1 if self.out else max(self.known, self.tracked))
        assert all(offset in self.handled for offset in self.existing if offset <= floor), "the floor skips a record"
        assert self.window.oldest == min(self.out, default=None)
        assert self.window.positions == self.filled()
        self.floor = floor


@mutant(
    "the-floor-counts-what-was-tracked-and-not-acked",
    "lastbit.streams.window:AckWindow._floor",
    "self._offsets[self._first] - 1 if self._first < len(self._offsets) else self._high",
    "self._high",
)
@mutant(
    "a-full-window-takes-more",
    "lastbit.streams.window:AckWindow.track",
    "len(self._offsets) - self._first < self._capacity",
    "True",
)
def test_a_window_matches_a_set_of_outstanding_offsets() -> None:
    """Offsets are tracked, acked, repeated, invented, lost and restored in any order."""
    run_state_machine_as_test(WindowMachine, settings=SETTINGS)
