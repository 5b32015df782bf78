"""Ranges of pending items, ranges of failed items, and the watermark: reading the bits of a batch in order.

A group without a row is all pending, so a billion untouched items are one range, found without reading anything. The
journal is read before the groups (see `journal`). A page reads at most `SCAN` rows. If all of these groups are full,
the page is empty, and `next` is the number from which to continue.

The batch and its bits are read in one snapshot. A deletion removes groups before the batch, so if groups were read
later than the batch, they might be missing and their items would look pending.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import sqlalchemy as sa
from bitarray import bitarray
from sqlalchemy.engine import Connection

from core.batches.batch import Batch
from core.bits import bitfield, group_rows, journal
from core.storage import limits, statements, tables
from lastbit.watermark import Piece, first_unresolved

SCAN: Final = 4096
"""The maximum number of rows that one page reads."""
STEP: Final = 256
"""Maximum rows of one statement."""
FIRST: Final = 4
"""Groups of each batch that the first statement for watermarks reads, as the first one is usually enough. Each further
statement reads four times as many."""
MANY: Final = 256
"""Full groups in a row after which a search for the watermark counts groups, instead of reading them one by one."""
SLICE: Final = 4096
LARGEST_SLICE: Final = 2**16
"""Groups that one statement counts, at least and at most."""
REASONS: Final = 1000
"""The maximum number of reasons on one page."""

Kind = Literal["pending", "failed", "skipped"]


@dataclass(slots=True)
class Range:
    """The numbers start .. end-1, all of one kind. `reasons` has the reasons of failed or skipped items, by number."""

    start: int
    end: int
    reasons: dict[int, str] = field(default_factory=dict)


class _Row(NamedTuple):
    """The row of a group."""

    group_no: int
    resolved: bytes | None
    resolved_count: int


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
    recent: Mapping[int, Sequence[int]], rows: Iterable[Any], first_group: int
) -> Iterator[tuple[int, Any, Sequence[int]]]:
    """(group, row or None, indexes in the journal) of the groups from `first_group` on that have one of the rows or are
    in the journal, ascending. `recent` is the journal."""
    journal_groups = [group for group in sorted(recent, reverse=True) if group >= first_group]
    for row in rows:
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
    bits = bitfield.Group.load(bitfield.Columns(row.resolved, row.resolved_count), size).resolved
    if indexes:
        bits[list(indexes)] = True
    return bits


def page(snapshot: Connection, batch: Batch, kind: Kind, start: int, limit: int) -> RangePage:
    """At most `limit` ranges of `kind` among the numbers from `start` on, with the reasons of failed or skipped ones.
    `batch` must be from the same snapshot."""
    result = bare_page(snapshot, batch, kind, start, limit)
    return result if kind == "pending" else _with_reasons(snapshot, batch, kind, result)


def bare_page(snapshot: Connection, batch: Batch, kind: Kind, start: int, limit: int) -> RangePage:
    """`page`, without reasons."""
    pieces = _pending(snapshot, batch, start) if kind == "pending" else _resolved_as(snapshot, batch, kind, start)
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
    return RangePage(ranges, next_start)


def _pending(tx: Connection, batch: Batch, start: int) -> Iterator[tuple[int, int | None]]:
    """Runs of pending numbers, not merged across groups; (number, None) if the scan stops early."""
    size = batch.group_size
    position = max(start, batch.full_prefix * size)
    columns = tables.item_groups.c
    first_group = position // size
    recent = journal.recent(tx, batch.id, size) if batch.journal_next else {}
    groups = _touched(recent, _rows(tx, batch, first_group, [columns.resolved, columns.resolved_count]), first_group)
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


def _resolved_as(tx: Connection, batch: Batch, kind: Kind, start: int) -> Iterator[tuple[int, int | None]]:
    """As `_pending`, for failed or skipped numbers."""
    size = batch.group_size
    columns = tables.item_groups.c
    if not (batch.failed if kind == "failed" else batch.skipped):
        return
    for count, row in enumerate(_rows(tx, batch, start // size, [columns[kind].label("bits")])):
        first = row.group_no * size
        if count == SCAN:
            yield first, None
            return
        if row.bits is not None:
            bits = bitfield.widen(row.bits, size)
            for run in bitfield.runs(bits, True, max(start - first, 0), size):
                yield first + run[0], first + run[1]


def _with_reasons(tx: Connection, batch: Batch, kind: Kind, result: RangePage) -> RangePage:
    """Add the reasons. A page with too many of them ends earlier, if necessary in the middle of a range."""
    if not result.ranges:
        return result
    columns = (tables.failures if kind == "failed" else tables.skips).c
    start, end = result.ranges[0].start, result.ranges[-1].end
    base_query = sa.select(columns.number, columns.reason).where(
        columns.batch_id == batch.id, columns.number >= start, columns.number < end
    )
    query = base_query.order_by(columns.number)

    def above(last: Any, count: int) -> Sequence[Any]:
        part = query if last is None else query.where(columns.number > last.number)
        return tx.execute(part.limit(count)).all()

    def size(row: Any) -> int:
        return limits.size_as_json(row.reason)

    reasons, has_more = limits.within(limits.stepwise(above, size, REASONS + 1), size, REASONS + 1)
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


def watermarks(snapshot: Connection, batches: Collection[Batch]) -> dict[int, int]:
    """The smallest pending number of each batch, or `batch.items` if none is pending. The search begins at the
    full-prefix hint. One statement reads the first groups of all batches, which must be from the same snapshot."""
    if not batches:
        return {}
    group_sizes = {batch.id: batch.group_size for batch in batches if batch.journal_next}
    recent = journal.recent_by_batch(snapshot, group_sizes)
    first_groups = {batch.id: range(batch.full_prefix, batch.full_prefix + FIRST) for batch in batches}
    condition = group_rows.among(first_groups)
    text = f"SELECT batch_id, group_no, resolved, resolved_count FROM item_groups WHERE {condition}"  # noqa: S608
    rows: dict[int, list[_Row]] = {batch.id: [] for batch in batches}
    for id, *values in sorted(map(tuple, statements.run(snapshot, text)[0])):
        rows[id].append(_Row(*values))
    return {
        batch.id: first_unresolved(
            batch.full_prefix * batch.group_size,
            _pieces(snapshot, batch, recent.get(batch.id, {}), rows[batch.id]),
            batch.items,
        )
        for batch in batches
    }


def _pieces(
    tx: Connection, batch: Batch, recent: Mapping[int, Sequence[int]], first_rows: Sequence[_Row]
) -> Iterator[Piece]:
    """The groups with a row or journal entries, from the full-prefix hint on. `first_rows` are the rows of the first
    groups. Further rows are read only if the first groups are full."""
    size = batch.group_size
    start, end = batch.full_prefix, batch.full_prefix + FIRST
    first_recent = {group: indexes for group, indexes in recent.items() if group < end}
    yield from map(_piece, _touched(first_recent, first_rows, start), itertools.repeat(size))
    yield end * size, 0, None
    columns = tables.item_groups.c
    start, limit = end, MANY
    while True:
        rows = _rows(tx, batch, start, [columns.resolved, columns.resolved_count], step=4 * FIRST)
        row_count = 0
        for group in itertools.islice(_touched(recent, rows, start), limit):
            yield _piece(group, size)
            row_count += 1
        if row_count < limit:
            return
        # The search asks for another piece only if all of these are full.
        start += limit
        stop = _after_full_slices(tx, batch, start)
        yield start * size, (stop - start) * size, None
        start, limit = stop, SLICE  # the next slice isn't full


def _after_full_slices(tx: Connection, batch: Batch, start: int) -> int:
    """A group before which all from `start` on are full, and after which less than a slice is. The slices double as
    long as they are full, and then halve."""
    step, grows = SLICE, True
    while step >= SLICE:
        [[(count,)]] = statements.run(tx, group_rows.count_full(batch.id, batch.group_size, start, start + step))
        if count == step:
            start += step
            step = min(2 * step, LARGEST_SLICE) if grows else step // 2
        else:
            step, grows = step // 2, False
    return start


def _piece(touched: tuple[int, Any, Sequence[int]], size: int) -> Piece:
    """The group as a piece. A full one has no blob."""
    group, row, indexes = touched
    is_full = row is not None and row.resolved_count == size
    return group * size, size, None if is_full else _resolved(row, indexes, size)
