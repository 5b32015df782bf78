"""All differences between databases, one file per database. `dialect` lists the differences: settings of sessions,
statements, types of columns, codes of errors. `galera` has what MariaDB needs in a cluster, `callers` what each needs
in a transaction of a caller.

No other package asks which database it uses. A new database is a file here that implements `Dialect`, and a line in
`_DIALECTS`; a new difference is a member of `Dialect`. `core.storage.checks` has a file of checks for each.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.storage.dialects.callers import CallersMariaDB, CallersPostgreSQL, CallersSQLite
from core.storage.dialects.dialect import Dialect, Obstacle, Rows
from core.storage.dialects.mariadb import MariaDB
from core.storage.dialects.postgresql import PostgreSQL
from core.storage.dialects.sqlite import SQLite

__all__ = ["Dialect", "Obstacle", "Rows", "named", "of", "of_callers", "of_error", "of_sqlalchemy"]

_DIALECTS: Final[dict[str, Dialect]] = {
    "mysql": MariaDB(),
    "mariadb": MariaDB(),
    "postgresql": PostgreSQL(),
    "sqlite": SQLite(),
    "caller's mysql": CallersMariaDB(),
    "caller's mariadb": CallersMariaDB(),
    "caller's postgresql": CallersPostgreSQL(),
    "caller's sqlite": CallersSQLite(),
}


def named(backend: str) -> Dialect | None:
    """The dialect of a URL's backend, such as `mysql`; None if it isn't supported."""
    return _DIALECTS.get(backend)


def of_sqlalchemy(dialect: sa.Dialect) -> Dialect:
    """The dialect for one of SQLAlchemy's. It has another one for statements that are only shown: SQLite is as good."""
    return _DIALECTS.get(dialect.name, _DIALECTS["sqlite"])


def of(tx: Connection) -> Dialect:
    """The dialect of the database that a transaction runs on."""
    return _DIALECTS[tx.dialect.name]


def of_callers(backend: str) -> str:
    """The name that finds the dialect for transactions of callers, which know no other than this backend."""
    return f"caller's {backend}"


def of_error(error: BaseException) -> Dialect | None:
    """The dialect whose driver has raised the error, as SQLAlchemy passes it on; None if no driver has."""
    cause = getattr(error, "orig", None)
    return next((dialect for dialect in _DIALECTS.values() if isinstance(cause, dialect.driver_error)), None)
