"""Starts, reads and kills an example's processes, and ends all of them at the end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GRACE = 10
"""Seconds that a process gets to end before it is killed."""


class Failed(Exception):
    """A required step failed. The message is shown to the user."""


class Process:
    def __init__(self, name: str, arguments: list[str], folder: Path, reports: queue.Queue[Heard]) -> None:
        self.name = name
        self.log = folder / f"{name.replace(' ', '-')}.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  # our own modules
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C reaches this process only, which ends the others in order.
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.was_killed = False
        self._heard = reports
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # A killed process may leave an incomplete line.
            with contextlib.suppress(json.JSONDecodeError):
                self._heard.put(Heard(self, json.loads(line)))
        self._heard.put(Heard(self, None))

    def tell(self) -> None:
        """Send a line, so that a waiting process continues."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: no handler and no cleanup."""
        self.was_killed = True
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        return self._process.wait()

    def stop(self) -> None:
        """End the process in any state, and close its streams."""
        if self.running:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
            if self.running:
                self.kill()
        self._listening.join(GRACE)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-2000:].strip()


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end an example."""


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay the signals in `ENDING` until the context is left."""
    pending: list[int] = []
    handlers = {
        number: signal.signal(number, lambda signal_number, frame: pending.append(signal_number)) for number in ENDING
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if pending:
            signal.raise_signal(pending[0])


@dataclass(frozen=True, slots=True)
class Heard:
    """A report of a process; `facts` is None when its output has ended."""

    process: Process
    facts: dict[str, Any] | None


class Processes:
    """All processes of an example. Leaving the context ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._heard: queue.Queue[Heard] = queue.Queue()
        self._all: list[Process] = []

    def start(self, name: str, *arguments: str) -> Process:
        with _signals_wait():  # a process that is started but not in the list would not be ended
            process = Process(name, list(arguments), self._folder, self._heard)
            self._all.append(process)
        return process

    def hear(self, seconds: float) -> Heard | None:
        """The next report of any process, or None after `seconds` without one."""
        try:
            return self._heard.get(timeout=seconds)
        except queue.Empty:
            return None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        # In reverse order: consumers before the service that they use.
        for process in reversed(self._all):
            process.stop()


def start_service(processes: Processes, database: Path, seconds: float) -> tuple[Process, str]:
    """Start `python -m api` on SQLite. Returns it with its URL when it is ready. Raises `Failed`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = processes.start("service", "api", "--port", str(port), "--database-url", f"sqlite:///{database}")
    url = f"http://127.0.0.1:{port}"
    for _ in _tries(seconds):
        if not service.running:
            break
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(f"{url}/readyz", timeout=5),  # noqa: S310  # our own address
        ):
            return service, url
    raise Failed(f"the service did not become ready at {url}:\n{service.last_words()}")


def _tries(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.05)  # a starting service sends no signal
