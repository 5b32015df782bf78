"""What a tenant notices of its neighbours. The victim, in its own process, acks the items of its batch one by one over
four connections, a hundred a second together. Beside it, an attacker with a token that is limited to a prefix, to
5 requests and to 100 items a second does what could harm others; a stranger has no token. Each attack has a service of
its own with an empty database, and comes after some seconds without it.

The latency of an ack counts from when it was due, so an ack that waits behind a slow one is slow too. Beside the acks,
the victim reads over new connections (its pending items, its batches, an explanation: these need a thread), and
`/healthz` is called four times a second, over new connections.

`python -m bench.neighbours --against COMMIT` runs each attack on that commit's service as well.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import measure
from bench.against import code_of
from bench.hostile import attacks
from bench.hostile.attacks import ATTACKS, PREFIX, STRANGERS, Attacker
from bench.measure import Scale
from core.storage.database import Database
from lastbit import tokens
from lastbit.ids import DEFAULT_GROUP_SIZE, item_id
from lastbit.tokens import Role
from tests.support.servers import ROOT, ServiceProcess

REQUESTS: Final = 5
ITEMS: Final = 100
"""The attacker's rates per second."""
ACKERS: Final = 4
GROWING: Final = 20
"""Requests by which the growth of the database is measured."""
ROLES: Final = (Role.READ, Role.PRODUCE, Role.CONSUME)
_ENVIRONMENT: Final = {"connections": {"LASTBIT_MAX_CONNECTIONS": "300"}}
_LONG: Final = ("names 60", "names 200", "pages", "streams", "connections", "all")
"""Attacks that need a minute at the attacker's rate."""


@dataclass(frozen=True)
class Shape:
    """Seconds without an attack, of an attack, and of one that takes long to build up; batches and appends that the
    attacker prepares; requests of a stranger of each kind."""

    calm: float
    short: float
    long: float
    batches: int
    appends: int
    strangers: int

    @classmethod
    def of(cls, scale: Scale) -> Shape:
        return cls(8, 30, 60, 100, 20, 200) if scale.rounds > 2 else cls(0.4, 0.6, 0.6, 2, 1, 2)


VICTIM, ATTACKER, UNLIMITED = "lastbit_victim", "lastbit_attacker", "lastbit_unlimited"
"""Tokens. The last one is the attacker's without rates, to prepare what would otherwise take hours."""


def _lines() -> str:
    records = (
        tokens.known(VICTIM, "victim", ROLES, "victim-"),
        tokens.known(ATTACKER, "attacker", ROLES, PREFIX, requests=REQUESTS, items=ITEMS),
        tokens.known(UNLIMITED, "unlimited", ROLES, PREFIX),
    )
    return ";".join(token.line() for token in records)


class Caller:
    """A connection that is opened again when it breaks."""

    def __init__(self, port: int, token: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}

    def call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """The status, 0 if there is none, and the body."""
        try:
            self._connection.request(method, path, body, self._headers)
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return 0, None
        return response.status, json.loads(content) if content[:1] == b"{" else None

    def ok(self, method: str, path: str, body: bytes | None = None) -> Any:
        while True:
            status, response = self.call(method, path, body)
            if 200 <= status < 300:
                return response
            if status not in (0, 429, 503):
                raise RuntimeError(f"{method} {path} was answered {status}: {response}")
            time.sleep(1)  # as Retry-After asks

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class Seen:
    """Seconds of the victim's acks, its reads, and the probes; calls of the victim that were refused or broken."""

    acks: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    def p(self, share: float) -> float:
        return sorted(self.acks)[int(len(self.acks) * share)]


def _stand_by(port: int, seconds: float) -> Seen:
    """The victim. It runs in a separate process."""
    report = Seen()
    owner = Caller(port, VICTIM)
    batch = owner.ok("POST", "/v1/batches", attacks.encoded({"key": "victim-1", "items": 10**9}))["id"]
    acked: list[int] = []
    start = time.perf_counter()

    def regularly(pause: float) -> Iterator[tuple[int, float]]:
        for number in range(int(seconds / pause)):
            due = start + number * pause
            time.sleep(max(0.0, due - time.perf_counter()))  # part of the measurement
            yield number, due

    def ack(place: int) -> None:
        caller = Caller(port, VICTIM)
        for number, due in regularly(ACKERS / 100):
            item = item_id(batch, ACKERS * number + place, DEFAULT_GROUP_SIZE)
            status, _ = caller.call("POST", "/v1/acks", attacks.encoded({"items": [item]}))
            report.acks.append(time.perf_counter() - due)
            (acked if status == 200 else report.refused).append(status)
        caller.close()

    def newcomer(times: list[float], pause: float, *paths: str) -> None:
        for number, _ in regularly(pause):
            start_time = time.perf_counter()
            caller = Caller(port, VICTIM)
            status, _ = caller.call("GET", paths[number % len(paths)])
            caller.close()
            times.append(time.perf_counter() - start_time)
            if status != 200:
                report.refused.append(status)

    reads = (f"/v1/batches/{batch}/pending", "/v1/batches", f"/v1/batches/{batch}/explain")
    work: list[Callable[[], None]] = [
        *(lambda place=place: ack(place) for place in range(ACKERS)),  # type: ignore[misc]
        lambda: newcomer(report.reads, seconds / 60, *reads),
        lambda: newcomer(report.probes, 0.25, "/healthz"),
    ]
    threads = [threading.Thread(target=run) for run in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    verification = owner.ok("GET", f"/v1/batches/{batch}/verify")
    if not verification["ok"] or verification["acked"] < len(acked):
        raise RuntimeError(f"{len(acked)} acks were answered, but the batch has {verification}")
    return report


def _largest_labels(caller: Caller) -> dict[str, str]:
    """The most labels of the largest size that the service accepts."""
    for count in (64, 32, 16, 8, 4, 3, 2):
        labels = attacks.labels(count)
        status, _ = caller.call("POST", "/v1/batches", attacks.encoded({"key": PREFIX, "labels": labels}))
        if status == 201:
            return labels
    return {}


def _attacker(port: int, shape: Shape) -> Attacker:
    """The attacker, with large batches and events that it has made before."""
    caller = Caller(port, UNLIMITED)
    labels = _largest_labels(caller)
    body = attacks.encoded({"key": PREFIX, "labels": labels})
    for _ in range(shape.batches):
        batch = caller.ok("POST", "/v1/batches", body)["id"]
    for _ in range(shape.appends):
        caller.ok("POST", "/v1/events", attacks.large_events())
    caller.close()
    return Attacker(port, ATTACKER, REQUESTS, batch, labels)


@contextlib.contextmanager
def _service(url: str, root: Path, **environment: str) -> Iterator[ServiceProcess]:
    """A service with the code in this folder, and tokens. Its log is discarded."""
    command = [sys.executable, "-m", "api", "migrate", "--database-url", url]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    environment = {
        "LASTBIT_TOKENS": _lines(),
        "LASTBIT_LOG_LEVEL": "info",
        "PYTHONPATH": str(ROOT / "bench" / "hostile"),
        **environment,
    }
    service = ServiceProcess(url, root=root, module="slow_names", environment=environment, log=Path(os.devnull))
    try:
        yield service.start()
    finally:
        service.remove()


class Result(NamedTuple):
    alone: Seen
    attacked: Seen
    memory: float
    attacker: Attacker

    def row(self, name: str) -> list[str]:
        p50, p99, alone = self.attacked.p(0.5), self.attacked.p(0.99), self.alone.p(0.99)
        return [
            name,
            f"{p50 * 1e3:,.0f}",
            f"{p99 * 1e3:,.0f}",
            f"{p99 / alone:.1f}",
            *(f"{max(times):.2f}" for times in (self.attacked.reads, self.attacked.probes)),
            f"{self.memory:.0f}",
            str(len(self.attacked.refused)),
            f"{self.attacker.sent - self.attacker.refused}/{self.attacker.sent}",
        ]


def _measured(name: str, url: str, root: Path, shape: Shape) -> Result:
    seconds = shape.long if name in _LONG else shape.short
    with _service(url, root) as service:
        attacker = _attacker(service.port, shape)
    with (
        # Another process, without the memory that the preparation took.
        _service(url, root, **_ENVIRONMENT.get(name, {})) as service,
        multiprocessing.get_context("spawn").Pool(2) as pool,
    ):
        assert service.process is not None
        attacker.port = service.port
        alone = pool.apply(_stand_by, (service.port, shape.calm))
        attack = pool.apply_async(attacks.run, (name, attacker, seconds))
        attacked = pool.apply(_stand_by, (service.port, seconds))
        return Result(alone, attacked, measure.memory(service.process.pid, "VmHWM"), attack.get())


def _size(url: str) -> int:
    """Bytes of the database."""
    with Database(url) as database, database.engine.connect() as connection:
        if database.is_embedded:
            pages, free, size = (
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("page_count", "freelist_count", "page_size")
            )
            return int((pages - free) * size)
        return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())


def _costs(url: str, root: Path, shape: Shape) -> dict[str, str]:
    """KiB by which a request of `storage` lets the database grow, and the service's CPU ms for a stranger's request."""
    with _service(url, root) as service:
        assert service.process is not None
        attacker = replace(_attacker(service.port, replace(shape, batches=1, appends=0)), token=UNLIMITED)
        costs = {}
        for name, write in (("an open", attacks.open_with_labels), ("a PATCH", attacks.patch_one_label)):
            before = _size(url)
            attacks.repeat(write, attacker, GROWING)
            costs[f"KiB stored by {name}"] = f"{(_size(url) - before) / GROWING / 1024:,.0f}"
        for name, request in STRANGERS.items():
            before = measure.processor_time(service.process.pid)
            attacks.repeat(request, replace(attacker, token=None), shape.strangers)
            seconds = measure.processor_time(service.process.pid) - before
            costs[f"CPU ms of a stranger: {name}"] = f"{seconds / shape.strangers * 1e3:.1f}"
        return costs


@contextlib.contextmanager
def _sqlite() -> Iterator[Callable[[], str]]:
    with tempfile.TemporaryDirectory(prefix="lastbit-neighbours-") as folder:
        yield lambda: f"sqlite:///{tempfile.mkdtemp(dir=folder)}/lastbit.db"


@contextlib.contextmanager
def _postgresql() -> Iterator[Callable[[], str]]:
    with measure.postgresql() as server:
        yield server.new_database


DATABASES: Final = {"SQLite": _sqlite, "PostgreSQL": _postgresql}
"""Each yields a function that returns the URL of an empty database."""


def run(
    scale: Scale,
    commit: str | None = None,
    names: Collection[str] = (),
    databases: Collection[str] = tuple(DATABASES),
) -> None:
    """Print the tables of each database; beside this code, of that commit's too. A small run makes the attacks all at
    once only, unless they are named."""
    shape = Shape.of(scale)
    names = names or (tuple(ATTACKS) if scale.rounds > 2 else ("all",))
    with contextlib.ExitStack() as stack:
        codes = {"": ROOT}
        if commit is not None:
            codes = {f" ({commit})": stack.enter_context(code_of(commit)), **codes}
        for database in databases:
            with DATABASES[database]() as new_database:
                rows = [
                    _measured(name, new_database(), root, shape).row(name + code)
                    for name in names
                    for code, root in codes.items()
                ]
                measure.show(
                    f"neighbours: the victim's acks, one worker, {database}",
                    ["beside", "p50 ms", "p99 ms", "of alone", "read s", "probe s", "MiB", "refused", "got in"],
                    rows,
                    "goals: p99 at most 3 times that of acks alone, or 100 ms; a probe in 1 s; 512 MiB; none refused",
                )
                costs = [_costs(new_database(), root, shape) for root in codes.values()]
                measure.show(
                    f"neighbours: what a request costs, {database}",
                    ["", *(code.strip(" ()") or "now" for code in codes)],
                    [[name, *(cost[name] for cost in costs)] for name in costs[0]],
                    "goal: at most 1 ms for a request of a stranger",
                )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.neighbours", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--quick", action="store_true", help="a small run, to check that everything works")
    parser.add_argument("--against", metavar="COMMIT", help="run each attack on this commit's service as well")
    parser.add_argument("--database", choices=DATABASES, action="append", help="instead of both")
    parser.add_argument("attack", nargs="*", choices=[[], *ATTACKS], default=[], help=", ".join(ATTACKS))
    options = parser.parse_args()
    scale = Scale.quick() if options.quick else Scale.full()
    run(scale, options.against, options.attack, options.database or tuple(DATABASES))


if __name__ == "__main__":
    main()
