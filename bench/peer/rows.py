"""A row per item: what most teams write first, and for a few thousand items what they should write.

Users insert a row for each item when they fan out, and mark it done when it is. Two things make it exact, and are here:
the UPDATE names only rows that are not done, so that a redelivery changes nothing, and a counter in the batch's row
moves, in the same transaction, by the number of rows that really changed. The writer that sees it reach zero is the
last.

The index on (batch, done) finds what is still pending; each ack has to move an entry of it. A user who never
asks can do without it, so both are measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import pymysql

from bench.peer.direct import ask, connect
from tests.support.servers import MariaDB

INSERTED = 100_000
"""Rows of one INSERT: one with all would be a transaction of minutes."""


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
        # A reader that comes later must see what others committed meanwhile, and gaps need no locks.
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def ack(self, numbers: Sequence[int]) -> None:
        number_list = ", ".join(map(str, sorted(numbers)))  # in one order everywhere, so that writers don't deadlock
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
            raise RuntimeError(f"of {len(numbers)} rows {changes} were pending")

    def close(self) -> None:
        self._connection.close()
