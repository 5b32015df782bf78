"""The batch's own row: reading it, locking it, and ending it early. `writing` opens, extends and seals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed
from core.batches import settle
from core.batches.callbacks import Callback, Issued
from core.batches.lifecycle import Duty, State, Verb, judge
from core.batches.settle import Standing
from core.batches.tolerance import OnExceeded, Tolerance
from core.storage import dialects, statements, tables
from core.storage.row_codec import RowCodec
from core.storage.statements import LIST, Pipeline, chunks
from core.traces import TraceContext
from lastbit.ids import DEFAULT_GROUP_SIZE, ItemId, item_id

_ENDS: Final = frozenset(
    {f"{feed.BATCH}.completed", f"{feed.BATCH}.{State.EXPIRED}", f"{feed.BATCH}.{State.CANCELLED}"}
)
"""Types of the events that end a batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A row of `batches`. Times are aware, in UTC. The defaults are those of a new batch."""

    id: int
    key: str | None
    labels: Mapping[str, str]
    group_size: int
    items: int
    state: State
    on_exceeded: OnExceeded
    open_count: int
    created_at: datetime
    updated_at: datetime
    acked: int = 0
    failed: int = 0
    skipped: int = 0
    full_prefix: int = 0
    parent_batch: int | None = None
    parent_number: int | None = None
    parent_group_size: int | None = None
    parent_due: Verb | None = None
    seal_at: int | None = None
    """The number of items with which it seals itself, and which it can't exceed."""
    expires_in: int | None = None
    deadline: datetime | None = None
    tolerated_failures: int | None = None
    tolerated_failure_percentage: int | None = None
    exceeded: bool = False
    open_hash: bytes | None = None
    completed_by: bytes | None = None
    succeeded_by: bytes | None = None
    journal_next: int = 0
    no_journal: bool = False
    """Its bits never enter a journal, as transactions of callers lock its groups alone (see `core.enlisted`)."""
    generation: int = 0
    """How often it came back from an end, or was repaired: a part of the ids of its events from then on."""
    children: int = 0
    children_due: Duty | None = None
    children_told: int = 0
    sealed_at: datetime | None = None
    ended_at: datetime | None = None
    ended_by: int | None = None
    reason: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None

    @property
    def resolved(self) -> int:
        return self.acked + self.failed + self.skipped

    @property
    def pending(self) -> int:
        return self.items - self.resolved

    @property
    def complete(self) -> bool:
        return self.state is State.COMPLETE

    @property
    def succeeded(self) -> bool:
        return self.complete and self.tolerance.succeeds(self.items, self.failed)

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(self.tolerated_failures, self.tolerated_failure_percentage)

    @property
    def passes_tolerance(self) -> bool:
        """Whether its failures are beyond its tolerance now. `exceeded`: they are, or have been."""
        return self.tolerance.is_passed(self.items, self.failed, sealed=self.state is not State.OPEN)

    @property
    def standing(self) -> Standing:
        """What decides about its end."""
        counts = self.items, self.acked, self.failed, self.skipped
        return Standing(self.state, *counts, self.tolerance, self.on_exceeded, self.exceeded)

    @property
    def trace(self) -> TraceContext | None:
        """The context that the open brought."""
        return None if self.traceparent is None else TraceContext(self.traceparent, self.tracestate)

    @property
    def parent(self) -> str | None:
        """The id of the parent's item that this batch stands for."""
        if self.parent_batch is None or self.parent_number is None or self.parent_group_size is None:
            return None
        return item_id(self.parent_batch, self.parent_number, self.parent_group_size)


_table = tables.batches.c
ROWS: Final = RowCodec(Batch, tables.batches, {"key": "batch_key", "generation": "repairs"})
"""Reads and writes batches. `open_key`, `seen_updated_at` and `history` are read by themselves."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The parameters of an open, including defaults: two bodies with the same meaning are equal openings."""

    key: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    group_size: int = DEFAULT_GROUP_SIZE
    items: int = 0
    sealed: bool = False
    seal_at: int | None = None
    expires_in: int | None = None
    parent: ItemId | None = None
    tolerated_failures: int | None = None
    tolerated_failure_percentage: int | None = None
    on_exceeded: OnExceeded = OnExceeded.CONTINUE
    callback: Callback | None = None
    deadline: datetime | None = None
    """In UTC."""

    @property
    def is_sealed(self) -> bool:
        """Whether the open also seals the batch."""
        return self.sealed or self.items == self.seal_at

    @property
    def has_policies(self) -> bool:
        """Whether the batch has a policy that every release that works on it must know."""
        policies = self.tolerated_failures, self.tolerated_failure_percentage, self.callback, self.deadline
        return any(policy is not None for policy in policies)

    def fingerprint(self) -> bytes:
        """32 bytes that two openings share only if they are equal. Defaults are left out, so that a release with one
        more field still recognizes the openings of its predecessor."""
        defaults = Opening()
        facts = {f.name: getattr(self, f.name) for f in fields(self)}
        content = {name: value for name, value in facts.items() if value != getattr(defaults, name)}
        if self.parent is not None:
            content["parent"] = str(self.parent)
        if self.deadline is not None:
            content["deadline"] = self.deadline.isoformat()
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()


@dataclass(frozen=True, slots=True)
class Opened:
    """`callback`: the batch's, or None if it has none, or has none any more."""

    batch: Batch
    start: int
    count: int
    newly: bool
    replayed: bool
    callback: Issued | None = None


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
    query = sa.select(*ROWS.columns).where(_table.id == batch, _table.state != State.DELETING)
    row = tx.execute(query).mappings().first()
    if row is None:
        raise errors.BatchNotFound(batch)
    return ROWS.from_row(row)


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


def by_id(tx: Connection, ids: Collection[int], *, is_all: bool = False) -> dict[int, Batch]:
    """Read without a lock; ids that don't exist are left out. `is_all`: the transaction reads nothing else."""
    dialect = dialects.of(tx)
    run = statements.finish if is_all else statements.run
    records = [record for rows in run(tx, *selects(dialect, ids)) for record in dialect.records(rows)]
    return {batch.id: batch for batch in map(ROWS.from_record, records)}


def selects(dialect: dialects.Dialect, ids: Collection[int]) -> list[str]:
    """Statements that read batches without a lock. Their records are arguments of `ROWS.from_record`."""
    is_known = f"state <> '{State.DELETING}'"
    return [
        dialect.select(ROWS.expressions(dialect), f"batches WHERE id IN ({','.join(map(str, part))}) AND {is_known}", 0)
        for part in chunks(sorted(ids), LIST)
    ]


def event(batch: Batch, name: str, **more: Any) -> feed.NewEvent:
    """The event of a transition of the batch, with the batch's current counts and `more` data."""
    return events(batch, [name], **more)[0]


def events(
    batch: Batch, names: Sequence[str], *, trigger: TraceContext | None = None, **more: Any
) -> list[feed.NewEvent]:
    """The events of transitions of the batch, with the batch's current counts and `more` data. `trigger` is the context
    of the request that caused them."""
    trace = batch.trace
    data = _json(
        {
            "labels": dict(batch.labels),
            "items": batch.items,
            "acked": batch.acked,
            "failed": batch.failed,
            "skipped": batch.skipped,
            "pending": batch.pending,
            "parent": batch.parent,
            **(trace.headers() if trace is not None else {}),
            **more,
        }
    )
    # A reopened batch ends again, and a repair can revoke a completion that was announced. The later end is another
    # event, with an id of its own.
    suffix = f":{batch.generation}" if batch.generation else ""
    return [
        feed.NewEvent(
            f"{feed.BATCH}:{batch.id}:{name}{suffix}", f"{feed.BATCH}.{name}", batch.key, data, batch.id, trace, trigger
        )
        for name in names
    ]


_json: Final = json.JSONEncoder(ensure_ascii=False).encode


def ended(event: feed.Event) -> bool:
    """Whether the event announces a terminal state of its batch."""
    return event.type in _ENDS


def lock(tx: Connection, batch: int) -> tuple[Batch, datetime]:
    """The batch under its lock, and the database's time. Raises `errors.BatchNotFound`."""
    query = sa.select(*ROWS.columns, tables.utc_now().label("now")).where(_table.id == batch).with_for_update()
    row = tx.execute(query).mappings().first()
    if row is None or row["state"] == State.DELETING:
        raise errors.BatchNotFound(batch)
    return ROWS.from_row(row), row["now"]


def locked(tx: Connection, ids: Collection[int]) -> frozenset[int]:
    """Those of the batches whose row is locked by another transaction. Never waits; the caller must roll back."""
    if not dialects.of(tx).locks_rows:
        return frozenset()
    ids_found: set[int] = set()
    for part in chunks(sorted(ids), LIST):
        query = sa.select(_table.id).where(_table.id.in_(part))
        free = set(tx.scalars(query.with_for_update(skip_locked=True)))
        ids_found |= set(tx.scalars(query)) - free
    return frozenset(ids_found)


def update(tx: Connection, batch: int, **columns: Any) -> None:
    """Write these columns, in which a value need not be one of a `Batch`; see `save`."""
    tx.execute(sa.update(tables.batches).where(_table.id == batch).values(**columns))


def save(tx: Connection, before: Batch, after: Batch) -> None:
    """Write what differs between the two."""
    statements.run(tx, *ROWS.updates(dialects.of(tx), [(before, after)]))


def lock_all(tx: Connection, ids: Collection[int], *, skip_locked: bool = False) -> dict[int, Batch]:
    """Those of the batches that exist, under their locks; with `skip_locked`, without those that are locked now.
    Observes a short wait for locks."""
    dialect = dialects.of(tx)
    skip = " SKIP LOCKED" if skip_locked and dialect.locks_rows else ""
    answer = Pipeline(tx).query_keys(
        ids,
        lambda part: dialect.select(
            ROWS.expressions(dialect),
            f"{dialect.by_primary_key(dialect.name(tx, 'batches'))} WHERE id IN ({','.join(map(str, part))}) "
            f"ORDER BY id{dialect.for_update()}{skip}",
            0,
        ),
    )
    batches = map(ROWS.from_record, answer.records())
    return {batch.id: batch for batch in batches if batch.state is not State.DELETING}


def cancel(
    tx: Connection, batch_id: int, fingerprint: bytes, *, reason: str | None = None, children: bool = False
) -> Batch:
    """End a live batch; its row stays as a tombstone. With `children`, it must end its live descendants, also if it was
    cancelled before (see `descendants`). `fingerprint` identifies the request, whose repeat doesn't end a batch that
    was reopened since. Raises `errors.BatchNotFound`, `BatchEnded`."""
    batch, now = lock(tx, batch_id)
    if not batch.complete and batch.completed_by == fingerprint:
        children = children and batch.state is State.CANCELLED
    elif batch.state is not State.CANCELLED:
        judge("cancel", batch_id, batch.state)
        return end(tx, batch, State.CANCELLED, now, by=fingerprint, reason=reason, children=children)
    if not children or not batch.children:
        return batch
    after = replace(batch, children_due=Duty.END, children_told=0)
    save(tx, batch, after)
    return after


def settled(before: Batch, change: Batch, now: datetime, by: bytes | None = None) -> tuple[Batch, list[str]]:
    """What a change makes of the batch, whose lock is held or which is new; and the names of the events. `by`
    identifies the request."""
    transition = settle.settle(before.standing, change.standing)
    columns = transition.columns(now, is_nested=change.parent_batch is not None, has_children=change.children > 0)
    if transition.completed:
        columns["completed_by"] = by
    if transition.succeeded:
        columns["succeeded_by"] = by
    if any(getattr(change, name) != value for name, value in columns.items()):
        change = replace(change, **columns)
    return change, transition.events()


def ending(
    batch: Batch,
    state: State,
    now: datetime,
    *,
    reason: str | None = None,
    ended_by: int | None = None,
    by: bytes | None = None,
    children: bool = True,
    **more: Any,
) -> tuple[Batch, list[feed.NewEvent]]:
    """What a live batch becomes when it is cancelled or expires, and the events. `reason` is for people; `ended_by` is
    the ancestor that ended it; `by` identifies the request; `more` are further data of the event. `children`: whether
    its live descendants end."""
    change = replace(batch, state=state, reason=reason, ended_by=ended_by, completed_by=by, updated_at=now)
    after, names = settled(batch, change, now)
    if not children:
        after = replace(after, children_due=None)
    causes: dict[str, Any] = {
        name: cause for name, cause in (("reason", reason), ("ended_by", ended_by)) if cause is not None
    }
    return after, events(after, names, **causes, **more)


def end(tx: Connection, batch: Batch, state: State, now: datetime, **causes: Any) -> Batch:
    """Cancel or expire a live batch whose lock is held. `causes`: see `ending`."""
    after, new_events = ending(batch, state, now, **causes)
    save(tx, batch, after)
    feed.append(tx, new_events)
    return after
