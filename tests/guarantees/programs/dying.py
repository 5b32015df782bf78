"""Requests that die: a process runs one request on a database and exits, by `os._exit`, at a chosen point of it.

The points of a request are: before each statement, before each COMMIT, and after each COMMIT, which is before the
answer. "After a statement" is the same as "before the next one", as nothing durable happens in between. The points are
counted in the driver, so that each statement of an executemany counts. If a COMMIT is sent with the writes before it,
the process dies between them as a server would: the writes were executed, and the COMMIT wasn't.

`python -m tests.guarantees.programs.dying` is the server: it reads one job a line, forks, lets the child die, and
prints where it died. `Mortals` is its client.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa

from core import logs
from core.batches import purge
from core.commits.combiner import Combiner, Inline
from core.consumer_groups.leases import Caller
from core.consumer_groups.positions import Fence
from core.dispatcher import Dispatcher
from core.enlisted.transaction import Transaction
from core.service import Service
from core.storage.database import Database
from core.webhooks.backoff import Backoff
from core.webhooks.sender import SendResult
from lastbit.streams.snapshot import Snapshot
from tests import mutants
from tests.guarantees.drivers import journaled
from tests.guarantees.enlisted.service import EnlistingService
from tests.guarantees.models import orders
from tests.guarantees.models.service import Request, perform
from tests.support import packets
from tests.support.servers import ROOT

T = TypeVar("T")


@dataclass(frozen=True)
class Death:
    """`where` describes the point; `commits` is the number of COMMITs done before it."""

    where: str
    commits: int


class Mortals:
    """The client of the server that this module runs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.guarantees.programs.dying"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        url: str,
        request: Request,
        point: int,
        *,
        with_combiner: bool = False,
        with_journal: bool = False,
        enlisted: bool = False,
    ) -> Death | None:
        """Perform the request in a process that dies at the `point`th point; None if the request ended before that.
        `enlisted`: in a caller's transaction, whose COMMIT is the first that counts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"url": url, "request": request, "point": point, "combined": with_combiner, "journaled": with_journal}
        job["enlisted"] = enlisted
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        assert "trouble" not in reply, reply["trouble"]
        return Death(reply["where"], reply["commits"]) if "where" in reply else None

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class _Points:
    """Counts the points that the request passes, and ends the process at one of them."""

    def __init__(self, point: int, pipe: int) -> None:
        self.left = point
        self.said = pipe
        self.commits = 0
        self.counts_commits = True
        self.armed = False
        self._one_dies = threading.Lock()

    def passed(self, place: str) -> None:
        self.commits += self.counts_commits and place == packets.AFTER
        if not self.armed:
            return
        with self._one_dies:  # the thread that ends the process never releases it, so no other thread can write
            if not self.left:
                os.write(self.said, json.dumps({"where": place, "commits": self.commits}).encode())
                os._exit(9)
            self.left -= 1

    def is_next(self) -> bool:
        return self.armed and not self.left

    def watch_sqlite(self, database: Database) -> None:
        # The trace callback runs before each statement, including BEGIN and COMMIT.
        @sa.event.listens_for(database.engine, "connect")
        def trace(connection: Any, _: object) -> None:
            connection.set_trace_callback(lambda text: self.passed(f"before {text[:60]}"))

        commit = database.engine.dialect.do_commit

        def watched_commit(connection: Any) -> None:
            commit(connection)
            self.passed(packets.AFTER)

        database.engine.dialect.do_commit = watched_commit  # type: ignore[method-assign]


class _MortalCaller(EnlistingService):
    """Its transactions that make a batch ready don't count as commits of the request."""

    points: _Points

    def _write(self, work: Callable[[Transaction], T]) -> T:
        def counted_work(tx: Transaction) -> T:
            self.points.counts_commits = False
            result = work(tx)
            self.points.counts_commits = True
            return result

        return super()._write(counted_work)


class Written:
    """A sender whose receiver is a file: it appends a line for each event, which survives the process."""

    def __init__(self, log: Path) -> None:
        self._sent = log

    def check(self, url: str) -> None:
        pass

    def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        with self._sent.open("a") as file:
            file.write(headers["webhook-id"] + "\n")
        return SendResult(200, None, 0)


def dispatch(database: Database, log: Path) -> None:
    """Deliver everything that is due. Each webhook has two deliveries at a time, which share transactions."""
    dispatcher = Dispatcher(database, Written(log), backoff=Backoff(), lease=timedelta(minutes=1), threads=8)
    while dispatcher.run_once():
        dispatcher.settle()
    dispatcher.stop()


def _live_and_die(job: dict[str, Any], pipe: int) -> None:
    points = _Points(job["point"], pipe)
    purge.CHUNK = 2  # type: ignore[misc]  # several chunks for each purge
    if job["journaled"]:
        journaled.everything(pytest.MonkeyPatch())
    database = Database(job["url"])
    combiner = Combiner if job["combined"] else Inline
    service_type = _MortalCaller if job["enlisted"] else Service
    service = service_type(database, combiner=combiner, writes=combiner, sender=Written(Path(os.devnull)))
    if isinstance(service, _MortalCaller):
        service.points = points
    if database.is_embedded:
        points.watch_sqlite(database)
    else:
        packets.watch(points, database, pytest.MonkeyPatch())
    database.read(lambda tx: tx.exec_driver_sql("SELECT 1"))  # connect before the points are counted
    points.armed = True
    request = job["request"]
    match request["verb"]:
        case "deliver":
            orders.run(service, request)
        case "dispatch":
            dispatch(database, Path(request["sent"]))
        case "sync":
            service.consumer_groups.sync(request["group"], Caller(request["worker"], request["session"]))
        case "commit":
            holds = Fence(request["group"], 0, request["worker"], 1)
            service.consumer_groups.commit(holds, Snapshot.decode(bytes.fromhex(request["snapshot"])))
        case _:
            perform(service, request)
    os.write(pipe, b"{}")


def _fork(job: dict[str, Any]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            _live_and_die(job, writer)
        except BaseException as error:  # noqa: BLE001  # report every error to the parent
            os.write(writer, json.dumps({"trouble": repr(error)}).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        output = pipe.read()
    os.waitpid(child, 0)
    return output or json.dumps({"trouble": "the child returned nothing"})


@contextlib.contextmanager
def mortals() -> Iterator[Mortals]:
    server = Mortals()
    try:
        yield server
    finally:
        server.close()


if __name__ == "__main__":
    mutants.from_environment()
    logs.configure("error")  # to standard error; standard output carries the answers
    for line in sys.stdin:
        print(_fork(json.loads(line)), flush=True)
