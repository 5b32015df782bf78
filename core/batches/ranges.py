"""Ranges of pending items, ranges of failed items, and the watermark: reading the bits of a batch in order.

A group without a row is all pending, so a billion untouched items are one range, found without reading anything. The
journal is read before the groups (see `journal`). A page reads at most `SCAN` rows. If all of these groups are full,
the page is empty, and `next` is the number from which to continue.

The batch and its bits are read in one snapshot. A deletion removes groups before the batch, so if groups were read
later than the batch, they might be missing and their items would look pending.
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
"""The maximum number of rows that one page reads."""
STEP: Final = 256
"""Maximum rows of one statement."""
FIRST: Final = 4
"""Maximum rows of the first statement, if the first row is usually enough. Each further statement reads four times as
many."""
REASONS: Final = 1000
"""The maximum number of reasons on one page."""

Kind = Literal["pending", "failed"]


@dataclass(slots=True)
class Range:
    """The numbers start .. end-1, all pending or all failed. `reasons` has the reasons of failed items, by number."""

    start: int
    end: int
    reasons: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RangePage:
    """`next` is the first number of the next page, or None at the end."""

    ranges: list[Range]
    next: int | None


def _rows(
    tx: Connection, batch: Batch, first_group: int, selected_columns: list[Any], step: int = STEP
) -> Iterator[Any]:
    """Rows of a batch's groups from `first_group` on, ascending; the first statement reads `step` of them."""
    columns = tables.item_groups.c
    while True:
        query = sa.select(columns.group_no, *selected_columns).where(
            columns.batch_id == batch.id, columns.group_no >= first_group
        )
        rows = tx.execute(query.order_by(columns.group_no).limit(step)).all()
        yield from rows
        if len(rows) < step:
            return
        step = min(4 * step, STEP)
        first_group = rows[-1].group_no + 1


def _touched(
    tx: Connection, batch: Batch, first_group: int, columns: list[Any], step: int = STEP
) -> Iterator[tuple[int, Any, Sequence[int]]]:
    """(group, row or None, indexes in the journal) of the groups from `first_group` on that have a row or are in the
    journal, ascending."""
    recent = journal.recent(tx, batch.id, batch.group_size) if batch.journal_next else {}
    journal_groups = [group for group in sorted(recent, reverse=True) if group >= first_group]
    for row in _rows(tx, batch, first_group, columns, step):
        while journal_groups and journal_groups[-1] < row.group_no:
            group = journal_groups.pop()
            yield group, None, recent[group]
        if journal_groups and journal_groups[-1] == row.group_no:
            journal_groups.pop()
        yield row.group_no, row, recent.get(row.group_no, ())
    while journal_groups:
        group = journal_groups.pop()
        yield group, None, recent[group]


def _resolved(row: Any, indexes: Sequence[int], size: int) -> bitarray:
    if row is None:
        return bitfield.mask_of(list(indexes), size)
    bits = bitfield.Group.load(row.resolved, None, row.resolved_count, 0, size).resolved
    if indexes:
        bits[list(indexes)] = True
    return bits


def page(snapshot: Connection, batch: Batch, kind: Kind, start: int, limit: int) -> RangePage:
    """At most `limit` ranges of `kind` among the numbers from `start` on. `batch` must be from the same snapshot."""
    pieces = _pending(snapshot, batch, start) if kind == "pending" else _failed(snapshot, batch, start)
    ranges: list[Range] = []
    next_start: int | None = None
    for first, end in pieces:
        if end is None:  # the scan has reached its limit; the next page continues here
            next_start = first
            break
        if ranges and ranges[-1].end == first:
            ranges[-1].end = end
        elif len(ranges) == limit:
            next_start = first
            break
        else:
            ranges.append(Range(first, end))
    result = RangePage(ranges, next_start)
    return result if kind == "pending" else _with_reasons(snapshot, batch, result)


def _pending(tx: Connection, batch: Batch, start: int) -> Iterator[tuple[int, int | None]]:
    """Runs of pending numbers, not merged across groups; (number, None) if the scan stops early."""
    size = batch.group_size
    position = max(start, batch.full_prefix * size)
    columns = tables.item_groups.c
    groups = _touched(tx, batch, position // size, [columns.resolved, columns.resolved_count])
    for count, (group, row, indexes) in enumerate(groups):
        first = group * size
        if first >= batch.items:
            break
        if count == SCAN:
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
    columns = tables.item_groups.c
    if not batch.failed:
        return
    for count, row in enumerate(_rows(tx, batch, start // size, [columns.failed])):
        first = row.group_no * size
        if count == SCAN:
            yield first, None
            return
        if row.failed is not None:
            bits = bitfield.widen(row.failed, size)
            for run in bitfield.runs(bits, True, max(start - first, 0), size):
                yield first + run[0], first + run[1]


def _with_reasons(tx: Connection, batch: Batch, result: RangePage) -> RangePage:
    """Add the reasons. A page with too many of them ends earlier, if necessary in the middle of a range."""
    if not result.ranges:
        return result
    columns = tables.failures.c
    start, end = result.ranges[0].start, result.ranges[-1].end
    base_query = sa.select(columns.number, columns.reason).where(
        columns.batch_id == batch.id, columns.number >= start, columns.number < end
    )
    query = base_query.order_by(columns.number)

    def above(last: Any, count: int) -> Sequence[Any]:
        part = query if last is None else query.where(columns.number > last.number)
        return tx.execute(part.limit(count)).all()

    def size(row: Any) -> int:
        return len(row.reason)

    reasons, has_more = limits.within(limits.stepwise(above, size), size, REASONS + 1)
    stop, next_start = end, result.next
    if has_more:
        stop = next_start = reasons.pop().number if len(reasons) > REASONS else reasons[-1].number + 1
    by_number = {row.number: row.reason for row in reasons}
    ranges = []
    numbers = iter(sorted(by_number))
    number = next(numbers, None)
    for item_range in result.ranges:
        if item_range.start >= stop:
            break
        item_range.end = min(item_range.end, stop)
        while number is not None and number < item_range.end:
            if number >= item_range.start:
                item_range.reasons[number] = by_number[number]
            number = next(numbers, None)
        ranges.append(item_range)
    return RangePage(ranges, next_start)


def watermark(snapshot: Connection, batch: Batch) -> int:
    """The smallest pending number, or `batch.items` if none is pending. The search begins at the full-prefix hint.
    `batch` must be from the same snapshot."""
    return first_unresolved(batch.full_prefix * batch.group_size, _pieces(snapshot, batch), batch.items)


def _pieces(tx: Connection, batch: Batch) -> Iterator[Piece]:
    """The groups with a row or journal entries, from the full-prefix hint on. Bits are read only if a group isn't
    full."""
    size = batch.group_size
    columns = tables.item_groups.c
    for group, row, indexes in _touched(tx, batch, batch.full_prefix, [columns.resolved_count], FIRST):
        if row is not None and row.resolved_count == size:
            yield group * size, size, None
            continue
        if row is not None:
            row = tx.execute(
                sa.select(columns.resolved, columns.resolved_count).where(
                    columns.batch_id == batch.id, columns.group_no == group
                )
            ).one()
        yield group * size, size, _resolved(row, indexes, size)
