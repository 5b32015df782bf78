"""An effect and the ack of its message in one transaction (`Lastbit.once`), beside what people write by hand: a table
of the messages that were handled, an *inbox*, with a row for each. Durable servers, and the engine of an application.

Idle: one consumer. Busy: eight threads on one batch of 16 groups. Both sides begin a transaction, insert the effect's
row, and commit; a message is new in all cases. The eight threads share one interpreter, which `once` needs for longer
than a single INSERT, so some of the busy ratio is Python's.

The last table has the bytes of a million messages, half of them handled in random order, on PostgreSQL after a
VACUUM FULL.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from bench import measure
from bench.measure import Scale
from lastbit.embedded import Lastbit

WRITERS = 8
GROUPS = 16
MESSAGES = 1_000_000
OWN = (
    *("batches", "item_groups", "ack_journal", "count_outbox", "event_outbox", "failures", "extends", "feed"),
    "commit_marks",
)
"""The tables that have something about a batch."""

_metadata = sa.MetaData()
EFFECTS = sa.Table("effects", _metadata, sa.Column("item", sa.String(40)))
INBOX = sa.Table(
    "handled_messages",
    _metadata,
    sa.Column("item", sa.String(40), primary_key=True),
    sa.Column("handled_at", sa.DateTime, server_default=sa.func.now()),
)

Handle = Callable[[str], object]


def _effect(tx: Any, item: str) -> None:
    tx.execute(sa.insert(EFFECTS).values(item=item))


def _with_inbox(engine: sa.Engine) -> Handle:
    ignored = "INSERT IGNORE INTO" if engine.dialect.name in ("mysql", "mariadb") else "INSERT INTO"
    end = "" if engine.dialect.name in ("mysql", "mariadb") else " ON CONFLICT DO NOTHING"
    statement = sa.text(f"{ignored} handled_messages (item) VALUES (:item){end}")

    def handle(item: str) -> None:
        with engine.begin() as tx:
            if tx.execute(statement, {"item": item}).rowcount:
                _effect(tx, item)

    return handle


def _with_once(lastbit: Lastbit) -> Handle:
    return lambda item: lastbit.once(item, lambda tx: _effect(tx, item))


def _idle(handle: Handle, items: Sequence[str]) -> float:
    """Median seconds of a message."""
    seconds = []
    for item in items:
        start = time.perf_counter()
        handle(item)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _busy(handle: Handle, items: Sequence[str]) -> float:
    """Seconds of a message, with eight writers."""
    order = random.Random(1).sample(items, len(items))

    def work(number: int) -> None:
        for item in order[number::WRITERS]:
            handle(item)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(WRITERS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - start) / len(items)


@contextlib.contextmanager
def _applications() -> Iterator[dict[str, tuple[sa.Engine, Lastbit]]]:
    """An engine and Lastbit on the same database, on each kind of server."""
    with measure.postgresql() as postgresql, measure.mariadb(["--log-bin", "--sync-binlog=1"]) as mariadb:
        drivers = {"PostgreSQL": (postgresql, "postgresql+psycopg"), "MariaDB": (mariadb, "mysql+pymysql")}
        sides = {}
        for title, (server, driver) in drivers.items():
            url = sa.make_url(server.new_database()).set(drivername=driver)
            engine = sa.create_engine(url, isolation_level="READ COMMITTED", pool_size=WRITERS)
            _metadata.create_all(engine)
            lastbit = Lastbit(engine)
            lastbit.migrate()
            sides[title] = engine, lastbit
        yield sides
        for engine, lastbit in sides.values():
            lastbit.close()
            engine.dispose()


def _bytes(engine: sa.Engine, lastbit: Lastbit) -> tuple[int, int]:
    """Of the inbox, and of all of Lastbit's tables and indexes."""
    client = lastbit.client()
    batch = client.open(items=MESSAGES, sealed=True)
    half = random.Random(2).sample(range(MESSAGES), MESSAGES // 2)
    client.ack([batch.ids[number] for number in half])
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("TRUNCATE handled_messages")
        text = f"INSERT INTO handled_messages (item) SELECT '{batch.id}:' || n / 8192 || ':' || mod(n, 8192) "
        connection.exec_driver_sql(
            f"{text} FROM generate_series(0, {MESSAGES - 1}) n WHERE random() < 0.5 ORDER BY random()"
        )
        connection.exec_driver_sql("VACUUM FULL")
        sizes = [
            int(connection.exec_driver_sql(f"SELECT pg_total_relation_size('{name}')").scalar_one())
            for name in ("handled_messages", *OWN)
        ]
    return sizes[0], sum(sizes[1:])


def run(scale: Scale) -> None:
    calls = max(scale.requests // 40, 64)
    rounds: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    with _applications() as applications:
        for number in range(scale.rounds + 1):
            medians: tuple[dict[str, float], dict[str, float]] = ({}, {})
            for title, (engine, lastbit) in applications.items():
                handles = _with_inbox(engine), _with_once(lastbit)
                for name, work in (("idle", _idle), ("busy", _busy)):
                    for side in (0, 1) if number % 2 else (1, 0):
                        size = -(-calls // GROUPS // 8) * 8
                        batch = lastbit.client().open(items=GROUPS * max(size, 64), group_size=max(size, 64))
                        step = len(batch.ids) / calls
                        items = [batch.ids[int(place * step)] for place in range(calls)]
                        medians[side][f"{title}, {name}"] = work(handles[side], items)
            if number:  # the first round warms up
                for side in (0, 1):
                    rounds[side].append(medians[side])
        measure.show(
            f"once: an effect for each message (medians of {scale.rounds} rounds of {calls})",
            ["", "inbox row, ms", "once, ms", "ratio"],
            measure.compared(*rounds),
            "ratio: the time with `once` divided by that with an inbox row",
        )
        inbox, own = _bytes(*applications["PostgreSQL"])
    measure.show(
        f"once: bytes on disk for {MESSAGES:,} messages, half of them handled",
        ["", "MB"],
        [["inbox", f"{inbox / 1e6:.1f}"], ["Lastbit, all its tables", f"{own / 1e6:.2f}"]],
        f"the inbox takes {inbox / own:.0f} times as much",
    )


if __name__ == "__main__":
    measure.alone(run)
