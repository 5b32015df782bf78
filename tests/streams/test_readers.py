"""The threads that read the sources of several streams in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lastbit.streams._readers import READERS, Readers
from tests.mutants import mutant
from tests.support.exposition import eventually
from tests.support.threads import no_more_threads, no_thread_left


class Stream:
    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read = read
        self.turns = 0

    def read(self, until: float) -> float | None:
        self.turns += 1
        return self._read()


class Blocking(Stream):
    """Its source blocks until `goes_on`, and ends then."""

    def __init__(self, goes_on: threading.Event) -> None:
        super().__init__(self._end)
        self._goes_on = goes_on

    def _end(self) -> None:
        assert self._goes_on.wait(60)


def threads() -> int:
    return sum(thread.name == "lastbit-reader" for thread in threading.enumerate())


@contextmanager
def running() -> Iterator[Readers]:
    with no_thread_left():
        readers = Readers()
        readers.start()
        try:
            yield readers
        finally:
            readers.stop()


@mutant(
    "a-stream-that-must-end-waits-for-its-turn",
    "lastbit.streams._readers:Readers.hasten",
    "self._add(0.0, stream)",
    "self._add(time.monotonic() + 3600.0, stream)",
)
def test_a_stream_can_be_given_the_next_turn() -> None:
    """Only while it waits for its turn: two threads never read one stream."""
    begun, goes_on = threading.Event(), threading.Event()
    pauses = iter([3600.0, None])

    def blocked() -> None:
        begun.set()
        goes_on.wait(60)

    with running() as readers:
        resting, blocking = Stream(lambda: next(pauses)), Stream(blocked)
        readers.add(resting)
        readers.add(blocking)
        try:
            eventually(lambda: len(readers._turns), 1)
            assert begun.wait(60)
            readers.hasten(blocking)
            readers.hasten(resting)
            eventually(lambda: resting.turns, 2)
            assert blocking.turns == 1
        finally:
            goes_on.set()


@mutant(
    "a-thread-that-was-started-for-a-source-that-blocked-stays",
    "lastbit.streams._readers:Readers._next",
    "len(self._threads) <= self._needed()",
    "True",
)
def test_a_source_that_blocks_has_a_thread_of_its_own_meanwhile() -> None:
    goes_on = threading.Event()
    with running() as readers:
        assert threads() == READERS
        streams = [Blocking(goes_on) for _ in range(2 * READERS)]
        calm = Stream(lambda: 0.01)
        for stream in (*streams, calm):
            readers.add(stream)
        try:
            eventually(lambda: calm.turns > 10, True)
            assert [stream.turns for stream in streams] == [1] * 2 * READERS
            assert threads() == 3 * READERS
        finally:
            goes_on.set()
        eventually(threads, READERS)
        turns = calm.turns
        eventually(lambda: calm.turns > turns, True)


def test_without_further_threads_the_sources_wait_for_each_other() -> None:
    goes_on = threading.Event()
    with running() as readers, no_more_threads():
        for _ in range(READERS):
            readers.add(Blocking(goes_on))
        calm = Stream(lambda: 0.01)
        eventually(lambda: len(readers._reading), READERS)
        readers.add(calm)
        threading.Event().wait(0.3)  # for longer than the readers' patience
        assert calm.turns == 0
        goes_on.set()
        eventually(lambda: calm.turns > 1, True)


@pytest.mark.parametrize("started", range(READERS + 1))
def test_readers_that_can_not_all_be_started_end(started: int) -> None:
    readers = Readers()
    with no_thread_left():
        with no_more_threads(after=started), pytest.raises(RuntimeError):
            readers.start()
        readers.stop()
