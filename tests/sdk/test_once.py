"""`once`: an effect and its ack are one, however often a message is delivered, whatever fails."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from lastbit import errors
from lastbit.embedded import Lastbit
from tests.conftest import Server
from tests.guarantees.drivers.rounds import nobody_pays
from tests.mutants import mutant

pytestmark = [pytest.mark.mariadb]

CHARGES = sa.Table("charges", sa.MetaData(), sa.Column("item", sa.String(40)))
DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mysql+pymysql"}


@pytest.fixture
def url(database_url: str) -> sa.URL:
    url = sa.make_url(database_url)
    return url.set(drivername=DRIVERS[url.get_backend_name()])


@pytest.fixture
def engine(url: sa.URL) -> Iterator[sa.Engine]:
    options = {} if url.drivername == "sqlite" else {"isolation_level": "READ COMMITTED"}
    engine = sa.create_engine(url, **options)
    CHARGES.create(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def lastbit(url: sa.URL, engine: sa.Engine) -> Iterator[Lastbit]:
    with Lastbit(url.render_as_string(hide_password=False) if url.drivername == "sqlite" else engine) as lastbit:
        lastbit.migrate()
        yield lastbit


def charging(item: str) -> Callable[[Any], object]:
    return lambda tx: tx.execute(sa.insert(CHARGES).values(item=item))


def charges(engine: sa.Engine) -> list[str]:
    with engine.connect() as tx:
        return sorted(tx.scalars(sa.select(CHARGES.c.item)))


def test_a_repeat_has_no_effect_and_tells_of_the_completion(lastbit: Lastbit, engine: sa.Engine) -> None:
    batch = lastbit.client().open(items=2, sealed=True)
    for item in batch.ids:
        result = lastbit.once(item, charging(item))
        assert (result.applied, result.repeated) == (1, 0)
    assert [(completed.batch, completed.newly) for completed in result.completed] == [(batch.id, True)]
    again = lastbit.once(batch.ids[0], charging("again"))
    assert (again.applied, again.repeated) == (0, 1)
    assert [(completed.batch, completed.newly) for completed in again.completed] == [(batch.id, False)]
    assert charges(engine) == list(batch.ids)
    assert batch.verify().ok


@pytest.mark.parametrize("reason", ["cancelled", "unknown_item", "unknown_batch"])
def test_an_item_that_takes_no_ack_has_no_effect(lastbit: Lastbit, engine: sa.Engine, reason: str) -> None:
    batch = lastbit.client().open(items=2)
    item = batch.ids[0]
    if reason == "cancelled":
        batch.cancel()
    elif reason == "unknown_item":
        item = f"{batch.id}:0:7"
    else:
        item = "77:0:0"
    result = lastbit.once(item, charging(item))
    assert (result.applied, [rejected.reason for rejected in result.rejected]) == (0, [reason])
    assert charges(engine) == []


def test_an_effect_that_fails_leaves_the_item_pending(lastbit: Lastbit, engine: sa.Engine) -> None:
    batch = lastbit.client().open(items=1, sealed=True)

    def effect(tx: Any) -> None:
        charging("half")(tx)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lastbit.once(batch.ids[0], effect)
    assert charges(engine) == []
    assert batch.refresh().acked == 0
    assert lastbit.once(batch.ids[0], charging("whole")).applied == 1
    assert charges(engine) == ["whole"]


def test_an_effect_may_extend_its_own_batch(lastbit: Lastbit) -> None:
    batch = lastbit.client().open(items=1, sealed=True)
    new: list[str] = []

    def add(tx: Any) -> None:
        new.extend(lastbit.extend(tx, batch.id, 2, by=batch.ids[0], idempotency_key="links"))

    assert not lastbit.once(batch.ids[0], add).completed
    assert [lastbit.once(item, lambda tx: None).applied for item in new] == [1, 1]
    assert batch.refresh().state == "complete"


@mutant(
    "an-item-is-looked-at-without-a-lock",
    "core.enlisted.acks:_lock_and_look",
    "dialect.for_update('batch_id', 'group_no')",
    "''",
)
def test_each_item_of_many_deliveries_has_one_effect(lastbit: Lastbit, engine: sa.Engine) -> None:
    """Every message is delivered twice, by four consumers in their own order, that repeat what the database refuses."""
    batch = lastbit.client().open(items=150, sealed=True, group_size=64)
    newly: list[int] = []
    start = threading.Barrier(4)

    def consume(seed: int) -> None:
        messages = [*batch.ids, *batch.ids]
        random.Random(seed).shuffle(messages)
        start.wait(60)
        while messages:
            try:
                result = lastbit.once(messages[-1], charging(messages[-1]))
            except sa.exc.OperationalError:  # a deadlock, or a file that is locked
                continue
            messages.pop()
            newly.extend(completed.batch for completed in result.completed if completed.newly)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(consume, range(4)))
    assert charges(engine) == sorted(batch.ids)
    assert newly == [batch.id]
    assert batch.verify().ok
    assert [event.type for event in lastbit.client().events(batch=batch.id).events][-2:] == [
        "batch.completed",
        "batch.succeeded",
    ]


@mutant(
    "a-repeat-keeps-its-effect",
    "lastbit.embedded._transactions:once",
    "not result.applied",
    "False",
)
def test_of_two_deliveries_at_once_one_has_an_effect(lastbit: Lastbit, engine: sa.Engine) -> None:
    """The second one is acked while the first one is in its effect."""
    if engine.dialect.name == "sqlite":
        pytest.skip("one transaction writes to a file at a time")
    item = lastbit.client().open(items=1).ids[0]
    begun, acked = threading.Event(), threading.Event()

    def slowly(tx: Any) -> None:
        charging("slow")(tx)
        begun.set()
        assert acked.wait(60)

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(lastbit.once, item, slowly)
        assert begun.wait(60)
        assert lastbit.once(item, charging("quick")).applied == 1
        acked.set()
        assert (slow.result(60).applied, slow.result().repeated) == (0, 1)
    assert charges(engine) == ["quick"]


def test_a_decorated_function_takes_the_item_first(lastbit: Lastbit, engine: sa.Engine) -> None:
    batch = lastbit.client().open(items=1)

    @lastbit.once
    def charge(tx: Any, name: str, *, times: int) -> None:
        tx.execute(sa.insert(CHARGES), [{"item": name}] * times)

    assert charge(batch.ids[0], "a", times=2).applied == 1
    assert charge(batch.ids[0], "a", times=2).applied == 0
    assert charges(engine) == ["a", "a"]
    assert charge.__name__ == "charge"


def plain_connection(url: sa.URL) -> Any:
    if url.drivername == "sqlite":
        return sqlite3.connect(url.database or "")
    if url.drivername.startswith("postgresql"):
        return psycopg.connect(url.set(drivername="postgresql").render_as_string(hide_password=False))
    connection = pymysql.connect(host=url.host, port=url.port, user=url.username, database=url.database)
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    return connection


def test_sessions_and_plain_connections_are_committed(lastbit: Lastbit, engine: sa.Engine, url: sa.URL) -> None:
    batch = lastbit.client().open(items=3, sealed=True)

    def add(session: Session) -> None:
        session.execute(sa.insert(CHARGES).values(item="session"))

    assert lastbit.once(batch.ids[0], add, using=sessionmaker(engine)).applied == 1
    connection = plain_connection(url)

    def insert(tx: Any) -> None:
        cursor = tx.cursor()
        cursor.execute("INSERT INTO charges VALUES ('plain')")
        cursor.close()

    assert lastbit.once(batch.ids[1], insert, using=connection).applied == 1
    assert lastbit.once(batch.ids[1], insert, using=connection).applied == 0
    connection.close()
    assert lastbit.once(batch.ids[2], charging("engine"), using=engine).completed[0].newly
    assert charges(engine) == ["engine", "plain", "session"]


def test_asynchronous_effects(lastbit: Lastbit, engine: sa.Engine, url: sa.URL) -> None:
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql+psycopg": "postgresql+asyncpg"}
    if url.drivername not in drivers:
        pytest.skip("an asynchronous driver of MariaDB is not among the supported ones")
    batch = lastbit.client().open(items=2, sealed=True)

    async def run() -> list[tuple[int, bool]]:
        async_engine = create_async_engine(url.set(drivername=drivers[url.drivername]))

        async def effect(tx: AsyncConnection) -> None:
            await tx.execute(sa.insert(CHARGES).values(item="async"))

        results = [await lastbit.async_once(item, effect, using=async_engine) for item in [*batch.ids, batch.ids[0]]]
        await async_engine.dispose()
        return [(result.applied, bool(result.completed)) for result in results]

    assert asyncio.run(run()) == [(1, False), (1, True), (0, True)]
    assert charges(engine) == ["async", "async"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("1:0:0", lambda tx: None, "engine"), "sessionmaker"),
        (("1:0:0", None, None), "an item and an effect"),
    ],
)
def test_misuse_has_a_clear_error(lastbit: Lastbit, arguments: tuple[Any, Any, Any], expected: str) -> None:
    item, effect, using = arguments
    with pytest.raises(errors.InvalidArgument, match=expected):
        lastbit.once(item, effect, using=using)
    with pytest.raises(errors.MalformedItem):
        lastbit.once("7-0", lambda tx: None)


@pytest.fixture
def mortal(mortal_server: Server) -> Iterator[tuple[Lastbit, sa.Engine]]:
    url = sa.make_url(mortal_server.new_database())
    engine = sa.create_engine(url.set(drivername=DRIVERS[url.get_backend_name()]), isolation_level="READ COMMITTED")
    CHARGES.create(engine)
    with Lastbit(engine) as lastbit:
        lastbit.migrate()
        yield lastbit, engine
    engine.dispose()


@mutant(
    "a-database-that-is-away-after-the-commit-is-an-error",
    "core.service.enlisted:EnlistedService._settled",
    "errors.CoreError",
    "errors.InconsistentBatch",
)
def test_a_database_that_dies_after_the_commit_does_not_undo_the_answer(
    mortal: tuple[Lastbit, sa.Engine], mortal_server: Server
) -> None:
    lastbit, engine = mortal
    [item] = lastbit.client().open(items=1, sealed=True).ids
    sa.event.listen(engine, "checkin", lambda *_: mortal_server.stop(signal.SIGKILL), once=True)
    result = lastbit.once(item, charging(item))
    assert (result.applied, result.completed) == (1, ())
    mortal_server.start()
    engine.dispose()
    again = lastbit.once(item, charging("again"))
    assert (again.repeated, [completed.batch for completed in again.completed]) == (1, [1])
    assert charges(engine) == [item]


@mutant(
    "an-outage-is-an-error-of-the-core",
    "lastbit.embedded._transactions:Enlisted._send",
    "core.Unavailable",
    "core.Misconfigured",
)
def test_a_database_that_is_away_before_the_effect_is_an_error_of_lastbit(
    mortal: tuple[Lastbit, sa.Engine], mortal_server: Server
) -> None:
    lastbit, engine = mortal
    [item] = lastbit.client().open(items=1, sealed=True).ids
    with engine.connect() as tx:
        tx.execute(sa.select(CHARGES.c.item))
        mortal_server.stop(signal.SIGKILL)
        with pytest.raises(errors.DatabaseUnreachable):
            lastbit._enlist(tx).is_resolved(item)
        tx.invalidate()


def test_without_a_schema_or_at_another_isolation_level_the_error_says_what_to_do(server_url: str) -> None:
    url = sa.make_url(server_url)
    engine = sa.create_engine(url.set(drivername=DRIVERS[url.get_backend_name()]), isolation_level="SERIALIZABLE")
    with Lastbit(engine) as lastbit:
        with pytest.raises(errors.SchemaMismatch, match="migrate"):
            lastbit.once("1:0:0", lambda tx: None)
        lastbit.migrate()
        item = lastbit.client().open(items=1).ids[0]
        with pytest.raises(errors.InvalidArgument, match=r"SERIALIZABLE.*use READ COMMITTED"):
            lastbit.once(item, lambda tx: None)
        with engine.connect() as tx, pytest.raises(errors.InvalidArgument, match="SERIALIZABLE"):
            lastbit.open(tx, items=1)
    engine.dispose()


@mutant(
    "nobody-pays-the-debts-of-the-dead",
    "api.in_process:InProcess.check_schema",
    "self.service.enlisted.start(debts=True)",
    "self.service.enlisted.start()",
)
def test_a_parent_completes_though_the_process_that_ended_its_child_died(
    lastbit: Lastbit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No dispatcher runs, so the processes of Lastbit do what it would do."""
    parent = lastbit.client().open(items=1, sealed=True)
    child = lastbit.client().open(items=1, sealed=True, parent=parent.ids[0])
    with monkeypatch.context() as dying:
        nobody_pays(dying)
        assert lastbit.once(child.ids[0], lambda tx: None).completed[0].newly
    parent.wait(timeout=30)
