"""Recounts a batch, and compares its counts with its bits and its state with its counts.

Counts change by the number of changed bits, in the same transaction. So a disagreement is a bug or a broken row. This
module only reports it; an explicit repair corrects it (see `repair`). A recount reads one snapshot, so a batch that is
acked at the same time does not look inconsistent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from bitarray import bitarray
from bitarray.util import zeros
from sqlalchemy.engine import Connection

from core.batches import batch as batches
from core.batches.batch import Batch
from core.batches.lifecycle import LIVE, State
from core.batches.ranges import STEP
from core.bits import bitfield, journal
from core.storage import tables

ITEMS: Final = 2**18
"""Groups of a batch with reasons are read in steps of about this many items, since each item may have one."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The counts of the batch row and those of the bits. `faults` describes the disagreements."""

    items: int
    acked: int
    failed: int
    skipped: int
    pending: int
    counted_acked: int
    counted_failed: int
    counted_skipped: int
    faults: list[str]

    @property
    def ok(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """The stored content of one group, which may be inconsistent. The bitfields have the same length: at least
    group_size bits."""

    number: int
    resolved: bitarray
    failed: bitarray
    skipped: bitarray
    resolved_count: int
    failed_count: int
    skipped_count: int
    width: int | None
    """Bits of the stored blob of resolved items; None if there is no blob."""
    acked: Sequence[int]
    """Indexes in the journal."""
    reasons: Sequence[int]
    """Indexes with a row in `failures`."""
    skip_reasons: Sequence[int]
    """Indexes with a row in `skips`."""

    def union(self) -> bitarray:
        """The resolved items: those of the row and those of the journal."""
        bits = self.resolved.copy()
        bits[list(self.acked)] = True
        return bits


def verify(tx: Connection, batch_id: int) -> Verification:
    """Recount the batch. `tx` must be a snapshot. Raises `errors.BatchNotFound`."""
    batch = batches.get(tx, batch_id)
    recount = Recount(batch, waiting(tx, batch_id))
    for group in groups(tx, batch):
        recount.add(group)
    return recount.verification()


class Counts(NamedTuple):
    acked: int = 0
    failed: int = 0
    skipped: int = 0


def waiting(tx: Connection, batch_id: int) -> Counts:
    """What transactions of callers have added to the bits, and the batch doesn't count yet (see `core.enlisted`)."""
    columns = tables.count_outbox.c
    sums = (sa.func.coalesce(sa.func.sum(column), 0) for column in (columns.acked, columns.failed, columns.skipped))
    row = tx.execute(sa.select(*sums).where(columns.batch_id == batch_id)).one()
    return Counts(*map(int, row))


NOTHING: Final = Counts()


class Recount:
    """Collects the counts and faults of a batch. Add the groups in ascending order. `waiting`: what the bits have, and
    the batch doesn't count yet."""

    def __init__(self, batch: Batch, waiting: Counts = NOTHING) -> None:
        self._batch = batch
        self._waiting = waiting
        self._resolved = 0
        self._failed = 0
        self._skipped = 0
        self._full = 0
        """All groups below this one are full."""
        self._faults: list[str] = []

    def add(self, group: StoredGroup) -> bool:
        """Add a group. Returns whether the group itself has faults."""
        faults = [f"group {group.number}: {fault}" for fault in _faults(group, issued_of(self._batch, group.number))]
        self._faults += faults
        resolved = group.union().count()
        self._resolved += resolved
        self._failed += group.failed.count()
        self._skipped += group.skipped.count()
        if group.number == self._full and resolved == self._batch.group_size:
            self._full += 1
        return bool(faults)

    def verification(self) -> Verification:
        batch = self._batch
        counted = self._resolved - self._failed - self._skipped, self._failed, self._skipped
        expected = batch.acked, batch.failed, batch.skipped
        faults = self._faults.copy()
        if counted != tuple(map(sum, zip(expected, self._waiting, strict=True))):
            faults.append(
                f"the counts are {batch.acked} acked, {batch.failed} failed and {batch.skipped} skipped, but the bits "
                f"are {counted[0]}, {counted[1]} and {counted[2]}"
            )
        if batch.full_prefix > self._full:
            faults.append(
                f"full_prefix is {batch.full_prefix}, so all groups below must be full, but group {self._full} is not"
            )
        all_resolved = self._resolved == batch.items
        if batch.state is State.COMPLETE and not all_resolved:
            faults.append(f"it is complete, but {batch.items - self._resolved} items are pending")
        if batch.state is State.SEALED and all_resolved and not any(self._waiting):
            faults.append("it is sealed and nothing is pending, but it is not complete")
        if batch.passes_tolerance and batch.state in (*LIVE, State.COMPLETE) and not batch.exceeded:
            faults.append("its failures pass its tolerance, but it is not marked as exceeded")
        counts = batch.items, batch.acked, batch.failed, batch.skipped, batch.pending
        return Verification(*counts, *counted, faults)


def issued_of(batch: Batch, group: int) -> int:
    """The number of items of the group that have been issued."""
    return max(0, min(batch.group_size, batch.items - group * batch.group_size))


def groups(tx: Connection, batch: Batch) -> Iterator[StoredGroup]:
    """The groups that have a row, journal entries or reasons, ascending. `tx` must be a snapshot, or hold the lock of a
    journaled batch."""
    columns = tables.item_groups.c
    journal_items = journal.recent(tx, batch.id, batch.group_size)
    has_reasons = [tx.scalar(sa.select(_belongs(table, batch).exists())) for table in (tables.failures, tables.skips)]
    step = max(1, min(STEP, ITEMS // batch.group_size)) if any(has_reasons) else STEP
    after = -1
    while True:
        query = sa.select(tables.item_groups).where(columns.batch_id == batch.id, columns.group_no > after)
        rows = {row.group_no: row for row in tx.execute(query.order_by(columns.group_no).limit(step))}
        last = max(rows) if len(rows) == step else None
        reasons, skip_reasons = (
            _reasons(tx, table, batch, after + 1, last) if has_some else {}
            for table, has_some in zip((tables.failures, tables.skips), has_reasons, strict=True)
        )
        in_journal = {number for number in journal_items if number > after and (last is None or number <= last)}
        for number in sorted(rows.keys() | reasons.keys() | skip_reasons.keys() | in_journal):
            indexes = [by_group.get(number, ()) for by_group in (journal_items, reasons, skip_reasons)]
            yield _stored(number, rows.get(number), batch.group_size, *indexes)
        if last is None:
            return
        after = last


def _belongs(table: sa.Table, batch: Batch) -> sa.Select[Any]:
    """The numbers with a reason in the table."""
    return sa.select(table.c.number).where(table.c.batch_id == batch.id)


def _reasons(tx: Connection, table: sa.Table, batch: Batch, first: int, last: int | None) -> dict[int, list[int]]:
    """By group, the indexes with a reason in the table, in the groups `first` to `last` (None: to the end)."""
    number_column = table.c.number
    query = _belongs(table, batch).where(number_column >= first * batch.group_size)
    if last is not None:
        query = query.where(number_column < (last + 1) * batch.group_size)
    indexes: dict[int, list[int]] = {}
    for number in tx.scalars(query):
        group, index = divmod(number, batch.group_size)
        indexes.setdefault(group, []).append(index)
    return indexes


def _stored(number: int, row: Any, size: int, *indexes: Sequence[int]) -> StoredGroup:
    """`indexes`: the journal, and the reasons."""
    if row is None:
        resolved, failed, skipped_bits = (zeros(size, bitfield.ENDIAN) for _ in range(3))
        return StoredGroup(number, resolved, failed, skipped_bits, 0, 0, 0, None, *indexes)
    size = max(size, *[8 * len(blob or b"") for blob in (row.resolved, row.failed, row.skipped)])
    resolved = bitfield.widen(row.resolved or b"", size)
    if row.resolved is None:
        resolved[: row.resolved_count] = True
    width = None if row.resolved is None else 8 * len(row.resolved)
    failed = bitfield.widen(row.failed or b"", size)
    skipped_bits = bitfield.widen(row.skipped or b"", size)
    counts = row.resolved_count, row.failed_count, row.skipped_count or 0
    return StoredGroup(number, resolved, failed, skipped_bits, *counts, width, *indexes)


def _faults(group: StoredGroup, issued: int) -> Iterator[str]:
    if group.width is not None and group.width < group.resolved_count:
        yield f"its blob has {group.width} bits, but resolved_count is {group.resolved_count}: it was truncated"
    if group.resolved.count() != group.resolved_count:
        yield f"resolved_count is {group.resolved_count}, but {group.resolved.count()} bits are set"
    if group.failed.count() != group.failed_count:
        yield f"failed_count is {group.failed_count}, but {group.failed.count()} bits are set"
    if group.skipped.count() != group.skipped_count:
        yield f"skipped_count is {group.skipped_count}, but {group.skipped.count()} bits are set"
    if any(bits.count(1, issued) for bits in (group.resolved, group.failed, group.skipped)):
        yield "bits of items that were never issued are set"
    if (group.failed & ~group.resolved).any():
        yield "items are failed but not resolved"
    if (group.skipped & ~group.resolved).any():
        yield "items are skipped but not resolved"
    if (group.failed & group.skipped).any():
        yield "items are both failed and skipped"
    if any(index >= issued for index in group.acked):
        yield "its journal names items that were never issued"
    if any(group.failed[index] or group.skipped[index] for index in group.acked):
        yield "its journal names items that are failed or skipped"
    stray = sum(not group.failed[index] for index in group.reasons)
    if stray > 0:
        yield f"items that are not failed have a reason of a failure: {stray}"
    stray_skips = sum(not group.skipped[index] for index in group.skip_reasons)
    if stray_skips > 0:
        yield f"items that are not skipped have a reason of a skip: {stray_skips}"
