"""Restarts processes that have ended, as systemd does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.support.servers import ROOT


class Kept:
    """One process with its children. `ended` counts the exit codes of the processes that ended without being killed."""

    def __init__(self, name: str, module: str, *arguments: str, log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self.ended: Counter[int] = Counter()
        self.begun = 0
        self._command = [sys.executable, "-m", module, *arguments]
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self._lock = threading.Lock()
        self._told = True
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process if it isn't running."""
        with self._lock:
            if self._process is not None:
                code = self._process.poll()
                if code is None:
                    return
                if not self._told:
                    self.ended[code] += 1
            self._told = False
            self.begun += 1
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; SIGKILL goes to its children too."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._process is None or self._process.poll() is not None:
                return
            self._told = True
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def workers(self) -> list[int]:
        """The process ids of its workers."""
        with self._lock:
            pid = None if self._process is None else self._process.pid
        pids = []
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    pids.append(int(child))
        return pids


class Keeper:
    """Keeps processes running inside a `with` block."""

    def __init__(self, programs: list[Kept]) -> None:
        self.kept = programs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        for program in self.kept:
            program.kill()

    def leave(self) -> None:
        """Stop restarting processes."""
        self._stop.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._stop.wait(0.1):
            for program in list(self.kept):
                program.start()
