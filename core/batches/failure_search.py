"""Finding failures: those of the batches to which a filter applies, whose reason contains a text.

The newest batch comes first, and within a batch the lowest number. There is no index of reasons, so the work of a page
is bounded: it selects at most `BATCHES` batches, as a page of the list does, and examines about `EXAMINED` failures of
them. So a page may be empty and not the last.

A failure without a reason has no row, and isn't found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.batches import search
from core.batches.batch import Batch
from core.batches.search import Filter
from core.storage import limits, tables
from core.storage.statements import LIST

BATCHES: Final = 1_000
"""Maximum batches with failures that a page selects."""
EXAMINED: Final = 10_000
"""Maximum failures that a page examines, by the counts of their batches."""

_failures = tables.failures.c


class Place(NamedTuple):
    """The number in a batch from which a page goes on."""

    batch: int
    number: int


@dataclass(frozen=True, slots=True)
class FailurePage:
    """Each failure is a row of the table (`batch_id`, `number`, `reason`, `failed_at`). `batches`: theirs, by id.
    `next`: where the next page begins; None at the end."""

    failures: Sequence[Any]
    batches: dict[int, Batch]
    next: Place | None


def page(
    tx: Connection, conditions: Filter, text: str | None = None, *, place: Place | None = None, limit: int = 100
) -> FailurePage:
    """At most `limit` failures from the place on; fewer if their reasons are long. `text`: a part of the reason, in
    either case; for letters outside ASCII, as far as the database knows their cases."""
    before = None if place is None else place.batch + 1
    batch_page = search.page(tx, replace(conditions, failed=True), before=before, limit=BATCHES)
    by_id = {batch.id: batch for batch in batch_page.batches}
    waiting = deque(batch_page.batches)
    start = place.number if place is not None and place.batch in by_id else 0
    budget, size = EXAMINED, 0
    failures: list[Any] = []
    while waiting:
        if not budget:
            return FailurePage(failures, by_id, Place(waiting[0].id, start))
        part = [waiting.popleft()]
        count, end = part[0].failed, None
        if count > budget:
            count, end = budget, _end(tx, part[0], start, budget)
        while waiting and len(part) < LIST and count + waiting[0].failed <= budget:
            part.append(waiting.popleft())
            count += part[-1].failed
        rows, is_full = _rows(tx, part, start, end, text, limit - len(failures), max(1, limits.BYTES - size))
        failures += rows
        size += sum(map(_size, rows))
        if is_full:
            return FailurePage(failures, by_id, Place(failures[-1].batch_id, failures[-1].number + 1))
        if end is not None:
            return FailurePage(failures, by_id, Place(part[0].id, end))
        budget, start = budget - count, 0
    return FailurePage(failures, by_id, None if batch_page.before is None else Place(batch_page.before - 1, 0))


def _end(tx: Connection, batch: Batch, start: int, budget: int) -> int | None:
    """The number of the batch's first failure beyond this number, from `start` on; None if there is none."""
    query = sa.select(_failures.number).where(_failures.batch_id == batch.id, _failures.number >= start)
    end: int | None = tx.scalar(query.order_by(_failures.number).offset(budget).limit(1))
    return end


def _rows(
    tx: Connection, part: Sequence[Batch], start: int, end: int | None, text: str | None, limit: int, byte_limit: int
) -> tuple[list[Any], bool]:
    """The failures of these batches, newest batch first: of the first one those with numbers from `start` to before
    `end`, of the others all; and whether a limit was reached."""
    query = sa.select(_failures.batch_id, _failures.number, _failures.reason, _failures.failed_at)
    query = query.order_by(_failures.batch_id.desc(), _failures.number)
    if text is not None:
        query = query.where(tables.holds(sa.func.lower(_failures.reason), sa.func.lower(text)))
    ids = [batch.id for batch in part]

    def after(last: Any, count: int) -> Sequence[Any]:
        first, lowest = (ids[0], start) if last is None else (last.batch_id, last.number + 1)
        numbers = [_failures.number >= lowest, *([] if end is None else [_failures.number < end])]
        conditions = sa.and_(_failures.batch_id == first, *numbers)
        if other_ids := ids[ids.index(first) + 1 :]:
            conditions = sa.or_(conditions, _failures.batch_id.in_(other_ids))
        return tx.execute(query.where(conditions).limit(count)).all()

    return limits.within(limits.stepwise(after, _size, limit, most=byte_limit), _size, limit, byte_limit)


def _size(row: Any) -> int:
    return limits.size_as_json(row.reason)
