"""`python -m examples.screws` as its user sees it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.servers import ROOT


def test_the_screws_are_counted_to_the_truth_though_everybody_dies(tmp_path: Path) -> None:
    """More was published and read than there was; the totals are equal to the truth all the same."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.screws", "--reports", "300"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    died = re.search(
        r"the republisher died (\d+) times and published ([\d,]+) screws; the counter died (\d+)", done.stdout
    )
    assert died
    said = re.findall(r"^(?:counting what was read|the tally|the truth): +([\d,]+)$", done.stdout, re.MULTILINE)
    read, tally, truth = (int(number.replace(",", "")) for number in said)
    assert min(int(died[1]), int(died[3])) >= 1
    assert int(died[2].replace(",", "")) > truth
    assert read > tally == truth > 0
    assert "each total is the truth" in done.stdout
    assert list(tmp_path.iterdir()) == []
