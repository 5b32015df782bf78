"""Count what one HTTP call runs through: the calls of our functions, their files, and how often one call is in another
file than the call before it.

    python -m scripts.call_paths            a table: ack, open, seal, get
    python -m scripts.call_paths --list     and each file, with the calls of its functions

The service runs in this process, on an empty SQLite database in a temporary folder. Each request is sent once before,
for a batch of its own, so that imports and caches don't count. Our functions are those in `api`, `core` and
`lastbit`. A coroutine counts each time it goes on.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from api.__main__ import _Server, configuration, listening
from core.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(f"{ROOT / package}/" for package in ("api", "core", "lastbit"))
ROUNDS = 5
STARTUP = 30.0
"""Seconds that the service may take to start."""


@dataclass
class CallPath:
    calls: Counter[str] = field(default_factory=Counter)
    """By file."""
    hops: int = 0
    file: str = ""
    """That of the newest call."""

    def add(self, file: str) -> None:
        self.calls[file] += 1
        self.hops += file != self.file
        self.file = file


class Recorder:
    """Records the calls of our functions, in all threads that start after it was installed."""

    def __init__(self) -> None:
        self._path: CallPath | None = None

    def install(self) -> None:
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = self._path
        if path is not None and event == "call" and frame.f_code.co_filename.startswith(OURS):
            path.add(frame.f_code.co_filename)

    def paths(self, client: Client) -> dict[str, CallPath]:
        """One call of each kind."""
        paths = {}
        for name, request in requests(client).items():
            self._path = paths[name] = CallPath()
            client.call(*request)
            self._path = None
        return paths


class Client:
    """A keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{method} {path} was answered {response.status}: {answer.decode()}")
        return json.loads(answer)

    def open(self) -> int:
        batch: int = self.call("POST", "/v1/batches", {"items": 10})["id"]
        return batch


@contextmanager
def running_service(recorder: Recorder) -> Iterator[int]:
    """Serves in a thread of this process. Yields the port."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LASTBIT_DATABASE_URL": f"sqlite:///{folder}/lastbit.db", "LASTBIT_LOG_LEVEL": "error"}
        config = configuration(Settings(port=0))
        sockets, started = listening(config), threading.Event()
        server = _Server(config, started.set)
        recorder.install()
        thread = threading.Thread(target=server.run, kwargs={"sockets": sockets})
        thread.start()
        if not started.wait(STARTUP):
            raise RuntimeError(f"the service has not started in {STARTUP:.0f} seconds")
        yield sockets[0].getsockname()[1]
        server.should_exit = True
        thread.join()


def requests(client: Client) -> dict[str, tuple[str, str, Any]]:
    """A request of each kind, for a batch that was just opened."""
    batch = client.open()
    return {
        "ack": ("POST", "/v1/acks", {"items": [f"{batch}:0:3"]}),
        "open": ("POST", "/v1/batches", {"items": 10}),
        "seal": ("POST", f"/v1/batches/{batch}/seal", None),
        "get": ("GET", f"/v1/batches/{batch}", None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.call_paths", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="also list the files of each call")
    options = parser.parse_args()
    recorder = Recorder()
    table = Table("call", box=box.SIMPLE_HEAD)
    for heading in ("calls", "files", "hops between files", "lines of the files"):
        table.add_column(heading, justify="right")
    files: dict[str, Counter[str]] = {}
    with running_service(recorder) as port:
        client = Client(port)
        for request in requests(client).values():
            client.call(*request)
        rounds = [recorder.paths(client) for _ in range(ROUNDS)]
    for name in rounds[0]:
        # The threads of the service meet in a different order each time.
        path = sorted((each[name] for each in rounds), key=lambda path: path.calls.total())[ROUNDS // 2]
        files[name] = path.calls
        lines = sum(len(Path(file).read_text().splitlines()) for file in path.calls)
        table.add_row(name, f"{path.calls.total():,}", str(len(path.calls)), str(path.hops), f"{lines:,}")
    Console().print(table)
    if options.list:
        for name, calls_by_file in files.items():
            print(f"\n{name}")  # noqa: T201
            for file, calls in calls_by_file.most_common():
                print(f"{calls:6} {Path(file).relative_to(ROOT)}")  # noqa: T201


if __name__ == "__main__":
    main()
