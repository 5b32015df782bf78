"""Worker processes of the queues' own commands, and waiting for what they do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastbit import BatchHandle
from lastbit.integrations import _ended
from tests.support.servers import ROOT, wait_until_it_prints


class Workers:
    """A worker command with all its processes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []
        """What it has printed."""

    def kill(self) -> None:
        """End all processes by SIGKILL, but for those of other process groups, such as a work-horse of RQ."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def remove(self) -> None:
        """`kill`, and end all that is left of the session: a work-horse that outlives its worker would end its job in
        the next test."""
        self.kill()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(path.name)) == self._process.pid:
                    os.kill(int(path.name), signal.SIGKILL)

    def wait(self) -> int:
        """Wait until the main process ends by itself, and return its exit code."""
        return self._process.wait(60)

    def stop(self) -> int:
        """Ask the main process to stop, as a supervisor does, and return its exit code."""
        self._process.terminate()
        return self._process.wait(60)


@contextlib.contextmanager
def running(*command: str, prints: str, folder: Path = ROOT, **environment: str) -> Iterator[Workers]:
    """`python -m COMMAND` in a folder, from when its output contains `prints` on."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    workers = Workers(process)
    try:
        wait_until_it_prints(process, prints, lines=workers.lines)
        yield workers
    finally:
        workers.remove()


def reasons(batch: BatchHandle) -> dict[str, str]:
    """The reason of each failed item that has one."""
    return {item: reason for failed in batch.failed() for item, reason in failed.reasons.items()}


def reasons_by_number(batch: BatchHandle) -> dict[int, str]:
    """The failed items' numbers (of group 0) and reasons."""
    found = reasons(batch)
    return {int(item.split(":")[2]): found.get(item, "") for failed in batch.failed() for item in failed.ids}


def wait_until(happened: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Poll, for things that send no signal."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not happened():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        pause.wait(0.02)


def counted_questions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches for which the service is asked whether they have ended, from now on."""
    questions: list[int] = []
    state = _ended._state
    monkeypatch.setattr(_ended, "_state", lambda service, id: questions.append(id) or state(service, id))
    return questions
