"""Redrive: asking the producer to send failed items again, or pending ones, whose messages were lost. It appends an
event that names them and changes no bit; the acks of the items that were sent again override the failures. The batch's
`updated_at` changes: otherwise the janitor might delete a batch that ended long ago before these acks arrive.

What could go wrong, and why it can't:

*The response is lost, so the client sends the request again.* The repeat finds the event of the first request, and
returns its content (see `once`).

*Items are acked or fail after the failures were read.* They are read before the lock, as a batch may have a million of
them. Under the lock, the batch's counts tell whether any bit has changed since; then they are read again. A batch that
changes each time gets the event of the last read: an item that was acked since is sent again, and its ack is a repeat;
one that failed since is not in the event, and its failure is newer than the request.

*The batch is deleted in the meantime.* Locking its row then raises `errors.BatchNotFound`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Final

import sqlalchemy as sa
from bitarray import bitarray
from sqlalchemy.engine import Connection

from core import errors, feed
from core.batches import batch as batches
from core.batches import nesting, once, ranges
from core.batches.batch import Batch
from core.batches.lifecycle import judge
from core.bits import bitfield
from core.storage import tables
from core.storage.database import Database
from core.storage.statements import LIST, chunks
from lastbit.ids import ItemId

TYPE: Final = f"{feed.BATCH}.redrive"
RANGES: Final = 1000
"""Maximum ranges of one event."""
SCAN: Final = 100_000
"""Maximum failures of one reason that are read for their numbers."""
STEP: Final = 10_000
"""Maximum rows of one statement."""
READS: Final = 3
"""Maximum times that the failures are read."""

_failures = tables.failures.c
_groups = tables.item_groups.c


@dataclass(frozen=True, slots=True)
class Wish:
    """What to redrive: all failed items, or those with this `reason`, or the failed ones among the `items`, of which
    the service never gets more than `RANGES`. Or, with `pending`, all pending items that no child holds, if the batch
    hasn't changed for `unchanged_for` seconds. `note` is for the reader of the event."""

    reason: str | None = None
    items: Sequence[ItemId] | None = None
    note: str | None = None
    pending: bool = False
    unchanged_for: int = 0

    def content(self) -> str:
        items = None if self.items is None else list(map(str, self.items))
        return json.dumps([self.reason, items, self.note, *([self.unchanged_for] if self.pending else [])])


@dataclass(frozen=True, slots=True)
class Span:
    """The numbers start .. end-1."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Redriven:
    """`count` failed or pending items; the first `RANGES` ranges of them; whether there are `more`; and the event's
    position."""

    batch: Batch
    count: int
    ranges: Sequence[Span]
    more: bool
    position: int
    replayed: bool


@dataclass(frozen=True, slots=True)
class _Found:
    count: int
    ranges: list[Span]
    more: bool


def _version(batch: Batch) -> tuple[int, int, int, int, int]:
    """Equal for two reads of a batch only if no bit changed in between, as the counts of a group are (see `cache`):
    nothing but a repair takes them back. New items are pending."""
    return batch.acked, batch.failed, batch.skipped, batch.items, batch.generation


def redrive(database: Database, batch_id: int, wish: Wish, idempotency_key: str | None = None) -> Redriven:
    """Append the event. Raises `errors.BatchNotFound`, `BatchEnded` for an expired or cancelled batch, `NothingFailed`,
    `NothingPending`, `InvalidRequest` for items of another batch, `IdempotencyKeyReused`."""
    request = once.Request.of("redrive", batch_id, idempotency_key, wish.content())
    reads_left, done = READS, None
    while done is None:
        reads_left -= 1
        before, found = database.snapshot(_find, batch_id, wish)
        version = None if not reads_left else _version(before)
        done = database.write(_append, batch_id, wish, request, found, version)
    return done


def _append(
    tx: Connection, batch_id: int, wish: Wish, request: once.Request, found: _Found, version: Any
) -> Redriven | None:
    """None if the batch has another `version` than when its failures were read."""
    batch, now = batches.lock(tx, batch_id)
    earlier = request.event(tx)
    if earlier is not None:
        data = json.loads(earlier.data)
        spans = [Span(span["start"], span["end"]) for span in data["ranges"]]
        return Redriven(batch, data["count"], spans, data["more"], earlier.position, replayed=True)
    judge("redrive", batch_id, batch.state)
    if version is not None and version != _version(batch):
        return None
    if wish.pending and now - batch.updated_at < timedelta(seconds=wish.unchanged_for):
        raise errors.NothingPending(batch_id, wish.unchanged_for)
    if not found.ranges:
        raise errors.NothingPending(batch_id) if wish.pending else errors.NothingFailed(batch_id)
    before, batch = batch, replace(batch, updated_at=max(batch.updated_at, now))
    batches.save(tx, before, batch)
    data = _data(batch, wish, found)
    position = feed.append(tx, [feed.NewEvent(request.event_id, TYPE, batch.key, data, batch_id, batch.trace)])[0]
    return Redriven(batch, found.count, found.ranges, found.more, position, replayed=False)


def _data(batch: Batch, wish: Wish, found: _Found) -> str:
    facts: dict[str, Any] = {
        "labels": dict(batch.labels),
        "group_size": batch.group_size,
        "count": found.count,
        "ranges": [asdict(span) for span in found.ranges],
        "more": found.more,
        "reason": wish.reason,
        "note": wish.note,
        "pending": wish.pending,
        **(batch.trace.headers() if batch.trace is not None else {}),
    }
    return json.dumps(facts, ensure_ascii=False)


def _find(tx: Connection, batch_id: int, wish: Wish) -> tuple[Batch, _Found]:
    batch = batches.get(tx, batch_id)
    if wish.items is not None:
        numbers = sorted(set(_numbers(batch, wish.items)))
        failed = _those_failed(tx, batch, numbers, wish.reason)
        return batch, _Found(len(failed), _spans(failed)[0], more=False)
    if wish.reason is not None:
        return batch, _of_reason(tx, batch, wish.reason)
    if wish.pending:
        spans, has_more = _first_ranges(tx, batch, "pending")
        held = _held(tx, batch, spans)
        free = [part for span in spans for part in _without(span, held)]
        return batch, _Found(batch.pending - len(held), free[:RANGES], has_more or len(free) > RANGES)
    spans, has_more = _first_ranges(tx, batch, "failed")
    return batch, _Found(batch.failed, spans, has_more)


def _first_ranges(tx: Connection, batch: Batch, kind: ranges.Kind) -> tuple[list[Span], bool]:
    spans: list[Span] = []
    start: int | None = 0
    while start is not None and len(spans) < RANGES:
        # A page may be empty, and not the last.
        page = ranges.bare_page(tx, batch, kind, start, RANGES - len(spans))
        spans += [Span(span.start, span.end) for span in page.ranges]
        start = page.next
    return spans, start is not None


def _held(tx: Connection, batch: Batch, spans: Sequence[Span]) -> list[int]:
    """The items that a child resolves, ascending: sending their messages again would not help."""
    if not batch.children or not spans:
        return []
    held = nesting.holders(tx, {}, [(batch.id, spans[0].start, spans[-1].end)])
    return sorted(int(number) for _, number, _ in held)


def _without(span: Span, numbers: Sequence[int]) -> Iterator[Span]:
    """The parts of the span between these numbers, which ascend."""
    start = span.start
    for number in numbers[bisect_left(numbers, span.start) : bisect_left(numbers, span.end)]:
        if start < number:
            yield Span(start, number)
        start = number + 1
    if start < span.end:
        yield Span(start, span.end)


def _numbers(batch: Batch, items: Iterable[ItemId]) -> Iterator[int]:
    for place, item in enumerate(items):
        number = item.number(batch.group_size) if item.batch == batch.id else None
        if number is None or number >= batch.items:
            raise errors.InvalidRequest(f"body.items[{place}]", f"expected an item of batch {batch.id}, got {item}")
        yield number


def _those_failed(tx: Connection, batch: Batch, numbers: Sequence[int], reason: str | None) -> list[int]:
    size = batch.group_size
    bits: dict[int, bitarray] = {}
    for part in chunks(sorted({number // size for number in numbers}), LIST):
        query = sa.select(_groups.group_no, _groups.failed)
        rows = tx.execute(query.where(_groups.batch_id == batch.id, _groups.group_no.in_(part)))
        bits |= {row.group_no: bitfield.widen(row.failed, size) for row in rows if row.failed is not None}
    chosen = [number for number in numbers if number // size in bits and bits[number // size][number % size]]
    return chosen if reason is None else sorted(_having(tx, batch, chosen, reason))


def _having(tx: Connection, batch: Batch, numbers: Collection[int], reason: str) -> set[int]:
    """Those of the numbers that failed for the reason."""
    numbers_found: set[int] = set()
    for part in chunks(list(numbers), LIST):
        query = sa.select(_failures.number, _failures.reason)
        rows = tx.execute(query.where(_failures.batch_id == batch.id, _failures.number.in_(part)))
        numbers_found |= {row.number for row in rows if row.reason == reason}
    return numbers_found


def _of_reason(tx: Connection, batch: Batch, reason: str) -> _Found:
    # MariaDB's comparison ignores blanks at the end of a text, so it is repeated here.
    query = (
        sa.select(_failures.number, _failures.reason)
        .where(_failures.batch_id == batch.id, _failures.reason == reason)
        .order_by(_failures.number)
    )
    numbers: list[int] = []
    last = -1
    while True:
        rows = tx.execute(query.where(_failures.number > last).limit(STEP)).all()
        numbers += [row.number for row in rows if row.reason == reason]
        if len(rows) < STEP:
            spans, more = _spans(numbers)
            return _Found(len(numbers), spans, more)
        last = rows[-1].number
        if len(numbers) >= SCAN:
            break
    spans, _ = _spans(numbers)
    counted = sa.select(sa.func.count()).where(_failures.batch_id == batch.id, _failures.reason == reason)
    return _Found(tx.execute(counted).scalar_one(), spans, more=True)


def _spans(numbers: Iterable[int]) -> tuple[list[Span], bool]:
    """The runs of ascending numbers, at most `RANGES`; and whether there are more."""
    spans: list[Span] = []
    for number in numbers:
        if spans and spans[-1].end == number:
            spans[-1] = Span(spans[-1].start, number + 1)
        elif len(spans) == RANGES:
            return spans, True
        else:
            spans.append(Span(number, number + 1))
    return spans, False
