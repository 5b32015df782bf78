"""`python -m examples.ordered` as its user sees it, and that its proof would notice what it is there for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from examples.ordered.files import Event, Files, invent
from examples.ordered.proof import Crash, Ledger
from lastbit.streams import Snapshot
from tests.support.examples import Example


def test_the_example_ends_with_its_proof(tmp_path: Path) -> None:
    """Two workers killed at work, nothing skipped, fewer replays than an offset alone would have cost; nothing left."""
    said = Example("ordered", tmp_path).said()
    assert said.count("killed (SIGKILL)") == 2
    assert "skipped    none of 168 events" in said
    replayed = re.search(r"replayed +(\d+) events", said)
    alone = re.search(r"it would have been (\d+)", said)
    assert replayed
    assert alone
    assert int(replayed[1]) < int(alone[1])


def test_events_come_from_the_file_after_an_offset(tmp_path: Path) -> None:
    """As they were written, each user's steps in order."""
    events = invent()
    files = Files(tmp_path)
    files.write_events(events)
    assert [event for _, event in files.events()] == events
    assert [offset for offset, _ in files.events(after=99)] == list(range(100, len(events)))
    for user in (1, 2, 3):
        assert [event.step for event in events if event.user == user] == list(range(len(events) // 3))


EVENTS = [Event(0, 1, 0, ""), Event(1, 2, 0, ""), Event(2, 1, 1, ""), Event(3, 2, 1, "")]


def ledger(**different: Any) -> Ledger:
    """Of a run in which all adds up, but for what is given: killed when 0, 1 and 3 were done, 3 not written down."""
    fine: dict[str, Any] = {
        "events": EVENTS,
        "effects": [0, 1, 3, 2, 3],
        "crashes": [Crash(3, Snapshot(1, 3, (2, 3)))],
        "end": Snapshot(3, 3),
    }
    return Ledger(**{**fine, **different})


@pytest.mark.parametrize(
    ("different", "fault"),
    [
        ({"effects": [0, 1, 3]}, "event 2 was skipped"),
        ({"effects": [2, 0, 1, 3]}, "step 1 was handled before step 0"),
        ({"effects": [0, 1, 3, 1, 2]}, "event 1 was stored as done and was replayed"),
        ({"end": Snapshot(3, 4, (4,))}, "not the end of the stream"),
        ({"crashes": []}, "no worker was killed"),
        ({"errors": ["the last worker ended with exit status 1"]}, "exit status 1"),
    ],
)
def test_a_run_that_does_not_add_up_says_so(different: dict[str, Any], fault: str) -> None:
    """Each thing that must hold is looked at."""
    assert ledger().faults() == []
    assert ledger().replayed == 1
    assert any(fault in each for each in ledger(**different).faults())
