"""MariaDB and MySQL: may they be written to, do they keep what they said, are our sessions as we ask for them?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core import errors, tables
from core.storage import faults
from core.storage.checks import every, galera
from core.storage.checks.findings import Finding, Verdict
from core.storage.database import LOCK_WAIT, Database

PACKET: Final = 16 * 2**20
"""Bytes that a server takes in one packet by default. A flush sends less than 4 MiB."""
MARIADB: Final = (10, 6)
MYSQL: Final = (8, 0)


def rules(tx: Connection, database: Database, workers: int) -> Iterator[Finding]:
    with tx.begin() as transaction:
        version = str(tx.exec_driver_sql("SELECT VERSION()").scalar_one())
        url = database.url
        yield Finding("database", Verdict.FINE, f"reached at {url.host}:{url.port or 3306}/{url.database}")
        yield _version(version)
        schema_found = every.database_schema(tx)
        yield schema_found
        rows = tx.exec_driver_sql("SHOW GLOBAL VARIABLES")
        look = {str(name).lower(): str(value) for name, value in rows if value is not None}
        yield _read_only(look)
        if schema_found.verdict is Verdict.FINE:
            yield every.writes(tx)
            yield _engines(tx)
        yield _replica(tx)
        yield from _durability(look)
        yield from _session(tx)
        yield from galera.rules(tx, look)
        yield _binary_log(look)
        yield _packet(look)
        yield _connections(look, database, workers)
        yield every.clock(tx)
        transaction.rollback()


def _numbers(version: str) -> tuple[int, ...]:
    # Some MariaDB servers prefix their version with 5.5.5-, for replication.
    match = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()


def _version(version: str) -> Finding:
    kind, oldest = ("MariaDB", MARIADB) if "mariadb" in version.lower() else ("MySQL", MYSQL)
    if _numbers(version) >= oldest:
        return Finding("version", Verdict.FINE, f"{kind} {version}")
    minimum = ".".join(map(str, oldest))
    return Finding(
        "version", Verdict.UNSAFE, f"{kind} {version} is older than {minimum}", f"upgrade to {minimum} at least"
    )


def _read_only(look: dict[str, str]) -> Finding:
    enabled = [
        name for name in ("read_only", "super_read_only", "innodb_read_only") if look.get(name, "OFF") not in _OFF
    ]
    if not enabled:
        return Finding("read_only", Verdict.FINE, "the server takes writes")
    return Finding(
        "read_only",
        Verdict.BROKEN,
        f"the server takes no writes: {', '.join(enabled)} is on",
        "name the primary in LASTBIT_DATABASE_URL; or, where this is it, SET GLOBAL read_only = 0",
    )


_OFF: Final = frozenset({"OFF", "0", ""})


def _engines(tx: Connection) -> Finding:
    names = [table.name for table in tables.metadata.sorted_tables]
    rows = tx.execute(
        sa.text(
            "SELECT table_name, engine FROM information_schema.tables "
            "WHERE table_schema = DATABASE() AND table_name IN :names AND engine <> 'InnoDB' ORDER BY table_name"
        ).bindparams(sa.bindparam("names", names, expanding=True))
    ).all()
    if not rows:
        return Finding("engine", Verdict.FINE, "each table is InnoDB's")
    engines = ", ".join(f"{name} is {engine}'s" for name, engine in rows)
    return Finding(
        "engine",
        Verdict.BROKEN,
        f"not each table has transactions: {engines}",
        "ALTER TABLE … ENGINE = InnoDB for each",
    )


def _replica(tx: Connection) -> Finding:
    for statement in ("SHOW ALL SLAVES STATUS", "SHOW REPLICA STATUS", "SHOW SLAVE STATUS"):
        try:
            rows = tx.exec_driver_sql(statement).all()
        except DBAPIError as error:
            if faults.classify(error) is errors.Fault.OUTAGE:
                raise
            continue  # another kind of server, or an account without the privilege
        if not rows:
            return Finding("replica", Verdict.FINE, "the server is nobody's replica")
        break
    else:
        # This needs no privilege, but shows only a running replica.
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
    elif look.get("wsrep_on") == "ON":
        yield Finding(
            "durability",
            Verdict.UNSAFE,
            f"innodb_flush_log_at_trx_commit is {flush}: acks that were answered are on the other nodes too, and are "
            "lost when the machines of all nodes fail within about a second, as by one power supply",
            "SET GLOBAL innodb_flush_log_at_trx_commit = 1 on each node, or know that nothing fails all of them",
        )
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
    expected = {"time_zone": "+00:00", "innodb_lock_wait_timeout": str(LOCK_WAIT)}
    wrong = [
        f"{name} is {session.get(name)}, not {value}" for name, value in expected.items() if session[name] != value
    ]
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
        f"max_allowed_packet is {size:,} bytes: large calls may be refused forever",
        "SET GLOBAL max_allowed_packet = 16777216, which is the default, and in the server's configuration",
    )


def _connections(look: dict[str, str], database: Database, workers: int) -> Finding:
    limit, needed = int(look.get("max_connections", 0)), workers * database.most_connections
    if limit > needed:
        return Finding("connections", Verdict.FINE, f"max_connections is {limit}, the service takes {needed} at most")
    return Finding(
        "connections",
        Verdict.UNSAFE,
        f"max_connections is {limit}, the service may want {needed}",
        f"SET GLOBAL max_connections = {needed + 50} or more: other replicas, jobs and people connect too",
    )
