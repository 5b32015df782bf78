"""How many messages a receive asks for, and what a run's messages wait for."""

from __future__ import annotations

import pytest

from lastbit.integrations.sqs._inbox import Inbox, Run

MESSAGES = [{"MessageId": str(number)} for number in range(10)]


def test_a_receive_is_made_for_ten_messages() -> None:
    """Not for one, whenever a worker has taken one; it would take as long."""
    inbox = Inbox(10)
    assert inbox.request() == 10
    assert inbox.wanted() == 0, "a receive is under way"
    assert inbox.put(10, [Run([message]) for message in MESSAGES])
    for number in range(10):
        assert inbox.wanted() == 0, f"{10 - number} messages wait"
        assert inbox.take() is not None
    assert inbox.wanted() == 10


def test_without_prefetch_a_receive_is_made_for_idle_workers() -> None:
    """So messages go to processes that can handle them now."""
    assert Inbox(0).wanted() == 0


@pytest.mark.parametrize(
    ("endings", "deletable"),
    [([0, 1, 2], [[0], [1], [2]]), ([1, 0, 2], [[], [0, 1], [2]]), ([2, 1], [[], []])],
)
def test_a_message_of_a_run_waits_for_its_predecessors(endings: list[int], deletable: list[list[int]]) -> None:
    """It is deleted after them, or left with them."""
    run = Run(list(MESSAGES[:3]))
    assert [run.end(position) for position in endings] == [
        [MESSAGES[number] for number in numbers] for numbers in deletable
    ]
