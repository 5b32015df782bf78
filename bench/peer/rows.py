"""A row for each item: what most teams write first, and the right choice for a few thousand items.

Users insert a row for each item at the fan-out, and mark it when it is done. Two things make this exact, and both are
here: the UPDATE names only rows that are not done, so that a redelivery changes nothing; and in the same transaction a
counter in the batch's row moves by the number of rows that really changed. The writer that brings it to zero is the
last.

The index on (batch, done) finds pending rows; each ack must move an entry in it. Users who never query pending rows can
do without the index, so both variants are measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import pymysql

from bench.peer.direct import ask, connect
from tests.support.servers import MariaDB

INSERTED = 100_000
"""Rows in one INSERT: with all rows it would be a transaction of minutes."""


class Rows:
    def __init__(self, server: MariaDB, items: int, *, index_pending: bool) -> None:
        self._server = server
        self._url = server.new_database()
        index = ", KEY (batch, done)" if index_pending else ""
        ask(
            server,
            self._url,
            "CREATE TABLE batches (id BIGINT PRIMARY KEY, pending BIGINT NOT NULL, sealed TINYINT NOT NULL)",
            f"INSERT INTO batches VALUES (1, {items}, 1)",
            "CREATE TABLE items (batch BIGINT NOT NULL, number BIGINT NOT NULL, done TINYINT NOT NULL, "
            f"updated_at DATETIME(6) NOT NULL, PRIMARY KEY (batch, number){index})",
            *(
                f"INSERT INTO items SELECT 1, seq, 0, UTC_TIMESTAMP(6) FROM seq_{start}_to_{end - 1}"
                for start, end in ((start, min(start + INSERTED, items)) for start in range(0, items, INSERTED))
            ),
        )

    def writer(self) -> RowsWriter:
        return RowsWriter(connect(self._server, self._url))

    def acked(self) -> int:
        acked, pending = ask(
            self._server,
            self._url,
            "SELECT COUNT(*) - SUM(done = 0), (SELECT pending FROM batches) - SUM(done = 0) FROM items",
        )[0]
        if pending:
            raise RuntimeError(f"the counter of pending rows is {pending} too high")
        return int(acked)

    def close(self) -> None: ...


class RowsWriter:
    def __init__(self, connection: pymysql.Connection) -> None:
        self._connection = connection
        # A later read must see other sessions' commits, and gaps need no locks.
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def ack(self, numbers: Sequence[int]) -> None:
        number_list = ", ".join(map(str, sorted(numbers)))  # the same order everywhere, against deadlocks
        with self._connection.cursor() as cursor:
            changes = cursor.execute(
                "UPDATE items FORCE INDEX (PRIMARY) SET done = 1, updated_at = UTC_TIMESTAMP(6) "
                f"WHERE batch = 1 AND number IN ({number_list}) AND done = 0"
            )
            cursor.execute(
                "UPDATE batches SET pending = pending - %s WHERE id = 1 AND pending >= %s", (changes, changes)
            )
            cursor.execute("SELECT sealed AND pending = 0 FROM batches WHERE id = 1")
            cursor.fetchone()
        self._connection.commit()
        if changes != len(numbers):
            raise RuntimeError(f"{changes} of {len(numbers)} rows were pending")

    def close(self) -> None:
        self._connection.close()
