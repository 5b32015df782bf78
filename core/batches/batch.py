"""The batch's own row: reading it, locking it, and ending it early. `writing` opens, extends and seals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cache
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from core import errors, feed
from core.batches import nesting
from core.batches.callbacks import Callback, Issued
from core.batches.lifecycle import State, judge
from core.batches.tolerance import OnExceeded, Tolerance
from core.storage import dialects, statements, tables
from core.storage.dialects import Rows
from core.storage.statements import LIST, as_time, chunks
from core.traces import TraceContext
from lastbit.ids import DEFAULT_GROUP_SIZE, ItemId, item_id

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
    deadline: datetime | None
    tolerated_failures: int | None
    tolerated_failure_percentage: int | None
    on_exceeded: OnExceeded
    exceeded: bool
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
    traceparent: str | None
    tracestate: str | None

    @property
    def pending(self) -> int:
        return self.items - self.acked - self.failed

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
COLUMNS = [_table.batch_key.label("key") if f.name == "key" else _table[f.name] for f in fields(Batch)]
_NAMES: Final = [f.name for f in fields(Batch)]
_TEXTS: Final = frozenset({"key", "labels", "traceparent", "tracestate"})
_HASHES: Final = frozenset({"open_hash", "completed_by", "succeeded_by"})
_TIMES: Final = frozenset({"deadline", "created_at", "updated_at", "sealed_at", "ended_at"})
_NULL: Final = "-"


@cache
def expressions(dialect: dialects.Dialect) -> tuple[str, ...]:
    """The columns of a batch for `statements.select`. A driver parses one text faster than this number of columns."""
    kinds: dict[str, Any] = dict.fromkeys(_TEXTS, "text") | dict.fromkeys(_HASHES, "bytes")
    kinds |= dict.fromkeys(_TIMES, "time")
    columns = {name: _table["batch_key" if name == "key" else name] for name in _NAMES}
    return tuple(
        dialect.flat(column.name, kinds.get(name, "plain"), nullable=bool(column.nullable))
        for name, column in columns.items()
    )


def from_row(row: RowMapping) -> Batch:
    values = {f.name: row[f.name] for f in fields(Batch)}
    read = {
        "labels": json.loads(values["labels"]),
        "state": State(values["state"]),
        "on_exceeded": OnExceeded(values["on_exceeded"]),
        "exceeded": bool(values["exceeded"]),
    }
    return Batch(**{**values, **read})


def from_record(record: Sequence[Any]) -> Batch:
    """The batch in one of the `statements.records` of `expressions`."""
    values: list[Any] = [None if value == _NULL else read(value) for read, value in zip(_READERS, record, strict=True)]
    return Batch(*values)


def _labels(digits: str) -> Mapping[str, str]:
    labels: Mapping[str, str] = json.loads(bytes.fromhex(digits))
    return labels


def _text(digits: str) -> str:
    return bytes.fromhex(digits).decode()


_SPECIAL: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("key", "traceparent", "tracestate"), _text),
    "labels": _labels,
    "state": State,
    "parent_due": str,
    "on_exceeded": OnExceeded,
    "exceeded": lambda digit: bool(int(digit)),
    **dict.fromkeys(_HASHES, bytes.fromhex),
    **dict.fromkeys(_TIMES, as_time),
}
_READERS: Final = [_SPECIAL.get(name, int) for name in _NAMES]


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
    tolerated_failures: int | None = None
    tolerated_failure_percentage: int | None = None
    on_exceeded: OnExceeded = OnExceeded.CONTINUE
    callback: Callback | None = None
    deadline: datetime | None = None
    """In UTC."""

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
    row = tx.execute(sa.select(*COLUMNS).where(_table.id == batch, _table.state != State.DELETING)).mappings().first()
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


def by_id(tx: Connection, ids: Collection[int], *, is_all: bool = False) -> dict[int, Batch]:
    """Read without a lock; ids that don't exist are left out. `is_all`: the transaction reads nothing else."""
    dialect = dialects.of(tx)
    run = statements.finish if is_all else statements.run
    return {batch.id: batch for rows in run(tx, *selects(dialect, ids)) for batch in from_rows(dialect, rows)}


def selects(dialect: dialects.Dialect, ids: Collection[int]) -> list[str]:
    """Statements that read batches without a lock. Their rows are arguments of `from_rows`."""
    return [
        dialect.select(
            expressions(dialect), f"batches WHERE id IN ({','.join(map(str, part))}) AND state <> '{State.DELETING}'", 0
        )
        for part in chunks(sorted(ids), LIST)
    ]


def from_rows(dialect: dialects.Dialect, rows: Rows) -> list[Batch]:
    """The batches in rows that a SELECT of `expressions` found."""
    return [from_record(record) for record in dialect.records(rows)]


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
            "pending": batch.pending,
            "parent": batch.parent,
            **(trace.headers() if trace is not None else {}),
            **more,
        }
    )
    # A repair can revoke a completion that was announced. The true completion is another event, with an id of its own.
    suffix = f":{batch.repairs}" if batch.repairs else ""
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
    query = sa.select(*COLUMNS, tables.utc_now().label("now")).where(_table.id == batch).with_for_update()
    row = tx.execute(query).mappings().first()
    if row is None or row["state"] == State.DELETING:
        raise errors.BatchNotFound(batch)
    return from_row(row), row["now"]


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


def update(tx: Connection, batch: int, **values: Any) -> None:
    tx.execute(sa.update(tables.batches).where(_table.id == batch).values(**values))


def cancel(tx: Connection, batch_id: int) -> Batch:
    """End a live batch; its row stays as a tombstone. Raises `errors.BatchNotFound`, `BatchEnded`."""
    batch, now = lock(tx, batch_id)
    judge("cancel", batch_id, batch.state)
    if batch.state is State.CANCELLED:
        return batch
    return end(tx, batch, State.CANCELLED, now)


def end(tx: Connection, batch: Batch, state: State, now: datetime, **more: Any) -> Batch:
    """Cancel or expire a live batch whose lock is held. `more` are further data of the event."""
    values: dict[str, Any] = {"state": state, "ended_at": now, "updated_at": now}
    if batch.parent_batch is not None:
        values["parent_due"] = nesting.owed(succeeded=False)
    update(tx, batch.id, **values)
    after = get(tx, batch.id)
    feed.append(tx, [event(after, str(state), **more)])
    return after
