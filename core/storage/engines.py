"""Pooling and replacing connections, for all databases."""

from __future__ import annotations

import math
import time
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Engine, ExceptionContext
from sqlalchemy.pool import ConnectionPoolEntry

MOST_AGE: Final = 1800
"""Seconds after which a connection to a server is replaced."""
MOST_IDLE: Final = 300
"""Seconds without use after which a connection is replaced: proxies and firewalls drop idle connections, some of them
silently."""
_MADE: Final = "lastbit.made"
_USED: Final = "lastbit.used"


def pool(connections: int) -> dict[str, Any]:
    """Settings of the pool. Returned connections stay open: making one takes longer than most transactions. The most
    recently used ones are used first, so that after a peak the others become idle and are closed."""
    return {"pool_size": connections, "max_overflow": 0, "pool_timeout": 10, "pool_use_lifo": True}


def replace_old_connections(engine: Engine) -> None:
    """Replace connections that are older than `MOST_AGE` or were idle for `MOST_IDLE`. When a connection breaks, also
    replace all connections that were made before.

    SQLAlchemy can do both, but it uses the wall clock. If that clock was ahead when a connection broke, and was then
    corrected, SQLAlchemy would treat every new connection as an old one. Until the clock had caught up, each
    transaction would make a new connection.
    """
    breakage = -math.inf

    @sa.event.listens_for(engine, "connect")
    def record_creation(_: object, record: ConnectionPoolEntry) -> None:
        record.info[_MADE] = record.info[_USED] = time.monotonic()

    @sa.event.listens_for(engine, "checkin")
    def record_return(_: object, record: ConnectionPoolEntry) -> None:
        record.info[_USED] = time.monotonic()

    @sa.event.listens_for(engine, "handle_error")
    def record_breakage(context: ExceptionContext) -> None:
        nonlocal breakage
        if context.is_disconnect and context.connection is not None and not context.connection.invalidated:
            context.invalidate_pool_on_disconnect = False
            try:
                created = context.connection.info[_MADE]
            except NotImplementedError:
                return  # the first connection: SQLAlchemy asks for the server's settings before it is in the pool
            # All connections that were made before probably broke at the same time.
            if created > breakage:
                breakage = time.monotonic()

    @sa.event.listens_for(engine, "checkout")
    def check_age(_: object, record: ConnectionPoolEntry, __: object) -> None:
        created, now = record.info[_MADE], time.monotonic()
        if record.info[_USED] == created:
            return  # a new connection; SQLAlchemy raises an error if connections are refused twice in a row
        if created <= breakage or now - created > MOST_AGE or now - record.info[_USED] > MOST_IDLE:
            raise sa.exc.DisconnectionError("it may be broken")  # the pool makes a new one
