"""A producer that is its own consumer, and makes flushes wait for a group while their batch grows.

For each piece of its plan it holds the batch's first group, sends an ack of many items that needs this group and the
last one, and waits until the flush waits for the lock. Then it extends the batch and acks the newest item on several
connections, of which some belong to other processes. A flush that has read its batch before its locks now writes the
last group as it was before. `holding` waits for the same to happen by chance.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core.errors import CoreError
from core.storage import tables
from core.storage.database import Database
from lastbit import Client, errors
from lastbit.ids import ItemIds
from tests.chaos.broker import Link
from tests.chaos.plans import Plan
from tests.support import waits

CONNECTIONS = 6
"""How many connections ack the newest item at once; a service has three processes."""
PATIENCE = 1.0
"""Seconds to wait for the flush, and for one of these acks. The flush itself waits two seconds for its lock."""
_groups = tables.item_groups.c
_SESSION = {"mysql": sa.text("SELECT CONNECTION_ID()"), "postgresql": sa.text("SELECT pg_backend_pid()")}
_WAITERS = {
    "mysql": sa.text(
        "SELECT COUNT(*) FROM information_schema.innodb_lock_waits waits JOIN information_schema.innodb_trx holders "
        "ON holders.trx_id = waits.blocking_trx_id WHERE holders.trx_mysql_thread_id = :session"
    ),
    "oceanbase": sa.text("SELECT COUNT(*) FROM oceanbase.V$OB_LOCKS WHERE block = 1 AND id2 = :session"),
    "postgresql": sa.text("SELECT COUNT(*) FROM pg_locks WHERE NOT granted AND :session = ANY(pg_blocking_pids(pid))"),
}
"""How many transactions wait for a lock of this session."""


def race(connect: Callable[[], Client], link: Link, database_url: str) -> None:
    """Work until the broker stops the actor."""
    with Database(database_url) as database, ThreadPoolExecutor(CONNECTIONS + 1) as pool:
        while (plans := link.take("plans", 1)) is not None:
            for tag, plan in plans:
                try:
                    _Race(connect, database, pool).run(Plan.from_json(plan))
                except (errors.LastbitError, CoreError, DBAPIError):  # the database may be away
                    link.back([tag])
                else:
                    link.done([tag])


class _Race:
    def __init__(self, connect: Callable[[], Client], database: Database, pool: ThreadPoolExecutor) -> None:
        self._connect = connect
        self._database = database
        self._pool = pool
        self._pause = threading.Event()

    def run(self, plan: Plan) -> None:
        with self._connect() as client:
            batch = client.open(
                key=plan.key, group_size=plan.group_size, items=plan.first, idempotency_key=f"open-{plan.key}"
            )
            ids = list(batch.ids)
            client.ack(ids[:1])
            for number, count in enumerate(plan.pieces):
                ids += self._grow(client, batch.id, ids, count, f"{plan.key}-{number}")
            client.ack(ids)
            client.batch(batch.id).seal()

    def _grow(self, client: Client, batch: int, ids: Sequence[str], count: int, key: str) -> ItemIds:
        """Extend the batch while a flush waits that needs its first group and its last one."""
        with ExitStack() as stack:
            clients = [stack.enter_context(self._connect()) for _ in range(CONNECTIONS + 1)]
            holding, watching = (stack.enter_context(self._database.connection()) for _ in range(2))
            row = (_groups.batch_id == batch, _groups.group_no == 0)
            holding.execute(sa.select(_groups.group_no).where(*row).with_for_update())
            # Many ids, so that it is no little flush; the last one may have been acked before.
            acks = [self._pool.submit(clients[0].ack, ids[:-1])]
            try:
                self._see_a_waiter(watching, holding.scalar(_SESSION[holding.dialect.name]))
                new_ids = client.batch(batch).extend(count, idempotency_key=key)
                newest = [self._pool.submit(one.ack, [new_ids[-1]]) for one in clients[1:]]
                acks += newest
                wait(newest, PATIENCE, "FIRST_COMPLETED")
            finally:
                holding.rollback()
                wait(acks)
        for ack in acks:
            ack.result()
        return new_ids

    def _see_a_waiter(self, watching: Connection, session: int) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not watching.scalar(_WAITERS[waits.server(watching)], {"session": session}):
            watching.rollback()
            self._pause.wait(0.12)  # the server caches its list of lock waits for 0.1 s
