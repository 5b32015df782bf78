"""Carlyle (github.com/paradoxical-io/carlyle), Lastbit's ancestor: a batch is closed, its items are bits, and the
caller that clears the last one learns of it.

Its users run a Scala service on MySQL. This module has its schema and the statements of its ack, in Python. A row holds
64 items in a BIGINT whose bits are 1 while pending, under a random UUID; all rows exist from the start. An ack clears a
group's bits in an UPDATE, then queries whether the batch is closed, and if so whether any of its groups is not zero.

It sends these statements for one group after the other, each with its own commit: an ack of 100 random items is a
hundred commits, and after a partial failure the caller doesn't know which were done. `together` sends the same UPDATEs
in one transaction with a single query: not what its users run, but what its schema could do.

It does not know whether an item was acked before: the affected rows only show that the row's version changed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import pymysql

from bench.peer.direct import ask, connect
from tests.support.servers import MariaDB

GROUP = 64
INSERTED = 5_000
"""Rows in one INSERT."""


class Carlyle:
    def __init__(self, server: MariaDB, items: int, *, one_transaction: bool) -> None:
        self._server = server
        self._url = server.new_database()
        self._items = items
        self._together = one_transaction
        self._groups = [str(uuid.uuid4()) for _ in range(-(-items // GROUP))]
        now = _now()
        rows = [
            f"('{group}', 1, {(1 << min(items - number * GROUP, GROUP)) - 1}, {GROUP}, 0, {now}, {now})"
            for number, group in enumerate(self._groups)
        ]
        ask(
            server,
            self._url,
            "CREATE TABLE batches (batch_id BIGINT AUTO_INCREMENT PRIMARY KEY, is_closed BIT DEFAULT 0, "
            "created_at BIGINT NOT NULL, updated_at BIGINT NOT NULL)",
            f"INSERT INTO batches VALUES (1, 1, {now}, {now})",
            "CREATE TABLE batch_item_groups (id VARCHAR(255) CHARACTER SET utf8mb3 PRIMARY KEY, "
            "batch_id BIGINT NOT NULL, items BIGINT UNSIGNED NOT NULL, size BIGINT NOT NULL, "
            "version BIGINT NOT NULL DEFAULT 0, created_at BIGINT NOT NULL, updated_at BIGINT NOT NULL, "
            "FOREIGN KEY (batch_id) REFERENCES batches (batch_id), KEY batch_items_batch_id_idx (batch_id))",
            *(
                f"INSERT INTO batch_item_groups VALUES {', '.join(rows[start : start + INSERTED])}"
                for start in range(0, len(rows), INSERTED)
            ),
        )

    def writer(self) -> CarlyleWriter:
        return CarlyleWriter(connect(self._server, self._url), self._groups, one_transaction=self._together)

    def acked(self) -> int:
        pending = ask(self._server, self._url, "SELECT SUM(BIT_COUNT(items)) FROM batch_item_groups")
        return self._items - int(pending[0][0])

    def close(self) -> None: ...


class CarlyleWriter:
    def __init__(self, connection: pymysql.Connection, groups: list[str], *, one_transaction: bool) -> None:
        self._connection = connection
        self._groups = groups
        self._together = one_transaction
        connection.autocommit(not one_transaction)

    def ack(self, numbers: Sequence[int]) -> None:
        masks: dict[int, int] = {}
        for number in numbers:
            masks[number // GROUP] = masks.get(number // GROUP, 0) | 1 << number % GROUP
        for group in sorted(masks, key=self._groups.__getitem__):  # in key order, so that writers don't deadlock
            self._clear(self._groups[group], masks[group])
            if not self._together:
                self._is_empty()
        if self._together:
            self._is_empty()
            self._connection.commit()

    def _clear(self, group: str, bits: int) -> None:
        with self._connection.cursor() as cursor:
            rows = cursor.execute(
                "UPDATE batch_item_groups SET items = CAST(items AS UNSIGNED) & CAST(%s AS UNSIGNED), updated_at = %s, "
                "version = version + 1 WHERE id = %s",
                (~bits & (1 << GROUP) - 1, _now(), group),
            )
        if rows != 1:
            raise RuntimeError(f"group {group} is missing")

    def _is_empty(self) -> bool:
        with self._connection.cursor() as cursor:
            cursor.execute("SELECT is_closed FROM batches WHERE batch_id = 1")
            if cursor.fetchone() != (b"\x01",):
                return False
            cursor.execute(
                "SELECT EXISTS (SELECT 1 FROM batch_item_groups g JOIN batches b ON b.batch_id = g.batch_id "
                "WHERE b.is_closed = 1 AND g.batch_id = 1 AND g.items <> 0)"
            )
            return bool(cursor.fetchone() == (0,))

    def close(self) -> None:
        self._connection.close()


def _now() -> int:
    return int(time.time() * 1000)
