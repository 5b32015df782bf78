"""`python -m examples.once` as its user sees it, killed at work."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

from tests.support.servers import ROOT

LINES = 400


def command(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.once", "parcels.txt", "charges.db"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_each_line_is_charged_once_although_a_run_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parcels.txt").write_text("".join(f"{number}\n" for number in range(LINES)))
    with command(tmp_path) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "100 charged\n"
        killed.kill()
    outputs = [command(tmp_path).communicate(timeout=120)[0].splitlines()[-1] for _ in range(2)]
    assert outputs[0].endswith(" before; the batch is complete")
    assert outputs[1] == f"0 charged in this run, {LINES} before; the batch is complete"
    connection = sqlite3.connect(tmp_path / "charges.db")
    parcels = [int(parcel) for (parcel,) in connection.execute("SELECT parcel FROM charges")]
    connection.close()
    assert parcels == list(range(LINES))
