"""Commit marks: whether a transaction was committed, although the answer to its COMMIT was lost.

A connection can break after the server has received a COMMIT. Then only the database knows the outcome. So each
transaction that writes also writes a mark, in the packet of its COMMIT: `commit_marks` has one row for each connection,
its *writer*, with the number of the writer's last committed transaction. When the answer is lost, `settle` reads the
row in another connection. If the transaction was committed, its result counts as if the answer had arrived; otherwise
it runs again. So a caller never notices, whichever the work, and no work is done twice.

What could go wrong, and why it can't:

*The transaction is still in progress* when its mark is looked for, and commits later. If it has written its mark,
`settle` waits for that row. If not, `settle` bars the number, and a transaction that writes a barred number fails
before its COMMIT: the mark becomes NULL, which the column doesn't accept.

*The commit is lost again*, in a crash or by a failover to a server that lags behind. It has the same fate as its mark.
`settle` writes the row in any case, so its own commit makes that of the transaction durable, and in a cluster
certification orders the two.

*The answer to `settle` is lost.* It can be repeated.

The method is that of a status table, as in Gray and Reuter, "Transaction Processing" (1993), section 10.3, on testable
transactions.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from core.storage import dialects, statements, tables
from core.storage.dialects.dialect import HAS_WRITTEN, note_writes

KEEP: Final = timedelta(days=1)
"""How long the row of a writer without commits is kept. A connection is replaced much earlier."""
MOST: Final = 1000
"""Commits after which a connection becomes another writer. While PostgreSQL keeps old versions of rows for a long
snapshot, such as that of a backup, each change of a row reads all of them."""
CHUNK: Final = 500
"""Rows that one transaction removes."""

_WRITER: Final = "lastbit.writer"
"""The key in a connection's `info` for its writer and the number of its last transaction."""


class Mark(NamedTuple):
    """Identifies a transaction. The numbers of a writer are even, and ascend; a barred one becomes odd."""

    writer: int
    number: int


def new(tx: Connection) -> Mark:
    """The mark of the transaction that begins."""
    last: Mark | None = tx.info.get(_WRITER)
    if last is None or last.number >= 2 * MOST:
        mark = Mark(secrets.randbits(63), 2)
    else:
        mark = Mark(last.writer, last.number + 2)
    tx.info[_WRITER] = mark
    tx.info[HAS_WRITTEN] = False
    return mark


def watch(engine: Engine) -> None:
    """Note the writes that SQLAlchemy executes on this engine. The dialects note those that they send themselves."""

    @sa.event.listens_for(engine, "do_execute")
    @sa.event.listens_for(engine, "do_executemany")
    def executing(_: Any, statement: str, __: Any, context: Any) -> None:
        note_writes(context.root_connection, [statement])


def statement(tx: Connection, mark: Mark) -> str:
    """Writes the mark. It fails if the mark is barred."""
    number = mark.number
    return _upsert(dialects.of(tx), mark.writer, number, f"CASE WHEN commit_marks.mark < {number} THEN {number} END")


def touch(tx: Connection) -> None:
    """Write as little as a transaction can: on a server its mark, which no other connection waits for."""
    if dialects.of(tx).is_embedded:
        note(tx, 0)
    else:
        tx.info[HAS_WRITTEN] = True


def note(tx: Connection, writer: int) -> None:
    """Note the present time for a writer that is no connection."""
    statements.run(tx, _upsert(dialects.of(tx), writer, 0, "0"))


def settle(tx: Connection, mark: Mark) -> bool:
    """Whether the transaction with this mark was committed. If not, it can't be any more. The caller commits."""
    barred = mark.number + 1
    keep_or_bar = f"CASE WHEN commit_marks.mark < {mark.number} THEN {barred} ELSE commit_marks.mark END"
    _, rows = statements.run(
        tx,
        _upsert(dialects.of(tx), mark.writer, barred, keep_or_bar),
        f"SELECT mark FROM commit_marks WHERE writer = {mark.writer}",  # noqa: S608
    )
    return bool(rows[0][0] == mark.number)


def _upsert(dialect: dialects.Dialect, writer: int, number: int, otherwise: str) -> str:
    """Inserts the writer's row with this number; if there is one, sets its mark to `otherwise`."""
    return (
        f"INSERT INTO commit_marks (writer, mark, marked_at) VALUES ({writer}, {number}, {dialect.now})"  # noqa: S608
        f"{dialect.on_conflict('writer')} mark = {otherwise}, marked_at = {dialect.now}"
    )


def forget(tx: Connection) -> int:
    """Remove some of the rows of connections that have not committed for long. Returns how many."""
    columns = tables.commit_marks.c
    old = sa.and_(columns.writer >= 0, columns.marked_at < tables.clock(tx) - KEEP)
    writers = tx.scalars(sa.select(columns.writer).where(old).order_by(columns.writer).limit(CHUNK)).all()
    return tx.execute(sa.delete(tables.commit_marks).where(columns.writer.in_(writers), old)).rowcount if writers else 0
