"""The URL of a database that a user names by a URL or by an engine of SQLAlchemy."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from lastbit import errors


def url_of(database: object) -> Any:
    """The URL of the database, with its password, for the service's own drivers. Options of an engine other than its
    URL are not taken over. Raises `InvalidArgument`."""
    sqlalchemy = import_module("sqlalchemy")
    url = getattr(database, "url", database)  # of an `Engine` or an `AsyncEngine`
    if isinstance(url, str):
        try:
            url = sqlalchemy.make_url(url)
        except (sqlalchemy.exc.ArgumentError, ValueError) as cause:
            raise _refusal("the URL can't be read") from cause
    if not isinstance(url, sqlalchemy.URL):
        raise _refusal(f"{type(database).__name__} is no database")
    return _for_own_driver(url)


def _for_own_driver(url: Any) -> Any:
    backend = url.get_backend_name()
    if backend == "sqlite":
        if not url.database or url.database == ":memory:" or "mode=memory" in str(url):
            raise _refusal("SQLite in memory would lose all data at the end, and each connection would have its own")
        if not url.database.startswith("file:"):
            # A process that is forked may change its folder before it uses the file.
            url = url.set(database=str(Path(url.database).absolute()))
        return url.set(drivername="sqlite")
    if not url.database:
        raise _refusal(f"the URL {url} names no database, perhaps as the engine was made with a creator")
    if url.drivername == "postgresql+asyncpg" and "ssl" in url.query:
        # asyncpg's name of the option; the value is the same.
        url = url.update_query_dict({"sslmode": url.query["ssl"]}).difference_update_query(["ssl"])
    return url


def _refusal(found: str) -> errors.InvalidArgument:
    return errors.InvalidArgument(
        f"{found}: expected a URL such as postgresql://user@host/app, mysql://user@host/app or "
        "sqlite:///app.db, or an engine of SQLAlchemy with such a URL"
    )
