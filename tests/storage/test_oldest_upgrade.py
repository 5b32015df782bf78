"""The upgrade of a database of the oldest release that can be upgraded: nothing is lost, and its tables become those of
a new database. That release is real: a commit of this repository. See decision 45."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors
from core.acks.call import Call
from core.batches.lifecycle import Verb
from core.service import Service
from core.storage import schema
from core.storage.database import Database
from tests.guarantees.drivers.releases import Release, earlier
from tests.mutants import mutant
from tests.support import templates

FILL = """
import sys
from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.service import Service
from core.storage import schema
from core.storage.database import Database
from lastbit.ids import ItemId

with Database(sys.argv[1]) as database:
    schema.migrate(database)
    service = Service(database)
    parent = service.batches.open(Opening(key="nightly", labels={"team": "a"}, group_size=64, items=70)).batch.id
    service.batches.open(Opening(items=1, sealed=True, parent=ItemId(parent, 1, 5)))
    service.batches.extend(parent, 30, "more")
    service.acks.ack(Call.of(Verb.ACK, [(parent, 0, number) for number in range(0, 60, 2)])).result(60)
    service.acks.ack(Call.of(Verb.FAIL, [(parent, 0, 1)], reason="broken")).result(60)
    service.stop()
"""
"""What the release does with a new database: in the first batch, 30 items are acked and one has failed."""
FIRST, CHILD = 1, 2
NOW = datetime.datetime(2026, 11, 28, 21, 57, 0, 123456)  # noqa: DTZ001  # as a driver gives it
VALUES: dict[type, Any] = {int: 7, str: "x", bytes: b"x", datetime.datetime: NOW}


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return earlier(tmp_path_factory.mktemp("oldest"))


def stored(database: Database, like: dict[str, list[str]] | None = None) -> dict[str, tuple[list[str], list[str]]]:
    """The columns and rows of each table, or of those of `like`."""
    answer = {}
    with database.engine.connect() as connection:
        inspector = sa.inspect(connection)
        for table in like or inspector.get_table_names():
            names = like[table] if like else [column["name"] for column in inspector.get_columns(table)]
            query = sa.select(*map(sa.column, names)).select_from(sa.table(table))
            answer[table] = names, sorted(repr(tuple(row)) for row in connection.execute(query))
    return answer


def fill_empty_tables(database: Database) -> None:
    """Insert a row into each table that has none."""
    with database.engine.begin() as connection:
        metadata = sa.MetaData()
        metadata.reflect(connection)
        for table in metadata.sorted_tables:
            if not connection.scalar(sa.select(sa.func.count()).select_from(table)):
                row = {column.name: VALUES[column.type.python_type] for column in table.c}
                connection.execute(sa.insert(table).values(row))


def description(database: Database) -> tuple[dict[str, list[str]], list[str]]:
    """The columns of each table in their order, and all else that defines the tables."""
    inspector = sa.inspect(database.engine)
    names = {
        table: [column["name"] for column in inspector.get_columns(table)]
        for table in inspector.get_table_names()
        if not table.endswith("_version")
    }
    if not database.is_embedded:
        definition = [line for text in templates.dump(database) for line in text.splitlines()]
        lines = [line.rstrip(",") for line in definition if not re.match(r"INSERT|SELECT pg_catalog.setval", line)]
        return names, sorted(
            re.sub(r" AUTO_INCREMENT=\d+", "", line.replace("alembic_version", "lastbit_version")) for line in lines
        )
    lines = []
    with database.engine.connect() as connection:
        for table in names:
            columns = connection.exec_driver_sql(f"PRAGMA table_xinfo({table})").all()
            lines += [f"{table} {column}" for column in columns]
            for _, index, *kind in connection.exec_driver_sql(f"PRAGMA index_list({table})").all():
                indexed = connection.exec_driver_sql(f"PRAGMA index_xinfo({index})").all()
                lines.append(f"{table} {index} {kind} {indexed}")
        query = "SELECT name FROM sqlite_master WHERE sql LIKE '%AUTOINCREMENT%'"
        lines += [f"numbered: {name}" for name in connection.exec_driver_sql(query).scalars()]
    return names, sorted(lines)


@mutant(
    "a-new-database-lacks-indexes",
    "core.storage.schema:_create",
    "sorted(table.indexes, key=lambda index: str(index.name))",
    "[]",
)
@mutant(
    "an-upgrade-that-was-not-finished-is-refused",
    "core.storage.schema:check",
    "oldest > newest()",
    "oldest != newest()",
)
@pytest.mark.parametrize("kind", ["sqlite", "mariadb", "postgresql"])
def test_a_database_of_the_oldest_release_is_upgraded(
    oldest: Release, kind: str, request: pytest.FixtureRequest
) -> None:
    """With rows in all tables. Its last upgrade was never finished: releases before it may run."""
    url: str = request.getfixturevalue(f"{kind}_url")
    process = subprocess.run(
        [sys.executable, "-c", FILL, url], cwd=oldest.root, env=oldest.environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    with Database(url) as database:
        with pytest.raises(errors.Misconfigured, match=r"revision 0016, but this release needs .*migrate"):
            database.read(schema.check)
        fill_empty_tables(database)
        with database.engine.begin() as connection:
            connection.exec_driver_sql("UPDATE schema_support SET oldest = '0002'")
        before = stored(database)
        assert len(before) == 22
        schema.migrate(database)
        database.read(schema.check)
        del before["alembic_version"]
        assert stored(database, {table: names for table, (names, _) in before.items()}) == before

        service = Service(database)
        batch = service.batches.get(FIRST)
        assert (batch.key, batch.labels) == ("nightly", {"team": "a"})
        assert (batch.items, batch.acked, batch.failed) == (100, 30, 1)
        assert service.batches.extend(FIRST, 30, "more").start == 70
        service.batches.seal(FIRST)
        service.acks.ack(Call.of(Verb.ACK, [(CHILD, 0, 0)])).result(60)
        rest = [(FIRST, *divmod(number, 64)) for number in range(100)]
        result = service.acks.ack(Call.of(Verb.ACK, rest)).result(60)
        assert result.rejected == []
        assert service.batches.get(FIRST).acked == 100
        assert service.batches.verify(FIRST).ok
        service.stop()
        schema.finish(database)
        upgraded = description(database)
    server = None if kind == "sqlite" else request.getfixturevalue(kind)
    with Database(f"{url}-new" if server is None else server.new_database()) as database:
        schema.migrate(database)
        assert description(database) == upgraded


@mutant("a-schema-that-is-too-old-is-a-newer-one", "core.storage.schema:_check_age", "revision < oldest", "False")
@pytest.mark.parametrize("revision", ["0001", "0015"])
def test_an_older_database_is_refused_and_stays_as_it_is(database_url: str, revision: str) -> None:
    """It may have no table of the releases that it serves."""
    with Database(database_url) as database:
        schema.migrate(database)
        with database.engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE lastbit_version SET version_num = '{revision}'")
            connection.exec_driver_sql("DROP TABLE schema_support")
        before = stored(database)
        message = f"of revision {revision}, but this release upgrades from revision 0016 on: migrate with Lastbit 0.1.0"
        for act in (lambda: schema.migrate(database), lambda: database.read(schema.check)):
            with pytest.raises(errors.Misconfigured, match=message):
                act()
        assert stored(database) == before
