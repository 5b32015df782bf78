"""The picture of a batch: how much of each group is resolved, from the counts alone, and the bits of one group.

Groups are gathered into tiles of `per` groups, so that the picture of a billion items (122,000 groups) is a few
thousand tiles. No blob is read for it, and an answer covers at most `GROUPS` groups, however few tiles they are. A
group without a row is all pending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, tables
from core.batches.batch import Batch
from core.bits import bitfield, journal
from core.storage.statements import LIST, chunks

GROUPS: Final = 131_072
"""Groups that one answer covers at the most."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`groups` groups from `group` on: how many of their items are issued, resolved, and of these failed."""

    group: int
    groups: int
    issued: int
    resolved: int
    failed: int


@dataclass(frozen=True, slots=True)
class Picture:
    """`groups` is how many the batch has; `next` the group where the next answer begins, or None at the end."""

    groups: int
    tiles: list[Tile]
    next: int | None


@dataclass(frozen=True, slots=True)
class Bits:
    """One group's bitfields, as wide as it is issued, in whole bytes."""

    tile: Tile
    resolved: bytes
    failed: bytes


def groups_of(batch: Batch) -> int:
    """How many groups the issued items of a batch make."""
    return -(-batch.items // batch.group_size)


def picture(tx: Connection, batch: Batch, start: int, limit: int, per: int) -> Picture:
    """At most `limit` tiles of `per` groups each (the last may be of fewer), from the group `start` on."""
    groups = groups_of(batch)
    tiles = min(limit, max(1, GROUPS // per), max(0, -(-(groups - start) // per)))
    end = min(start + tiles * per, groups)
    known = tables.item_groups.c
    # Not a division: MySQL's rounds.
    first = (known.group_no - (known.group_no - start) % per).label("first")
    query = (
        sa.select(first, sa.func.sum(known.resolved_count), sa.func.sum(known.failed_count))
        .where(known.batch_id == batch.id, known.group_no >= start, known.group_no < end)
        .group_by(first)
    )
    unfolded = _unfolded(tx, batch, start, end, per) if tiles and batch.journal_next else {}
    counts = {row[0]: (int(row[1]), int(row[2])) for row in tx.execute(query)} if tiles else {}
    found = []
    for group in range(start, end, per):
        wide = min(per, groups - group)
        issued = min((group + wide) * batch.group_size, batch.items) - group * batch.group_size
        resolved, failed = counts.get(group, (0, 0))
        found.append(Tile(group, wide, issued, resolved + unfolded.get(group, 0), failed))
    return Picture(groups, found, end if tiles and end < groups else None)


def _unfolded(tx: Connection, batch: Batch, start: int, end: int, per: int) -> dict[int, int]:
    """How many items of each tile the journal alone names. Of its groups the blobs are read: `journal.GROUPS` at the
    most."""
    recent = journal.recent(tx, batch.id, batch.group_size)
    wanted = sorted(group for group in recent if start <= group < end)
    found: dict[int, int] = {}
    known = tables.item_groups.c
    for part in chunks(wanted, LIST):
        query = sa.select(known.group_no, known.resolved, known.resolved_count).where(
            known.batch_id == batch.id, known.group_no.in_(part)
        )
        rows = {row.group_no: row for row in tx.execute(query)}
        for group in part:
            count = len(recent[group])
            if row := rows.get(group):
                stored = bitfield.Group.load(row.resolved, None, row.resolved_count, 0, batch.group_size).resolved
                count = sum(not stored[index] for index in recent[group])
            tile = group - (group - start) % per
            found[tile] = found.get(tile, 0) + count
    return found


def bits(tx: Connection, batch: Batch, group: int) -> Bits:
    """The bits of one group. Raises `errors.GroupNotFound` where no item of it is issued."""
    if group >= groups_of(batch):
        raise errors.GroupNotFound(batch.id, group, groups_of(batch))
    issued = min(batch.group_size, batch.items - group * batch.group_size)
    width = -(-issued // 8)
    known = tables.item_groups.c
    query = sa.select(known.resolved, known.failed, known.resolved_count, known.failed_count)
    recent = journal.recent(tx, batch.id, batch.group_size) if batch.journal_next else {}
    row = tx.execute(query.where(known.batch_id == batch.id, known.group_no == group)).first()
    size = batch.group_size
    found = bitfield.Group.empty(size) if row is None else bitfield.Group.load(*row, size)
    journal.union(found, recent.get(group, ()))
    lost = bytes(width) if found.failed is None else found.failed.tobytes()[:width]
    tile = Tile(group, 1, issued, found.resolved_count, found.failed_count)
    return Bits(tile, found.resolved.tobytes()[:width], lost)
