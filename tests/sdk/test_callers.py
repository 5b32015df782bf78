"""Calls in transactions of callers, with each driver: what is committed counts, what is rolled back is gone, and
nothing depends on the caller's settings or changes them."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import psycopg2
import psycopg2.extras
import pymysql
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from core.storage import tables
from lastbit import errors
from lastbit.embedded import Lastbit
from tests.conftest import server_kind

pytestmark = [pytest.mark.mariadb]

Connect = Callable[[sa.URL], Any]
"""Returns a connection in a transaction, which has `commit`, `rollback` and `close`."""


def engine_of(driver: str, **options: Any) -> Connect:
    def connect(url: sa.URL) -> Any:
        if not driver.startswith("sqlite"):
            options.setdefault("isolation_level", "READ COMMITTED")
        return sa.create_engine(url.set(drivername=driver), poolclass=sa.NullPool, **options).connect()

    return connect


def session_of(driver: str) -> Connect:
    def connect(url: sa.URL) -> Session:
        engine = sa.create_engine(url.set(drivername=driver), poolclass=sa.NullPool, isolation_level="READ COMMITTED")
        return sessionmaker(engine)()

    return connect


def plain_psycopg(url: sa.URL) -> Any:
    return psycopg.connect(url.set(drivername="postgresql").render_as_string(False), row_factory=dict_row)


def plain_psycopg2(url: sa.URL) -> Any:
    return psycopg2.connect(
        url.set(drivername="postgresql").render_as_string(False), cursor_factory=psycopg2.extras.RealDictCursor
    )


def plain_pymysql(url: sa.URL) -> Any:
    connection = pymysql.connect(
        host=url.host,
        port=url.port,
        user=url.username,
        password=url.password or "",
        database=url.database,
        cursorclass=pymysql.cursors.DictCursor,
    )
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    return connection


def plain_sqlite3(url: sa.URL) -> Any:
    connection = sqlite3.connect(url.database or "")
    connection.row_factory = sqlite3.Row
    connection.execute("BEGIN IMMEDIATE")
    return connection


DRIVERS: dict[str, dict[str, Connect]] = {
    "sqlite": {"sqlalchemy": engine_of("sqlite"), "sqlite3": plain_sqlite3},
    "postgresql": {
        "sqlalchemy and psycopg": engine_of("postgresql+psycopg"),
        "sqlalchemy and psycopg2": engine_of("postgresql+psycopg2"),
        "session": session_of("postgresql+psycopg"),
        "psycopg": plain_psycopg,
        "psycopg2": plain_psycopg2,
    },
    "mysql": {
        "sqlalchemy": engine_of("mysql+pymysql"),
        "session": session_of("mysql+pymysql"),
        "pymysql": plain_pymysql,
    },
}


@pytest.fixture
def lastbit(database_url: str) -> Iterator[Lastbit]:
    with Lastbit(database_url) as lastbit:
        lastbit.migrate()
        yield lastbit


@pytest.fixture
def url(database_url: str) -> sa.URL:
    return sa.make_url(database_url)


@pytest.fixture
def connects(url: sa.URL) -> list[Connect]:
    return list(DRIVERS[url.get_backend_name().replace("mariadb", "mysql")].values())


@contextlib.contextmanager
def connected(connect: Connect, url: sa.URL) -> Iterator[Any]:
    connection = connect(url)
    try:
        yield connection
    finally:
        connection.close()


def settled_counts(lastbit: Lastbit, batch: int) -> tuple[int, int, int]:
    """The counts, once nothing waits."""
    lastbit._answering().service.enlisted.move([batch])
    found = lastbit.client().batch(batch).refresh()
    return found.acked, found.failed, found.skipped


def test_each_driver_acks_opens_and_seals(lastbit: Lastbit, url: sa.URL, connects: list[Connect]) -> None:
    reason = "it's 100 % \\ broken %s :x ☃"
    for connect in connects:
        with connected(connect, url) as tx:
            batch = lastbit.open(tx, key="order ☃ %", items=70, group_size=64, labels={"team": "%s \\ 'x'"})
            assert lastbit.extend(tx, batch.id, 2)[0] == f"{batch.id}:1:6"
            assert lastbit.ack(tx, batch.ids[:2]).applied == 2
            assert lastbit.fail(tx, batch.ids[2:4], reason).applied == 2
            assert lastbit.skip(tx, [batch.ids[64]], reason).applied == 1
            assert lastbit.ack(tx, batch.ids[1:3]).applied == 1, "it sees its own calls"
            lastbit.seal(tx, batch.id)
            tx.commit()
        assert settled_counts(lastbit, batch.id) == (3, 1, 1)
        handle = lastbit.client().batch(batch.id)
        assert (handle.refresh().state, handle.refresh().labels) == ("sealed", {"team": "%s \\ 'x'"})
        assert [found.reason for found in handle.failure_reasons().reasons] == [reason]
        assert handle.verify().ok


def test_what_is_rolled_back_is_gone(lastbit: Lastbit, url: sa.URL, connects: list[Connect]) -> None:
    shared = lastbit.client().open(items=3)
    for connect in connects:
        with connected(connect, url) as tx:
            opened = lastbit.open(tx, items=2)
            lastbit.ack(tx, [opened.ids[0], shared.ids[0]])
            lastbit.seal(tx, shared.id)
            tx.rollback()
        with pytest.raises(errors.BatchNotFound):
            lastbit.client().batch(opened.id).refresh()
        assert settled_counts(lastbit, shared.id) == (0, 0, 0)
        assert shared.refresh().state == "open"


def test_errors_are_those_of_a_client(lastbit: Lastbit, url: sa.URL, connects: list[Connect]) -> None:
    with connected(connects[0], url) as tx:
        with pytest.raises(errors.MalformedItem):
            lastbit.ack(tx, "7-0-1")
        with pytest.raises(errors.InvalidRequest, match="items"):
            lastbit.open(tx, items=-1)
        with pytest.raises(errors.InvalidRequest, match="parent"):
            lastbit.open(tx, parent="1:0:0")
        with pytest.raises(errors.BatchNotFound):
            lastbit.seal(tx, 77)
        assert [item.reason for item in lastbit.ack(tx, "77:0:0").rejected] == ["unknown_batch"]


def autocommitting(url: sa.URL) -> Any:
    backend = url.get_backend_name()
    if backend == "sqlite":
        return sqlite3.connect(url.database or "", isolation_level=None)
    if backend == "postgresql":
        connection = plain_psycopg(url)
        connection.autocommit = True
        return connection
    connection = plain_pymysql(url)
    connection.autocommit(True)
    return connection


def closed(url: sa.URL) -> Any:
    connection = next(iter(DRIVERS[url.get_backend_name()].values()))(url)
    connection.close()
    return connection


def failed(url: sa.URL) -> Any:
    connection = plain_psycopg(url)
    with contextlib.suppress(psycopg.Error):
        connection.execute("SELECT nonsense")
    return connection


def of_another_database(url: sa.URL) -> Any:
    return sqlite3.connect(":memory:")


@pytest.mark.parametrize(
    ("connect", "expected"),
    [
        (autocommitting, "autocommit"),
        (closed, "closed"),
        (failed, "roll it back"),
        (of_another_database, "Lastbit's database is"),
        (lambda url: "tx", "expected a Connection"),
        (lambda url: create_async_engine("sqlite+aiosqlite://").connect(), "async_"),
    ],
)
def test_misuse_has_a_clear_error(lastbit: Lastbit, url: sa.URL, connect: Connect, expected: str) -> None:
    backend = url.get_backend_name()
    if (connect is failed and backend != "postgresql") or (connect is of_another_database and backend == "sqlite"):
        pytest.skip("this database has no such state")
    connection = connect(url)
    with pytest.raises(errors.InvalidArgument, match=expected):
        lastbit.ack(connection, "1:0:0")


SETTINGS = {
    "postgresql": [
        "SET search_path = nowhere",
        "SET timezone = 'Asia/Kathmandu'",
        "SET datestyle = 'German'",
        "SET standard_conforming_strings = off",
        "SET bytea_output = 'escape'",
        "SET lock_timeout = '123ms'",
    ],
    "mysql": [
        "SET SESSION sql_mode = 'ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES,PAD_CHAR_TO_FULL_LENGTH'",
        "SET time_zone = '+05:45'",
        # OceanBase's engine for one server knows no other character set.
        "SET NAMES utf8mb4" if server_kind() == "oceanbase" else "SET NAMES latin1",
        "SET SESSION group_concat_max_len = 4",
        "SET SESSION innodb_lock_wait_timeout = 3",
    ],
}
SHOWN = {
    "postgresql": "SELECT name, setting FROM pg_settings WHERE context = 'user' ORDER BY name",
    "mysql": "SHOW SESSION VARIABLES WHERE Variable_name NOT REGEXP "
    "'timestamp|pseudo|rand_|last_|warning|insert_id|identity|in_transaction'",
}


def test_settings_of_the_session_matter_to_nobody(server_url: str) -> None:
    """The tables have a schema of their own. In the caller's, all of their names are taken."""
    url = sa.make_url(server_url)
    backend = url.get_backend_name().replace("mariadb", "mysql")
    driver = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}[backend]
    engine = sa.create_engine(url.set(drivername=driver), isolation_level="READ COMMITTED")
    schema = f"{url.database}_own" if backend == "mysql" else 'Own "%s'
    with Lastbit(engine, schema=schema) as lastbit, engine.connect() as tx:
        for name in tables.metadata.tables:
            tx.exec_driver_sql(f"CREATE TABLE {name} (mine INTEGER)")
        tx.commit()
        lastbit.migrate()
        for text in SETTINGS[backend]:
            tx.exec_driver_sql(text)
        tx.commit()
        before = tx.exec_driver_sql(SHOWN[backend]).all()
        batch = lastbit.open(tx, key="ä", items=70, group_size=64, labels={"ö": '"'}, idempotency_key="order-7")
        lastbit.extend(tx, batch.id, 2, idempotency_key="more")
        lastbit.ack(tx, batch.ids[:40])
        lastbit.fail(tx, batch.ids[64], 'it\'s "\\" broken ä')
        lastbit.skip(tx, batch.ids[65], "n\\o")
        lastbit.ack(tx, batch.ids[65])
        lastbit.seal(tx, batch.id)
        assert tx.exec_driver_sql(SHOWN[backend]).all() == before
        tx.commit()
        assert settled_counts(lastbit, batch.id) == (41, 1, 0)
        handle = lastbit.client().batch(batch.id)
        assert (handle.refresh().key, handle.refresh().labels) == ("ä", {"ö": '"'})
        assert [found.reason for found in handle.failure_reasons().reasons] == ['it\'s "\\" broken ä']
        assert handle.verify().ok
        held = lastbit.client().open(items=1, parent=batch.ids[66])
        assert [item.reason for item in lastbit.ack(tx, batch.ids[66]).rejected] == ["held"]
        assert lastbit.once(held.ids[0], lambda _: None, using=engine).applied == 1
        tx.rollback()
    engine.dispose()


ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}


@pytest.mark.parametrize("kind", ["connection", "session"])
def test_asynchronous_drivers(lastbit: Lastbit, url: sa.URL, kind: str) -> None:
    driver = ASYNC_DRIVERS.get(url.get_backend_name())
    if driver is None:
        pytest.skip("an asynchronous driver of MariaDB is not among the supported ones")

    async def run() -> int:
        engine = create_async_engine(url.set(drivername=driver), poolclass=sa.NullPool)
        async with AsyncSession(engine) if kind == "session" else engine.connect() as tx:
            batch = await lastbit.async_open(tx, items=3, labels={"a": "$1 %s"})
            assert (await lastbit.async_ack(tx, batch.ids[0])).applied == 1
            assert (await lastbit.async_fail(tx, batch.ids[1], "broken: $1")).applied == 1
            assert (await lastbit.async_skip(tx, batch.ids[2])).applied == 1
            assert len(await lastbit.async_extend(tx, batch.id, 1)) == 1
            await lastbit.async_seal(tx, batch.id)
            await tx.commit()
        await engine.dispose()
        return batch.id

    batch = asyncio.run(run())
    assert settled_counts(lastbit, batch) == (1, 1, 1)
    assert lastbit.client().batch(batch).refresh().state == "sealed"
