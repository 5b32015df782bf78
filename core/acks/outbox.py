"""The outbox of counts: what transactions of callers have changed, until their batches count it (see
`core.enlisted`).

Its rows are inserted by the holders of group locks, in any number of transactions at a time. They are counted and
removed under the lock of their batch's row, or go with a deleted batch. Those that one transaction takes need no order:
counts are added up, and a seal is judged after them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.acks.delta import BatchDelta
from core.storage import statements, tables
from core.storage.statements import LIST, Answer, Pipeline, chunks, inserts

PAGE: Final = 5000
"""Maximum rows that one pass of the mover takes."""

_COLUMNS: Final = "batch_id, acked, failed, skipped, filled, seals"
_OLDEST_FIRST: Final = "id"
_counts = tables.count_outbox.c
_events = tables.event_outbox.c


@dataclass(slots=True)
class Waiting:
    """What waits for one batch."""

    delta: BatchDelta = field(default_factory=lambda: BatchDelta(is_moved=True))
    has_counts: bool = False
    seals: bool = False


def leave(table: str, deltas: Mapping[int, BatchDelta]) -> list[str]:
    """INSERTs of a row for each batch. `table` is the outbox's name."""
    return inserts(
        table,
        _COLUMNS,
        [
            f"({batch},{delta.acked},{delta.failed},{delta.skipped},{delta.filled},0)"
            for batch, delta in sorted(deltas.items())
        ],
    )


def leave_seal(table: str, batch: int) -> list[str]:
    """INSERTs of the wish to seal the batch."""
    return inserts(table, _COLUMNS, [f"({batch},0,0,0,0,1)"])


def ask(pipeline: Pipeline, batches: Collection[int], *, seals: bool = True) -> Answer:
    """Let the next round trip read what waits for these batches, whose rows are locked by then: at most a page, the
    oldest rows of a batch first, so an item's failure comes no later than its redrive."""
    condition = f"batch_id IN ({','.join(map(str, sorted(batches)))}){'' if seals else ' AND seals = 0'}"
    return pipeline.query(
        f"SELECT id, {_COLUMNS} FROM count_outbox WHERE {condition} ORDER BY {_OLDEST_FIRST} LIMIT {PAGE}"  # noqa: S608
    )


def take(pipeline: Pipeline, answer: Answer) -> dict[int, Waiting]:
    """Let the next round trip remove the rows, and return what they have."""
    waiting: dict[int, Waiting] = {}
    rows = answer.rows()
    for _, batch, acked, failed, skipped_count, filled, seals in rows:
        entry = waiting.setdefault(batch, Waiting())
        entry.seals |= bool(seals)
        entry.has_counts |= not seals
        entry.delta.add(BatchDelta(acked, failed, skipped_count, filled))
    pipeline.later(*_removals([row[0] for row in rows]))
    return waiting


def _removals(ids: Sequence[int]) -> list[str]:
    # By id: rows with lower ids may be committed later.
    return [
        f"DELETE FROM count_outbox WHERE id IN ({','.join(map(str, part))})"  # noqa: S608
        for part in chunks(sorted(ids), LIST)
    ]


def among(tx: Connection, batches: Collection[int]) -> list[int]:
    """Those of the batches for which something waits, ascending. It locks nothing."""
    ids = ",".join(map(str, sorted(batches)))
    [rows] = statements.finish(
        tx,
        f"SELECT batch_id FROM count_outbox WHERE batch_id IN ({ids}) "  # noqa: S608
        f"UNION SELECT batch_id FROM event_outbox WHERE batch_id IN ({ids})",
    )
    return sorted(batch for (batch,) in rows)


def batches(tx: Connection, after: int, limit: int) -> list[int]:
    """The next batches above `after` for which something waits, ascending."""
    batch_ids: list[int] = []
    while len(batch_ids) < limit:
        # The minimum of a range of an index, however many rows a batch has in it.
        queries = [
            sa.select(sa.func.min(column)).where(column > after) for column in (_counts.batch_id, _events.batch_id)
        ]
        lowest = [batch for query in queries if (batch := tx.scalar(query)) is not None]
        if not lowest:
            break
        after = min(lowest)
        batch_ids.append(after)
    return batch_ids
