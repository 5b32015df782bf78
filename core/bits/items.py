"""Whether single items are resolved, for transactions that hold the lock of their batch's row and flip no bit.

Whoever flips a bit also changes the counts in the batch's row, under that lock and in the same transaction. So for its
holder no bit of the batch changes until the commit, and a plain read after the lock finds every bit that was committed.
Locks of groups, which come before it in the order (see `lock_order`), would add nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from core.bits import journal
from core.bits.bitfield import Columns, Group
from core.storage import dialects
from core.storage.statements import Answer, Pipeline, among
from lastbit.ids import ItemId


class Locked(Protocol):
    """What the locked row of a batch tells of its bits."""

    @property
    def group_size(self) -> int: ...
    @property
    def journal_next(self) -> int: ...


def ask(pipeline: Pipeline, items: Collection[ItemId]) -> Answer:
    """Let the next round trip read the groups of these items, after what waits in the pipeline: the statement that
    locks the rows of their batches, unless they are locked already."""
    table = dialects.of(pipeline.tx).name(pipeline.tx, "item_groups")
    return pipeline.query_keys(
        {(item.batch, item.group) for item in items},
        lambda part: (
            f"SELECT batch_id, group_no, resolved, resolved_count FROM {table} "  # noqa: S608
            f"WHERE {among(pipeline.tx, ('batch_id', 'group_no'), part)}"
        ),
    )


def resolved(
    pipeline: Pipeline, groups: Answer, batches: Mapping[int, Locked], items: Collection[ItemId]
) -> frozenset[ItemId]:
    """Those of the items that are not pending. `groups`: the answer to `ask`. Items of other batches than the
    locked `batches`, and indexes beyond a group's size, are left out."""
    numbers = {
        item: number
        for item in items
        if item.batch in batches and (number := item.number(batches[item.batch].group_size)) is not None
    }
    bits = {
        (batch, group): Group.load(Columns(blob, count), batches[batch].group_size).resolved
        for batch, group, blob, count in groups.rows()
        if batch in batches
    }
    journal_numbers: dict[int, set[int]] = {}
    for item, number in numbers.items():
        if batches[item.batch].journal_next:
            journal_numbers.setdefault(item.batch, set()).add(number)
    acked = journal.acked(pipeline.tx, journal_numbers)

    def is_resolved(item: ItemId, number: int) -> bool:
        group_bits = bits.get((item.batch, item.group))
        return number in acked.get(item.batch, ()) or (group_bits is not None and bool(group_bits[item.index]))

    return frozenset(item for item, number in numbers.items() if is_resolved(item, number))
