"""How `once` begins a transaction, and ends it: with an engine or a session factory of SQLAlchemy, with Django, or with
a plain driver's connection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from urllib.parse import quote

from lastbit import errors

Begin = Callable[[], Any]
"""Returns a context manager that gives the connection, commits at its end, and rolls back after an error."""


def beginning(using: Any) -> Begin:
    """Raises `InvalidArgument`."""
    if hasattr(using, "begin") and not hasattr(using, "cursor") and not hasattr(using, "exec_driver_sql"):
        begin: Begin = using.begin  # of an engine or a sessionmaker
        return begin
    if hasattr(using, "cursor") and hasattr(using, "commit") and hasattr(using, "rollback"):
        return lambda: _of_driver(using)
    raise errors.InvalidArgument(
        f"`using` is an engine or a sessionmaker of SQLAlchemy, or a connection of a driver, not {type(using).__name__}"
    )


@contextlib.contextmanager
def _of_driver(connection: Any) -> Iterator[Any]:
    try:
        yield connection
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def engine_of(url: Any, connections: int) -> Any:
    """An engine for transactions of effects, as an application would make it, on Lastbit's database."""
    sqlalchemy = import_module("sqlalchemy")
    backend = url.get_backend_name()
    driver = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mysql+pymysql"}
    options: dict[str, Any] = {"pool_size": connections, "max_overflow": 0, "pool_pre_ping": True}
    if backend != "sqlite":
        return sqlalchemy.create_engine(
            url.set(drivername=driver[backend]), isolation_level="READ COMMITTED", **options
        )
    engine = sqlalchemy.create_engine(url, **options)

    def connect(connection: Any, _: object) -> None:
        connection.isolation_level = None  # `begin` executes BEGIN

    def begin(connection: Any) -> None:
        # A transaction that reads before it writes could not go on if another one has written in between.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    sqlalchemy.event.listen(engine, "connect", connect)
    sqlalchemy.event.listen(engine, "begin", begin)
    return engine


def of_django(alias: str) -> tuple[str, Begin]:
    """The URL of a database of Django's settings, and how its transactions begin. Raises `InvalidArgument`."""
    django = import_module("django.db")
    try:
        settings = django.connections[alias].settings_dict
    except Exception as error:
        raise errors.InvalidArgument(f"Django's settings have no database {alias!r}: {error}") from error
    vendor = django.connections[alias].vendor
    if vendor == "sqlite":
        url = f"sqlite:///{settings['NAME']}"
    else:
        address = quote(str(settings.get("USER") or ""), safe="")
        if settings.get("PASSWORD"):
            address += f":{quote(str(settings['PASSWORD']), safe='')}"
        host, port = str(settings.get("HOST") or ""), str(settings.get("PORT") or "")
        query = ""
        if host.startswith("/"):
            query, host = f"?{'unix_socket' if vendor == 'mysql' else 'host'}={quote(host, safe='')}", ""
        place = f"{host}:{port}" if port and host else host
        scheme = {"postgresql": "postgresql", "mysql": "mysql"}.get(vendor)
        if scheme is None:
            raise errors.InvalidArgument(f"Lastbit does not work on {vendor}")
        url = f"{scheme}://{address + '@' if address else ''}{place}/{quote(str(settings['NAME']), safe='')}{query}"

    @contextlib.contextmanager
    def begin() -> Iterator[Any]:
        with import_module("django.db.transaction").atomic(using=alias):
            yield django.connections[alias]

    return url, begin
