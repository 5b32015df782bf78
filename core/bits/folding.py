"""Fold the whole journal when a seal completes the batch. Acks fold a portion at a time (`core.bits.journal.write`)."""

from __future__ import annotations

from sqlalchemy.engine import Connection

from core.bits import group_rows, journal
from core.storage import statements


def fold(tx: Connection, batch: int, group_size: int, items: int, journal_next: int) -> int:
    """Write the items of the journal to their groups, and empty the journal. The batch must be complete, and its row
    locked. Returns the new `journal_next`, from which other processes detect that their cached bits are outdated."""
    entries = statements.run(tx, journal.select({batch: None}))[0]
    state = journal.catch_up(tx, batch, group_size, None, journal_next, entries)
    change = journal.Change(batch, group_size, -(-items // group_size), changed=set(), acked=None, ends=True)
    texts, numbers = journal.write(tx, state, change)
    rows = [
        group_rows.row(tx, (batch, number), state.groups[number], min(group_size, items - number * group_size))
        for number in numbers
    ]
    for text in (*group_rows.upsert(tx, rows), *texts):
        statements.run(tx, text)
    return state.next
