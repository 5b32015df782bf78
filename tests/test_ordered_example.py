"""`python -m examples.ordered` as its user sees it, and that its proof detects faults."""

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
    """Two workers are killed at work; nothing is skipped, fewer events are replayed than with an offset alone, and
    nothing is left behind."""
    output = Example("ordered", tmp_path).run()
    assert output.count("killed (SIGKILL)") == 2
    assert "skipped    none of 168 events" in output
    replayed = re.search(r"replayed +(\d+) events", output)
    with_offset_alone = re.search(r"it would have been (\d+)", output)
    assert replayed
    assert with_offset_alone
    assert int(replayed[1]) < int(with_offset_alone[1])


def test_events_come_from_the_file_after_an_offset(tmp_path: Path) -> None:
    """As they were written, with each user's steps in order."""
    events = invent()
    files = Files(tmp_path)
    files.write_events(events)
    assert [event for _, event in files.events()] == events
    assert [offset for offset, _ in files.events(after=99)] == list(range(100, len(events)))
    for user in (1, 2, 3):
        assert [event.step for event in events if event.user == user] == list(range(len(events) // 3))


EVENTS = [Event(0, 1, 0, ""), Event(1, 2, 0, ""), Event(2, 1, 1, ""), Event(3, 2, 1, "")]


def ledger(**different: Any) -> Ledger:
    """The ledger of a consistent run, except for the given values: killed when 0, 1 and 3 were done, but 3 was not
    recorded."""
    values: dict[str, Any] = {
        "events": EVENTS,
        "effects": [0, 1, 3, 2, 3],
        "crashes": [Crash(3, Snapshot(1, 3, (2, 3)))],
        "end": Snapshot(3, 3),
    }
    return Ledger(**{**values, **different})


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
def test_an_inconsistent_run_is_reported(different: dict[str, Any], fault: str) -> None:
    """Every condition is checked."""
    assert ledger().faults() == []
    assert ledger().replayed == 1
    assert any(fault in line for line in ledger(**different).faults())
