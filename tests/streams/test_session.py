"""A session's thread: its users get the cause of its end, and no child process waits for it."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest

from lastbit.streams import SessionEnded
from lastbit.streams.sources.session import Done, Session
from tests.sdk.children import in_a_child


class Talk(Session[int]):
    """A session whose thread calls the functions handed to it."""

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


@pytest.mark.parametrize("exception", [OSError, SystemExit, KeyboardInterrupt])
def test_a_sessions_reader_gets_the_cause_of_its_end(exception: type[BaseException]) -> None:
    """For any class of exception; every later call gets it too."""

    def fail() -> None:
        raise exception

    session = Talk()
    session._hand_over(fail)
    with pytest.raises(SessionEnded, match=exception.__name__) as error_info:
        list(session._received())
    assert isinstance(error_info.value.__cause__, exception)
    with pytest.raises(SessionEnded):
        session._ask(lambda done: done())


@pytest.mark.parametrize("exception", [OSError, SystemExit])
def test_an_error_of_a_task_is_raised_in_its_caller(exception: type[BaseException]) -> None:
    """For any class of exception; and the session continues."""

    def fail(_: Done) -> None:
        raise exception

    session = Talk()
    with pytest.raises(exception):
        session._ask(fail)
    session._ask(lambda done: done())
    session.close()


def test_a_session_of_the_parent_process_raises_in_the_child() -> None:
    """A child process reads nothing and gets no answers."""
    session = Talk()
    for use in (lambda: list(session._received()), lambda: session._ask(lambda done: done())):
        assert in_a_child(use) == "UsedAfterFork"
    session.close()
