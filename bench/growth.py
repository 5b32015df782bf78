"""Whether calls read more rows in a database that has grown: from a thousand batches to a million, with ten events and
a delivered webhook for each, on MariaDB and PostgreSQL. A third of the batches is open.

The figure is the number of rows and index entries that the server reads for one call, the median of five, while nothing
else happens. Its exponent compares the largest database with the one of ten thousand batches: 0 if the call reads as
much, 1 if it reads ten times as much in a database that is ten times as large. The goal is 0.1.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Final

import sqlalchemy as sa

from bench import measure
from bench.measure import Scale
from core import janitor
from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.expiry import Policy
from core.batches.lifecycle import Verb
from core.batches.search import Filter
from core.commits.combiner import Inline
from core.service import Service
from core.storage import schema
from core.storage.database import Database
from core.webhooks import deliveries
from tests.support.plans import analyze
from tests.support.postgresql import PostgreSQL
from tests.support.servers import MariaDB

EVENTS: Final = 10
"""For each batch."""
CALLS: Final = 5
GOAL: Final = 0.1
FIRST: Final = 10**4
"""The batches with which the exponent begins: a filtered page of events examines at most 20,000, which a smaller feed
doesn't have."""
GROUP: Final = 64
ITEMS: Final = 10**4
"""Of the batch whose items are acked."""
FILLED: Final = ("batches", "item_groups", "feed", "deliveries")


class Grown:
    """A database with a number of batches, and a service on it."""

    def __init__(self, database: Database, batches: int) -> None:
        self.database = database
        self.is_postgresql = database.url.get_backend_name() == "postgresql"
        schema.migrate(database)
        # Not by the database's own connections: a million rows take longer than a statement of the service may.
        engine = sa.create_engine(database.url)
        with engine.begin() as tx:
            for statement in self._fill(batches):
                tx.exec_driver_sql(statement.replace("%", "%%"))
        engine.dispose()
        for table in FILLED:
            analyze(database, table)
        self.service = Service(database, combiner=Inline)
        self.batch = self.service.batches.open(Opening(group_size=GROUP, items=ITEMS)).batch.id
        self._nothing = statistics.median(self._read_by(lambda: None) for _ in range(CALLS))

    def _numbers(self, last: int) -> str:
        return f"generate_series(1, {last}) AS numbers (seq)" if self.is_postgresql else f"seq_1_to_{last}"

    def _fill(self, batches: int) -> Iterator[str]:
        now, last_event = self.database.dialect.now, EVENTS * batches
        batch_rows, each_event = self._numbers(batches), self._numbers(last_event)
        has_ended = "seq % 3 <> 0"
        labels = """CASE WHEN seq % 1000 = 1 THEN '{"team": "red"}' ELSE '{}' END"""
        bit = "decode('80', 'hex')" if self.is_postgresql else "x'80'"
        bit_count = f"CASE WHEN {has_ended} THEN 1 ELSE 0 END"
        ended_at = f"CASE WHEN {has_ended} THEN {now} END"
        yield (
            "INSERT INTO batches (id, batch_key, labels, group_size, items, acked, failed, state, full_prefix, "
            "open_count, created_at, updated_at, seen_updated_at, sealed_at, ended_at) "
            f"SELECT seq, CONCAT('order-', seq), {labels}, {GROUP}, 1, {bit_count}, 0, "
            f"CASE WHEN {has_ended} THEN 'complete' ELSE 'open' END, {bit_count}, 1, {now}, {now}, {now}, {ended_at}, "
            f"{ended_at} FROM {batch_rows}"
        )
        yield (
            "INSERT INTO item_groups (batch_id, group_no, resolved, resolved_count, failed_count) "
            f"SELECT seq, 0, {bit}, 1, 0 FROM {batch_rows} WHERE {has_ended}"
        )
        yield (
            "INSERT INTO feed (position, event_id, type, batch_id, appended_at) "
            f"SELECT seq, CONCAT('event-', seq), 'batch.opened', 1 + seq % {batches}, {now} FROM {each_event}"
        )
        yield (
            "INSERT INTO webhooks (id, url, secret, state, position, created_at) "
            f"VALUES (1, 'https://example.com/', 'secret', 'active', {last_event}, {now})"
        )
        yield (
            "INSERT INTO deliveries (webhook_id, position, state, attempts) "
            f"SELECT 1, seq, '{deliveries.Progress.DELIVERED}', 1 FROM {batch_rows}"
        )
        yield f"UPDATE feed_head SET position = {last_event}"
        yield f"UPDATE callback_cursor SET position = {last_event}"
        if self.is_postgresql:
            yield f"SELECT setval(pg_get_serial_sequence('batches', 'id'), {batches})"

    def read_by(self, call: Callable[[], object]) -> float:
        """The rows and index entries that the server reads for the call."""
        return max(statistics.median(self._read_by(call) for _ in range(CALLS)) - self._nothing, 0)

    def _read_by(self, call: Callable[[], object]) -> int:
        before = self._reads()
        call()
        return self._reads() - before

    def _reads(self) -> int:
        with self.database.connection() as tx:
            if not self.is_postgresql:
                rows = tx.exec_driver_sql("SHOW GLOBAL STATUS LIKE 'Handler_read%%'").all()
                return sum(int(count) for _, count in rows)
            # Calls come one after the other, so they used this session, which reports its counts when it next ends a
            # transaction.
            tx.exec_driver_sql("SELECT pg_stat_force_next_flush()")
            tx.commit()
            of_tables = "SELECT SUM(seq_tup_read + COALESCE(idx_tup_fetch, 0)) FROM pg_stat_user_tables"
            of_indexes = "SELECT SUM(idx_tup_read) FROM pg_stat_user_indexes"
            rows_read = tx.exec_driver_sql(f"SELECT ({of_tables}) + ({of_indexes})").scalar_one()
            return int(rows_read)


def _calls(sample: Grown) -> Mapping[str, Callable[[], object]]:
    service, database = sample.service, sample.database
    items = itertools.count()
    groups = itertools.count(ITEMS // GROUP // 2)

    def open_batch() -> int:
        return service.batches.open(Opening(key="new", items=1)).batch.id

    def ack() -> object:
        group, index = divmod(next(items), GROUP)
        return service.acks.ack(Call.of(Verb.ACK, [(sample.batch, group, index)])).result()

    def mask() -> object:
        return service.acks.ack(
            Call.of(Verb.ACK, masks=[(sample.batch, next(groups), b"\xff" * (GROUP // 8))])
        ).result()

    def claim() -> object:
        return database.write(deliveries.claim, timedelta(seconds=30), 10, {}, 10)

    to_seal = [open_batch() for _ in range(CALLS)]
    to_end = [open_batch() for _ in range(CALLS)]
    for batch in to_end:
        service.batches.seal(batch)
    sealable, endable = iter(to_seal), iter(to_end)
    head = service.feed.head()
    return {
        "open": open_batch,
        "extend": lambda: service.batches.extend(sample.batch, 1),
        "ack": ack,
        "mask": mask,
        "seal": lambda: service.batches.seal(next(sealable)),
        "the last ack": lambda: service.acks.ack(Call.of(Verb.ACK, [(next(endable), 0, 0)])).result(),
        "status": lambda: service.batches.get(sample.batch),
        "watermark": lambda: service.batches.watermark(sample.batch),
        "verify": lambda: service.batches.verify(1),
        "list": lambda: service.batches.page(Filter(), limit=100),
        "list: a key": lambda: service.batches.page(Filter(key="order-42"), limit=100),
        "list: a prefix": lambda: service.batches.page(Filter(key_prefix="order-42"), limit=100),
        "list: a label": lambda: service.batches.page(Filter(labels={"team": "red"}), limit=100),
        "list: no such label": lambda: service.batches.page(Filter(labels={"team": "blue"}), limit=100),
        "counts": lambda: service.batches.counts(Filter()),
        "page of the feed": lambda: service.feed.read(head - 1000, 100),
        "filtered page": lambda: service.feed.read(0, 100, types=["batch.cancelled"]),
        "events of a batch": lambda: service.feed.read(0, 100, batch=1),
        "claim of webhooks": claim,
        "plan of webhooks": lambda: database.write(deliveries.plan, 1),
        "pass of the janitor": lambda: janitor.run_once(database, Policy()),
    }


def _measured(server: MariaDB | PostgreSQL, sizes: list[int]) -> dict[str, dict[int, float]]:
    figures: dict[str, dict[int, float]] = {}
    for size in sizes:
        url = server.new_database()
        with Database(url) as database:
            sample = Grown(database, size)
            for name, call in _calls(sample).items():
                figures.setdefault(name, {})[size] = sample.read_by(call)
            sample.service.stop()
        server.drop_database(url)
    return figures


def exponent(figures: Mapping[int, float]) -> float:
    """Rows by size. A call that reads a row or two reads no more in a large database for one row more."""
    smallest, largest = min(max(FIRST, min(figures)), max(figures)), max(figures)
    if smallest == largest:
        return math.nan
    return math.log(max(figures[largest], 10) / max(figures[smallest], 10)) / math.log(largest / smallest)


def run(scale: Scale) -> None:
    sizes = [10**3, 10**4, 10**5, 10**6] if scale.items >= Scale.full().items else [10**3, 10**4, 2 * 10**4]
    with contextlib.ExitStack() as stack:
        unsafe = ["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=2G"]  # only reads are counted
        servers: dict[str, MariaDB | PostgreSQL] = {
            "MariaDB": stack.enter_context(measure.mariadb(unsafe)),
            "PostgreSQL": stack.enter_context(measure.postgresql()),
        }
        for name, server in servers.items():
            figures = _measured(server, sizes)
            over = [call for call, found in figures.items() if exponent(found) > GOAL]
            measure.show(
                f"growth: rows and index entries read by one call, {name} (medians of {CALLS} calls)",
                ["", *(f"{size:,} batches" for size in sizes), "exponent"],
                [
                    [call, *(f"{found[size]:,.0f}" for size in sizes), f"{exponent(found):.2f}"]
                    for call, found in figures.items()
                ],
                f"over {GOAL}: {', '.join(over) or 'none'}",
            )


if __name__ == "__main__":
    measure.alone(run)
