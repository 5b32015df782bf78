"""Where the tables are: in a schema of their own, or beside the tables of others. `schema.migrate` creates the schema,
and changes nothing where it would meet a table of others with one of our names.

The version of our tables is in a table with a name of its own, because a user's project may use Alembic too. A database
that was made before this rule keeps it in Alembic's `alembic_version`: releases from before look for it there. That is
ours if it stands beside our `item_groups`, which every version has. See decision 43.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from core import errors
from core.storage import dialects, tables
from core.storage.database import Database
from core.storage.dialects import Obstacle
from core.storage.dialects.dialect import SCHEMA

VERSION: Final = "lastbit_version"
EARLIER_VERSION: Final = "alembic_version"

Shape = Mapping[str, frozenset[str]]
"""The columns of tables, by their names."""


def version_table(tx: Connection) -> str:
    """The table that has, or will have, the version of our tables."""
    inspector = sa.inspect(tx)
    is_earlier = (
        not inspector.has_table(VERSION)
        and inspector.has_table(EARLIER_VERSION)
        and inspector.has_table("item_groups")
        and {"batch_id", "group_no"} <= _columns(tx, "item_groups")
    )
    return EARLIER_VERSION if is_earlier else VERSION


def _columns(tx: Connection, table: str) -> frozenset[str]:
    return frozenset(column["name"] for column in sa.inspect(tx).get_columns(table))


def create(database: Database) -> None:
    """Create the schema that the database was opened with, unless it exists. Raises `errors.Misconfigured` if the
    account may not."""
    schema, dialect = database.schema, database.dialect
    if schema is None:
        return
    # On MariaDB, nobody can connect to a database that doesn't exist.
    with Database(database.given_url, connections=1) as neighbour, neighbour.connection() as tx:
        try:
            dialect.create_schema(tx, schema)
            tx.commit()
        except IntegrityError:  # another process has just created it
            tx.rollback()
        except DBAPIError as error:
            if dialect.obstacle(error) not in (Obstacle.NO_PRIVILEGE, Obstacle.NO_ACCESS):
                raise
            tx.rollback()
            raise errors.Misconfigured(
                f"the user {database.url.username or ''!r} may not create {database.describe()}: run "
                f"{dialect.new_schema(tx, schema)} with an account that may, and migrate again"
            ) from error


def check_usage(tx: Connection) -> None:
    """Raise `errors.Misconfigured` if the account may not use the schema."""
    dialect = dialects.of(tx)
    if dialect.lacks_usage(tx):
        schema = tx.get_execution_options()[SCHEMA]
        user = tx.exec_driver_sql("SELECT current_user").scalar_one()
        raise errors.Misconfigured(
            f"the user {user!r} may not use the schema {schema!r}: "
            f"GRANT USAGE ON SCHEMA {dialect.quoted(schema)} TO {dialect.quoted(user)}, "
            "and the privileges on its tables (docs/database.md lists them)"
        )


def check_free(tx: Connection, existing: Shape, following: Shape) -> None:
    """Raise `errors.Misconfigured` if a table that a migration will create exists already, and isn't ours. `existing`
    are the tables that were created before, `following` those after the next migration: on MariaDB and MySQL, one that
    was killed has left some."""
    dialect = dialects.of(tx)
    for table in sorted(set(dialect.names(tx)) & tables.metadata.tables.keys() - existing.keys()):
        if not dialect.done_already or _columns(tx, table) != following.get(table):
            raise errors.Misconfigured(
                f"{_place(tx)} has a table {table!r} already, which isn't Lastbit's: {_advice(tx)}"
            )


def _place(tx: Connection) -> str:
    schema = tx.get_execution_options().get(SCHEMA)
    if dialects.of(tx).is_embedded:
        return "the SQLite file"
    return "the database" if schema is None else f"the schema {schema!r}"


def _advice(tx: Connection) -> str:
    if dialects.of(tx).is_embedded:
        return "name another file in LASTBIT_DATABASE_URL or --database-url"
    return (
        "name a schema (on MariaDB and MySQL: a database) for Lastbit's tables alone in LASTBIT_DATABASE_SCHEMA or "
        "--database-schema"
    )
