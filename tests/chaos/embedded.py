"""A consumer without the service: it has an effect for each item that it acks, in one transaction of its own database.

The effect is a row of a table without a unique key, so a second effect would show. Some effects fail after they were
written. Whatever leaves a doubt, a lost answer to a COMMIT among them, sends the message back to the queue.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from lastbit import errors
from lastbit.embedded import Lastbit
from lastbit.models import AckResult
from tests.chaos.consumers import REASON, Messages
from tests.chaos.record import ENLISTED, Record

EFFECTS = sa.Table(
    "effects",
    sa.MetaData(),
    sa.Column("item", sa.String(40), nullable=False),
    sa.Column("attempt", sa.String(40), nullable=False),
)
"""`attempt` is the key of the recorded call."""
FAILING = 0.03
"""Share of the effects that fail after they were written."""
THREADS = 4


class EffectFailed(Exception):
    """The message is delivered again."""


def engine_of(url: str) -> sa.Engine:
    """An engine as a user makes it, with a driver of a user's."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "postgresql":
        return sa.create_engine(parsed.set(drivername="postgresql+psycopg"))
    return sa.create_engine(parsed.set(drivername="mysql+pymysql"), isolation_level="READ COMMITTED")


class Embedded:
    """`Lastbit.once` for each item to ack and `Lastbit.fail` for the others, in several threads."""

    most = 24

    def __init__(self, record: Record) -> None:
        self._record = record
        self._engine = engine_of(os.environ["LASTBIT_DATABASE_URL"])
        self._lastbit = Lastbit(self._engine)
        self._pool = ThreadPoolExecutor(THREADS)

    def resolve(self, messages: Messages) -> None:
        waiting = [(message, self._pool.submit(self._resolve, message)) for message in messages.alone()]
        for message, result in waiting:
            with message.handled(DBAPIError, EffectFailed):
                result.result()

    def _resolve(self, message: Messages) -> None:
        for item in message.to_ack:
            self._recorded("/v1/acks", item, self._once)
        for item in message.to_fail:
            self._recorded("/v1/failures", item, self._fail)

    def _once(self, item: str, attempt: str) -> AckResult:
        def effect(tx: Any) -> None:
            tx.execute(sa.insert(EFFECTS).values(item=item, attempt=attempt))
            if random.random() < FAILING:
                raise EffectFailed

        return self._lastbit.once(item, effect)

    def _fail(self, item: str, _: str) -> AckResult:
        with self._engine.begin() as tx:
            return self._lastbit.fail(tx, item, REASON)

    def _recorded(self, path: str, item: str, call: Callable[[str, str], AckResult]) -> None:
        """Record the call as the request that has the same meaning."""
        attempt = ENLISTED + uuid.uuid4().hex
        number = self._record.ask("POST", path, attempt, {"items": [item]})
        try:
            result = call(item, attempt)
        except (errors.LastbitError, DBAPIError, EffectFailed) as error:
            self._record.lost(number, repr(error))
            raise
        self._record.answered(number, 200, asdict(result))
