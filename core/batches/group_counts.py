"""The picture of a batch (the counts of its groups), and the bits of one group.

Groups are combined into tiles, so that the picture of a billion items (122,000 groups) has a few thousand tiles. No
blob is read, except for groups with items in the journal. A response covers at most `GROUPS` groups, even if these are
few tiles. A group without a row is all pending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.batches.batch import Batch
from core.bits import bitfield, journal
from core.storage import tables
from core.storage.statements import LIST, chunks

GROUPS: Final = 131_072
"""The maximum number of groups in one response."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The counts of `groups` groups from `group` on; `resolved` includes `failed` and `skipped`."""

    group: int
    groups: int
    issued: int
    resolved: int
    failed: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Picture:
    """`groups` is the number of groups of the batch, `next` the first group of the next response (None at the end)."""

    groups: int
    tiles: list[Tile]
    next: int | None


@dataclass(frozen=True, slots=True)
class Bits:
    """The bitfields of the issued items of one group, in whole bytes."""

    tile: Tile
    resolved: bytes
    failed: bytes
    skipped: bytes


def groups_of(batch: Batch) -> int:
    """The number of groups with issued items."""
    return -(-batch.items // batch.group_size)


def picture(tx: Connection, batch: Batch, start: int, limit: int, tile_size: int) -> Picture:
    """At most `limit` tiles of `tile_size` groups each (the last may have fewer), from the group `start` on."""
    groups = groups_of(batch)
    tiles = min(limit, max(1, GROUPS // tile_size), max(0, -(-(groups - start) // tile_size)))
    end = min(start + tiles * tile_size, groups)
    columns = tables.item_groups.c
    # This uses no division, as MySQL's division rounds.
    first = (columns.group_no - (columns.group_no - start) % tile_size).label("first")
    query = (
        sa.select(
            first,
            sa.func.sum(columns.resolved_count),
            sa.func.sum(columns.failed_count),
            sa.func.coalesce(sa.func.sum(columns.skipped_count), 0),
        )
        .where(columns.batch_id == batch.id, columns.group_no >= start, columns.group_no < end)
        .group_by(first)
    )
    journal_counts = _unfolded(tx, batch, start, end, tile_size) if tiles and batch.journal_next else {}
    counts = {row[0]: (int(row[1]), int(row[2]), int(row[3])) for row in tx.execute(query)} if tiles else {}
    result = []
    for group in range(start, end, tile_size):
        width = min(tile_size, groups - group)
        issued = min((group + width) * batch.group_size, batch.items) - group * batch.group_size
        resolved, failed, skipped_count = counts.get(group, (0, 0, 0))
        result.append(Tile(group, width, issued, resolved + journal_counts.get(group, 0), failed, skipped_count))
    return Picture(groups, result, end if tiles and end < groups else None)


def _unfolded(tx: Connection, batch: Batch, start: int, end: int, tile_size: int) -> dict[int, int]:
    """By tile, the number of items that are resolved only in the journal. Reads the blobs of the journal's groups: at
    most `journal.GROUPS`."""
    recent = journal.recent(tx, batch.id, batch.group_size)
    numbers = sorted(group for group in recent if start <= group < end)
    counts: dict[int, int] = {}
    columns = tables.item_groups.c
    for part in chunks(numbers, LIST):
        query = sa.select(columns.group_no, columns.resolved, columns.resolved_count).where(
            columns.batch_id == batch.id, columns.group_no.in_(part)
        )
        rows = {row.group_no: row for row in tx.execute(query)}
        for group in part:
            count = len(recent[group])
            if row := rows.get(group):
                row_columns = bitfield.Columns(row.resolved, row.resolved_count)
                row_bits = bitfield.Group.load(row_columns, batch.group_size).resolved
                count = sum(not row_bits[index] for index in recent[group])
            tile = group - (group - start) % tile_size
            counts[tile] = counts.get(tile, 0) + count
    return counts


def bits(tx: Connection, batch: Batch, group: int) -> Bits:
    """The bits of one group. Raises `errors.GroupNotFound` if none of its items is issued."""
    if group >= groups_of(batch):
        raise errors.GroupNotFound(batch.id, group, groups_of(batch))
    issued = min(batch.group_size, batch.items - group * batch.group_size)
    width = -(-issued // 8)
    columns = tables.item_groups.c
    query = sa.select(*[columns[name] for name in bitfield.Columns._fields])
    recent = journal.recent(tx, batch.id, batch.group_size) if batch.journal_next else {}
    row = tx.execute(query.where(columns.batch_id == batch.id, columns.group_no == group)).first()
    size = batch.group_size
    bits = bitfield.Group.empty(size) if row is None else bitfield.Group.load(bitfield.Columns(*row), size)
    journal.union(bits, recent.get(group, ()))
    failed = bytes(width) if bits.failed is None else bits.failed.tobytes()[:width]
    skipped_bits = bytes(width) if bits.skipped is None else bits.skipped.tobytes()[:width]
    tile = Tile(group, 1, issued, *bits.version)
    return Bits(tile, bits.resolved.tobytes()[:width], failed, skipped_bits)
