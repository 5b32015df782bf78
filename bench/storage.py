"""The disk space of an item: Lastbit's `item_groups` and `ack_journal` in each state of a batch of 2,000,000 items,
compared with Carlyle's table (64 items a row under a random UUID) and a table with a row for each item.

It counts the 16 KB pages that are in use in the table's file, according to the file's own extent descriptors, after the
server has purged old row versions and written all pages (FLUSH TABLES … FOR EXPORT). Partly used pages count in full,
but not the three bookkeeping pages of every file, nor the empty root of a table without rows. The file itself is
larger: it grows by extents of 64 pages, later by four at a time. The batch's own row is excluded, for Lastbit and for
Carlyle. Each scenario has its own tables; bytes hardly vary, so there is one round.

HTTP does not matter here, so Lastbit's own core acks: in small calls until each group has a row, because rows are
inserted in the order in which their groups are first touched, and in large calls from then on.
"""

from __future__ import annotations

import contextlib
import random
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import measure
from bench.measure import Scale
from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.service import Service
from core.storage import schema
from core.storage.database import Database
from lastbit.ids import DEFAULT_GROUP_SIZE
from tests.support.servers import MariaDB

PAGE = 16_384
EXTENT = 64
BOOKKEEPING = 3
"""Bookkeeping pages of every file: its header with the first extent descriptors, the change buffer's bitmap, the
inodes."""
CALL = 10_000
"""Ids in a large call."""
STATEMENT = 5_000
"""Items in one UPDATE of the peers' tables."""

UNTOUCHED = "untouched"
HALF_IN_ORDER = "half, acked in order"
ALL_IN_ORDER = "complete, acked in order"
HALF_BORN_IN_ORDER = "a random half, groups first touched in order"
HALF_AT_RANDOM = "a random half, groups first touched at random"
HALF_JOURNALED = "a random half, 100 ids a call: journaled"
ALL_AT_RANDOM = "complete, acked at random"
REBUILT = "complete, acked at random, table rebuilt"
NOT_APART = "\N{EN DASH}"
"""If all rows of a table exist from the start, the order of first touches makes no difference."""


def pages_in_use(file: Path) -> int:
    """The pages in use by the extent descriptors of an InnoDB file: one page of descriptors for each 16,384 pages,
    starting with the first."""
    with file.open("rb") as content:
        first = content.read(PAGE)
        limit = struct.unpack_from(">I", first, 38 + 12)[0]  # FSP_FREE_LIMIT: pages beyond were never initialized
        pages = 0
        for start in range(0, limit, PAGE):
            content.seek(start * PAGE)
            descriptors = content.read(PAGE)
            for extent in range(min(limit - start + EXTENT - 1, PAGE) // EXTENT):
                # 40 bytes each, after the file header and the space header; two bits a page, the lower one means free.
                place = 38 + 112 + extent * 40 + 24
                bitmap = int.from_bytes(descriptors[place : place + 16], "little")
                free = (bitmap & int.from_bytes(b"\x55" * 16, "little")).bit_count()
                pages += EXTENT - free
    return pages


class Store:
    """A separate database, and the space that its tables take."""

    def __init__(self, server: MariaDB, items: int, url: str | None = None) -> None:
        self._server = server
        self.items = items
        self.url = url or server.new_database()
        self._name = self.url.rpartition("/")[2]
        self.connection = server.connect(self._name)
        # Without this, MariaDB turns a long IN list into a subquery.
        self.execute("SET SESSION in_predicate_conversion_threshold = 0")

    def execute(self, statement: str, values: Sequence[object] = ()) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return cursor.fetchall()

    def bits_per_item(self, table: str) -> float:
        self._wait_for_purge()
        if not self.execute(f"SELECT 1 FROM {table} LIMIT 1"):
            return 0.0
        self.execute(f"FLUSH TABLES {table} FOR EXPORT")
        try:
            pages = pages_in_use(self._server.folder / "data" / self._name / f"{table}.ibd")
        finally:
            self.execute("UNLOCK TABLES")
        return (pages - BOOKKEEPING) * PAGE * 8 / self.items

    def rebuild(self, table: str) -> None:
        self.execute(f"ALTER TABLE {table} FORCE")

    def _wait_for_purge(self) -> None:
        for _ in range(600):
            history = self.execute("SHOW GLOBAL STATUS LIKE 'Innodb_history_list_length'")
            if int(history[0][1]) == 0:
                return
            time.sleep(0.1)  # the purge runs in the background and is visible only in this number
        raise TimeoutError("the server did not purge old versions of rows within a minute")

    def close(self) -> None:
        self.connection.close()


@contextlib.contextmanager
def _store(server: MariaDB, items: int) -> Iterator[Store]:
    with contextlib.closing(Store(server, items)) as store:
        yield store
    server.drop_database(store.url)


def _parts(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]


class Batch:
    """A batch in Lastbit, with checked acks."""

    def __init__(self, service: Service, items: int) -> None:
        self._service = service
        self._id = service.batches.open(Opening(items=items, sealed=True)).batch.id

    def ack(self, numbers: Sequence[int], ids_a_call: int = CALL) -> None:
        for part in _parts(numbers, ids_a_call):
            items = [(self._id, *divmod(number, DEFAULT_GROUP_SIZE)) for number in part]
            applied = self._service.acks.ack(Call.of(Verb.ACK, items)).result().applied
            if applied != len(part):
                raise RuntimeError(f"{len(part)} items were sent, but {applied} applied")

    def check(self, acked: int) -> None:
        verification = self._service.batches.verify(self._id)
        if not (verification.ok and verification.acked == verification.counted_acked == acked):
            raise RuntimeError(f"{acked} items were acked, but the batch has {verification}")


def _first_of_each_group(numbers: list[int]) -> tuple[list[int], list[int]]:
    """One number of each group, ascending; and the remaining ones in their order."""
    first: dict[int, int] = {}
    for number in numbers:
        first.setdefault(number // DEFAULT_GROUP_SIZE, number)
    first_numbers = set(first.values())
    return sorted(first_numbers), [number for number in numbers if number not in first_numbers]


def lastbit(server: MariaDB, items: int) -> dict[str, float]:
    """Measure four scenarios of a batch."""
    bits_by_state: dict[str, float] = {}
    half = items // 2

    def run_scenario(scenario: Callable[[Batch, Callable[[str, int], None], Store], None]) -> None:
        with _store(server, items) as store, Database(store.url) as database:
            schema.migrate(database)
            service = Service(database)
            try:
                batch = Batch(service, items)

                def look(state: str, acked: int) -> None:
                    batch.check(acked)
                    bits_by_state[state] = store.bits_per_item("item_groups") + store.bits_per_item("ack_journal")

                scenario(batch, look, store)
            finally:
                service.stop()

    def in_order(batch: Batch, look: Callable[[str, int], None], store: Store) -> None:
        look(UNTOUCHED, 0)
        batch.ack(range(half))
        look(HALF_IN_ORDER, half)
        batch.ack(range(half, items))
        look(ALL_IN_ORDER, items)

    def born_in_order(batch: Batch, look: Callable[[str, int], None], store: Store) -> None:
        first, rest = _first_of_each_group(random.sample(range(items), half))
        batch.ack(first, 1)
        batch.ack(rest)
        look(HALF_BORN_IN_ORDER, half)

    def at_random(batch: Batch, look: Callable[[str, int], None], store: Store) -> None:
        numbers = random.sample(range(items), items)
        # After 20 acks a group on average, every group has a row.
        touching = min(half, 20 * -(-items // DEFAULT_GROUP_SIZE))
        batch.ack(numbers[:touching], 10)
        batch.ack(numbers[touching:half])
        look(HALF_AT_RANDOM, half)
        batch.ack(numbers[half:])
        look(ALL_AT_RANDOM, items)
        store.rebuild("item_groups")
        look(REBUILT, items)

    def journaled(batch: Batch, look: Callable[[str, int], None], store: Store) -> None:
        batch.ack(random.sample(range(items), half), 100)
        look(HALF_JOURNALED, half)

    for scenario in (in_order, born_in_order, journaled, at_random):
        run_scenario(scenario)
    return bits_by_state


class Carlyle:
    """Carlyle's table without the foreign key: a row of 64 items with a random UUID as its key, a bit set while
    pending."""

    table = "batch_item_groups"

    def __init__(self, store: Store) -> None:
        self._store = store
        store.execute(
            f"CREATE TABLE {self.table} (id VARCHAR(255) CHARACTER SET utf8mb3 PRIMARY KEY, batch_id BIGINT NOT NULL, "
            "items BIGINT UNSIGNED NOT NULL, size BIGINT NOT NULL, version BIGINT NOT NULL DEFAULT 0, "
            "created_at BIGINT NOT NULL, updated_at BIGINT NOT NULL, KEY (batch_id))"
        )
        now = int(time.time() * 1000)
        self._ids = [str(uuid.uuid4()) for _ in range(-(-store.items // 64))]
        rows = []
        for place, id in enumerate(self._ids):
            size = min(64, store.items - place * 64)
            rows.append((id, 1, (1 << size) - 1, size, now, now))
        columns = "(id, batch_id, items, size, created_at, updated_at)"
        with store.connection.cursor() as cursor:
            store.connection.begin()
            cursor.executemany(f"INSERT INTO {self.table} {columns} VALUES (%s, %s, %s, %s, %s, %s)", rows)
            store.connection.commit()

    def ack(self, numbers: Sequence[int]) -> None:
        """The same statements as Carlyle's, but with many groups in a transaction; a group's acks are sent as one
        mask."""
        masks: dict[int, int] = {}
        for number in numbers:
            masks[number // 64] = masks.get(number // 64, 0) | 1 << number % 64
        now = int(time.time() * 1000)
        with self._store.connection.cursor() as cursor:
            self._store.connection.begin()
            for group, mask in masks.items():
                cursor.execute(
                    f"UPDATE {self.table} SET items = items & ~CAST(%s AS UNSIGNED), updated_at = %s, "
                    "version = version + 1 WHERE id = %s",
                    (mask, now, self._ids[group]),
                )
            self._store.connection.commit()

    def acked(self) -> int:
        pending = self._store.execute(f"SELECT SUM(BIT_COUNT(items)) FROM {self.table}")
        return self._store.items - int(pending[0][0])


class Rows:
    """A row for each item, and an index of rows that are not done."""

    table = "items"

    def __init__(self, store: Store) -> None:
        self._store = store
        store.execute(
            f"CREATE TABLE {self.table} (batch BIGINT NOT NULL, number BIGINT NOT NULL, done TINYINT NOT NULL, "
            "updated_at DATETIME(6) NOT NULL, PRIMARY KEY (batch, number), KEY (batch, done))"
        )
        for start in range(0, store.items, 100_000):
            end = min(start + 100_000, store.items) - 1
            store.execute(
                f"INSERT INTO {self.table} SELECT 1, seq, 0, UTC_TIMESTAMP(6) FROM seq_{start}_to_{end}",
            )

    def ack(self, numbers: Sequence[int]) -> None:
        for part in _parts(numbers, STATEMENT):
            number_list = ", ".join(map(str, part))
            self._store.execute(
                f"UPDATE {self.table} FORCE INDEX (PRIMARY) SET done = 1, updated_at = UTC_TIMESTAMP(6) "
                f"WHERE batch = 1 AND number IN ({number_list})"
            )

    def acked(self) -> int:
        return int(self._store.execute(f"SELECT COUNT(*) FROM {self.table} WHERE done = 1")[0][0])


def peer(server: MariaDB, items: int, make: type[Carlyle] | type[Rows]) -> dict[str, float]:
    """The states that differ in a peer: all rows exist from the start, in the order of their keys."""
    bits_by_state: dict[str, float] = {}
    half = items // 2
    for order in ("in order", "at random"):
        with _store(server, items) as store:
            table = make(store)

            def look(state: str, acked: int, table: Carlyle | Rows = table, store: Store = store) -> None:
                if table.acked() != acked:
                    raise RuntimeError(f"{acked} items were acked, but {table.table} has {table.acked()}")
                bits_by_state[state] = store.bits_per_item(table.table)

            if order == "in order":
                look(UNTOUCHED, 0)
                numbers: Sequence[int] = range(items)
            else:
                numbers = random.sample(range(items), items)
            table.ack(numbers[:half])
            look(HALF_IN_ORDER if order == "in order" else HALF_AT_RANDOM, half)
            table.ack(numbers[half:])
            look(ALL_IN_ORDER if order == "in order" else ALL_AT_RANDOM, items)
            if order == "at random":
                store.rebuild(table.table)
                look(REBUILT, items)
    return bits_by_state


def run(scale: Scale) -> None:
    # The peers' tables are larger than the default pool of 128 MB; the final size on disk is the same.
    with measure.mariadb(["--innodb-buffer-pool-size=1G"]) as server:
        lastbit_bits = lastbit(server, scale.items)
        carlyle = peer(server, scale.items, Carlyle)
        rows = peer(server, scale.items, Rows)
    measure.show(
        f"storage: bits per item on disk, MariaDB, a batch of {scale.items:,} items",
        ["", "Lastbit", "in bytes", "Carlyle's table", "a row per item"],
        [
            [
                state,
                f"{bits:.2f}",
                f"{bits * scale.items / 8:,.0f}",
                *(f"{other[state]:.1f}" if state in other else NOT_APART for other in (carlyle, rows)),
            ]
            for state, bits in lastbit_bits.items()
        ],
    )


if __name__ == "__main__":
    measure.alone(run)
