"""Calls that are made a moment later. `test_workers` and the adapters' tests have outages."""

from __future__ import annotations

import threading

import pytest

from lastbit.integrations._delayed import DelayedCalls
from tests.mutants import mutant
from tests.sdk.children import in_a_child
from tests.support.threads import no_more_threads


@mutant(
    "a-thread-that-could-not-be-started-counts-as-running",
    "lastbit.integrations._delayed:DelayedCalls.start",
    "thread = threading.Thread(target=self._work, name=self._name, daemon=True)",
    "self._thread = thread = threading.Thread(target=self._work, name=self._name, daemon=True)",
)
def test_a_thread_that_could_not_be_started_is_started_with_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    """Calls that wait are made then, in their order."""
    made: list[int] = []
    is_done = threading.Event()
    delayed = DelayedCalls("again", 0)
    with no_more_threads():
        with pytest.raises(RuntimeError):
            delayed.start()
        assert delayed.add(lambda: made.append(1))
        assert not delayed.add(lambda: made.append(2))
    assert "until a thread can be started" in caplog.text
    delayed.add(is_done.set)
    assert is_done.wait(10)
    assert made == [1, 2]
    assert delayed.close() == 0


def test_a_call_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def leave() -> None:
        raise SystemExit(3)

    is_done = threading.Event()
    delayed = DelayedCalls("again", 0)
    delayed.add(leave)
    delayed.add(is_done.set)
    assert is_done.wait(10)
    delayed.close()
    assert "SystemExit: 3" in caplog.text


def test_after_a_close_no_call_is_made_and_no_thread_is_left() -> None:
    made: list[int] = []
    delayed = DelayedCalls("closed", 3600)
    delayed.start()
    delayed.add(lambda: made.append(1))
    delayed.add(lambda: made.append(2))
    assert delayed.close() == 2
    delayed.add(lambda: made.append(3))
    assert not made
    assert "closed" not in {thread.name for thread in threading.enumerate()}


def test_a_child_process_has_a_thread_of_its_own_and_no_call_of_its_parent() -> None:
    """Whatever the parent's threads did at the fork: here, one of them holds the lock."""
    delayed = DelayedCalls("again", 0)
    with no_more_threads():
        delayed.add(lambda: pytest.fail("a call of the parent"))

    def use() -> None:
        made: list[int] = []
        is_done = threading.Event()
        with no_more_threads():
            delayed.add(lambda: made.append(1))
        delayed.add(is_done.set)
        assert is_done.wait(10)
        assert made == [1]

    with delayed._changed:
        assert in_a_child(use) == "nothing"
