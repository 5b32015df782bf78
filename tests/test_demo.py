"""`make demo` as its user sees it: what it says in the end, and that nothing of it is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from examples.demo.broker import Statistics
from examples.demo.proof import Ledger
from lastbit import AckResult, Batch, Completed, Counted, Verification
from tests.servers import ROOT

COMMAND = [sys.executable, "-m", "examples.demo"]


def left_behind(folder: Path) -> list[str]:
    """Files in the demo's folder for temporary files, and processes that still have it in their environment."""
    mark = f"TMPDIR={folder}".encode()
    found = [str(path) for path in folder.iterdir()]
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Its temporary files go where we see them."""
    return {**os.environ, "TMPDIR": str(tmp_path), "TERM": "dumb"}


def test_the_demo_ends_with_the_completed_batch_and_its_proof(tmp_path: Path, environment: dict[str, str]) -> None:
    """Crashes and duplicates on the way, one call that completed the batch, bits that agree with the counts."""
    ran = subprocess.run(COMMAND, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    said = ran.stdout
    assert ran.returncode == 0, said + ran.stderr
    assert "complete, exactly" in said
    assert "producer killed" in said
    assert "the same ids" in said
    assert re.search(r"consumer \d killed", said)
    items = re.search(r"^  items +([\d,]+), one for each file", said, re.MULTILINE)
    assert items
    assert int(items[1].replace(",", "")) > 100
    duplicates = re.search(r"^  duplicates seen +([\d,]+) of", said, re.MULTILINE)
    assert duplicates
    assert int(duplicates[1].replace(",", "")) > 10
    assert re.search(r"^  completed by +(an ack of consumer \d|the producer's seal): ", said, re.MULTILINE)
    assert re.search(r"^  proof +verify ok: .* 0 pending$", said, re.MULTILINE)
    assert re.search(r"^  storage +at most [\d,]+ bytes", said, re.MULTILINE)
    assert "Try next" in said
    assert ran.stderr == ""
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, environment: dict[str, str], number: int) -> None:
    """Ctrl-C in the middle: one line, exit status 130, no process, no folder."""
    demo = subprocess.Popen(
        COMMAND, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert demo.stdout is not None
    assert any("opened batch" in line for line in demo.stdout)
    demo.send_signal(number)
    _, complaint = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert complaint.strip() == "lastbit demo: interrupted; nothing is left behind"
    assert left_behind(tmp_path) == []


THEN = datetime(2026, 1, 1, tzinfo=UTC)
BATCH = Batch(
    *(1, None, {}, "complete", 64, 10, 9, 1, 0, True, False, None, None),
    *(THEN, THEN, THEN, THEN),
)
VERIFICATION = Verification(True, 10, 9, 1, 0, Counted(9, 1))
QUEUE = Statistics(published=10, duplicated=1, deliveries=12, given_back=1, left=0, items_done=10)
AGAIN = AckResult(0, 1, (Completed(1, None, False, False, False),))


def ledger(**different: Any) -> Ledger:
    """Of a demo in which all adds up, but for what is given."""
    fine: dict[str, Any] = {
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
    return Ledger(**{**fine, **different})


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
def test_a_demo_that_does_not_add_up_says_so(different: dict[str, Any]) -> None:
    """Each thing that must hold is looked at; where one doesn't, the demo ends with exit status 1."""
    assert ledger().faults() == []
    assert ledger(**different).faults()
