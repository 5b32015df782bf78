"""`lastbit.embedded`: what a client without a service does otherwise. The tests of the verbs run on both."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from api.server.middleware import USUAL
from core.storage import forkable, schema
from core.storage.database import Database
from lastbit import ClientClosed, DatabaseUnreachable, InvalidArgument, Retry, SchemaMismatch, ServiceUnreachable
from lastbit._protocol import Request
from lastbit.embedded import Lastbit
from tests.conftest import Server
from tests.mutants import mutant
from tests.sdk.children import in_a_child
from tests.support.servers import ROOT, running_service

ONCE = Retry(attempts=1)


@pytest.fixture
def lastbit(database_url: str) -> Iterator[Lastbit]:
    """On an empty database of each kind, with the schema."""
    with Lastbit(database_url) as lastbit:
        lastbit.migrate()
        yield lastbit


def in_a_program(source: str, *arguments: str) -> str:
    """The output of a program of its own."""
    return subprocess.run(
        [sys.executable, "-c", f"from tests import mutants; mutants.from_environment()\n{source}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


def test_a_batch_lives_in_process(lastbit: Lastbit) -> None:
    """On each database; nested batches are paid without any job."""
    with lastbit.client() as client:
        outer = client.open(key="outer", items=1, sealed=True)
        inner = client.open(key="inner", items=2, parent=outer.ids[0])
        inner.extend(1)
        inner.seal()
        assert client.ack(inner.ids[:1]).applied == 1
        assert client.fail(inner.ids[1], reason="late").applied == 1
        (completed,) = client.skip(f"{inner.id}:0:2").completed
        assert completed.newly
        assert outer.refresh().failed == 1
        assert client.events(batch=outer.id).events[-1].type == "batch.completed"


def test_a_program_ends_without_close(sqlite_url: str) -> None:
    """With threads of the private event loop that wait for work, and a follower that has begun."""
    source = """
import sys
from lastbit.embedded import Lastbit
lastbit = Lastbit(sys.argv[1])
lastbit.migrate()
client = lastbit.client()
client.open(items=1)
print(len(list(client.batches())), next(client.follow()).type)
"""
    assert in_a_program(source, sqlite_url) == "1 batch.opened\n"


def test_importing_the_sdk_loads_nothing_of_the_service() -> None:
    source = (
        "import sys, lastbit, lastbit.client, lastbit.embedded; print({'core', 'api', 'sqlalchemy'} & {*sys.modules})"
    )
    assert in_a_program(source) == "set()\n"


def test_a_missing_service_is_named() -> None:
    source = """
import sys
sys.modules["lastbit_server"] = None
from lastbit.embedded import Lastbit
try:
    Lastbit("sqlite:///app.db")
except ImportError as error:
    print(error)
"""
    assert "pip install 'lastbit[embedded]'" in in_a_program(source)


@mutant(
    "each-request-is-a-line-of-the-programs-output",
    "api.in_process:_Loop._respond",
    "self._routes if verb_of(path, request.method) is not None else self._routes.fastapi",
    "self._routes",
)
def test_requests_are_written_to_no_log(
    lastbit: Lastbit, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A program's standard output is its own."""
    caplog.set_level(logging.DEBUG, "lastbit.embedded")
    with lastbit.client() as client:
        batch = client.open(items=1)
        list(client.batches())
        client.ack(batch.ids)
    assert capfd.readouterr() == ("", "")
    lines = [record.getMessage() for record in caplog.records if record.name == "lastbit.embedded"]
    assert [line for line in lines if "/v1/" in line] == []


def test_what_goes_wrong_is_logged_with_logging() -> None:
    """The lines of the program's own loggers stay where they were, and its configuration of structlog is respected."""
    source = """
import logging, sys, structlog
from lastbit.embedded import Lastbit
logging.basicConfig(format="%(name)s %(levelname)s", level="WARNING", stream=sys.stdout)
Lastbit("sqlite:///app.db")
structlog.get_logger("core.commits").warning("ours")
structlog.get_logger("app").warning("theirs")
structlog.configure([structlog.processors.KeyValueRenderer()], logger_factory=structlog.PrintLoggerFactory())
Lastbit("sqlite:///app.db")
structlog.get_logger("core.commits").warning("configured")
"""
    our_line, their_line, last_line = in_a_program(source).splitlines()
    assert our_line == "lastbit.embedded WARNING"
    assert their_line.endswith("theirs")
    assert last_line == "event='configured'"


@mutant(
    "a-program-is-locked-out-by-the-settings-of-a-service",
    "api.in_process:InProcess.__init__",
    "Settings.model_construct(database_url=url, shed_after=0.0)",
    "Settings(database_url=url, shed_after=0.0)",
)
def test_settings_of_a_service_do_not_apply(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as its tokens, in the environment of a container with both."""
    monkeypatch.setenv("LASTBIT_TOKENS", "none")
    monkeypatch.setenv("LASTBIT_DATABASE_URL", "mysql://app@db/app")
    monkeypatch.setenv("LASTBIT_TOKEN", "lb_unknown")
    with Lastbit(sqlite_url) as lastbit, lastbit.client() as client:
        lastbit.migrate()
        batch = client.open(items=1)
        assert [entry.id for entry in client.batches()] == [batch.id]


# Construction


@pytest.mark.parametrize(
    ("database", "text"),
    [
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:///file:x?mode=memory&uri=true", "in memory"),
        (sa.create_engine("sqlite://"), "in memory"),
        (sa.create_engine("postgresql+psycopg://", creator=lambda: None), "creator"),
        ("oracle://user@host/app", "oracle is not supported"),
        ("mysql://user:secret@host", "names no database"),
        ("app.db", "can't be read"),
        (None, "NoneType is no database"),
        (17, "int is no database"),
    ],
)
def test_what_is_no_database_is_refused(database: object, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as refusal:
        Lastbit(database)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("connections", [0, -1, 1.5, True, "10"])
def test_connections_are_a_number(connections: Any) -> None:
    with pytest.raises(InvalidArgument, match="connections is a whole number"):
        Lastbit("sqlite:///app.db", connections=connections)


def test_an_engine_gives_its_url(sqlite_url: str) -> None:
    """The driver is Lastbit's own, also for a database that the program uses with one for event loops."""
    path = sa.make_url(sqlite_url).database
    databases = [sa.create_engine(sqlite_url), sa.make_url(sqlite_url), f"sqlite+aiosqlite:///{path}"]
    for number, database in enumerate(databases, 1):
        with Lastbit(database) as lastbit:
            lastbit.migrate()
            assert lastbit.client().open().id == number


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("postgresql+asyncpg://app:secret@db/app?ssl=require", "embedded:postgresql://app@db/app"),
        ("postgresql+psycopg2://app:p%40ss@db:5433/app", "embedded:postgresql://app@db:5433/app"),
        ("mysql+aiomysql://app:secret@db/app", "embedded:mysql://app@db/app"),
    ],
)
def test_the_url_has_no_password(given: str, url: str) -> None:
    with Lastbit(given) as lastbit, lastbit.client() as client:
        assert client.url == lastbit.url == url
        assert "secret" not in f"{lastbit!r} {client!r} {client.driver.service!r}"
        assert client.driver.service.address == url


def test_neither_it_nor_its_clients_are_pickled(lastbit: Lastbit) -> None:
    for owner in (lastbit, lastbit.client(), lastbit.async_client()):
        with pytest.raises(TypeError, match="can't be sent to another process"):
            pickle.dumps(owner)


# Schemas


@mutant(
    "a-client-without-a-service-works-on-any-schema",
    "api.in_process:InProcess.check_schema",
    "self.service.check_ready()",
    "pass",
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_schema_that_does_not_fit_is_refused(database_url: str, is_async: bool) -> None:
    """None, an older one, and one of a newer release that doesn't support this one; after that, calls succeed."""
    with Lastbit(database_url) as lastbit, Database(database_url) as database:

        def call() -> None:
            if is_async:
                asyncio.run(lastbit.async_client(retry=ONCE).open(items=1))
            else:
                lastbit.client(retry=ONCE).open(items=1)

        with pytest.raises(SchemaMismatch, match=r"has no schema.*migrate"):
            call()
        schema.migrate(database, "0026")
        with pytest.raises(SchemaMismatch, match=r"revision 0026, but this release needs.*migrate"):
            call()
        lastbit.migrate()
        database.write(lambda tx: tx.exec_driver_sql("UPDATE schema_support SET oldest = '9999'"))
        with pytest.raises(SchemaMismatch, match="use a newer release"):
            call()
        database.write(lambda tx: tx.exec_driver_sql(f"UPDATE schema_support SET oldest = '{schema.newest()}'"))
        call()


def test_a_newer_schema_that_supports_this_release_is_used(lastbit: Lastbit, database_url: str) -> None:
    """And `migrate` leaves it as it is."""
    with Database(database_url) as database:
        database.write(lambda tx: tx.exec_driver_sql("UPDATE lastbit_version SET version_num = '9999'"))
        lastbit.migrate()
        assert lastbit.client().open(items=1).ids
        assert database.read(schema.current) == "9999"


# Closing


def test_a_closed_one_refuses_calls(lastbit: Lastbit) -> None:
    client, awaited = lastbit.client(), lastbit.async_client()
    batch = client.open(items=1)
    list(client.batches())
    lastbit.close()
    lastbit.close()
    for call in (client.open, batch.refresh, lambda: list(client.batches()), lastbit.migrate):
        with pytest.raises(ClientClosed):
            call()
    with pytest.raises(ClientClosed):
        asyncio.run(awaited.open())


def test_a_closed_client_leaves_others_open(lastbit: Lastbit) -> None:
    with lastbit.client() as client:
        client.open()
    assert lastbit.client().open().id


@mutant(
    "close-waits-for-no-call",
    "api.in_process:InProcess.close",
    "self._calls.wait(GRACE)",
    "pass",
)
def test_close_waits_for_the_calls_in_progress(lastbit: Lastbit, database_url: str) -> None:
    """Each ack has an answer or is refused, and all that were answered are stored. A follower ends."""
    client = lastbit.client(retry=ONCE)
    batch = client.open(items=2000)
    started = threading.Event()

    def ack_all(items: list[str]) -> list[str]:
        answered = []
        try:
            for item in items:
                client.ack(item)
                answered.append(item)
                started.set()
        except ClientClosed:
            pass
        return answered

    def follow() -> str:
        try:
            for event in client.follow(after=client.events().last):
                raise AssertionError(event)
        except ClientClosed as error:
            return str(error)
        raise AssertionError

    ids = list(batch.ids)
    with ThreadPoolExecutor(5) as pool:
        follower = pool.submit(follow)
        ackers = [pool.submit(ack_all, ids[start::4]) for start in range(4)]
        assert started.wait(30)
        lastbit.close()
        answered = [item for acker in ackers for item in acker.result()]
        assert "closed" in follower.result(30)
    with Lastbit(database_url) as again:
        assert again.client().batch(batch.id).refresh().acked == len(answered)


# Forks


@mutant(
    "a-forked-child-keeps-the-connections-of-its-parent",
    "lastbit.embedded:Lastbit._leave_to_parent",
    "self._running = None",
    "pass",
)
def test_a_child_makes_its_own_connections(lastbit: Lastbit) -> None:
    """The parent has used connections, the event loop and its threads; both go on, and the child may fork too."""
    client = lastbit.client()
    batch = client.open(items=6)
    ids = list(batch.ids)
    client.ack(ids[0])
    list(client.batches())

    def use(start: int) -> None:
        assert client.ack(ids[start]).applied == 1
        assert [entry.id for entry in client.batches()] == [batch.id]
        asyncio.run(lastbit.async_client().ack(ids[start + 1]))

    def use_twice() -> None:
        use(1)
        assert in_a_child(lambda: use(3)) == "nothing"
        lastbit.close()

    assert in_a_child(use_twice) == "nothing"
    assert client.ack(ids[5]).completed == ()
    assert batch.refresh().acked == 6
    assert [entry.id for entry in client.batches()] == [batch.id]


@mutant(
    "a-forked-child-keeps-the-lock-of-its-parent",
    "lastbit.embedded:Lastbit._leave_to_parent",
    "self._lock = threading.Lock()",
    "pass",
)
def test_a_lock_that_is_held_during_a_fork_does_not_stop_the_child(sqlite_url: str) -> None:
    with Lastbit(sqlite_url) as lastbit:
        lastbit.migrate()
        with lastbit._lock:
            assert in_a_child(lambda: lastbit.client().open()) == "nothing"


@mutant(
    "a-fork-waits-for-no-transaction",
    "core.storage.forkable:ForkableDatabase.pause",
    "self._changed.wait_for(lambda: not self._users, PATIENCE)",
    "True",
)
def test_children_and_their_parent_lose_no_ack(lastbit: Lastbit) -> None:
    """While threads of the parent have a transaction at nearly any moment, children are forked. SQLite's locks, those
    of the drivers and our own are free in each."""
    client = lastbit.client()
    children = 12
    batch = client.open(items=20 * (children + 3), sealed=True)
    ids = list(batch.ids)
    lanes = [ids[start :: children + 3] for start in range(children + 3)]
    has_forked = threading.Event()

    def ack_lane(lane: list[str]) -> None:
        for item in lane:
            assert client.ack(item).applied == 1

    def ack_on(lane: list[str]) -> None:
        ack_lane(lane)
        while not has_forked.is_set():
            assert client.ack(lane).repeated == len(lane)

    with ThreadPoolExecutor(3) as pool:
        ackers = [pool.submit(ack_on, lane) for lane in lanes[:3]]
        try:
            results = [in_a_child(partial(ack_lane, lane)) for lane in lanes[3:]]
        finally:
            has_forked.set()
        assert results == ["nothing"] * children
        for acker in ackers:
            acker.result()
    state = batch.refresh()
    assert (state.acked, state.complete) == (len(ids), True)
    assert batch.verify().ok


def test_a_child_of_a_transaction_that_does_not_end_is_refused(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent goes on."""
    monkeypatch.setattr(forkable, "PATIENCE", 0.1)
    has_begun, may_end = threading.Event(), threading.Event()

    def hold(tx: Any) -> None:
        has_begun.set()
        may_end.wait(30)

    with Lastbit(sqlite_url) as lastbit, ThreadPoolExecutor(1) as pool:
        lastbit.migrate()
        client = lastbit.client()
        holder = pool.submit(lastbit._running.database.write, hold)
        assert has_begun.wait(30)
        assert in_a_child(client.open) == "UsedAfterFork"
        may_end.set()
        holder.result()
        assert client.open().id == 1


# Answers

ACK = "/v1/acks"
REQUESTS: list[tuple[str, str, str | None, dict[str, str]]] = [
    ("POST", ACK, '{"items": ["1:0:0", "1:0:9", "77:0:0"]}', {}),
    ("POST", ACK, '{"items": ["1:0:0"], "groups": [{"batch": 1, "group": 0, "bits": "AQ=="}]}', {}),
    ("POST", ACK, '{"groups": [{"batch": 1, "group": 0, "bits": "' + "A" * 20_000 + '"}]}', {}),
    ("POST", ACK, '{"items": ["1:0"]}', {}),
    ("POST", ACK, '{"items": [7]}', {}),
    ("POST", ACK, '{"items": ["1:0:0"], "reason": "none"}', {}),
    ("POST", ACK, "{", {}),
    ("POST", ACK, None, {}),
    ("POST", ACK, '{"items": []}', {"idempotency-key": "with blanks"}),
    ("POST", ACK, json.dumps({"items": ["1:0:0"] * 10_001}), {}),
    ("POST", ACK + "?dry=1", '{"items": []}', {}),
    ("GET", ACK, None, {}),
    ("POST", "/v1/failures", '{"items": ["1:0:0"], "reason": "late"}', {}),
    ("POST", "/v1/failures", json.dumps({"items": ["1:0:0"], "reason": "x" * 5000}), {}),
    ("POST", "/v1/skips", '{"items": ["1:0:0"]}', {}),
    ("POST", "/v1/batches", '{"key": "opened", "items": 2}', {"idempotency-key": "opened"}),
    ("POST", "/v1/batches", '{"key": "another"}', {"idempotency-key": "opened"}),
    ("POST", "/v1/batches", '{"items": -1, "colour": "red"}', {}),
    ("POST", "/v1/batches", '{"parent": "1:0:1"}', {}),
    ("POST", "/v1/batches", '{"group_size": 65}', {"idempotency-key": "x" * 256}),
    ("POST", "/v1/batches/1/items", '{"count": 0}', {}),
    ("POST", "/v1/batches/77/items", '{"count": 1}', {}),
    ("POST", "/v1/batches/99999999999999999/seal", None, {}),
    ("POST", "/v1/batches/1/seal", None, {}),
    ("POST", "/v1/batches/1/items", '{"count": 1}', {}),
    ("GET", "/v1/batches/1", None, {}),
    ("GET", "/v1/batches/01", None, {}),
    ("GET", "/v1/batches/77", None, {}),
    ("GET", "/v1/batches/1/watermark", None, {}),
    ("GET", "/v1/batches?key=opened&limit=5", None, {}),
    ("GET", "/v1/batches?key=o%20p&colour=red", None, {}),
    ("GET", "/v1/batches?cursor=none", None, {}),
    ("GET", "/v1/events?after=0&limit=3", None, {}),
    ("GET", "/v1/events?after=1000000", None, {}),
    ("POST", "/v1/events", '{"events": [{"id": "e1", "type": "card.charged"}]}', {}),
    ("POST", "/v1/events", '{"events": [{"id": "e2", "type": "batch.opened"}]}', {}),
    ("GET", "/v1/tallies/screws/a%2Fb", None, {}),
    ("DELETE", "/v1/batches/77", None, {}),
    ("PATCH", "/v1/batches/1", '{"labels": {"Team": "search"}, "deadline": "now"}', {}),
    ("GET", "/v1/nothing", None, {}),
    ("PUT", "/v1/batches", "{}", {}),
]
OF_A_SERVER = {"connection", "content-length", "date", "x-request-id"}


@pytest.mark.parametrize("is_async", [False, True])
def test_answers_are_those_of_the_service(sqlite_url: str, is_async: bool) -> None:
    """Status, headers and each byte of the body, whichever way makes the answer. Both see the same database, on which
    each request has been carried out before."""
    with running_service(sqlite_url) as service, Lastbit(sqlite_url) as lastbit:
        client = lastbit.client()
        client.open(items=3, idempotency_key="one")
        driver, async_driver = client.driver, lastbit.async_client().driver
        for method, target, body, headers in REQUESTS:
            all_headers = {"content-type": "application/json", **headers} if body is not None else headers
            for _ in range(2):
                response = httpx.request(method, service.url + target, content=body, headers=all_headers)
            request = Request(
                method, lastbit.url + target, (), all_headers, None if body is None else body.encode(), 30.0
            )
            answer: Any = asyncio.run(async_driver._send(request)) if is_async else driver._send(request)
            assert (answer.status, answer.body) == (response.status_code, response.content), (method, target)
            expected = {name: value for name, value in response.headers.items() if name not in OF_A_SERVER}
            usual = {name.decode(): value.decode() for name, value in USUAL.items()}
            answer_headers = {name: value for name, value in answer.headers.items() if name not in OF_A_SERVER}
            assert usual | answer_headers == expected, (method, target)


# Threads and tasks


@pytest.mark.parametrize("connections", [1, 3])
def test_more_threads_than_connections(database_url: str, connections: int) -> None:
    """Calls of all kinds wait for each other, and none fails."""
    with Lastbit(database_url, connections=connections) as lastbit:
        lastbit.migrate()
        client = lastbit.client(retry=ONCE)
        batch = client.open(items=400, sealed=True)
        ids = list(batch.ids)

        def work(start: int) -> int:
            acked = 0
            for number, item in enumerate(ids[start::8]):
                acked += client.ack(item).applied
                if number % 10 == 0:
                    assert client.open(items=1).ids
                    assert batch.watermark().watermark <= 400
                    assert list(client.batches(key="none")) == []
            return acked

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(work, range(8))) == 400
        assert batch.refresh().complete
        assert batch.verify().ok


def test_many_tasks_share_transactions(lastbit: Lastbit) -> None:
    async def ack_all() -> None:
        async with lastbit.async_client(retry=ONCE) as client:
            batch = await client.open(items=500, sealed=True)
            results = await asyncio.gather(*(client.ack(item) for item in batch.ids))
            assert sum(result.applied for result in results) == 500
            assert [completed.newly for result in results for completed in result.completed].count(True) == 1

    asyncio.run(ack_all())


def test_a_cancelled_call_ends_at_once_and_harms_no_other(lastbit: Lastbit) -> None:
    async def cancel() -> None:
        async with lastbit.async_client(retry=ONCE) as client:
            batch = await client.open(items=1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(batch.wait(), 0.1)
            waiting = asyncio.create_task(batch.wait())
            await client.ack(batch.ids)
            await batch.seal()
            assert (await waiting).complete

    asyncio.run(cancel())


# Outages


def test_a_database_that_is_down_is_named(unused_port: int) -> None:
    """At the start, and by `migrate`; with the retries of the client."""
    for scheme, database in (("mysql", "MariaDB"), ("postgresql", "PostgreSQL")):
        with Lastbit(f"{scheme}://app:secret@127.0.0.1:{unused_port}/app") as lastbit:
            client = lastbit.client(retry=Retry(attempts=2, base=0))
            with pytest.raises(DatabaseUnreachable, match=f"127.0.0.1:{unused_port}") as outage:
                client.open()
            assert outage.value.attempts == 2, database
            assert not outage.value.sent
            assert isinstance(outage.value, ServiceUnreachable)
            assert outage.value.is_temporary
            text = str(outage.value)
            assert "lastbit-server" not in text
            assert "LASTBIT_URL" not in text
            assert "secret" not in text
            with pytest.raises(DatabaseUnreachable, match=f"127.0.0.1:{unused_port}"):
                lastbit.migrate()

            async def open_one(lastbit: Lastbit = lastbit) -> None:
                await lastbit.async_client(retry=ONCE).open()

            with pytest.raises(DatabaseUnreachable, match=f"127.0.0.1:{unused_port}"):
                asyncio.run(open_one())


@mutant(
    "an-outage-is-an-answer",
    "api.in_process:_Loop._respond",
    "_raise_outage(scope.get(problems.ERROR))",
    "pass",
)
@pytest.mark.mariadb
def test_a_server_that_dies_and_comes_back(mortal_server: Server) -> None:
    """Calls of every kind fail while it is down. Afterwards they succeed, with the same objects."""
    url = mortal_server.new_database()
    with Lastbit(url) as lastbit:
        lastbit.migrate()
        client = lastbit.client(retry=ONCE)
        batch = client.open(items=3)
        ids = list(batch.ids)
        client.ack(ids[0])
        list(client.batches())

        async def ack_awaited(item: str) -> int:
            return (await lastbit.async_client(retry=ONCE).ack(item)).applied

        calls: list[Callable[[], object]] = [
            lambda: client.ack(ids[1]),
            lambda: asyncio.run(ack_awaited(ids[1])),
            lambda: client.open(),
            lambda: list(client.batches()),
            batch.refresh,
            lambda: client.events(),
            lastbit.migrate,
        ]
        mortal_server.stop()
        for call in calls:
            with pytest.raises(DatabaseUnreachable, match=r"can be reached|can't be"):
                call()
        mortal_server.start()
        assert client.ack(ids[1]).applied + asyncio.run(ack_awaited(ids[2])) == 2
        assert batch.refresh().acked == 3
        assert len(list(client.batches())) == 1


@pytest.mark.mariadb
def test_a_client_waits_for_a_server_that_restarts(mortal_server: Server) -> None:
    """A follower and an ack go on by their retries."""
    url = mortal_server.new_database()
    with Lastbit(url) as lastbit, ThreadPoolExecutor(2) as pool:
        lastbit.migrate()
        client = lastbit.client()
        batch = client.open(items=1, sealed=True)
        follower = client.follow(types="batch.completed")
        completed = pool.submit(lambda: next(follower))
        mortal_server.stop()
        acked = pool.submit(lambda: client.ack(batch.ids))
        mortal_server.start()
        assert acked.result(60).completed[0].newly
        assert completed.result(60).batch == batch.id


@pytest.mark.mariadb
def test_connections_that_died_are_replaced(server: Server, server_url: str) -> None:
    """A server that ended all sessions, as a proxy or a time-out does: no call fails."""
    with Lastbit(server_url) as lastbit:
        lastbit.migrate()
        client = lastbit.client(retry=ONCE)
        batch = client.open(items=2)
        list(client.batches())
        assert server.end_sessions(server_url) >= 1
        assert client.ack(batch.ids[0]).applied == 1
        server.end_sessions(server_url)
        assert [entry.id for entry in client.batches()] == [batch.id]
