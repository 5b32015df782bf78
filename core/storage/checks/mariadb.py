"""Checks for MariaDB, MySQL and OceanBase: write access, durability, and the settings of the service's sessions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core import errors
from core.storage import faults, tables
from core.storage.checks import every, galera, oceanbase
from core.storage.checks.findings import Finding, Verdict
from core.storage.database import LOCK_WAIT, Database
from core.storage.dialects.dialect import IDLE
from core.storage.dialects.mariadb import READ_TIMEOUT
from core.storage.dialects.oceanbase import session as session_of_oceanbase

PACKET: Final = 16 * 2**20
"""The default maximum of bytes in one packet. A flush sends less than 4 MiB."""
MARIADB: Final = (10, 6)
MYSQL: Final = (8, 0)


def rules(tx: Connection, database: Database, workers: int) -> Iterator[Finding]:
    with tx.begin() as transaction:
        version = str(tx.exec_driver_sql("SELECT VERSION()").scalar_one())
        url = database.url
        yield Finding("database", Verdict.FINE, f"reached at {url.host}:{url.port or 3306}/{url.database}")
        rows = tx.exec_driver_sql("SHOW GLOBAL VARIABLES")
        variables = {str(name).lower(): str(value) for name, value in rows if value is not None}
        is_oceanbase = oceanbase.is_one(variables)
        yield oceanbase.version(tx) if is_oceanbase else _version(version)
        schema_found = every.database_schema(tx)
        yield schema_found
        yield _read_only(variables)
        if schema_found.verdict is Verdict.FINE:
            yield every.ids(tx)
            yield every.writes(tx)
            yield _engines(tx)
        if is_oceanbase:
            yield from oceanbase.rules(tx, variables)
        else:
            yield _replica(tx)
            yield from _durability(variables)
        yield from _session(tx)
        if not is_oceanbase:
            yield from galera.rules(tx, variables)
            yield _binary_log(variables)
        yield _packet(variables)
        of_account = int(tx.exec_driver_sql("SELECT @@SESSION.max_user_connections").scalar_one())
        yield _connections(variables, of_account, database, workers)
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
        "version", Verdict.UNSAFE, f"{kind} {version} is older than {minimum}", f"upgrade to at least {minimum}"
    )


def _read_only(variables: dict[str, str]) -> Finding:
    enabled = [
        name for name in ("read_only", "super_read_only", "innodb_read_only") if variables.get(name, "OFF") not in _OFF
    ]
    if not enabled:
        return Finding("read_only", Verdict.FINE, "the server accepts writes")
    return Finding(
        "read_only",
        Verdict.BROKEN,
        f"the server accepts no writes: {', '.join(enabled)} is on",
        "set LASTBIT_DATABASE_URL to the primary; if this server is the primary, SET GLOBAL read_only = 0",
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
        return Finding("engine", Verdict.FINE, "all tables use InnoDB")
    engines = ", ".join(f"{name} uses {engine}" for name, engine in rows)
    return Finding(
        "engine",
        Verdict.BROKEN,
        f"some tables have no transactions: {engines}",
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
            return Finding("replica", Verdict.FINE, "the server is not a replica")
        break
    else:
        # This needs no privilege, but shows only a running replica.
        running = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Slave_running', 'Slaves_running')"
        if all(str(value) in _OFF for _, value in tx.exec_driver_sql(running)):
            return Finding("replica", Verdict.FINE, "the server is not a replica, as far as the account can see")
    return Finding(
        "replica",
        Verdict.UNSAFE,
        "the server is a replica: its data may be old, so acks of items that were just issued may be rejected",
        "set LASTBIT_DATABASE_URL to the primary; neither reading from a replica nor writing to it is safe",
    )


def _durability(variables: dict[str, str]) -> Iterator[Finding]:
    flush = variables.get("innodb_flush_log_at_trx_commit", "")
    if flush == "1":
        yield Finding("durability", Verdict.FINE, "the server flushes its log at each commit")
    elif variables.get("wsrep_on") == "ON":
        yield Finding(
            "durability",
            Verdict.UNSAFE,
            f"innodb_flush_log_at_trx_commit is {flush}: acknowledged acks are on other nodes too, but are "
            "lost if the machines of all nodes fail within about a second, for example with a shared power supply",
            "SET GLOBAL innodb_flush_log_at_trx_commit = 1 on each node, or be sure that they can't fail together",
        )
    else:
        yield Finding(
            "durability",
            Verdict.UNSAFE,
            f"innodb_flush_log_at_trx_commit is {flush}: acknowledged acks are lost if the machine fails"
            + (" or the server crashes" if flush == "0" else ""),
            "SET GLOBAL innodb_flush_log_at_trx_commit = 1, and in the server's configuration",
        )
    if variables.get("wsrep_on") == "ON" and variables.get("log_bin", "OFF") in _OFF:
        yield Finding("binary_log", Verdict.FINE, "the node writes no binary log")
    elif variables.get("log_bin", "OFF") in _OFF:
        yield Finding(
            "binary_log",
            Verdict.UNSAFE,
            "the server writes no binary log, so it shows commits to other sessions before they are on disk: if it "
            "fails at that moment, a repeated ack or a reader was told of a commit that is then undone",
            "set log_bin and sync_binlog = 1 in the server's configuration",
        )
    elif variables.get("sync_binlog") == "1":
        yield Finding("binary_log", Verdict.FINE, "the server flushes its binary log at each commit")
    else:
        yield Finding(
            "binary_log",
            Verdict.UNSAFE,
            f"sync_binlog is {variables.get('sync_binlog')}: after a machine failure, replicas and recoveries from "
            "the binary log lack acknowledged commits",
            "SET GLOBAL sync_binlog = 1, and in the server's configuration",
        )
    if variables.get("innodb_doublewrite", "ON") in _OFF:
        yield Finding(
            "doublewrite",
            Verdict.UNSAFE,
            "innodb_doublewrite is off: a page that was half written when the machine failed can't be restored",
            "turn it on, unless the file system writes 16 KiB atomically",
        )
    else:
        yield Finding("doublewrite", Verdict.FINE, "half-written pages can be restored")
    method = variables.get("innodb_flush_method", "")
    if method.lower() in ("nosync", "littlesync"):
        yield Finding(
            "flush_method",
            Verdict.UNSAFE,
            f"innodb_flush_method is {method}: the server doesn't flush its files",
            "remove it from the server's configuration",
        )


def _session(tx: Connection) -> Iterator[Finding]:
    rows = tx.exec_driver_sql(
        "SHOW SESSION VARIABLES WHERE Variable_name IN ('tx_isolation', 'transaction_isolation', 'sql_mode', "
        "'time_zone', 'innodb_lock_wait_timeout', 'idle_transaction_timeout', 'unique_checks') "
        "OR Variable_name LIKE 'ob\\_%%'"
    ).all()
    session = {str(name).lower(): str(value) for name, value in rows}
    isolation = session.get("transaction_isolation") or session.get("tx_isolation", "")
    proxy = "something between the service and the server, such as a proxy, changes sessions: connect without it"
    if isolation == "READ-COMMITTED":
        yield Finding("isolation", Verdict.FINE, "the service's sessions are READ COMMITTED")
    else:
        yield Finding("isolation", Verdict.BROKEN, f"the service's session is {isolation}, not READ-COMMITTED", proxy)
    expected = {"time_zone": "+00:00", "unique_checks": "ON"}
    if oceanbase.is_one(session):
        expected.update(session_of_oceanbase(LOCK_WAIT, READ_TIMEOUT))
    else:
        expected["innodb_lock_wait_timeout"] = str(LOCK_WAIT)
    if "idle_transaction_timeout" in session:  # MySQL has none
        expected["idle_transaction_timeout"] = str(IDLE)
    wrong = [f"{name} is {session[name]}, not {value}" for name, value in expected.items() if session[name] != value]
    if "STRICT_ALL_TABLES" not in session["sql_mode"]:
        wrong.append("sql_mode is not strict")
    if wrong:
        yield Finding("session", Verdict.BROKEN, "the service's session has wrong settings: " + "; ".join(wrong), proxy)
    else:
        yield Finding("session", Verdict.FINE, f"strict, in UTC, with a lock wait timeout of {LOCK_WAIT} s")


def _binary_log(variables: dict[str, str]) -> Finding:
    if variables.get("log_bin", "OFF") not in _OFF and variables.get("binlog_format") == "STATEMENT":
        return Finding(
            "binlog_format",
            Verdict.BROKEN,
            "binlog_format is STATEMENT, which doesn't support READ COMMITTED",
            "SET GLOBAL binlog_format = 'MIXED' or 'ROW', and in the server's configuration",
        )
    return Finding("binlog_format", Verdict.FINE, "the binary log, if there is one, supports READ COMMITTED")


def _packet(variables: dict[str, str]) -> Finding:
    size = int(variables.get("max_allowed_packet", PACKET))
    if size >= PACKET:
        return Finding("packet", Verdict.FINE, f"max_allowed_packet is {size // 2**20} MiB")
    return Finding(
        "packet",
        Verdict.UNSAFE,
        f"max_allowed_packet is {size:,} bytes: the server may always refuse large calls",
        "SET GLOBAL max_allowed_packet = 16777216, which is the default, and in the server's configuration",
    )


def _connections(variables: dict[str, str], of_account: int, database: Database, workers: int) -> Finding:
    """`of_account` is the limit of the account; 0 if it has none."""
    limit, demand = int(variables.get("max_connections", 0)), workers * database.most_connections
    if 0 < of_account <= demand:
        return Finding(
            "connections",
            Verdict.UNSAFE,
            f"max_user_connections of the account is {of_account}, the service may use {demand}",
            f"ALTER USER … WITH MAX_USER_CONNECTIONS {demand + 50} or more, or 0: other replicas and jobs connect too",
        )
    if limit > demand:
        return Finding("connections", Verdict.FINE, f"max_connections is {limit}, the service uses at most {demand}")
    return Finding(
        "connections",
        Verdict.UNSAFE,
        f"max_connections is {limit}, the service may use {demand}",
        f"SET GLOBAL max_connections = {demand + 50} or more: other replicas, jobs and operators connect too",
    )
