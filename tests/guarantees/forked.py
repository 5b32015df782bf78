"""Services that start at once: forked from a process that has imported everything.

`python -m tests.guarantees.forked` is that process: it reads the arguments of a service a line, forks it, and says its
process id, and in the end how it ended. `Nursery` talks to it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback

from api.__main__ import main
from tests.guarantees import mutants
from tests.servers import ROOT, free_port


class Nursery:
    """The other end of that process; it has one service at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.guarantees.forked"],
            cwd=ROOT,
            env={"LASTBIT_LOG_LEVEL": "error", **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, arguments: list[str]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()

    def hear(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Forked:
    """A service, on the same port each time. It is not waited for: who asks it asks until it listens."""

    def __init__(self, nursery: Nursery, database_url: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._nursery = nursery
        self._arguments = ["--port", str(self.port), "--database-url", database_url]
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        assert self._pid is not None
        return self._pid

    def start(self) -> None:
        self._nursery.say(self._arguments)
        self._pid = self._nursery.hear()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal; the exit code, as `subprocess` has it."""
        os.kill(self.pid, number)
        self._pid = None
        return self._nursery.hear()

    def __enter__(self) -> Forked:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid is not None:
            self.stop(signal.SIGKILL)


def _fork(arguments: list[str]) -> int:
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(2, 1)  # the other end reads numbers
        try:
            os._exit(main(arguments))
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        except BaseException:  # noqa: BLE001  # it must not become a second parent
            traceback.print_exc()
            os._exit(1)
    return pid


if __name__ == "__main__":
    import api.app  # noqa: F401  # what main would import by its name

    mutants.from_environment()
    for line in sys.stdin:
        child = _fork(json.loads(line))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
