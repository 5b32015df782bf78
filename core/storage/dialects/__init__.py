"""All differences between databases, one file per database. `dialect` lists the differences.

No other package asks which database it uses. A new database is a file here that implements `Dialect`, and a line in
`_DIALECTS`; a new difference is a member of `Dialect`. SQLAlchemy selects a column's type by database; those types are
in `core.storage.tables`.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy.engine import Connection

from core.storage.dialects.dialect import Dialect, Rows
from core.storage.dialects.mariadb import MariaDB
from core.storage.dialects.postgresql import PostgreSQL
from core.storage.dialects.sqlite import SQLite

__all__ = ["Dialect", "Rows", "named", "of"]

_DIALECTS: Final[dict[str, Dialect]] = {
    "mysql": MariaDB(),
    "mariadb": MariaDB(),
    "postgresql": PostgreSQL(),
    "sqlite": SQLite(),
}


def named(backend: str) -> Dialect | None:
    """The dialect of a URL's backend, such as `mysql`; None if it isn't supported."""
    return _DIALECTS.get(backend)


def of(tx: Connection) -> Dialect:
    """The dialect of the database that a transaction runs on."""
    return _DIALECTS[tx.dialect.name]
