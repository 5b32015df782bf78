"""Folding a whole journal outside of an ack transaction: a seal completes batches too (see `journal`)."""

from __future__ import annotations

from sqlalchemy.engine import Connection

from core.bits import group_rows, journal
from core.storage import statements


def fold(tx: Connection, batch: int, group_size: int, items: int, journal_next: int) -> int:
    """Write what the journal names to its groups, and empty it. The row of the batch, which is complete now, is locked.
    Its `journal_next` from here on: other processes find that what they hold is not the latest."""
    entries = statements.run(tx, journal.select({batch: None}))[0]
    known = journal.catch_up(tx, batch, group_size, None, journal_next, entries)
    change = journal.Change(batch, group_size, -(-items // group_size), changed=set(), acked=None, ends=True)
    texts, written = journal.write(tx, known, change)
    rows = [
        group_rows.row((batch, number), known.groups[number], min(group_size, items - number * group_size))
        for number in written
    ]
    for text in (*group_rows.upsert(tx, rows), *texts):
        statements.run(tx, text)
    return known.next
