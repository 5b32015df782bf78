"""Galera, a cluster of servers that all accept writes: session settings, and the certification of locked rows.

On one server, `SELECT … FOR UPDATE` keeps a row from all other transactions until the commit. In a cluster, a lock
holds only on its own node. Conflicting writes on other nodes are detected at the commit, by certification: of two
transactions that *wrote* the same row, the later one is rolled back on all nodes, with a deadlock error. Rows that were
locked but not written are not certified. When a decision depends on such a row, `guard` makes Galera certify it
(decision 0013 examines all transactions).

Each node applies the others' commits with a short delay. So before the first statement of a transaction, a session
waits until its node has applied all earlier commits (`wsrep_sync_wait`). Otherwise the ids of a recent extend could be
unknown on another node. Later statements of the transaction don't wait, so they may read old data. A transaction whose
decision depends on such data must write the row it read, or guard it.

A commit of another node can roll a transaction back between two of its statements. If they are in one packet, the
server reports the error and executes the rest of the packet nevertheless, as a new transaction. With a COMMIT at its
end, half of an ack was committed (seen with MariaDB 10.11). So a node gets each statement in a packet of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

SYNC_WAIT: Final = 7
"""Wait before SELECT and BEGIN (1), UPDATE and DELETE (2), INSERT and REPLACE (4): all statements that can begin a
transaction."""
_MEMBER: Final = "lastbit.cluster"
"""The key in a connection's `info`. The value is whether its server is a node of a cluster."""


def prepare(driver: Any, info: dict[str, Any]) -> None:
    """Check whether a new connection leads to a node, and if so set up its session."""
    with contextlib.closing(driver.cursor()) as cursor:
        cursor.execute("SHOW GLOBAL VARIABLES LIKE 'wsrep_on'")
        info[_MEMBER] = any(value == "ON" for _, value in cursor.fetchall())
        if info[_MEMBER]:
            cursor.execute(f"SET SESSION wsrep_sync_wait = {SYNC_WAIT}")


def is_node(tx: Connection) -> bool:
    """Whether the connection leads to a node of a cluster."""
    return bool(tx.info.get(_MEMBER))


def guard(tx: Connection, column: sa.Column[int], keys: Sequence[tuple[str | int, ...]]) -> None:
    """Make Galera certify locked rows as if they were written, without changing them. Does nothing on a single server,
    where the lock is enough. `keys` are the rows' primary keys."""
    if not is_node(tx):
        return
    names = column.table.primary_key.columns
    rows = [sa.and_(*(name == value for name, value in zip(names, key, strict=True))) for key in keys]
    # An UPDATE without a change isn't in the write set, so the value is increased and decreased again.
    for step in (1, -1):
        tx.execute(sa.update(column.table).where(sa.or_(*rows)).values({column.name: column + step}))
