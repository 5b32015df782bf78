"""Opens a database for a program. Each failure is one sentence with host, database, user, the cause, and advice."""

from __future__ import annotations

import contextlib
import enum
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from core import errors, programs
from core.storage import faults, schema
from core.storage.database import Database


class _Cause(enum.Enum):
    UNREACHABLE = enum.auto()
    REFUSED = enum.auto()
    NO_DATABASE = enum.auto()
    NO_ACCESS = enum.auto()
    NO_PRIVILEGE = enum.auto()


_MYSQL: Final = {
    **dict.fromkeys((2002, 2003, 2005), _Cause.UNREACHABLE),
    **dict.fromkeys((1045, 1698), _Cause.REFUSED),
    1049: _Cause.NO_DATABASE,
    1044: _Cause.NO_ACCESS,
    **dict.fromkeys((1142, 1143, 1227, 1370), _Cause.NO_PRIVILEGE),
}
_POSTGRESQL: Final = (
    (r'permission denied for database "', _Cause.NO_ACCESS),
    (r'database ".*" does not exist', _Cause.NO_DATABASE),
    (r'authentication failed|no password supplied|role ".*" does not exist|no pg_hba.conf entry', _Cause.REFUSED),
)
"""The texts of errors while connecting. The driver has no codes for them. If the server is set to another language, the
message for other errors contains its text."""


@contextlib.contextmanager
def opened(url: str) -> Iterator[Database]:
    """The database at `url`. Raises `errors.Misconfigured` for errors of the database itself, and passes on others."""
    with Database(url) as database:
        try:
            yield database
        except DBAPIError as error:
            raise errors.Misconfigured(": ".join(explain(database, error))) from error
        except errors.Unavailable as error:
            if not isinstance(error.__cause__, DBAPIError):
                raise
            raise errors.Misconfigured(": ".join(explain(database, error.__cause__))) from error


def check_privileges(database: Database) -> None:
    """Raise `errors.Misconfigured` if the account may not write to a table. Other errors are ignored here: a server
    that accepts no writes now may accept them later."""
    if database.is_embedded:
        return
    with database.connection() as connection, connection.begin() as transaction:
        for _, statement in schema.empty_writes():
            try:
                connection.execute(statement)
            except DBAPIError as error:
                if _cause(database.url, error) is _Cause.NO_PRIVILEGE:
                    raise errors.Misconfigured(": ".join(explain(database, error))) from error
                transaction.rollback()  # PostgreSQL refuses the COMMIT of a failed transaction
                return


def explain(database: Database, error: DBAPIError) -> tuple[str, str]:
    """The cause, with host, database and user, and the advice."""
    if database.is_embedded:
        return _of_file(Path(database.url.database or "").absolute(), error)
    return _of_server(database.url, error)


def _is_postgresql(url: sa.URL) -> bool:
    return url.get_backend_name() == "postgresql"


def _cause(url: sa.URL, error: DBAPIError) -> _Cause | None:
    if not _is_postgresql(url):
        return _MYSQL.get(faults.server_error(error)[0])
    state, text = getattr(error.orig, "sqlstate", None), str(error.orig)
    if state is not None:
        return _Cause.NO_PRIVILEGE if state == "42501" else None
    for pattern, cause in _POSTGRESQL:
        if re.search(pattern, text):
            return cause
    # Other errors of a server that responds, such as one that is starting, have a severity.
    return None if "FATAL" in text else _Cause.UNREACHABLE


def _text_and_code(url: sa.URL, error: DBAPIError) -> tuple[str, str | int]:
    """The server's text, in one line, and its code."""
    if not _is_postgresql(url):
        code, text = faults.server_error(error)
        return text, code
    lines = str(error.orig).removeprefix("connection failed: ").splitlines()
    return lines[0] if lines else type(error.orig).__name__, getattr(error.orig, "sqlstate", None) or "without a code"


def _of_server(url: sa.URL, error: DBAPIError) -> tuple[str, str]:
    text, code = _text_and_code(url, error)
    default = 5432 if _is_postgresql(url) else 3306
    server, name, user = f"{url.host or 'localhost'}:{url.port or default}", url.database or "", url.username or ""
    cause = _cause(url, error)
    if cause is _Cause.UNREACHABLE:
        return (
            f"no database server can be reached at {server} (database {name!r}, user {user!r}): {text}",
            "check host and port in LASTBIT_DATABASE_URL or --database-url, and that the server runs",
        )
    if cause is _Cause.REFUSED:
        return (
            f"the database server at {server} refuses the user {user!r} (database {name!r})",
            "check the password in LASTBIT_DATABASE_URL or --database-url, and that the user may connect from this "
            "machine",
        )
    if cause is _Cause.NO_DATABASE:
        options = "ENCODING 'UTF8'" if _is_postgresql(url) else "CHARACTER SET utf8mb4"
        return (
            f"the server at {server} has no database {name!r} (user {user!r})",
            f"create it with CREATE DATABASE {_quoted(url, name)} {options}, or name another in LASTBIT_DATABASE_URL",
        )
    if cause is _Cause.NO_ACCESS:
        return (
            f"the user {user!r} has no access to the database {name!r} at {server}, or it doesn't exist",
            "create it, and grant the user its privileges (docs/database.md lists them)",
        )
    if cause is _Cause.NO_PRIVILEGE:
        return (
            f"the user {user!r} lacks a privilege on the database {name!r} at {server}: {text}",
            "grant it (docs/database.md lists the privileges), and run "
            f"`{programs.command('api', 'migrate')}` with the account that may change the schema",
        )
    return (
        f"the database {name!r} at {server} can't be used (user {user!r}): {text} (error {code})",
        "look the error up in the server's documentation and in its log",
    )


def _quoted(url: sa.URL, name: str) -> str:
    """The database's name, quoted as an identifier."""
    quote = '"' if _is_postgresql(url) else "`"
    return quote + name.replace(quote, 2 * quote) + quote


def _of_file(path: Path, error: DBAPIError) -> tuple[str, str]:
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_NOTADB:
        return f"{path} is not an SQLite database", "name another file in LASTBIT_DATABASE_URL or --database-url"
    if not path.parent.is_dir():
        return f"the folder {path.parent} for the SQLite file doesn't exist", "create it, or choose another folder"
    if path.is_dir():
        return f"{path} is a folder, not an SQLite file", "choose a file in it"
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
        return (
            f"the SQLite file {path} can't be opened for writing",
            "give this process's user write access to it and to its folder",
        )
    return f"the SQLite file {path} can't be used: {error.orig}", "check the disk and the file's permissions"
