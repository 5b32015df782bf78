"""Is this database fit to keep promises? What an operator is told before the service is, and after.

Each rule looks at one thing and says what it found: fine, unsafe (it works until the day it doesn't: an answer could be
lost, or a reading be stale) or broken (the service can't work like this); and, where it isn't fine, what to do. Nothing
is changed, and nothing is written.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core import errors, faults, schema, tables
from core.db import LOCK_WAIT, Database


class Verdict(Enum):
    FINE = "fine"
    UNSAFE = "unsafe"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """`about` is stable, for scripts; `do` says what to do where the verdict isn't fine."""

    about: str
    verdict: Verdict
    says: str
    do: str | None = None


CLOCKS: Final = 2.0
"""Seconds that the database's clock may differ from this machine's. Nothing is counted by the latter; but it is a
witness: webhooks are signed by the database's, and receivers refuse what is minutes off."""
PACKET: Final = 16 * 2**20
"""Bytes that a server takes in one packet by default. A flush sends less than 4 MiB."""
MARIADB: Final = (10, 6)
MYSQL: Final = (8, 0)
SQLITE: Final = (3, 35)
NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "afs", "beegfs", "gpfs", "vboxsf"}
)
"""File systems on which locks, shared memory or fsync are not what SQLite needs."""
MEMORY: Final = frozenset({"tmpfs", "ramfs"})


def check(database: Database, *, workers: int = 1) -> list[Finding]:
    """All findings, in the order in which they matter. `workers` is how many processes will serve."""
    if database.is_sqlite:
        file = _sqlite_path(database.url.database or "")
        if not file.exists():
            return [
                Finding(
                    "database",
                    Verdict.BROKEN,
                    f"there is no file {file}",
                    "start the service, which makes it, or name the right one with LASTBIT_DATABASE_URL",
                )
            ]
        return _run(database, lambda tx: _sqlite(tx, file))
    return _run(database, lambda tx: _server(tx, database, workers))


def _run(database: Database, rules: Callable[[Connection], Iterator[Finding]]) -> list[Finding]:
    try:
        with database.engine.connect() as tx:
            return list(rules(tx))
    except (DBAPIError, sa.exc.TimeoutError) as error:
        if faults.classify(error) is None:
            raise
        return [
            Finding(
                "database",
                Verdict.BROKEN,
                faults.outage(error),
                "is it running, is the URL right, may this machine and this account connect?",
            )
        ]


def _schema(tx: Connection) -> Finding:
    try:
        schema.check(tx)
    except errors.Misconfigured as error:
        says, _, do = str(error).partition(": ")
        return Finding("schema", Verdict.BROKEN, says, do)
    return Finding("schema", Verdict.FINE, f"revision {schema.current(tx)}, which this release can work with")


def clock_ahead(tx: Connection) -> float:
    """Seconds that the database's clock is ahead of this machine's, at least; negative where it is behind."""
    before = datetime.now(UTC)
    theirs: datetime = tx.execute(sa.select(tables.utc_now())).scalar_one()
    after = datetime.now(UTC)
    # It was asked some time between the two: what it is off beyond that is certain.
    return (theirs - after).total_seconds() if theirs > after else min(0.0, (theirs - before).total_seconds())


def _clock(tx: Connection) -> Finding:
    ahead = clock_ahead(tx)
    if abs(ahead) <= CLOCKS:
        return Finding("clock", Verdict.FINE, "the database's agrees with this machine's")
    return Finding(
        "clock",
        Verdict.UNSAFE,
        f"the database's is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's",
        "let both follow the same time (NTP); batches expire and webhooks are signed by the database's",
    )


def _writes(tx: Connection) -> Finding:
    """Statements that change no row, and need the right to: what a read-only server or account refuses."""
    for table in tables.metadata.sorted_tables:
        column = next(iter(table.primary_key.columns))
        never = sa.false()
        statements = (
            sa.insert(table).from_select(list(table.c), sa.select(*table.c).where(never)),
            sa.update(table).where(never).values({column.name: column}),
            sa.delete(table).where(never),
        )
        for statement in statements:
            try:
                tx.execute(statement)
            except DBAPIError as error:
                verb = str(statement).split(" ", 1)[0]
                return Finding(
                    "writes",
                    Verdict.BROKEN,
                    f"{verb} on {table.name} is refused: {_words(error)}",
                    "GRANT SELECT, INSERT, UPDATE, DELETE to the account, on a server that takes writes",
                )
    return Finding("writes", Verdict.FINE, "the account may write to each table")


def _words(error: DBAPIError) -> str:
    args = getattr(error.orig, "args", ())
    return str(args[-1]) if args else type(error.orig).__name__


# MariaDB and MySQL


def _server(tx: Connection, database: Database, workers: int) -> Iterator[Finding]:
    with tx.begin() as transaction:
        version = str(tx.exec_driver_sql("SELECT VERSION()").scalar_one())
        url = database.url
        yield Finding("database", Verdict.FINE, f"reached at {url.host}:{url.port or 3306}/{url.database}")
        yield _version(version)
        schema_found = _schema(tx)
        yield schema_found
        rows = tx.exec_driver_sql("SHOW GLOBAL VARIABLES")
        look = {str(name).lower(): str(value) for name, value in rows if value is not None}
        yield _read_only(look)
        if schema_found.verdict is Verdict.FINE:
            yield _writes(tx)
            yield _engines(tx)
        yield _replica(tx)
        yield from _durability(look)
        yield from _session(tx)
        yield _binary_log(look)
        yield _packet(look)
        yield _connections(look, database, workers)
        yield _clock(tx)
        transaction.rollback()


def _numbers(version: str) -> tuple[int, ...]:
    # Replication makes some MariaDB servers say 5.5.5- first.
    found = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def _version(version: str) -> Finding:
    kind, oldest = ("MariaDB", MARIADB) if "mariadb" in version.lower() else ("MySQL", MYSQL)
    if _numbers(version) >= oldest:
        return Finding("version", Verdict.FINE, f"{kind} {version}")
    wanted = ".".join(map(str, oldest))
    return Finding(
        "version", Verdict.UNSAFE, f"{kind} {version} is older than {wanted}", f"upgrade to {wanted} at least"
    )


def _read_only(look: dict[str, str]) -> Finding:
    on = [name for name in ("read_only", "super_read_only", "innodb_read_only") if look.get(name, "OFF") not in _OFF]
    if not on:
        return Finding("read_only", Verdict.FINE, "the server takes writes")
    return Finding(
        "read_only",
        Verdict.BROKEN,
        f"the server takes no writes: {', '.join(on)} is on",
        "name the primary in LASTBIT_DATABASE_URL; or, where this is it, SET GLOBAL read_only = 0",
    )


_OFF: Final = frozenset({"OFF", "0", ""})


def _engines(tx: Connection) -> Finding:
    names = [table.name for table in tables.metadata.sorted_tables]
    found = tx.execute(
        sa.text(
            "SELECT table_name, engine FROM information_schema.tables "
            "WHERE table_schema = DATABASE() AND table_name IN :names AND engine <> 'InnoDB' ORDER BY table_name"
        ).bindparams(sa.bindparam("names", names, expanding=True))
    ).all()
    if not found:
        return Finding("engine", Verdict.FINE, "each table is InnoDB's")
    said = ", ".join(f"{name} is {engine}'s" for name, engine in found)
    return Finding(
        "engine", Verdict.BROKEN, f"not each table has transactions: {said}", "ALTER TABLE … ENGINE = InnoDB for each"
    )


def _replica(tx: Connection) -> Finding:
    for statement in ("SHOW ALL SLAVES STATUS", "SHOW REPLICA STATUS", "SHOW SLAVE STATUS"):
        try:
            rows = tx.exec_driver_sql(statement).all()
        except DBAPIError as error:
            if faults.classify(error) is faults.Fault.OUTAGE:
                raise
            continue  # another kind of server, or an account that may not ask
        if not rows:
            return Finding("replica", Verdict.FINE, "the server is nobody's replica")
        break
    else:
        # Anybody may ask this; it tells of one that runs.
        running = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Slave_running', 'Slaves_running')"
        if all(str(value) in _OFF for _, value in tx.exec_driver_sql(running)):
            return Finding(
                "replica", Verdict.FINE, "the server replicates from nobody now, as far as the account can see"
            )
    return Finding(
        "replica",
        Verdict.UNSAFE,
        "the server is a replica: what it says may be old, so an ack may be refused whose item was just issued",
        "name the primary in LASTBIT_DATABASE_URL; the service neither reads from replicas nor writes to them safely",
    )


def _durability(look: dict[str, str]) -> Iterator[Finding]:
    flush = look.get("innodb_flush_log_at_trx_commit", "")
    if flush == "1":
        yield Finding("durability", Verdict.FINE, "the log is flushed at each commit")
    else:
        yield Finding(
            "durability",
            Verdict.UNSAFE,
            f"innodb_flush_log_at_trx_commit is {flush}: acks that were answered are lost when the machine fails"
            + (", or the server" if flush == "0" else ""),
            "SET GLOBAL innodb_flush_log_at_trx_commit = 1, and in the server's configuration",
        )
    if look.get("log_bin", "OFF") in _OFF:
        yield Finding("binary_log", Verdict.FINE, "there is none")
    elif look.get("sync_binlog") == "1":
        yield Finding("binary_log", Verdict.FINE, "it is flushed at each commit")
    else:
        yield Finding(
            "binary_log",
            Verdict.UNSAFE,
            f"sync_binlog is {look.get('sync_binlog')}: after a failure of the machine replicas, and what is recovered "
            "from the binary log, miss commits that were answered",
            "SET GLOBAL sync_binlog = 1, and in the server's configuration",
        )
    if look.get("innodb_doublewrite", "ON") in _OFF:
        yield Finding(
            "doublewrite",
            Verdict.UNSAFE,
            "innodb_doublewrite is off: a page that was half written when the machine failed can't be mended",
            "leave it on, unless the file system writes 16 KiB atomically",
        )
    else:
        yield Finding("doublewrite", Verdict.FINE, "pages that were half written can be mended")
    method = look.get("innodb_flush_method", "")
    if method.lower() in ("nosync", "littlesync"):
        yield Finding(
            "flush_method",
            Verdict.UNSAFE,
            f"innodb_flush_method is {method}: nothing is flushed when the server says so",
            "take it out of the server's configuration",
        )


def _session(tx: Connection) -> Iterator[Finding]:
    rows = tx.exec_driver_sql(
        "SHOW SESSION VARIABLES WHERE Variable_name IN ('tx_isolation', 'transaction_isolation', 'sql_mode', "
        "'time_zone', 'innodb_lock_wait_timeout')"
    ).all()
    session = {str(name).lower(): str(value) for name, value in rows}
    isolation = session.get("transaction_isolation") or session.get("tx_isolation", "")
    proxy = "something between the service and the server, like a proxy, changes its sessions: connect without it"
    if isolation == "READ-COMMITTED":
        yield Finding("isolation", Verdict.FINE, "our sessions are READ COMMITTED")
    else:
        yield Finding("isolation", Verdict.BROKEN, f"our session came out as {isolation}, not READ-COMMITTED", proxy)
    wanted = {"time_zone": "+00:00", "innodb_lock_wait_timeout": str(LOCK_WAIT)}
    wrong = [f"{name} is {session.get(name)}, not {value}" for name, value in wanted.items() if session[name] != value]
    if "STRICT_ALL_TABLES" not in session["sql_mode"]:
        wrong.append("sql_mode is not strict")
    if wrong:
        yield Finding("session", Verdict.BROKEN, "our session came out otherwise: " + "; ".join(wrong), proxy)
    else:
        yield Finding("session", Verdict.FINE, f"strict, in UTC, waits {LOCK_WAIT} s for a lock")


def _binary_log(look: dict[str, str]) -> Finding:
    if look.get("log_bin", "OFF") not in _OFF and look.get("binlog_format") == "STATEMENT":
        return Finding(
            "binlog_format",
            Verdict.BROKEN,
            "binlog_format is STATEMENT, which READ COMMITTED can't be written with",
            "SET GLOBAL binlog_format = 'MIXED' or 'ROW', and in the server's configuration",
        )
    return Finding("binlog_format", Verdict.FINE, "READ COMMITTED can be written to the binary log, where there is one")


def _packet(look: dict[str, str]) -> Finding:
    size = int(look.get("max_allowed_packet", PACKET))
    if size >= PACKET:
        return Finding("packet", Verdict.FINE, f"max_allowed_packet is {size // 2**20} MiB")
    return Finding(
        "packet",
        Verdict.UNSAFE,
        f"max_allowed_packet is {size:,} bytes: large calls may be refused for ever",
        "SET GLOBAL max_allowed_packet = 16777216, which is the default, and in the server's configuration",
    )


def _connections(look: dict[str, str], database: Database, workers: int) -> Finding:
    most, wanted = int(look.get("max_connections", 0)), workers * database.most_connections
    if most > wanted:
        return Finding("connections", Verdict.FINE, f"max_connections is {most}, the service takes {wanted} at most")
    return Finding(
        "connections",
        Verdict.UNSAFE,
        f"max_connections is {most}, the service may want {wanted}",
        f"SET GLOBAL max_connections = {wanted + 50} or more: other replicas, jobs and people connect too",
    )


# SQLite


def _sqlite(tx: Connection, file: Path) -> Iterator[Finding]:
    yield Finding("database", Verdict.FINE, f"the file {file} can be read")
    number = ".".join(map(str, SQLITE))
    if sqlite3.sqlite_version_info >= SQLITE:
        yield Finding("version", Verdict.FINE, f"SQLite {sqlite3.sqlite_version}")
    else:
        said = f"SQLite {sqlite3.sqlite_version} is older than {number}"
        yield Finding("version", Verdict.BROKEN, said, f"run a Python that has SQLite {number} at least")
    schema_found = _schema(tx)
    yield schema_found
    journal = str(tx.exec_driver_sql("PRAGMA journal_mode").scalar_one())
    if journal == "wal":
        yield Finding("journal", Verdict.FINE, "WAL")
    else:
        yield Finding(
            "journal",
            Verdict.UNSAFE,
            f"journal_mode stays {journal}, not WAL: who reads keeps out who writes",
            "put the file on a local disk",
        )
    synchronous = int(tx.exec_driver_sql("PRAGMA synchronous").scalar_one())
    if synchronous >= 2:
        yield Finding("durability", Verdict.FINE, "synchronous is FULL: each commit is flushed")
    else:
        yield Finding(
            "durability",
            Verdict.UNSAFE,
            f"synchronous came out as {synchronous}: acks that were answered are lost when the machine fails",
            "run a SQLite that was not built to ignore it",
        )
    yield _file_system(file)
    tx.rollback()
    if schema_found.verdict is Verdict.FINE:
        yield _sqlite_writes(tx, file)
    yield Finding("clock", Verdict.FINE, "the database's is this machine's")


def _sqlite_writes(tx: Connection, file: Path) -> Finding:
    do = f"let the service's account write to {file} and to its folder"
    try:
        writer = tx.execution_options(lastbit_begin="IMMEDIATE")
        with writer.begin() as transaction:
            found = _writes(writer)
            transaction.rollback()
    except DBAPIError as error:
        return Finding("writes", Verdict.BROKEN, f"nothing can be written: {_words(error)}", do)
    return found if found.verdict is Verdict.FINE else Finding("writes", Verdict.BROKEN, found.says, do)


def _file_system(file: Path) -> Finding:
    try:
        kind = file_system(file.resolve(), Path("/proc/self/mountinfo").read_text())
    except OSError:
        kind = None
    if kind is None:
        return Finding("file_system", Verdict.FINE, "of a kind that can't be told; it has to be a local disk")
    if kind in NETWORK or kind.startswith("fuse."):
        return Finding(
            "file_system",
            Verdict.UNSAFE,
            f"the file is on {kind}, where locks and flushes may not hold: it can be torn, and acks lost",
            "put the file on a local disk, or use MariaDB",
        )
    if kind in MEMORY:
        return Finding(
            "file_system",
            Verdict.UNSAFE,
            f"the file is on {kind}, in memory: it is gone when the machine or the container stops",
            "put the file on a local disk",
        )
    return Finding("file_system", Verdict.FINE, f"{kind}, a local disk")


def file_system(path: Path, mounts: str) -> str | None:
    """The kind of file system that `path` is on, by the lines of /proc/self/mountinfo; None where they don't say."""
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        # Blanks and the like stand there as octal numbers.
        point = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4]))
        depth = len(point.parts)
        # Of two at one place the later one covers the earlier.
        if path.is_relative_to(point) and (best is None or depth >= best[0]):
            best = depth, right.split(" ", 1)[0]
    return best[1] if best else None


def _sqlite_path(name: str) -> Path:
    return Path(unquote(name.removeprefix("file:").partition("?")[0]) if name.startswith("file:") else name)


def as_json(found: list[Finding]) -> dict[str, Any]:
    """What scripts are told."""
    return {
        "ok": all(each.verdict is Verdict.FINE for each in found),
        "findings": [
            {"about": each.about, "verdict": each.verdict.value, "says": each.says, "do": each.do} for each in found
        ],
    }
