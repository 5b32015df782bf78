"""Galera: a cluster of servers, each of which takes writes. What its sessions need, and how a row guards there.

On one server a row that is locked (`SELECT … FOR UPDATE`) is nobody else's until the commit. In a cluster a lock holds
on its own node alone. What the others have written meanwhile is found at the commit, by certification: of two
transactions that *wrote* the same row the later one is rolled back, with the error of a deadlock, everywhere. A row
that was locked and not written plays no part in that. Where such a row is what a decision rests on, it is a guard, and
`guard` has it certified (decision 0013 goes through all transactions).

Each node applies by itself what the others have committed, a little later. So a session waits, before the first
statement of a transaction, until its node has applied what was committed anywhere before (`wsrep_sync_wait`): or a
fresh extend's ids would be unknown on another node. Within a transaction nothing waits; what is read there may be old,
and whoever decides by it writes the row that he read, or has it guarded.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import pymysql
import sqlalchemy as sa
from sqlalchemy.engine import Connection

SYNC_WAIT: Final = 7
"""Before SELECT and BEGIN (1), UPDATE and DELETE (2), INSERT and REPLACE (4): whatever a transaction begins with."""
_MEMBER: Final = "lastbit.cluster"
"""In a connection's `info`: its server is a node of a cluster."""


def prepare(driver: Any, info: dict[str, Any]) -> None:
    """A new connection of the driver's: ask whether the server is a node, and set up the session for it."""
    with contextlib.closing(driver.cursor()) as cursor:
        cursor.execute("SHOW GLOBAL VARIABLES LIKE 'wsrep_on'")
        info[_MEMBER] = any(value == "ON" for _, value in cursor.fetchall())
        if info[_MEMBER]:
            cursor.execute(f"SET SESSION wsrep_sync_wait = {SYNC_WAIT}")


def is_node(tx: Connection) -> bool:
    """Whether the connection leads to a node of a cluster."""
    return bool(tx.info.get(_MEMBER))


def is_apart(tx: Connection) -> bool:
    """Whether it leads to a node that takes no part in its cluster now. Such a node says that a wait for the others
    has ended in vain, by the number of a lock wait."""
    if not is_node(tx):
        return False
    driver = tx.connection.dbapi_connection
    assert driver is not None
    try:
        with contextlib.closing(driver.cursor()) as cursor:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'wsrep_ready'")
            return any(value != "ON" for _, value in cursor.fetchall())
    except pymysql.MySQLError:
        return True


def guard(tx: Connection, column: sa.Column[int], *row: sa.ColumnElement[bool]) -> None:
    """Have a row that is locked certified as if it were written, and leave it as it is. On one server its lock is
    enough, and nothing is done."""
    if not is_node(tx):
        return
    # Values that stay the same are not written, so: up, and down again. Both are in the transaction's write set.
    for step in (1, -1):
        tx.execute(sa.update(column.table).where(*row).values({column.name: column + step}))
