"""Runs the how-to page of an adapter as a reader does: its first program is the module `tasks` of the worker, and its
second one the producer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.integrations import workers
from tests.support.servers import ROOT
from tests.test_docs import blocks

REDIS = "redis://127.0.0.1:6379"
"""The address on the pages."""


def follow(page: str, folder: Path, redis_url: str, command: Sequence[str], prints: str) -> None:
    """The producer prints what the page shows, and so does the worker when the batch has ended. `command`: the module
    of the worker's command, with its arguments."""
    path = ROOT / "docs" / page
    tasks, producer = blocks(path, "python")[:2]
    assert REDIS in tasks
    (folder / "tasks.py").write_text(tasks.replace(REDIS, redis_url))
    (folder / "produce.py").write_text(producer)
    line = " ".join(command).replace("rq.cli", "rq")
    assert f"\n{line}\n" in path.read_text(), "the page starts the worker with this command"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    output, report = blocks(path, "text")
    with workers.running(*command, prints=prints, folder=folder) as worker:
        process = subprocess.run(
            [sys.executable, "produce.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
        )
        assert process.returncode == 0, process.stderr
        assert process.stdout == output
        # Less than the longest pause of a worker that looks for its app's first ending.
        workers.wait_until(lambda: report.strip() in "".join(worker.lines), f"the worker prints {report!r}", 25)


def run_example(module: str, command: Sequence[str], prints: str) -> str:
    """The output of an example's producer, while its worker runs."""
    with workers.running(*command, prints=prints):
        process = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    return process.stdout
