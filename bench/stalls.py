"""The longest time that an ack waits for other work. A bystander in a separate process acks the items of its batch one
by one the whole time, while other clients cause long work on the same service and database: millions of items fail with
a reason, and are redriven; parents of nested batches are locked; sixty readers poll; a row stays locked; a batch with
broken counts is redelivered repeatedly; a chain of nested batches ends; readers look for rare events in a long feed;
another session holds the feed's head again and again; acks and extends want a journaled and a plain batch; a caller's
transaction opens a batch, completes another one, and sleeps. The last three, which depend on the server's locks, run on
PostgreSQL as well.

The figure is the bystander's slowest ack, from sending it to reading its answer. It must stay below a second on an
otherwise idle machine, and below 0.3 s beside the journaled and the plain batch. Beside the transaction that sleeps, a
second table has the calls of four clients that open and complete batches, and use one that the transaction has changed.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bench import measure
from bench.measure import Scale
from bench.overload import Memory
from core.storage import schema, tables
from core.storage.database import Database
from lastbit.embedded import Lastbit
from lastbit.ids import DEFAULT_GROUP_SIZE, item_id
from tests.chaos.embedded import engine_of
from tests.support.postgresql import PostgreSQL
from tests.support.servers import MariaDB, ServiceProcess

REASON = "the parser gave up: unexpected end of the document"


@dataclass(frozen=True)
class Shape:
    """The size of a case: items that fail, seconds of cases without an end of their own, nested batches in the
    chain, events in the feed."""

    items: int
    seconds: float
    chain: int
    events: int

    @classmethod
    def of(cls, scale: Scale) -> Shape:
        return cls(scale.items, 10, 300, 10**6) if scale.rounds > 2 else cls(scale.items, 1, 10, 10**5)


class Caller:
    """A keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        read = answer.read()
        return answer.status, json.loads(read) if read else None

    def ok(self, method: str, path: str, body: Any = None) -> Any:
        """The body of a successful answer. While the service is overloaded, the call is repeated."""
        while True:
            status, response = self.call(method, path, body)
            if status < 300:
                return response
            if status != 503:
                raise RuntimeError(f"{method} {path} was answered {status}: {response}")
            time.sleep(1)  # as Retry-After asks

    def open(self, items: int, **fields: Any) -> int:
        batch: int = self.ok("POST", "/v1/batches", {"items": items, "sealed": True, **fields})["id"]
        return batch


@dataclass
class Waits:
    """The seconds of each of the bystander's acks, and the number of refused ones."""

    took: list[float]
    refused: int


def _stand_by(port: int, orders: Connection) -> None:
    """The bystander: it acks between two orders, and answers the second one with its waits."""
    caller = Caller(port)
    batch, number = 0, 0
    while orders.recv():
        if not batch:
            batch = caller.open(10**9)
        waits = Waits([], 0)
        orders.send(None)
        while not orders.poll():
            start = time.perf_counter()
            status, _ = caller.call("POST", "/v1/acks", {"items": [item_id(batch, number)]})
            waits.took.append(time.perf_counter() - start)
            waits.refused += status == 503
            number += status == 200
            if status not in (200, 503):
                raise RuntimeError(f"the bystander's ack got {status}")
        orders.recv()
        orders.send(waits)


class Bystander:
    def __init__(self, port: int) -> None:
        self._orders, other_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_stand_by, args=(port, other_end), daemon=True)
        self._process.start()

    def during(self, work: Callable[[], object]) -> Waits:
        self._orders.send(True)
        self._orders.recv()
        try:
            work()
        finally:
            self._orders.send(True)
        waits: Waits = self._orders.recv()
        return waits

    def stop(self) -> None:
        self._orders.send(False)
        self._process.join()


def together(count: int, work: Callable[[int], object]) -> None:
    """Run `work` in this many threads. Raises the error of one of them."""
    failures: list[Exception] = []

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:  # noqa: BLE001  # raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@contextlib.contextmanager
def locked(database: Database, *statements: str) -> Iterator[None]:
    """Lock these rows in another session."""
    with database.engine.connect() as session, session.begin() as transaction:
        for statement in statements:
            session.exec_driver_sql(f"{statement} FOR UPDATE")
        yield
        transaction.rollback()


class Cases:
    def __init__(self, port: int, database: Database, shape: Shape) -> None:
        self.port = port
        self.database = database
        self.shape = shape
        self.failed_by_masks = 0
        self.beside: dict[str, list[float]] = {}
        """The seconds of each call beside a transaction that sleeps, by what it was."""

    def fail_by_ids(self) -> None:
        """Calls of 10,000 ids over four connections."""
        batch, size = Caller(self.port).open(self.shape.items), 10_000
        starts = iter(range(0, self.shape.items, size))
        lock = threading.Lock()

        def work(_: int) -> None:
            caller = Caller(self.port)
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                ids = [item_id(batch, number) for number in range(start, min(start + size, self.shape.items))]
                caller.ok("POST", "/v1/failures", {"items": ids, "reason": REASON})

        together(4, work)
        self._check(batch, failed=self.shape.items)

    def _masks(self, batch: int) -> list[dict[str, Any]]:
        bits = base64.b64encode(b"\xff" * (DEFAULT_GROUP_SIZE // 8)).decode()
        return [
            {"batch": batch, "group": group, "bits": bits}
            for group in range(-(-self.shape.items // DEFAULT_GROUP_SIZE))
        ]

    def fail_by_masks(self) -> None:
        """All items in one call."""
        batch = self.failed_by_masks = Caller(self.port).open(self.shape.items)
        Caller(self.port).ok("POST", "/v1/failures", {"groups": self._masks(batch), "reason": REASON})
        self._check(batch, failed=self.shape.items)

    def redrive(self) -> None:
        """Ack the same items in one call."""
        Caller(self.port).ok("POST", "/v1/acks", {"groups": self._masks(self.failed_by_masks)})
        self._check(self.failed_by_masks, failed=0)

    def _check(self, batch: int, *, failed: int) -> None:
        status = Caller(self.port).ok("GET", f"/v1/batches/{batch}")
        if (status["failed"], status["state"]) != (failed, "complete"):
            raise RuntimeError(f"{failed} items must have failed, but the batch is {status}")

    def locked_parents(self) -> None:
        """Twelve children end, each with its own parent; another session holds the group of half of the parents and the
        row of the other half."""
        caller = Caller(self.port)
        parents = [caller.open(2) for _ in range(12)]
        for parent in parents:
            caller.ok("POST", "/v1/acks", {"items": [item_id(parent, 1)]})
        children = [caller.open(1, parent=item_id(parent, 0)) for parent in parents]
        by_group, by_row = (",".join(map(str, part)) for part in (parents[:6], parents[6:]))
        with locked(
            self.database,
            f"SELECT * FROM item_groups WHERE batch_id IN ({by_group})",
            f"SELECT * FROM batches WHERE id IN ({by_row})",
        ):
            together(12, lambda n: Caller(self.port).ok("POST", "/v1/acks", {"items": [item_id(children[n], 0)]}))
            time.sleep(self.shape.seconds / 2)  # part of the measurement: acks next to the locked rows

    def readers(self) -> None:
        """Sixty connections poll the status of batches, their pending ranges and the list."""
        caller = Caller(self.port)
        batches = [caller.open(100_000) for _ in range(20)]
        for batch in batches:
            caller.ok("POST", "/v1/acks", {"items": [item_id(batch, number) for number in range(0, 100_000, 20)]})
        until = time.monotonic() + self.shape.seconds

        def poll(number: int) -> None:
            reader = Caller(self.port)
            batch = batches[number % len(batches)]
            paths = (f"/v1/batches/{batch}", f"/v1/batches/{batch}/pending", "/v1/batches?limit=20")
            while time.monotonic() < until:
                reader.ok("GET", paths[number % len(paths)])

        together(60, poll)

    def stuck_row(self) -> None:
        """Four clients ack a batch whose row another session holds."""
        batch = Caller(self.port).open(1000)
        until = time.monotonic() + 2 * self.shape.seconds

        def insist(number: int) -> None:
            caller = Caller(self.port)
            while time.monotonic() < until:
                caller.call("POST", "/v1/acks", {"items": [item_id(batch, number)]})

        with locked(self.database, f"SELECT * FROM batches WHERE id = {batch}"):
            together(4, insist)

    def inconsistent(self) -> None:
        """A client sends the items of a batch with broken counts repeatedly."""
        batch = Caller(self.port).open(1000)
        with self.database.engine.begin() as tx:
            tx.execute(sa.update(tables.batches).where(tables.batches.c.id == batch).values(acked=1000))
        until = time.monotonic() + self.shape.seconds

        def insist(number: int) -> None:
            caller = Caller(self.port)
            while time.monotonic() < until:
                status, _ = caller.call("POST", "/v1/acks", {"items": [item_id(batch, number)]})
                if status != 500:
                    raise RuntimeError(f"an ack of an inconsistent batch got {status}")

        together(4, insist)

    def chain(self) -> None:
        """End a batch that is the only item of another one, and so on."""
        caller = Caller(self.port)
        batch = root = caller.open(1)
        for _ in range(self.shape.chain):
            batch = caller.open(1, parent=item_id(batch, 0))
        caller.ok("POST", "/v1/acks", {"items": [item_id(batch, 0)]})
        if self.shape.chain <= 300 and not caller.ok("GET", f"/v1/batches/{root}?wait=60")["succeeded"]:
            raise RuntimeError("the end of the chain did not reach its root")

    def fill_feed(self) -> None:
        """Events of a type that nobody reads. The feed must be empty."""
        with self.database.engine.begin() as tx:
            tx.exec_driver_sql(
                "INSERT INTO feed (position, event_id, type, event_key, data, appended_at) "
                f"SELECT seq, CONCAT('e', seq), 'other', CONCAT('order-', seq), JSON_OBJECT('order', seq, 'text', "
                f"REPEAT('x', 100)), UTC_TIMESTAMP(6) FROM seq_1_to_{self.shape.events}"
            )
            tx.execute(sa.update(tables.feed_head).values(position=self.shape.events))

    def filtered_pages(self) -> None:
        """Four connections read the feed from its beginning, filtered by a type that never occurs."""
        until = time.monotonic() + self.shape.seconds

        def look(_: int) -> None:
            reader, after = Caller(self.port), 0
            while time.monotonic() < until:
                page = reader.ok("GET", f"/v1/events?after={after}&type=never")
                after = page["next"] if page["next"] < page["last"] else 0

        together(4, look)

    def held_head(self) -> None:
        """Sixty-four clients complete batches, while another session holds the feed's head 0.6 of every 0.75 s."""
        until = time.monotonic() + self.shape.seconds

        def hold() -> None:
            while time.monotonic() < until:
                with locked(self.database, "SELECT * FROM feed_head"):
                    time.sleep(0.6)  # part of the measurement, as is the pause
                time.sleep(0.15)

        def complete(_: int) -> None:
            caller = Caller(self.port)
            while time.monotonic() < until:
                caller.ok("POST", "/v1/acks", {"items": [item_id(caller.open(1), 0)]})

        together(65, lambda number: hold() if number == 64 else complete(number))

    def two_kinds_of_batches(self) -> None:
        """Sixteen clients ack items of a plain and of a journaled batch in each call; as many extend one of the two."""
        caller = Caller(self.port)
        plain, journaled = (caller.open(10**6, sealed=False) for _ in range(2))
        for _ in range(2):
            items = [item_id(journaled, number) for number in random.sample(range(10**6), 100)]
            caller.ok("POST", "/v1/acks", {"items": items})
        with self.database.engine.connect() as session:
            if not session.scalar(sa.select(tables.batches.c.journal_next).where(tables.batches.c.id == journaled)):
                raise RuntimeError("the batch is not journaled")
        until = time.monotonic() + self.shape.seconds

        def work(number: int) -> None:
            caller = Caller(self.port)
            while time.monotonic() < until:
                if number < 16:
                    items = [item_id(batch, random.randrange(10**6)) for batch in (plain, journaled)]
                    caller.ok("POST", "/v1/acks", {"items": items})
                else:
                    caller.ok("POST", f"/v1/batches/{(plain, journaled)[number % 2]}/items", {"count": 1})

        together(32, work)

    def sleeping_caller(self) -> None:
        """A transaction of a caller opens a batch, completes another one, acks an item of a third, and sleeps. Four
        clients open and complete batches, and ack the third one's items in its other group, and extend it."""
        caller = Caller(self.port)
        completing, shared = caller.open(1), caller.open(2 * DEFAULT_GROUP_SIZE, sealed=False)
        engine = engine_of(self.database.url.render_as_string(hide_password=False))
        numbers = iter(range(DEFAULT_GROUP_SIZE, 2 * DEFAULT_GROUP_SIZE))

        def work(_: int) -> None:
            client = Caller(self.port)
            while time.monotonic() < until:
                batch = self._timed("an open", lambda: client.open(1))
                ack = {"items": [item_id(batch, 0)]}
                completion = self._timed("an ack that completes", lambda: client.ok("POST", "/v1/acks", ack))  # noqa: B023
                if not completion["completed"]:
                    raise RuntimeError(f"batch {batch} is not complete: {completion}")
                ack = {"items": [item_id(shared, next(numbers))]}
                self._timed("an ack in its batch", lambda: client.ok("POST", "/v1/acks", ack))  # noqa: B023
                self._timed(
                    "an extend of its batch", lambda: client.ok("POST", f"/v1/batches/{shared}/items", {"count": 1})
                )

        with Lastbit(engine, connections=2) as lastbit:
            with engine.begin() as tx:
                opened = lastbit.open(tx, items=1, sealed=True)
                lastbit.ack(tx, [item_id(completing, 0), item_id(shared, 0)])
                until = time.monotonic() + self.shape.seconds
                together(4, work)
            for batch, wait, state in ((completing, 10, "complete"), (opened.id, 0, "sealed")):
                if caller.ok("GET", f"/v1/batches/{batch}?wait={wait}")["state"] != state:
                    raise RuntimeError(f"batch {batch} is not {state} after the transaction")
        engine.dispose()

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        answer = call()
        self.beside.setdefault(name, []).append(time.perf_counter() - start)
        return answer


@contextlib.contextmanager
def quiet_service(url: str) -> Iterator[ServiceProcess]:
    """A service whose log is discarded: it has a line for each call that gets a 500."""
    environment = {"LASTBIT_LOG_LEVEL": "warning"}
    service = ServiceProcess(url, environment=environment, log=Path(os.devnull)).start()
    try:
        yield service
    finally:
        service.stop(signal.SIGKILL)


def run(scale: Scale) -> None:
    shape = Shape.of(scale)
    with measure.mariadb() as mariadb:
        _run("MariaDB", mariadb, shape)
    with measure.postgresql() as postgresql:
        _run("PostgreSQL", postgresql, shape, locks_alone=True)


def _run(name: str, server: MariaDB | PostgreSQL, shape: Shape, *, locks_alone: bool = False) -> None:
    """Run the cases, or those `locks_alone` that depend on the server's locks, and print their table."""
    with Database(server.new_database()) as database, contextlib.ExitStack() as stack:
        schema.migrate(database)
        service = stack.enter_context(quiet_service(database.url.render_as_string(hide_password=False)))
        assert service.process is not None
        cases = Cases(service.port, database, shape)
        if not locks_alone:
            cases.fill_feed()
        count = f"{shape.items:,} items"
        alone = ("nothing else", lambda: time.sleep(shape.seconds))  # part of the measurement: acks alone
        of_locks: list[tuple[str, Callable[[], object]]] = [
            ("the feed's head is held", cases.held_head),
            ("acks and extends on a journaled and a plain batch", cases.two_kinds_of_batches),
            ("a caller's transaction sleeps", cases.sleeping_caller),
        ]
        works: list[tuple[str, Callable[[], object]]] = [
            (f"{count} fail with a reason, 10,000 ids a call", cases.fail_by_ids),
            (f"{count} fail with a reason, one call of masks", cases.fail_by_masks),
            (f"these {count} are redriven by one call", cases.redrive),
            ("twelve parents are locked", cases.locked_parents),
            ("sixty readers poll", cases.readers),
            ("a row is locked", cases.stuck_row),
            ("an inconsistent batch is redelivered", cases.inconsistent),
            (f"a chain of {shape.chain} nested batches ends", cases.chain),
            (f"four readers filter {shape.events:,} events", cases.filtered_pages),
        ]
        bystander = Bystander(service.port)
        rows = []
        for case, work in [alone, *([] if locks_alone else works), *of_locks]:
            memory = Memory(service.process.pid)
            memory.start()
            start = time.monotonic()
            waits = bystander.during(work)
            seconds = time.monotonic() - start
            resident = memory.stop()
            latencies = sorted(waits.took)
            if not latencies:
                raise RuntimeError(f"{case}: the bystander got no answer")
            rows.append(
                [
                    case,
                    f"{seconds:.1f}",
                    f"{len(latencies):,}" + (f" ({waits.refused} refused)" if waits.refused else ""),
                    *_shown(latencies),
                    f"{max(resident, default=0):.0f}",
                ]
            )
        bystander.stop()
    measure.show(
        f"stalls: single acks of a bystander, one worker, {name}",
        ["while", "seconds", "acks", "p50 ms", "p99 ms", "slowest ms", "RSS MB"],
        rows,
    )
    measure.show(
        f"stalls: calls of four clients beside a transaction that sleeps, {name}",
        ["call", "calls", "p50 ms", "p99 ms", "slowest ms"],
        [[call, f"{len(took):,}", *_shown(sorted(took))] for call, took in cases.beside.items()],
    )


def _shown(latencies: Sequence[float]) -> list[str]:
    """Median, 99th percentile and maximum, in ms."""
    places = (len(latencies) // 2, len(latencies) * 99 // 100, -1)
    return [f"{latencies[place] * 1e3:.{digits}f}" for place, digits in zip(places, (1, 1, 0), strict=True)]


if __name__ == "__main__":
    measure.alone(run)
