"""One rule for a batch's watermark and a window's floor, and one test suite for both: the properties of the first
unresolved position, for a batch in a database, a window, and the rule itself on plain bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import pytest
from bitarray import bitarray
from hypothesis import given, settings
from hypothesis import strategies as st

from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.commits.combiner import Inline
from core.service import Service
from core.storage import schema
from core.storage.database import Database
from lastbit.streams import AckWindow
from lastbit.watermark import Piece, first_unresolved
from tests.mutants import mutant
from tests.support.servers import sqlite_file

SIZE = 64


class Positions(Protocol):
    """Numbers 0, 1, 2, … that are issued and resolved."""

    def issue(self, count: int) -> None: ...

    def resolve(self, numbers: set[int]) -> None: ...

    def first_pending(self) -> int: ...


class OfABatch:
    service: Service

    def __init__(self) -> None:
        self._batch = self.service.batches.open(Opening(group_size=SIZE)).batch.id

    def issue(self, count: int) -> None:
        self.service.batches.extend(self._batch, count)

    def resolve(self, numbers: set[int]) -> None:
        ids = [(self._batch, number // SIZE, number % SIZE) for number in sorted(numbers)]
        self.service.acks.ack(Call.of(Verb.ACK, ids)).result()

    def first_pending(self) -> int:
        return self.service.batches.watermark(self._batch)[1]


class OfAWindow:
    def __init__(self) -> None:
        self._window = AckWindow()
        self._issued = 0

    def issue(self, count: int) -> None:
        for offset in range(self._issued, self._issued + count):
            self._window.track(offset)
        self._issued += count

    def resolve(self, numbers: set[int]) -> None:
        for number in numbers:
            self._window.ack(number)

    def first_pending(self) -> int:
        return self._window.floor + 1


class OfARestoredWindow(OfAWindow):
    """A window that is saved to a snapshot and restored before each read."""

    def first_pending(self) -> int:
        self._window = AckWindow.restore(self._window.snapshot())
        return super().first_pending()


class OfBits:
    """The rule alone: pieces of different kinds and lengths, as sparse as possible, from the prefix that it returned
    last."""

    def __init__(self) -> None:
        self._prefix = self._issued = 0
        self._resolved: set[int] = set()

    def issue(self, count: int) -> None:
        self._issued += count

    def resolve(self, numbers: set[int]) -> None:
        self._resolved |= numbers

    def pieces(self) -> Iterator[Piece]:
        kinds: list[Callable[[list[int]], bitarray | bytearray]] = [bitarray, bytearray]
        for place in range(self._issued // 16 + 1):
            numbers = range(16 * place, 16 * place + 16)
            bits = [int(number in self._resolved) for number in numbers]
            if any(bits) and numbers[-1] >= self._prefix:
                yield 16 * place, 16, None if all(bits) else kinds[place % 2](bits)

    def first_pending(self) -> int:
        self._prefix = first_unresolved(self._prefix, self.pieces(), self._issued)
        return self._prefix


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with sqlite_file() as url, Database(url) as database:
        schema.migrate(database)
        service_ = Service(database, combiner=Inline)
        yield service_
        service_.stop()


@pytest.fixture(params=[OfABatch, OfAWindow, OfARestoredWindow, OfBits])
def kind(request: pytest.FixtureRequest, service: Service) -> type[Positions]:
    OfABatch.service = service
    made: type[Positions] = request.param
    return made


numbers = st.one_of(
    st.sets(st.integers(0, 300), max_size=20),
    st.tuples(st.integers(0, 200), st.integers(0, 150)).map(lambda run: set(range(run[0], run[0] + run[1]))),
)


@mutant(
    "offsets-outside-all-pieces-are-resolved",
    "lastbit.watermark:first_unresolved",
    "position < start or position >= end",
    "position >= end",
)
@settings(max_examples=40)
@given(steps=st.lists(st.one_of(st.integers(0, 3 * SIZE), numbers), max_size=12))
def test_the_watermark_is_the_first_pending_position_and_never_goes_back(
    kind: type[Positions], steps: list[int | set[int]]
) -> None:
    """Positions are issued and resolved in any order, some repeatedly. With nothing pending, the watermark is the
    number of issued positions."""
    positions = kind()
    issued, resolved, before = 0, set[int](), 0
    for step in steps:
        if isinstance(step, int):
            positions.issue(step)
            issued += step
        elif issued_numbers := {number for number in step if number < issued}:
            positions.resolve(issued_numbers)
            resolved |= issued_numbers
        first = positions.first_pending()
        assert first == min(set(range(issued)) - resolved, default=issued)
        assert first >= before
        before = first


@settings(max_examples=20)
@given(order=st.permutations(range(2 * SIZE + 5)))
def test_the_watermark_reaches_the_end_in_any_order(kind: type[Positions], order: list[int]) -> None:
    """One by one; it passes each position only once it is resolved."""
    positions = kind()
    positions.issue(len(order))
    chunks = [set(order[place : place + 20]) for place in range(0, len(order), 20)]
    resolved: set[int] = set()
    for chunk in chunks:
        positions.resolve(chunk)
        resolved |= chunk
        assert resolved.issuperset(range(positions.first_pending()))
    assert positions.first_pending() == len(order)


def test_no_piece_is_read_after_the_deciding_one() -> None:
    """As each may cost a read."""

    def pieces() -> Iterator[Piece]:
        yield 0, 8, None
        yield 8, 8, bytearray([1, 1, 0, 1, 1, 1, 1, 1])
        raise AssertionError

    assert first_unresolved(0, pieces(), 100) == 10
    assert first_unresolved(3, [(0, 8, None), (16, 8, None)], 100) == 8  # a missing piece
    assert first_unresolved(5, [], 100) == 5
    assert first_unresolved(0, [(0, 8, bytearray([1] * 8))], 6) == 6  # no position is beyond the end
    assert first_unresolved(0, [(0, 8, bytearray([1] * 7))], 100) == 8
