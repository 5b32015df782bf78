"""The batch's own row: opening, extending, sealing, cancelling and reading it.

These verbs lock only the batch row, not groups, so they can't deadlock with acks, which lock groups first (lock order
everywhere: item_groups → batches). One exception: a seal that completes a journaled batch writes its groups, which acks
also write only under the lock of that row (see `journal`).

The Idempotency-Key of a request is looked up *under the batch's lock and before the state is judged*. So a producer
that lost the response to its extend still learns its numbers if the batch has since been sealed, completed or
cancelled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import IntegrityError

from core import errors, feed, tables
from core.batches import nesting
from core.batches.lifecycle import State, completes, judge
from core.bits import folding
from core.storage import faults, limits
from core.storage.statements import LIST, chunks
from lastbit.ids import DEFAULT_GROUP_SIZE, MAX_ITEMS, ItemId, item_id

SCAN: Final = 1000
"""The maximum number of rows that one page of a list examines: a filter by label is not indexed."""
FIRST: Final = 32
"""Rows of the first statement of a page: their labels may take a quarter of a mebibyte."""
_ENDS: Final = frozenset(
    {f"{feed.BATCH}.completed", f"{feed.BATCH}.{State.EXPIRED}", f"{feed.BATCH}.{State.CANCELLED}"}
)
"""Types of the events that end a batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A row of `batches`. Times are aware, in UTC."""

    id: int
    key: str | None
    labels: Mapping[str, str]
    group_size: int
    items: int
    acked: int
    failed: int
    state: State
    full_prefix: int
    parent_batch: int | None
    parent_number: int | None
    parent_group_size: int | None
    parent_due: str | None
    expires_in: int | None
    open_hash: bytes | None
    open_count: int
    completed_by: bytes | None
    succeeded_by: bytes | None
    journal_next: int
    repairs: int
    created_at: datetime
    updated_at: datetime
    sealed_at: datetime | None
    ended_at: datetime | None

    @property
    def pending(self) -> int:
        return self.items - self.acked - self.failed

    @property
    def complete(self) -> bool:
        return self.state is State.COMPLETE

    @property
    def succeeded(self) -> bool:
        return self.complete and self.failed == 0

    @property
    def parent(self) -> str | None:
        """The id of the parent's item that this batch stands for."""
        if self.parent_batch is None or self.parent_number is None or self.parent_group_size is None:
            return None
        return item_id(self.parent_batch, self.parent_number, self.parent_group_size)


_table = tables.batches.c
_COLUMNS = [_table.batch_key.label("key") if f.name == "key" else _table[f.name] for f in fields(Batch)]


def from_row(row: RowMapping) -> Batch:
    values = {f.name: row[f.name] for f in fields(Batch)}
    return Batch(**{**values, "labels": json.loads(values["labels"]), "state": State(values["state"])})


@dataclass(frozen=True, slots=True)
class Opening:
    """The parameters of an open, including defaults: two bodies with the same meaning are equal openings."""

    key: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    group_size: int = DEFAULT_GROUP_SIZE
    items: int = 0
    sealed: bool = False
    expires_in: int | None = None
    parent: ItemId | None = None

    def fingerprint(self) -> bytes:
        """32 bytes that two openings share only if they are equal. Defaults are left out, so that a release with one
        more field still recognizes the openings of its predecessor."""
        defaults = Opening()
        facts = {f.name: getattr(self, f.name) for f in fields(self)}
        content = {name: value for name, value in facts.items() if value != getattr(defaults, name)}
        if self.parent is not None:
            content["parent"] = str(self.parent)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()


@dataclass(frozen=True, slots=True)
class Opened:
    batch: Batch
    start: int
    count: int
    newly: bool
    replayed: bool


@dataclass(frozen=True, slots=True)
class Extended:
    """Numbers start .. start+count-1 were issued; `batch` is the current state."""

    batch: Batch
    start: int
    count: int
    replayed: bool


@dataclass(frozen=True, slots=True)
class Sealed:
    batch: Batch
    newly: bool
    newly_succeeded: bool


def get(tx: Connection, batch: int) -> Batch:
    """Read without a lock. Raises `errors.BatchNotFound`."""
    row = tx.execute(sa.select(*_COLUMNS).where(_table.id == batch, _table.state != State.DELETING)).mappings().first()
    if row is None:
        raise errors.BatchNotFound(batch)
    return from_row(row)


class Fixed(NamedTuple):
    """The attributes of a batch that never change."""

    group_size: int
    key: str | None


def fixed(tx: Connection, ids: Collection[int]) -> dict[int, Fixed]:
    """Read without a lock; ids that don't exist are left out."""
    constants: dict[int, Fixed] = {}
    for part in chunks(sorted(ids), LIST):
        query = sa.select(_table.id, _table.group_size, _table.batch_key)
        rows = tx.execute(query.where(_table.id.in_(part), _table.state != State.DELETING))
        constants |= {row.id: Fixed(row.group_size, row.batch_key) for row in rows}
    return constants


def by_id(tx: Connection, ids: Collection[int]) -> dict[int, Batch]:
    """Read without a lock; ids that don't exist are left out."""
    batches: dict[int, Batch] = {}
    for part in chunks(sorted(ids), LIST):
        rows = tx.execute(sa.select(*_COLUMNS).where(_table.id.in_(part), _table.state != State.DELETING)).mappings()
        batches |= {row["id"]: from_row(row) for row in rows}
    return batches


def event(batch: Batch, name: str) -> feed.NewEvent:
    """The event of a transition of the batch, with the batch's current counts."""
    data = {
        "labels": dict(batch.labels),
        "items": batch.items,
        "acked": batch.acked,
        "failed": batch.failed,
        "pending": batch.pending,
        "parent": batch.parent,
    }
    # A repair can revoke a completion that was announced. The true completion is another event, with an id of its own.
    id = f"{feed.BATCH}:{batch.id}:{name}" + (f":{batch.repairs}" if batch.repairs else "")
    return feed.NewEvent(id, f"{feed.BATCH}.{name}", batch.key, json.dumps(data, ensure_ascii=False), batch.id)


def ended(event: feed.Event) -> bool:
    """Whether the event announces a terminal state of its batch."""
    return event.type in _ENDS


def lock(tx: Connection, batch: int) -> tuple[Batch, datetime]:
    """The batch under its lock, and the database's time. Raises `errors.BatchNotFound`."""
    query = sa.select(*_COLUMNS, tables.utc_now().label("now")).where(_table.id == batch).with_for_update()
    row = tx.execute(query).mappings().first()
    if row is None or row["state"] == State.DELETING:
        raise errors.BatchNotFound(batch)
    return from_row(row), row["now"]


def update(tx: Connection, batch: int, **values: Any) -> None:
    tx.execute(sa.update(tables.batches).where(_table.id == batch).values(**values))


def open_batch(
    tx: Connection, opening: Opening, idempotency_key: str | None, fingerprint: bytes, prefix: str | None = None
) -> Opened:
    """Insert the batch, with items and sealed if the opening says so. `fingerprint` identifies the request. `prefix` is
    the one that the caller is limited to; its idempotency keys are separate from those of other callers.

    Raises `errors.IdempotencyKeyReused`; `InvalidRequest`, `BatchEnded` for a parent that can't have this child.
    """
    open_hash = opening.fingerprint()
    open_key = _open_key(idempotency_key, prefix)
    # Before the key is looked up: two opens with the same key and parent run one after the other, and the second finds
    # the key instead of an item that has a child already.
    parent = None if opening.parent is None else nesting.lock_parent(tx, opening.parent)
    if idempotency_key is not None:
        query = sa.select(*_COLUMNS).where(_table.open_key == open_key).with_for_update()
        row = tx.execute(query).mappings().first()
        if row is not None:
            batch = from_row(row)
            if batch.open_hash != open_hash:
                raise errors.IdempotencyKeyReused(idempotency_key, f"it opened batch {batch.id}")
            return Opened(batch, 0, batch.open_count, batch.completed_by == fingerprint, replayed=True)
    parent_columns: dict[str, Any] = {} if opening.parent is None else nesting.adopt(tx, opening.parent, parent)
    state = State.SEALED if opening.sealed else State.OPEN
    newly = completes(state, opening.items, 0, 0)
    now = tx.scalar(sa.select(tables.utc_now()))
    try:
        result = tx.execute(
            sa.insert(tables.batches).values(
                batch_key=opening.key,
                labels=json.dumps(dict(opening.labels)),
                group_size=opening.group_size,
                items=opening.items,
                acked=0,
                failed=0,
                state=State.COMPLETE if newly else state,
                full_prefix=0,
                expires_in=opening.expires_in,
                open_key=open_key,
                open_hash=open_hash if idempotency_key is not None else None,
                open_count=opening.items,
                completed_by=fingerprint if newly else None,
                succeeded_by=fingerprint if newly else None,
                created_at=now,
                updated_at=now,
                sealed_at=now if opening.sealed else None,
                ended_at=now if newly else None,
                parent_due=nesting.owed(State.COMPLETE, 0) if newly and parent_columns else None,
                **parent_columns,
            )
        )
    except IntegrityError as error:
        if faults.is_duplicate(error):
            raise faults.BeginAgain from error  # a concurrent open has inserted the same key or child: find it
        raise
    assert result.inserted_primary_key is not None
    batch = get(tx, result.inserted_primary_key[0])
    event_names = ["opened", *(["sealed"] if opening.sealed else []), *(["completed", "succeeded"] if newly else [])]
    feed.append(tx, [event(batch, name) for name in event_names])
    return Opened(batch, 0, opening.items, newly, replayed=False)


def _open_key(idempotency_key: str | None, prefix: str | None) -> str | None:
    """The stored key. Keys of opens are global, except that callers limited to different prefixes can't collide."""
    if idempotency_key is None or prefix is None:
        return idempotency_key
    return "limited:" + hashlib.sha256(json.dumps([prefix, idempotency_key]).encode()).hexdigest()


def extend(tx: Connection, batch_id: int, count: int, idempotency_key: str | None) -> Extended:
    """Issue `count` more numbers. Raises `errors.BatchNotFound`, `BatchEnded`, `IdempotencyKeyReused`,
    `InvalidRequest` (more items than a batch can hold)."""
    batch, now = lock(tx, batch_id)
    columns = tables.extends.c
    if idempotency_key is not None:
        before = tx.execute(
            sa.select(columns.start, columns["count"].label("issued")).where(
                columns.batch_id == batch_id, columns.idempotency_key == idempotency_key
            )
        ).first()
        if before is not None:
            if before.issued != count:
                raise errors.IdempotencyKeyReused(idempotency_key, f"it extended batch {batch_id} by {before.issued}")
            return Extended(batch, before.start, count, replayed=True)
    judge("extend", batch_id, batch.state)
    start = batch.items
    if start + count > MAX_ITEMS:
        raise errors.InvalidRequest(
            "body.count",
            f"expected at most {MAX_ITEMS - start}: a batch holds at most 10^12 items, this one has {start}",
        )
    update(tx, batch_id, items=start + count, updated_at=now)
    if idempotency_key is not None:
        row = {"batch_id": batch_id, "idempotency_key": idempotency_key, "start": start, "count": count}
        tx.execute(sa.insert(tables.extends).values(row))
    return Extended(get(tx, batch_id), start, count, replayed=False)


def seal(tx: Connection, batch_id: int, fingerprint: bytes) -> Sealed:
    """Declare that no more items will be added; completes the batch if none is pending. `fingerprint` identifies the
    request.

    Raises `errors.BatchNotFound`, `BatchEnded` (expired, cancelled).
    """
    batch, now = lock(tx, batch_id)
    judge("seal", batch_id, batch.state)
    if batch.state is not State.OPEN:
        return Sealed(batch, batch.completed_by == fingerprint, batch.succeeded_by == fingerprint)
    values: dict[str, Any] = {"state": State.SEALED, "sealed_at": now, "updated_at": now}
    newly = completes(State.SEALED, batch.items, batch.acked, batch.failed)
    newly_succeeded = newly and batch.failed == 0
    if newly:
        values |= {"state": State.COMPLETE, "ended_at": now, "completed_by": fingerprint}
        if batch.journal_next:
            values["journal_next"] = folding.fold(tx, batch.id, batch.group_size, batch.items, batch.journal_next)
    if newly_succeeded:
        values["succeeded_by"] = fingerprint
    if newly and batch.parent_batch is not None:
        values["parent_due"] = nesting.owed(State.COMPLETE, batch.failed)
    update(tx, batch_id, **values)
    now_sealed = get(tx, batch_id)
    event_names = ["sealed", *(["completed"] if newly else []), *(["succeeded"] if newly_succeeded else [])]
    feed.append(tx, [event(now_sealed, name) for name in event_names])
    return Sealed(now_sealed, newly, newly_succeeded)


def cancel(tx: Connection, batch_id: int) -> Batch:
    """End a live batch; its row stays as a tombstone. Raises `errors.BatchNotFound`, `BatchEnded`."""
    batch, now = lock(tx, batch_id)
    judge("cancel", batch_id, batch.state)
    if batch.state is State.CANCELLED:
        return batch
    return end(tx, batch, State.CANCELLED, now)


def end(tx: Connection, batch: Batch, state: State, now: datetime) -> Batch:
    """Cancel or expire a live batch whose lock is held."""
    values: dict[str, Any] = {"state": state, "ended_at": now, "updated_at": now}
    if batch.parent_batch is not None:
        values["parent_due"] = nesting.owed(state, batch.failed)
    update(tx, batch.id, **values)
    after = get(tx, batch.id)
    feed.append(tx, [event(after, str(state))])
    return after


@dataclass(frozen=True, slots=True)
class BatchPage:
    """The next page has the ids below `before`; None at the end."""

    batches: list[Batch]
    before: int | None


def page(
    tx: Connection,
    *,
    state: State | None = None,
    key: str | None = None,
    labels: Mapping[str, str] | None = None,
    prefix: str | None = None,
    before: int | None = None,
    limit: int = 100,
) -> BatchPage:
    """Batches, newest first; with `prefix`, only those whose key begins with it. A page examines at most `SCAN` rows,
    and fewer if labels are large. So with a filter by labels, a page may be empty and not the last."""
    query = sa.select(*_COLUMNS).order_by(_table.id.desc())
    query = query.where(_table.state == state if state else _table.state != State.DELETING)
    if key is not None:
        query = query.where(_table.batch_key == key)
    if prefix is not None:
        query = query.where(tables.begins(_table.batch_key, prefix))

    def below(last: Batch | None, count: int) -> list[Batch]:
        start = before if last is None else last.id
        part = query if start is None else query.where(_table.id < start)
        return [from_row(row) for row in tx.execute(part.limit(count)).mappings()]

    filters = dict(labels or {})
    scan_limit = SCAN if filters else limit + 1
    rows = limits.stepwise(below, _label_bytes, first=min(scan_limit, FIRST))
    candidates, has_more = limits.within(rows, _label_bytes, scan_limit)
    matches: list[Batch] = []
    for batch in candidates:
        if len(matches) == limit:
            return BatchPage(matches, matches[-1].id)
        if filters.items() <= batch.labels.items():
            matches.append(batch)
    return BatchPage(matches, candidates[-1].id if has_more else None)


def _label_bytes(batch: Batch) -> int:
    return sum(len(name) + len(value) for name, value in batch.labels.items())
