"""Which items are pending, which are failed, and where the watermark stands: reading the bits of a batch in order.

A group without a row is all pending, so a billion untouched items are one range, found without reading anything. What a
journal names is read before the groups (see `journal`). A page reads at most `SCAN` rows: a batch whose rows are all
full answers with an empty page and a place to go on from, rather than with a late one.

The batch and its bits are read in one snapshot: a deletion removes groups before it removes the batch, so groups that
are read later than the batch may be missing, and their items would look pending.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import sqlalchemy as sa
from bitarray import bitarray
from sqlalchemy.engine import Connection

from core import tables
from core.batches.batch import Batch
from core.bits import bitfield, journal
from core.storage import limits
from lastbit.watermark import Piece, first_unresolved

SCAN: Final = 4096
"""Rows that one page reads at the most."""
STEP: Final = 256
"""Rows of one statement."""
FIRST: Final = 4
"""Rows of the first statement where the first row is mostly enough. Each further one takes four times as many."""
REASONS: Final = 1000
"""Reasons on one page at the most."""

Kind = Literal["pending", "failed"]


@dataclass(slots=True)
class Range:
    """The numbers start .. end-1, all pending or all failed; `reasons` by number, where they were given."""

    start: int
    end: int
    reasons: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RangePage:
    """`next` is the number from which the next page begins, or None at the end."""

    ranges: list[Range]
    next: int | None


def _rows(tx: Connection, batch: Batch, first_group: int, columns: list[Any], step: int = STEP) -> Iterator[Any]:
    """Rows of a batch's groups from `first_group` on, ascending; the first statement reads `step` of them."""
    known = tables.item_groups.c
    while True:
        query = sa.select(known.group_no, *columns).where(known.batch_id == batch.id, known.group_no >= first_group)
        rows = tx.execute(query.order_by(known.group_no).limit(step)).all()
        yield from rows
        if len(rows) < step:
            return
        step = min(4 * step, STEP)
        first_group = rows[-1].group_no + 1


def _touched(
    tx: Connection, batch: Batch, first_group: int, columns: list[Any], step: int = STEP
) -> Iterator[tuple[int, Any, Sequence[int]]]:
    """(group, its row or None, what the journal names of it) of the groups from `first_group` on that have the one or
    the other, ascending."""
    recent = journal.recent(tx, batch.id, batch.group_size) if batch.journal_next else {}
    named = [group for group in sorted(recent, reverse=True) if group >= first_group]
    for row in _rows(tx, batch, first_group, columns, step):
        while named and named[-1] < row.group_no:
            group = named.pop()
            yield group, None, recent[group]
        if named and named[-1] == row.group_no:
            named.pop()
        yield row.group_no, row, recent.get(row.group_no, ())
    while named:
        group = named.pop()
        yield group, None, recent[group]


def _resolved(row: Any, indexes: Sequence[int], size: int) -> bitarray:
    if row is None:
        return bitfield.mask_of(list(indexes), size)
    bits = bitfield.Group.load(row.resolved, None, row.resolved_count, 0, size).resolved
    if indexes:
        bits[list(indexes)] = True
    return bits


def page(snapshot: Connection, batch: Batch, kind: Kind, start: int, limit: int) -> RangePage:
    """At most `limit` ranges of `kind` among the numbers from `start` on. `batch` is of the same snapshot."""
    pieces = _pending(snapshot, batch, start) if kind == "pending" else _failed(snapshot, batch, start)
    ranges: list[Range] = []
    next_start: int | None = None
    for first, end in pieces:
        if end is None:  # enough was read; go on from here another time
            next_start = first
            break
        if ranges and ranges[-1].end == first:
            ranges[-1].end = end
        elif len(ranges) == limit:
            next_start = first
            break
        else:
            ranges.append(Range(first, end))
    found = RangePage(ranges, next_start)
    return found if kind == "pending" else _with_reasons(snapshot, batch, found)


def _pending(tx: Connection, batch: Batch, start: int) -> Iterator[tuple[int, int | None]]:
    """Runs of pending numbers, not merged across groups; (number, None) where the scan stops early."""
    size = batch.group_size
    position = max(start, batch.full_prefix * size)
    known = tables.item_groups.c
    touched = _touched(tx, batch, position // size, [known.resolved, known.resolved_count])
    for seen, (group, row, indexes) in enumerate(touched):
        first = group * size
        if first >= batch.items:
            break
        if seen == SCAN:
            yield position, None
            return
        if position < first:
            yield position, first  # groups without a row
            position = first
        end = min(first + size, batch.items)
        bits = _resolved(row, indexes, size)
        for run in bitfield.runs(bits, False, position - first, end - first):
            yield first + run[0], first + run[1]
        position = end
    if position < batch.items:
        yield position, batch.items


def _failed(tx: Connection, batch: Batch, start: int) -> Iterator[tuple[int, int | None]]:
    size = batch.group_size
    known = tables.item_groups.c
    if not batch.failed:
        return
    for seen, row in enumerate(_rows(tx, batch, start // size, [known.failed])):
        first = row.group_no * size
        if seen == SCAN:
            yield first, None
            return
        if row.failed is not None:
            bits = bitfield.widen(row.failed, size)
            for run in bitfield.runs(bits, True, max(start - first, 0), size):
                yield first + run[0], first + run[1]


def _with_reasons(tx: Connection, batch: Batch, found: RangePage) -> RangePage:
    """Add the reasons. Where a page would bear too many it ends sooner, if need be in the middle of a range."""
    if not found.ranges:
        return found
    known = tables.failures.c
    start, end = found.ranges[0].start, found.ranges[-1].end
    query = sa.select(known.number, known.reason).where(
        known.batch_id == batch.id, known.number >= start, known.number < end
    )
    ordered = query.order_by(known.number)

    def above(last: Any, count: int) -> Sequence[Any]:
        part = ordered if last is None else ordered.where(known.number > last.number)
        return tx.execute(part.limit(count)).all()

    def size(row: Any) -> int:
        return len(row.reason)

    reasons, cut = limits.within(limits.stepwise(above, size), size, REASONS + 1)
    stop, next_start = end, found.next
    if cut:
        stop = next_start = reasons.pop().number if len(reasons) > REASONS else reasons[-1].number + 1
    by_number = {row.number: row.reason for row in reasons}
    ranges = []
    numbers = iter(sorted(by_number))
    number = next(numbers, None)
    for each in found.ranges:
        if each.start >= stop:
            break
        each.end = min(each.end, stop)
        while number is not None and number < each.end:
            if number >= each.start:
                each.reasons[number] = by_number[number]
            number = next(numbers, None)
        ranges.append(each)
    return RangePage(ranges, next_start)


def watermark(snapshot: Connection, batch: Batch) -> int:
    """The smallest pending number; `batch.items` where none is. Begins at the full-prefix hint. `batch` is of the same
    snapshot."""
    return first_unresolved(batch.full_prefix * batch.group_size, _pieces(snapshot, batch), batch.items)


def _pieces(tx: Connection, batch: Batch) -> Iterator[Piece]:
    """The groups that were touched, from the full-prefix hint on. Only of one that is not full the bits are read."""
    size = batch.group_size
    known = tables.item_groups.c
    for group, row, indexes in _touched(tx, batch, batch.full_prefix, [known.resolved_count], FIRST):
        if row is not None and row.resolved_count == size:
            yield group * size, size, None
            continue
        if row is not None:
            row = tx.execute(
                sa.select(known.resolved, known.resolved_count).where(
                    known.batch_id == batch.id, known.group_no == group
                )
            ).one()
        yield group * size, size, _resolved(row, indexes, size)
