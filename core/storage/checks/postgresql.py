"""Checks for PostgreSQL: write access, durability, standbys, and the settings of the service's sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sqlalchemy.engine import Connection

from core.storage.checks import every
from core.storage.checks.findings import Finding, Verdict
from core.storage.database import LOCK_WAIT, Database
from core.storage.dialects.dialect import IDLE

OLDEST: Final = 15
_SETTINGS: Final = """
    server_version server_version_num server_encoding default_transaction_read_only fsync
    full_page_writes synchronous_commit synchronous_standby_names default_transaction_isolation
    TimeZone client_encoding lock_timeout standard_conforming_strings statement_timeout
    client_min_messages idle_in_transaction_session_timeout search_path max_connections
    superuser_reserved_connections reserved_connections
"""


def rules(tx: Connection, database: Database, workers: int) -> Iterator[Finding]:
    with tx.begin() as transaction:
        names = ", ".join(f"'{name}'" for name in _SETTINGS.split())
        rows = tx.exec_driver_sql(f"SELECT name, setting FROM pg_settings WHERE name IN ({names})")  # noqa: S608
        settings = {str(name): str(value) for name, value in rows}
        url = database.url
        yield Finding("database", Verdict.FINE, f"reached at {url.host}:{url.port or 5432}/{url.database}")
        yield _version(settings)
        yield _encoding(settings)
        schema_found = every.database_schema(tx)
        yield schema_found
        is_standby = bool(tx.exec_driver_sql("SELECT pg_is_in_recovery()").scalar_one())
        yield _replica(is_standby)
        yield _read_only(settings)
        if schema_found.verdict is Verdict.FINE:
            yield every.ids(tx)
            with tx.begin_nested() as savepoint:  # a refused statement aborts the transaction
                writes = every.writes(tx)
                savepoint.rollback()
            yield writes
        yield from _durability(settings)
        yield from _session(settings, database)
        limits = tx.exec_driver_sql(
            "SELECT (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user), "
            "(SELECT datconnlimit FROM pg_database WHERE datname = current_database())"
        ).one()
        yield _connections(settings, [limit for limit in limits if limit >= 0], database, workers)
        yield every.clock(tx)
        transaction.rollback()


def _version(settings: dict[str, str]) -> Finding:
    version = settings["server_version"]
    if int(settings["server_version_num"]) >= OLDEST * 10_000:
        return Finding("version", Verdict.FINE, f"PostgreSQL {version}")
    return Finding(
        "version", Verdict.UNSAFE, f"PostgreSQL {version} is older than {OLDEST}", f"upgrade to at least {OLDEST}"
    )


def _encoding(settings: dict[str, str]) -> Finding:
    encoding = settings["server_encoding"]
    if encoding == "UTF8":
        return Finding("encoding", Verdict.FINE, "the database stores any text")
    return Finding(
        "encoding",
        Verdict.BROKEN,
        f"the database's encoding is {encoding}, which can't store every text",
        "create a database with ENCODING 'UTF8' TEMPLATE template0",
    )


def _replica(is_standby: bool) -> Finding:
    if not is_standby:
        return Finding("replica", Verdict.FINE, "the server is not a standby")
    return Finding(
        "replica",
        Verdict.BROKEN,
        "the server is a standby, or recovers from a backup: its data may be old, and it accepts no writes",
        "set LASTBIT_DATABASE_URL to the primary, or promote this server if the primary is gone for good",
    )


def _read_only(settings: dict[str, str]) -> Finding:
    if settings["default_transaction_read_only"] == "off":
        return Finding("read_only", Verdict.FINE, "transactions may write")
    return Finding(
        "read_only",
        Verdict.BROKEN,
        "default_transaction_read_only is on: the server accepts no writes",
        "turn it off for the account, for the database, and in the server's configuration",
    )


def _durability(settings: dict[str, str]) -> Iterator[Finding]:
    commit, standbys = settings["synchronous_commit"], settings["synchronous_standby_names"]
    advice = "set synchronous_commit = on for the account, for the database, and in the server's configuration"
    if commit == "off":
        says = "synchronous_commit is off: acknowledged acks are lost if the server or its machine crashes"
        yield Finding("durability", Verdict.UNSAFE, says, advice)
    elif standbys and commit in ("local", "remote_write"):
        says = f"synchronous_commit is {commit}: a standby that is promoted may lack acknowledged acks"
        yield Finding("durability", Verdict.UNSAFE, says, advice)
    else:
        copies = ", and a synchronous standby has it" if standbys else ""
        yield Finding("durability", Verdict.FINE, f"the server flushes its log at each commit{copies}")
    if settings["fsync"] == "on":
        yield Finding("fsync", Verdict.FINE, "the server flushes its files")
    else:
        yield Finding(
            "fsync",
            Verdict.UNSAFE,
            "fsync is off: the database can be damaged beyond repair if the machine fails",
            "set fsync = on in the server's configuration",
        )
    if settings["full_page_writes"] == "on":
        yield Finding("full_page_writes", Verdict.FINE, "half-written pages can be restored")
    else:
        yield Finding(
            "full_page_writes",
            Verdict.UNSAFE,
            "full_page_writes is off: a page that was half written when the machine failed can't be restored",
            "turn it on, unless the file system writes 8 KiB atomically",
        )


def _session(settings: dict[str, str], database: Database) -> Iterator[Finding]:
    proxy = "something between the service and the server, such as a pooler, changes sessions: connect without it"
    isolation = settings["default_transaction_isolation"]
    if isolation == "read committed":
        yield Finding("isolation", Verdict.FINE, "the service's sessions are READ COMMITTED")
    else:
        yield Finding("isolation", Verdict.BROKEN, f"the service's session is {isolation}, not read committed", proxy)
    expected = {
        "TimeZone": "UTC",
        "client_encoding": "UTF8",
        "lock_timeout": str(LOCK_WAIT * 1000),
        "idle_in_transaction_session_timeout": str(IDLE * 1000),
        "standard_conforming_strings": "on",
        "statement_timeout": "0",
        "client_min_messages": "warning",
    }
    if database.schema is not None:
        expected["search_path"] = database.dialect.quoted(database.schema)
    wrong = [f"{name} is {settings[name]}, not {value}" for name, value in expected.items() if settings[name] != value]
    if wrong:
        yield Finding("session", Verdict.BROKEN, "the service's session has wrong settings: " + "; ".join(wrong), proxy)
    else:
        yield Finding("session", Verdict.FINE, f"UTF-8, in UTC, with a lock timeout of {LOCK_WAIT} s")


def _connections(settings: dict[str, str], limits: list[int], database: Database, workers: int) -> Finding:
    """`limits` are those of the account and of the database."""
    reserve = int(settings["superuser_reserved_connections"]) + int(settings.get("reserved_connections", "0"))
    limit, demand = int(settings["max_connections"]) - reserve, workers * database.most_connections
    if limits and min(limits) <= demand:
        return Finding(
            "connections",
            Verdict.UNSAFE,
            f"the service may use {demand} connections, but its account or database is limited to {min(limits)}",
            f"ALTER ROLE … CONNECTION LIMIT {demand + 50} or more, or -1, and ALTER DATABASE as well",
        )
    if limit > demand:
        return Finding(
            "connections", Verdict.FINE, f"{limit} connections are allowed, the service uses at most {demand}"
        )
    return Finding(
        "connections",
        Verdict.UNSAFE,
        f"the service may use {demand} connections, but the server allows it only {limit}",
        f"set max_connections = {demand + reserve + 50} or more in the server's configuration, and restart it",
    )
