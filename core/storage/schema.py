"""The version of the schema, its creation, and its migrations, which use Alembic and are in `migrations/`.

A new database gets the tables of `core.storage.tables` at once, an earlier one the migrations that it lacks (decision
0045). After each migration the previous release still works, so that old and new code can run side by side during an
upgrade, and the old code can be restored. A *newer* schema records in `tables.schema_support` whether it still supports
this code (decision 0014). An older schema never supports newer code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
import tenacity
from alembic import command, context, op
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core import errors, programs
from core.storage import dialects, faults, namespaces, statements, tables
from core.storage.database import LOCK_WAIT, Database
from core.storage.numbering import Numbering

PATIENCE: Final = 60
"""Seconds for which a migration retries to lock a table that is in use."""

_MIGRATIONS: Final = Path(__file__).resolve().parents[2] / "migrations"


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    return config


@cache
def _revisions() -> list[str]:
    """The revisions that this code can upgrade, the oldest first. The last one is its own."""
    script = ScriptDirectory.from_config(_config())
    return [revision.revision for revision in script.walk_revisions()][::-1]


def newest() -> str:
    """The newest revision that this code knows."""
    return _revisions()[-1]


def current(tx: Connection) -> str | None:
    """The revision that the database has."""
    version_table = namespaces.version_table(tx)
    return MigrationContext.configure(tx, opts={"version_table": version_table}).get_current_revision()


def check(tx: Connection) -> None:
    """Raise `errors.Misconfigured` if the schema is missing, older than this code, or no longer supports it."""
    revision = current(tx)
    if revision is None:
        namespaces.check_usage(tx)
    _check_age(revision)
    if revision is None or revision in _revisions()[:-1]:
        state = "no schema" if revision is None else f"the schema of revision {revision}"
        migration = programs.command("api", "migrate")
        account = "" if dialects.of(tx).is_embedded else ", with the account that may change the schema"
        raise errors.Misconfigured(
            f"the database has {state}, but this release needs revision {newest()}: run `{migration}`{account}, "
            "and start again"
        )
    # Even if the revision is ours: a migration first withdraws support for older releases, then changes the schema.
    oldest, ids = tx.execute(sa.select(tables.schema_support.c.oldest, tables.schema_support.c.batch_ids)).one()
    if oldest > newest():
        raise errors.Misconfigured(
            f"the database has the schema of revision {revision}, which requires a release that knows revision "
            f"{oldest}, but this one knows at most {newest()}: use a newer release, or restore an earlier backup"
        )
    expected = 1 if ids is None else Numbering.parse(ids).divisor
    if (distance := dialects.of(tx).distance_of_ids(tx)) not in (None, expected):
        raise errors.Misconfigured(
            f"the ids of batches should be {expected} apart, but the sequence of batches.id adds {distance}: restore "
            "the schema from the same backup as the rows"
        )


def _check_age(revision: str | None) -> None:
    """Raise `errors.Misconfigured` if no migration begins at this revision or before."""
    oldest = _revisions()[0]
    if revision is not None and revision < oldest:
        raise errors.Misconfigured(
            f"the database has the schema of revision {revision}, but this release upgrades from revision {oldest} on: "
            "migrate with Lastbit 0.1.0 first (docs/upgrades.md says where it is)"
        )


def empty_writes() -> Iterator[tuple[sa.Table, sa.Executable]]:
    """Statements that change no row of a table, but require the privilege to write to it."""
    for table in tables.metadata.sorted_tables:
        column = next(iter(table.primary_key.columns))
        no_row = sa.false()
        yield table, sa.insert(table).from_select(list(table.c), sa.select(*table.c).where(no_row))
        yield table, sa.update(table).where(no_row).values({column.name: column})
        yield table, sa.delete(table).where(no_row)


def migrate(database: Database, revision: str = "head", ids: Numbering | None = None) -> None:
    """Create the tables in a new database, or upgrade or downgrade those of another to `revision`; before that, create
    the schema if it is one of the database's own. Concurrent migrations wait for each other. A migration that was
    killed half-way is completed. `ids`: which numbers become ids of batches, if the database is new.

    Raises `errors.Unavailable` if the database can't be reached or another migration takes longer than a minute;
    `errors.LockTimeout` if a long transaction keeps a table in use; `errors.Misconfigured` if the schema can't be
    created, is older than the oldest revision, or has tables of others with our names, or if the database has other
    `ids`.
    """
    namespaces.create(database)
    with database.connection() as connection:
        if database.is_embedded:
            connection = connection.execution_options(**database.dialect.begin_writing)
            _migrate(connection, revision, ids)
            return
        with database.dialect.migrating(connection):
            _migrate_under_load(connection, revision, ids)


def finish(database: Database) -> None:
    """Withdraw support for releases before this one. None of them may run any more. From then on, the service may write
    data that they don't understand. Raises the same errors as `check`."""

    def mark(tx: Connection) -> None:
        check(tx)
        tx.execute(sa.update(tables.schema_support).values(oldest=newest()))

    database.write(mark)


def serves_only(tx: Connection, revision: str) -> bool:
    """Whether every release that the schema supports knows this revision."""
    [rows] = statements.run(tx, f"SELECT oldest FROM {dialects.of(tx).name(tx, 'schema_support')}")  # noqa: S608
    oldest = statements.as_text(rows[0][0]) if rows else None
    return oldest is not None and oldest >= revision


def _migrate_under_load(connection: Connection, revision: str, ids: Numbering | None) -> None:
    """Migrate while the service runs. Altering a table waits until no transaction uses it, and blocks all others
    meanwhile. So each wait is short; between attempts the others can proceed."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_in_use),
        stop=tenacity.stop_after_delay(PATIENCE),
        wait=tenacity.wait_random(LOCK_WAIT / 2, LOCK_WAIT),
        after=lambda _: connection.rollback(),
        reraise=True,
    )
    try:
        retrying(_migrate, connection, revision, ids)
    except DBAPIError as error:
        if _is_in_use(error):
            raise errors.LockTimeout(
                f"a long transaction, such as a dump, has used a table for more than {PATIENCE} s: end it, or wait "
                "for its end, and migrate again; nothing is lost"
            ) from error
        raise


def _is_in_use(error: BaseException) -> bool:
    """Whether another transaction uses the table. On PostgreSQL, a migration holds the tables that it has altered, so
    it can deadlock with a transaction that uses several tables."""
    return faults.classify(error) in (errors.Fault.LOCK_WAIT, errors.Fault.CONFLICT)


def _migrate(connection: Connection, revision: str, ids: Numbering | None) -> None:
    before = current(connection)
    if before is not None and ids is not None:
        _check_ids(connection, ids)
    _check_age(before)
    if before is not None and before not in _revisions():
        return  # the schema is from a newer release; `check` decides whether it supports this one
    if before is None:
        namespaces.check_usage(connection)
    if before != newest():
        _check_names(connection, before)
    if before is None:
        _create(connection, ids)
    is_back = revision != "head" and revision < (before or newest())
    _alembic(connection, command.downgrade if is_back else command.upgrade, revision)
    connection.commit()


def _alembic(connection: Connection, act: Callable[..., None], *arguments: str) -> None:
    config = _config()
    config.attributes.update(connection=connection, version_table=namespaces.version_table(connection))
    with _alembic_as_before():
        act(config, *arguments)


@contextlib.contextmanager
def _alembic_as_before() -> Iterator[None]:
    """Alembic's modules `op` and `context` act for the migration that runs. If that is a user's own, which calls
    `migrate`, let them act for it again afterwards."""
    modules = [vars(op), vars(context)]
    before = [module.copy() for module in modules]
    try:
        yield
    finally:
        for module, names in zip(modules, before, strict=True):
            module.update(names)


def _check_names(connection: Connection, before: str | None) -> None:
    """Raise `errors.Misconfigured` if the next step, a creation or a migration, would create a table that exists."""
    revisions = _revisions()
    following = newest() if before is None else revisions[revisions.index(before) + 1]
    namespaces.check_free(connection, {} if before is None else _shape(before), _shape(following))


@cache
def _shape(revision: str) -> dict[str, frozenset[str]]:
    """The tables of a revision, with their columns."""
    if revision == newest():
        return {table.name: frozenset(table.columns.keys()) for table in tables.metadata.sorted_tables}
    with sa.create_engine("sqlite://", poolclass=sa.NullPool).connect() as connection:
        _create(connection, ids=None)
        _alembic(connection, command.downgrade, revision)
        inspector = sa.inspect(connection)
        return {
            table: frozenset(column["name"] for column in inspector.get_columns(table))
            for table in inspector.get_table_names()
        }


def _create(connection: Connection, ids: Numbering | None) -> None:
    """Create the tables of this release, with their first rows and their version.

    On MariaDB and MySQL, each of these steps is committed by itself. After a kill, the next migration skips those that
    were done. First comes the table of the version, without which that of others would be taken for ours; then the
    `ids`, so that no table can be without them, and that no earlier release uses the database; the version is last.
    """
    _alembic(connection, command.ensure_version)
    support = tables.schema_support
    first_rows: dict[str, dict[str, Any]] = {
        support.name: {"oldest": newest(), "batch_ids": None if ids is None else str(ids)},
        tables.feed_head.name: {"position": 0, "trimmed": 0},
        tables.callback_cursor.name: {"position": 0},
    }
    for table in (support, *(table for table in tables.metadata.sorted_tables if table is not support)):
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        steps: list[sa.Executable] = [sa.schema.CreateTable(table), *map(sa.schema.CreateIndex, indexes)]
        if table.name in first_rows:
            steps.append(sa.insert(table).values(id=1, **first_rows[table.name]))
        for step in steps:
            try:
                connection.execute(step)
            except DBAPIError as error:
                if not faults.is_done_already(error):
                    raise
        if table is support and ids is not None:
            _check_ids(connection, ids)
    dialect = dialects.of(connection)
    for statement in (*dialect.after_creation, *([] if ids is None else dialect.number_batches(ids))):
        connection.exec_driver_sql(statement)
    _alembic(connection, command.stamp, "head")


def _check_ids(connection: Connection, ids: Numbering) -> None:
    """Raise `errors.Misconfigured` if the database has other ids."""
    chosen = numbering(connection)
    if chosen != ids:
        has = "gives batches all numbers as ids" if chosen is None else f"has the ids {chosen}"
        raise errors.Misconfigured(
            f"the database {has}, not {ids}: they are chosen at the first migrate of an empty database, and stay"
        )


def numbering(connection: Connection) -> Numbering | None:
    """Which numbers are ids of batches; None: all, as in a schema of any earlier release."""
    inspector, support = sa.inspect(connection), tables.schema_support
    if not inspector.has_table(support.name):
        return None
    if all(column["name"] != support.c.batch_ids.name for column in inspector.get_columns(support.name)):
        return None
    text = connection.scalar(sa.select(support.c.batch_ids))
    return None if text is None else Numbering.parse(text)
