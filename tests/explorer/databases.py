"""Differences between databases for the explorer: which sessions wait for a lock, and how to write and read a scene.

To add a database, add a class here: the search needs only `waiting`, `may_run` and `execute`.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol

import pymysql
from pymysql.constants import CLIENT

from core.storage.database import Database
from tests.explorer.accesses import NEW_IDS
from tests.explorer.sessions import Session, Stop
from tests.support import templates, waits
from tests.support.postgresql import PostgreSQL
from tests.support.servers import MariaDB

WAITED: Final = "0.004 s"
"""A session that has waited this long for a lock has searched for a deadlock: of the sessions of a deadlock, the one
that begins to wait last finds it and is rolled back."""
EVERY_VACUUM: Final = 500
"""Schedules after which PostgreSQL removes old versions of rows."""
_BYTES: Final = re.compile(r"\bx'([0-9a-f]*)'")

Rows = list[tuple[Any, ...]]

MANY: Final = 1_000_000
"""Rows that the optimizer assumes in each table."""


class Explored(Protocol):
    """A database that the explorer owns."""

    url: str

    def waiting(self, sessions: Collection[Session]) -> set[Session]:
        """The sessions that wait for a lock now."""

    def may_run(self, session: Session | Stop, other_sessions: Collection[Session | Stop]) -> bool:
        """Whether the session's next statement can start while the others are stopped."""

    def execute(self, texts: Sequence[str]) -> list[Rows]:
        """Execute statements and commit; return the rows of each."""

    def freeze(self, *, is_patient: bool) -> None:
        """Called once a scene is written: from here on the server does nothing by itself. `is_patient`: it first
        finishes what it does in the background."""

    def close(self) -> None: ...


class OnMariaDB:
    """A database on a MariaDB server. InnoDB's monitor shows at once which transactions wait for a lock;
    information_schema caches its answer for 0.1 s."""

    def __init__(self, server: MariaDB) -> None:
        self._server = server
        self.url = server.new_database()
        with Database(self.url) as database:
            templates.migrate(database)
            url = database.url
        self._connection, self._watcher = (
            pymysql.connect(
                host=url.host,
                port=url.port or 3306,
                user=url.username,
                database=url.database,
                autocommit=True,
                ssl_disabled=True,
                client_flag=CLIENT.MULTI_STATEMENTS,
            )
            for _ in range(2)
        )
        for table, first in NEW_IDS.items():
            self.execute([f"ALTER TABLE {table} AUTO_INCREMENT = {first + 1}"])
        self._pretend_many_rows()

    def _pretend_many_rows(self) -> None:
        """Make the optimizer choose indexes as in a large database, and the same ones in each schedule: with few rows
        it may scan a table, and so lock rows that a statement doesn't name. The server runs with
        `innodb_stats_auto_recalc` off."""
        own_tables = "database_name = DATABASE()"
        statistics = (
            "SELECT database_name, table_name, index_name, MAX(stat_name) AS last FROM mysql.innodb_index_stats"
        )
        self.execute(
            [
                f"UPDATE mysql.innodb_table_stats SET n_rows = {MANY}, clustered_index_size = {MANY // 100},"
                f" sum_of_other_index_sizes = {MANY // 100} WHERE {own_tables}",
                f"UPDATE mysql.innodb_index_stats SET stat_value = {MANY // 100} WHERE {own_tables}"
                " AND stat_name IN ('size', 'n_leaf_pages')",
                f"UPDATE mysql.innodb_index_stats AS stats JOIN ({statistics} WHERE stat_name LIKE 'n\\_diff%'"
                " GROUP BY 1, 2, 3) AS longest USING (database_name, table_name, index_name)"
                f" SET stat_value = POW({MANY}, RIGHT(stat_name, 2) / RIGHT(last, 2))"
                f" WHERE {own_tables} AND stat_name LIKE 'n\\_diff%'",
                "FLUSH TABLES",
            ]
        )

    def waiting(self, sessions: Collection[Session]) -> set[Session]:
        ((row,),) = self.execute(["SHOW ENGINE INNODB STATUS"])
        text = row[2].partition("LIST OF TRANSACTIONS")[2]
        ids = {
            int(match[1])
            for part in text.split("---TRANSACTION ")
            if "\nLOCK WAIT " in part and (match := re.search(r"MariaDB thread id (\d+)", part))
        }
        return {session for session in sessions if session.thread_id in ids}

    def may_run(self, session: Session | Stop, other_sessions: Collection[Session | Stop]) -> bool:
        return True

    def execute(self, texts: Sequence[str]) -> list[Rows]:
        results: list[Rows] = []
        with self._connection.cursor() as cursor:
            cursor.execute(";".join(texts))
            results.append(list(cursor.fetchall()))
            while cursor.nextset():
                results.append(list(cursor.fetchall()))
        return results

    def freeze(self, *, is_patient: bool) -> None:
        """Stop the purge threads from removing rows deleted from now on: a lock wait ends when its row is removed. On a
        busy machine they may not have removed all rows of the last scene yet."""
        with self._watcher.cursor() as cursor:
            if is_patient:
                cursor.execute("COMMIT")
                cursor.execute("SET GLOBAL innodb_max_purge_lag_wait = 0")
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")

    def close(self) -> None:
        self._watcher.close()
        self._connection.close()
        self._server.drop_database(self.url)


class OnOceanBase(OnMariaDB):
    """A database on a seekdb server, whose view shows at once which sessions wait for a row. Of the sessions of a
    deadlock, the first whose lock wait ends is rolled back."""

    def _pretend_many_rows(self) -> None:
        """Its statements lock the rows that they name, whatever the plan."""

    def waiting(self, sessions: Collection[Session]) -> set[Session]:
        ((*rows,),) = self.execute([waits.ON_OCEANBASE])
        ids = {id for (id,) in rows}
        return {session for session in sessions if session.thread_id in ids}

    def freeze(self, *, is_patient: bool) -> None:
        """Old versions of rows have no locks."""


class OnPostgreSQL:
    """A database on a PostgreSQL server, which shows at once which sessions wait for a lock."""

    def __init__(self, server: PostgreSQL) -> None:
        self._server = server
        self.url = server.new_database()
        with Database(self.url) as database:
            templates.migrate(database)
        self._connection = server.connect(self.url.rpartition("/")[2])
        for table, first in NEW_IDS.items():
            self.execute([f"ALTER TABLE {table} ALTER COLUMN id RESTART WITH {first + 1}"])
        self._scenes = 0

    def waiting(self, sessions: Collection[Session]) -> set[Session]:
        ((rows),) = self.execute(
            [f"SELECT pid FROM pg_locks WHERE NOT granted AND clock_timestamp() > waitstart + interval '{WAITED}'"]
        )
        ids = {id for (id,) in rows}
        return {session for session in sessions if session.thread_id in ids}

    def may_run(self, session: Session | Stop, other_sessions: Collection[Session | Stop]) -> bool:
        return True

    def execute(self, texts: Sequence[str]) -> list[Rows]:
        results: list[Rows] = []
        text = _BYTES.sub(r"'\\x\1'::bytea", ";".join(texts))
        with self._connection.cursor() as cursor:
            cursor.execute(text.encode())
            results.append(cursor.fetchall() if cursor.description else [])
            while cursor.nextset():
                results.append(cursor.fetchall() if cursor.description else [])
        return results

    def freeze(self, *, is_patient: bool) -> None:
        """The server runs without autovacuum."""
        self._scenes += 1
        if self._scenes % EVERY_VACUUM == 0:
            self._connection.execute("VACUUM")

    def close(self) -> None:
        self._connection.close()
        self._server.drop_database(self.url)


class OnSQLite:
    """A database file. One session writes at a time; the others read, or wait to start."""

    def __init__(self, url: str) -> None:
        self.url = url
        with Database(url) as database:
            templates.migrate(database)
            path = database.url.database
        assert path is not None
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for table, first in NEW_IDS.items():
            self.execute([f"INSERT INTO sqlite_sequence (name, seq) VALUES ('{table}', {first})"])

    def waiting(self, sessions: Collection[Session]) -> set[Session]:
        return set()

    def may_run(self, session: Session | Stop, other_sessions: Collection[Session | Stop]) -> bool:
        return session.next != "BEGIN IMMEDIATE" or not any(other.writing for other in other_sessions)

    def execute(self, texts: Sequence[str]) -> list[Rows]:
        self._connection.execute("BEGIN IMMEDIATE")
        results = [self._connection.execute(text).fetchall() for text in texts]
        self._connection.execute("COMMIT")
        return results

    def freeze(self, *, is_patient: bool) -> None:
        """SQLite has no threads of its own."""

    def close(self) -> None:
        self._connection.close()
