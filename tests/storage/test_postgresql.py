"""PostgreSQL only: its tables and the settings of its sessions."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from core import errors
from core.storage import schema, tables
from core.storage.database import Database
from tests.mutants import mutant
from tests.support.postgresql import PostgreSQL
from tests.support.waits import waits_for_a_lock


def test_the_tables_have_the_collations_and_options_of_their_definition(postgresql_url: str) -> None:
    """`alembic check` compares neither. Keys are compared by bytes; bitfields stay in their rows."""
    with Database(postgresql_url) as database:
        schema.migrate(database)
        with database.engine.connect() as connection:
            collations = connection.exec_driver_sql(
                "SELECT table_name, column_name, collation_name FROM information_schema.columns "
                "WHERE table_schema = 'public' AND collation_name IS NOT NULL"
            ).all()
            options = connection.exec_driver_sql(
                "SELECT relname, reloptions FROM pg_class WHERE reloptions IS NOT NULL AND relkind = 'r'"
            ).all()
            storage = connection.exec_driver_sql(
                "SELECT attrelid::regclass::text, attname::text FROM pg_attribute "
                "WHERE attstorage = 'e' AND attrelid::regclass::text IN ('item_groups', 'ack_journal') AND attnum > 0"
            ).all()
    by_bytes = {
        (table.name, column.name)
        for table in tables.metadata.sorted_tables
        for column in table.c
        if isinstance(column.type, tables.ByteText)
    }
    assert {(table, column) for table, column, _ in collations} == by_bytes
    assert {collation for _, _, collation in collations} == {"C"}
    defined = {
        table.name: {f"{name}={value}" for name, value in table.dialect_options["postgresql"]["with"].items()}
        for table in tables.metadata.sorted_tables
        if table.dialect_options["postgresql"]["with"]
    }
    assert {table: set(values) for table, values in options} == defined
    assert set(map(tuple, storage)) == {
        ("item_groups", "resolved"),
        ("item_groups", "failed"),
        ("ack_journal", "numbers"),
    }


def test_the_largest_bitfields_fit(postgresql_url: str) -> None:
    """Two of 4,096 bytes that can't be compressed are more than a page."""
    bits = bytes(range(256)) * 16
    with Database(postgresql_url) as database:
        schema.migrate(database)
        with database.engine.begin() as connection:
            values = {"batch_id": 1, "group_no": 0, "resolved": bits, "failed": bits}
            connection.execute(sa.insert(tables.item_groups).values(resolved_count=1, failed_count=1, **values))
            row = connection.execute(sa.select(tables.item_groups.c.resolved, tables.item_groups.c.failed)).one()
    assert tuple(map(bytes, row)) == (bits, bits)


class Killed(BaseException):
    """Stands for the death of the migrating process."""


def test_a_migration_that_was_killed_leaves_nothing(postgresql_url: str) -> None:
    """Data definition is part of the transaction, so that the next migration starts from the same schema."""

    def kill(*event: object) -> None:
        if re.match(r"\s*CREATE TABLE timers", str(event[2])):
            raise Killed

    with Database(postgresql_url) as database:
        sa.event.listen(database.engine, "after_cursor_execute", kill)
        with pytest.raises(Killed):
            schema.migrate(database)
    with Database(postgresql_url) as database:
        assert sa.inspect(database.engine).get_table_names() == []
        schema.migrate(database)
        database.read(schema.check)


def test_a_table_in_use_delays_a_migration(
    postgresql: PostgreSQL, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long transaction: the migration gives up with advice, and succeeds after its end."""
    monkeypatch.setattr(schema, "PATIENCE", 0)
    with Database(postgresql_url) as database:
        schema.migrate(database, "0016")
        with contextlib.closing(postgresql.connect(database.url.database)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT 1 FROM batches")
            with pytest.raises(errors.LockTimeout, match="a long transaction"):
                schema.migrate(database)
        schema.migrate(database)
        database.read(schema.check)


@mutant(
    "a-deadlock-ends-a-migration",
    "core.storage.schema:_is_in_use",
    "(errors.Fault.LOCK_WAIT, errors.Fault.CONFLICT)",
    "(errors.Fault.LOCK_WAIT,)",
)
def test_a_migration_that_deadlocks_with_a_transaction_begins_again(
    postgresql: PostgreSQL, postgresql_url: str
) -> None:
    """The transaction has used a table that the migration waits for, and then uses one that the migration has
    altered."""
    with Database(postgresql_url) as database, ThreadPoolExecutor(1) as pool:
        schema.migrate(database, "0016")
        with contextlib.closing(postgresql.connect(database.url.database)) as transaction:
            transaction.execute("SET deadlock_timeout = '1min'")  # the server ends the migration
            transaction.execute("BEGIN")
            transaction.execute("SELECT 1 FROM batches")
            migration = pool.submit(schema.migrate, database)
            assert waits_for_a_lock(database, migration)
            transaction.execute("SELECT 1 FROM extends")
            transaction.execute("COMMIT")
        migration.result(60)
        database.read(schema.check)
