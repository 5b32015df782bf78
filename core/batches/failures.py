"""Failures by reason: how many items of a batch failed for each reason, when, and a few of them.

The work is bounded. Up to `MOST` failures, all are examined. Beyond that, the result is a sample: the first failures of
each of at most `GROUPS` groups, which are spread evenly over the batch, as one cause often affects neighbouring
items.

The batch and its failures are read in one snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.batches import ranges
from core.batches.batch import Batch
from core.bits import bitfield
from core.storage import limits, tables

MOST: Final = 5_000
"""Maximum failures that are examined one by one. Decoding a row takes the driver about ten microseconds."""
GROUPS: Final = 25
"""Maximum groups of a sample."""
SAMPLE: Final = 2_500
"""Maximum failures of a sample, divided equally between its groups."""
EXAMINED: Final = 8 * 2**20
"""Maximum bytes of the reasons that are examined."""
EXAMPLES: Final = 5
"""Items that are shown for each reason."""

_failures = tables.failures.c
_groups = tables.item_groups.c


@dataclass(slots=True)
class Reason:
    """Items that failed for the same reason. `reason` and the times are None for those without one. `numbers` has the
    first `EXAMPLES` of those examined."""

    reason: str | None
    count: int = 0
    first_at: datetime | None = None
    last_at: datetime | None = None
    numbers: list[int] = field(default_factory=list)

    def add(self, number: int, at: datetime) -> None:
        self.count += 1
        self.first_at = at if self.first_at is None else min(self.first_at, at)
        self.last_at = at if self.last_at is None else max(self.last_at, at)
        if len(self.numbers) < EXAMPLES:
            self.numbers.append(number)


@dataclass(frozen=True, slots=True)
class Reasons:
    """The reasons, the most frequent ones first. `examined`: the number of failures of which these are the reasons.
    `next`: the place of the first one on the next page; None at the end."""

    reasons: Sequence[Reason]
    examined: int
    exact: bool
    next: int | None


def by_reason(snapshot: Connection, batch: Batch, start: int, limit: int) -> Reasons:
    """At most `limit` of the batch's reasons, from the place `start` on. `batch` must be from the same snapshot."""
    reasons: dict[str | None, Reason] = {}
    exact = _examine_all(snapshot, batch, reasons)
    if not exact:
        reasons.clear()
        _examine_some(snapshot, batch, reasons)
    order = sorted(reasons.values(), key=lambda row: (-row.count, row.reason is None, row.reason))
    page, _ = limits.within(order[start:], lambda row: limits.size_as_json(row.reason), limit)
    end = start + len(page)
    examined = sum(row.count for row in order)
    return Reasons(page, examined, exact, end if end < len(order) else None)


def _examine_all(tx: Connection, batch: Batch, reasons: dict[str | None, Reason]) -> bool:
    """Return whether there were few enough failures for that."""
    if batch.failed > MOST:
        return False
    rows, has_more = _rows(tx, batch, 0, batch.items, MOST + 1)
    if has_more:  # their reasons are too long
        return False
    _collect(rows, reasons)
    if batch.failed > len(rows):
        with_reason = {row.number for row in rows}
        without = reasons[None] = Reason(None, batch.failed - len(rows))
        numbers = (number for number in _failed_numbers(tx, batch) if number not in with_reason)
        without.numbers += [number for _, number in zip(range(EXAMPLES), numbers, strict=False)]
    return True


def _failed_numbers(tx: Connection, batch: Batch) -> Iterator[int]:
    for part in ranges.bare_page(tx, batch, "failed", 0, EXAMPLES + MOST).ranges:
        yield from range(part.start, part.end)


def _examine_some(tx: Connection, batch: Batch, reasons: dict[str | None, Reason]) -> None:
    size = batch.group_size
    chosen = _spread(tx, batch)
    for group in chosen:
        first, end = group * size, min((group + 1) * size, batch.items)
        rows, has_more = _rows(tx, batch, first, end, SAMPLE // len(chosen))
        if has_more:
            end = rows[-1].number + 1
        _collect(rows, reasons)
        stored = tx.scalar(sa.select(_groups.failed).where(_groups.batch_id == batch.id, _groups.group_no == group))
        with_reason = {row.number for row in rows}
        for run in bitfield.runs(bitfield.widen(stored or b"", size), True, 0, end - first):
            numbers = [number for number in range(first + run[0], first + run[1]) if number not in with_reason]
            if numbers:
                without = reasons.setdefault(None, Reason(None))
                without.count += len(numbers)
                without.numbers += numbers[: EXAMPLES - len(without.numbers)]


def _spread(tx: Connection, batch: Batch) -> list[int]:
    """Groups with failures, evenly spread, at most `GROUPS` of them."""
    last = -(-batch.items // batch.group_size)
    query = sa.select(_groups.group_no).where(_groups.batch_id == batch.id, _groups.failed_count > 0)
    chosen: list[int] = []
    for place in range(GROUPS):
        start = max(place * last // GROUPS, chosen[-1] + 1 if chosen else 0)
        group = tx.scalar(query.where(_groups.group_no >= start).order_by(_groups.group_no).limit(1))
        if group is None:
            break
        chosen.append(group)
    return chosen


def _rows(tx: Connection, batch: Batch, first: int, end: int, limit: int) -> tuple[list[Any], bool]:
    """The failures with a reason among these numbers, ascending; and whether a limit was reached."""
    query = (
        sa.select(_failures.number, _failures.reason, _failures.failed_at)
        .where(_failures.batch_id == batch.id, _failures.number < end)
        .order_by(_failures.number)
    )

    def above(last: Any, count: int) -> Sequence[Any]:
        start = _failures.number >= first if last is None else _failures.number > last.number
        return tx.execute(query.where(start).limit(count)).all()

    def size(row: Any) -> int:
        return limits.size_as_json(row.reason)

    most = EXAMINED if limit > MOST else EXAMINED // GROUPS
    return limits.within(limits.stepwise(above, size, limit, first=1000, most=most), size, limit, most)


def _collect(rows: Sequence[Any], reasons: dict[str | None, Reason]) -> None:
    for row in rows:
        reason = reasons.get(row.reason)
        if reason is None:
            reason = reasons[row.reason] = Reason(row.reason)
        reason.add(row.number, row.failed_at)
