"""A session's thread: whatever ends it is known to the session's users, and no child process waits for it."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest

from lastbit.streams import SessionEnded
from lastbit.streams.sources.session import Done, Session
from tests.sdk.children import in_a_child


class Talk(Session[int]):
    """Its thread calls what is handed over."""

    def __init__(self) -> None:
        super().__init__("talk")
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread.start()

    def _talk(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _hand_over(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def _end(self, done: Done) -> None:
        self._work.put(None)
        done()


@pytest.mark.parametrize("raised", [OSError, SystemExit, KeyboardInterrupt])
def test_whatever_ends_a_session_its_reader_learns_of_it(raised: type[BaseException]) -> None:
    """Of any class; so does whoever asks for something."""

    def fail() -> None:
        raise raised

    session = Talk()
    session._hand_over(fail)
    with pytest.raises(SessionEnded, match=raised.__name__) as caught:
        list(session._received())
    assert isinstance(caught.value.__cause__, raised)
    with pytest.raises(SessionEnded):
        session._ask(lambda done: done())


@pytest.mark.parametrize("raised", [OSError, SystemExit])
def test_what_work_raises_is_raised_where_it_was_asked_for(raised: type[BaseException]) -> None:
    """Of any class; and the session goes on."""

    def fail(_: Done) -> None:
        raise raised

    session = Talk()
    with pytest.raises(raised):
        session._ask(fail)
    session._ask(lambda done: done())
    session.close()


def test_a_session_of_the_parent_process_says_so() -> None:
    """In the child nothing is read and nothing is answered."""
    session = Talk()
    for use in (lambda: list(session._received()), lambda: session._ask(lambda done: done())):
        assert in_a_child(use) == "UsedAfterFork"
    session.close()
