"""Opens a database for a program. Each failure is one sentence with host, database, user, the cause, and advice."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from core import errors, programs
from core.storage import faults, promises, schema
from core.storage.database import Database
from core.storage.dialects import Obstacle
from core.storage.refusals import INSTEAD


@contextlib.contextmanager
def opened(url: str, schema_name: str | None = None) -> Iterator[Database]:
    """The database at `url`. Raises `errors.Misconfigured` for errors of the database itself, and passes on others."""
    with Database(url, schema=schema_name) as database:
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
                if database.dialect.obstacle(error) is Obstacle.NO_PRIVILEGE:
                    raise errors.Misconfigured(": ".join(explain(database, error))) from error
                transaction.rollback()  # PostgreSQL refuses the COMMIT of a failed transaction
                return


def check_promises(database: Database) -> None:
    """Raise `errors.Misconfigured` if the server doesn't do what Lastbit relies on. An outage is ignored here."""
    try:
        broken = promises.broken(database, thorough=False)
    except errors.Unavailable:
        return
    except DBAPIError as error:
        if faults.classify(error) is not None:
            return
        raise errors.Misconfigured(": ".join(explain(database, error))) from error
    if broken:
        raise errors.Misconfigured(f"the database breaks what Lastbit's promises need: {'; '.join(broken)}: {INSTEAD}")


def explain(database: Database, error: DBAPIError) -> tuple[str, str]:
    """The cause, with host, database and user, and the advice."""
    if database.is_embedded:
        return _of_file(Path(database.url.database or "").absolute(), error)
    return _of_server(database, error)


def _of_server(database: Database, error: DBAPIError) -> tuple[str, str]:
    url, dialect = database.url, database.dialect
    server = f"{url.host or 'localhost'}:{url.port or dialect.default_port}"
    name, user = url.database or "", url.username or ""
    text, obstacle = dialect.text_of(error), dialect.obstacle(error)
    if obstacle is Obstacle.UNREACHABLE:
        return (
            f"no database server can be reached at {server} (database {name!r}, user {user!r}): {text}",
            "check host and port in LASTBIT_DATABASE_URL or --database-url, and that the server runs",
        )
    if obstacle is Obstacle.REFUSED:
        return (
            f"the database server at {server} refuses the user {user!r} (database {name!r})",
            "check the password in LASTBIT_DATABASE_URL or --database-url, and that the user may connect from this "
            "machine",
        )
    if obstacle is Obstacle.READ_ONLY:
        return (
            f"the server at {server} accepts no writes (database {name!r}, user {user!r}): {text}",
            "set LASTBIT_DATABASE_URL to the primary; if this server is the primary, let it accept writes again",
        )
    if obstacle is Obstacle.NO_DATABASE and database.schema is not None:
        return (
            f"the server at {server} has no database {name!r} (user {user!r})",
            f"run `{programs.command('api', 'migrate')}`, which creates it, with an account that may",
        )
    if obstacle is Obstacle.NO_DATABASE:
        return (
            f"the server at {server} has no database {name!r} (user {user!r})",
            f"create it with CREATE DATABASE {dialect.quoted(name)} {dialect.new_database}, or name another in "
            "LASTBIT_DATABASE_URL",
        )
    if obstacle is Obstacle.NO_ACCESS:
        return (
            f"the user {user!r} has no access to the database {name!r} at {server}, or it doesn't exist",
            "create it, and grant the user its privileges (docs/database.md lists them)",
        )
    if obstacle is Obstacle.NO_PRIVILEGE:
        return (
            f"the user {user!r} lacks a privilege on the database {name!r} at {server}: {text}",
            "grant it (docs/database.md lists the privileges), and run "
            f"`{programs.command('api', 'migrate')}` with the account that may change the schema",
        )
    code = dialect.code(error) or "without a code"
    return (
        f"the database {name!r} at {server} can't be used (user {user!r}): {text} (error {code})",
        "look the error up in the server's documentation and in its log",
    )


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
