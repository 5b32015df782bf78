"""Runs an example as its user does, and finds what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.servers import ROOT


class Example:
    """`python -m examples.NAME`. Its temporary files go to `folder`, which is set in the environment of all processes
    that it starts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self._command = [sys.executable, "-m", f"examples.{name}"]
        self._environment = {**os.environ, "TMPDIR": str(folder), "TERM": "dumb", "PYTHONPATH": str(ROOT)}

    def run(self, *arguments: str) -> str:
        """Run it to its end and return its output. Fails unless all figures agree, nothing is reported and no file is
        left."""
        command = [*self._command, *arguments]
        process = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=200)
        assert process.returncode == 0, process.stdout + process.stderr
        assert process.stderr == ""
        assert self.left_behind() == []
        return process.stdout

    def interrupt(self, word: str, number: int = signal.SIGINT) -> None:
        """Interrupt it once it has printed `word`: it must print one line, exit with status 130, and leave no process
        and no folder."""
        run = subprocess.Popen(
            self._command, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert run.stdout is not None
        assert any(word in line for line in run.stdout)
        run.send_signal(number)
        _, complaint = run.communicate(timeout=60)
        assert run.returncode == 130
        assert complaint.strip() == f"lastbit {self.name}: interrupted; nothing is left behind"
        assert self.left_behind() == []

    def left_behind(self) -> list[str]:
        """Files in its folder, and processes whose environment still names that folder."""
        mark = f"TMPDIR={self.folder}".encode()
        paths = [str(path) for path in self.folder.iterdir()]
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdecimal() and mark in (process / "environ").read_bytes().split(b"\0"):
                    paths.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
        return paths
