"""`make demo` as its user sees it: its final output, and that it leaves nothing behind."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from examples.demo.broker import Statistics
from examples.demo.proof import Ledger
from lastbit import AckResult, Batch, Completed, Counted, Verification
from tests.support.examples import Example


def test_the_demo_ends_with_the_completed_batch_and_its_proof(tmp_path: Path) -> None:
    """Crashes and duplicates in between, one call that completed the batch, and bits that agree with the counts."""
    output = Example("demo", tmp_path).run()
    assert "complete, exactly" in output
    assert "producer killed" in output
    assert "the same ids" in output
    assert re.search(r"consumer \d killed", output)
    items = re.search(r"^  items +([\d,]+), one for each file", output, re.MULTILINE)
    assert items
    assert int(items[1].replace(",", "")) > 100
    duplicates = re.search(r"^  duplicates seen +([\d,]+) of", output, re.MULTILINE)
    assert duplicates
    assert int(duplicates[1].replace(",", "")) > 10
    assert re.search(r"^  completed by +(an ack of consumer \d|the producer's seal): ", output, re.MULTILINE)
    assert re.search(r"^  proof +verify ok: .* 0 pending$", output, re.MULTILINE)
    assert re.search(r"^  storage +at most [\d,]+ bytes", output, re.MULTILINE)
    assert "Try next" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: int) -> None:
    """Ctrl-C in the middle: one line, exit status 130, no process, no folder."""
    Example("demo", tmp_path).interrupt("opened batch", number)


THEN = datetime(2026, 1, 1, tzinfo=UTC)
BATCH = Batch(
    *(1, None, {}, "complete", 64, 10, 9, 1, 0, 0, True, False, None, None),
    *(None, None, None, None, "continue", False),
    *(THEN, THEN, THEN, THEN, None, None, None, None),
)
VERIFICATION = Verification(True, 10, 9, 1, 0, Counted(9, 1))
QUEUE = Statistics(published=10, duplicated=1, deliveries=12, given_back=1, left=0, items_done=10)
AGAIN = AckResult(0, 1, (Completed(1, None, False, False, False),))


def ledger(**different: Any) -> Ledger:
    """The ledger of a demo in which everything agrees, except for the given values."""
    values: dict[str, Any] = {
        "files": 10,
        "batch": BATCH,
        "verification": VERIFICATION,
        "queue": QUEUE,
        "once_more": AGAIN,
        "metrics": {("ack", "applied"): 9, ("fail", "applied"): 1},
        "completed_by": ["an ack of consumer 1"],
        "producer_killed_at": 3,
        "resumed": True,
        "held_by_the_killed": 5,
    }
    return Ledger(**{**values, **different})


@pytest.mark.parametrize(
    "different",
    [
        {"files": 11},
        {"batch": None},
        {"batch": replace(BATCH, state="sealed", complete=False)},
        {"batch": replace(BATCH, acked=8, pending=1)},
        {"verification": replace(VERIFICATION, ok=False)},
        {"verification": replace(VERIFICATION, counted=Counted(10, 0))},
        {"metrics": {("ack", "applied"): 10, ("fail", "applied"): 1}},
        {"metrics": {("ack", "applied"): 9, ("fail", "applied"): 1, ("ack", "rejected"): 1}},
        {"completed_by": []},
        {"completed_by": ["an ack of consumer 1", "the producer's seal"]},
        {"once_more": AckResult(1, 0, AGAIN.completed)},
        {"once_more": AckResult(0, 1, (Completed(1, None, True, False, False),))},
        {"queue": replace(QUEUE, left=1)},
        {"queue": replace(QUEUE, items_done=9)},
        {"queue": replace(QUEUE, given_back=0)},
        {"resumed": False},
        {"reissued": [3]},
        {"errors": ["consumer 1: no answer"]},
    ],
    ids=str,
)
def test_an_inconsistent_demo_is_reported(different: dict[str, Any]) -> None:
    """Every condition is checked; if one fails, the demo ends with exit status 1."""
    assert ledger().faults() == []
    assert ledger(**different).faults()
