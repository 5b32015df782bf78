"""Opening, extending and sealing: many operations, on one batch or on many, in one transaction with few statements.

The rows of all batches that are extended or sealed are locked first, by one statement, in the order of their ids.
Then the operations are judged one by one, in the order of their arrival, each by the state that the ones before it
left. A refused operation changes nothing and doesn't affect the others. At the end, one statement for each kind of
change writes the rows.

These verbs lock batch rows and no groups. One exception: a seal that completes a journaled batch writes its groups,
which acks also write only under the lock of that row (see `lock_order`).

What could go wrong, and why it can't:

*A producer lost the response to its extend, and the batch was sealed since.* The Idempotency-Key is looked up *under
the batch's lock and before the state is judged*, so the repeated extend still returns its numbers.

*An item adds items to its sealed batch, and is acked at the same time.* The batch would complete without the new
items, or get items after its end. Whoever flips the item's bit needs the lock of the batch's row, too. So the bit is
read under that lock (see `core.bits.items`): while the item is pending, the batch can't be complete, nor become it
before this transaction commits.

*A batch seals itself while a lost extend is repeated.* The extend that issues the last number seals the batch in the
same transaction, and its key is stored with it. The repeat finds the key, and changes nothing.

*Two opens with one key.* Both may find no batch with the key. One inserts it; the other one's INSERT waits for that
commit, fails, and its transaction begins again (`faults.BeginAgain`). In one transaction, the second operation finds
what the first one opened.

*A batch is extended and sealed in the same transaction.* The operations are judged in order, by rows in memory whose
lock is held until the commit. The rows are written once, with the final values.

*The ids of the new batches are confused.* One INSERT has all rows; the database assigns ascending ids to them in their
order, and `Dialect.batch_ids` returns these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy.engine import Connection

from core import errors, feed
from core.batches import batch as batches
from core.batches import callbacks, history, nesting
from core.batches.batch import Batch, Extended, Opened, Opening, Sealed
from core.batches.lifecycle import State, judge
from core.bits import folding, items
from core.commits.kind import Kind
from core.commits.operation import Done, Operation
from core.storage import dialects, schema, tables
from core.storage.statements import Answer, Pipeline, among, as_text, as_time, inserts, packets
from core.traces import TraceContext
from lastbit.ids import MAX_ITEMS, ItemId

_NOW: Final = datetime.max.replace(tzinfo=UTC)
"""Stands for the database's time when a row is inserted."""
_OPENED: Final = [f.name for f in fields(Opening) if f.name in {column.name for column in fields(Batch)}]
"""What a batch gets from its opening as it is."""
POLICIES: Final = "0014"
"""The revision of the schema that introduced the newest of the policies that can be updated. An earlier release would
ignore some of them."""
SEAL_AT: Final = "0024"
"""The revision that introduced `seal_at`. An earlier release would issue more items, and not seal the batch."""


@dataclass(slots=True, eq=False, kw_only=True)
class Open(Operation):
    """Open a batch. `fingerprint` identifies the request. `prefix` is the one that the caller is limited to; its
    idempotency keys are separate from those of other callers.

    Its result is an `Opened`. Errors: `IdempotencyKeyReused`; `InvalidRequest`, `BatchEnded` for a parent that can't
    have this child, `InvalidRequest` for a deadline that has passed; `UpgradeNotFinished` for a policy that an earlier
    release would ignore.
    """

    opening: Opening
    idempotency_key: str | None = None
    fingerprint: bytes
    prefix: str | None = None
    secret: str | None = field(default=None, repr=False)
    """The secret of the opening's callback, if the batch is new."""
    trace: TraceContext | None = None
    """The context of the request. It is no part of the opening, as each repeat may have another one: the batch keeps
    the first."""
    cost: int = 8

    @property
    def must_be_alone(self) -> bool:
        """A parent's row is locked, and its bits are read, before anything else of the transaction."""
        return self.opening.parent is not None

    @property
    def open_key(self) -> str | None:
        """The stored key. Keys of opens are global, except that callers limited to different prefixes can't collide."""
        if self.idempotency_key is None or self.prefix is None:
            return self.idempotency_key
        return "limited:" + hashlib.sha256(json.dumps([self.prefix, self.idempotency_key]).encode()).hexdigest()


@dataclass(slots=True, eq=False, kw_only=True)
class Extend(Operation):
    """Issue `count` more numbers, and seal the batch if it seals itself at that. `digest` stands for what they are
    issued for: a repeat under the same key must have the same one, if both have any. Its result is an `Extended`.
    Errors: `BatchNotFound`, `BatchEnded`, `BatchFull`, `ItemResolved`, `IdempotencyKeyReused`, `InvalidRequest` (more
    items than a batch can hold, a digest without a key, or an item that the batch doesn't have)."""

    count: int
    idempotency_key: str | None = None
    digest: str | None = None
    by: ItemId | None = None
    """The item of the same batch on whose behalf they are issued. As long as it is pending, the batch may be sealed."""
    cost: int = 4

    def extend_key(self) -> str | None:
        """The stored key. Keys of extends on behalf of an item are the item's own: its handler may have the same key
        for each item."""
        if self.idempotency_key is None or self.by is None:
            return self.idempotency_key
        return "by:" + hashlib.sha256(json.dumps([*self.by, self.idempotency_key]).encode()).hexdigest()


@dataclass(slots=True, eq=False, kw_only=True)
class Seal(Operation):
    """Declare that no more items will be added; completes the batch if none is pending. `fingerprint` identifies the
    request; None if nobody waits for it. Its result is a `Sealed`. Errors: `BatchNotFound`, `BatchEnded` (expired,
    cancelled)."""

    fingerprint: bytes | None
    cost: int = 8


class BatchWrites(Kind):
    """Opens, extends and seals of batches."""

    handles = (Open, Extend, Seal)
    locks = ("batches", "webhooks")

    def __init__(self, pipeline: Pipeline, operations: Sequence[Open | Extend | Seal]) -> None:
        super().__init__(pipeline, operations)
        self._opens = [operation for operation in operations if isinstance(operation, Open)]
        self._changes = [operation for operation in operations if not isinstance(operation, Open)]
        self._events: list[feed.NewEvent] = []
        self._new: list[tuple[Open, Batch]] = []
        """The batches that the next round trip inserts."""
        self._inserts: list[tuple[int, Answer]] = []
        """The numbers of their rows in each INSERT."""
        self._repeats: list[tuple[Open, Open]] = []
        """Opens with the key of one of these, and that one."""

    def judge(self, refused: Mapping[Any, errors.CoreError]) -> None:
        # Before the key is looked up: two opens with the same key and parent run one after the other, and the second
        # finds the key instead of an item that has a child already.
        parents = self._lock_parents()
        found = _look(self.pipeline, self._opens, self._changes)
        self._change(found)
        self._open(found, parents)
        if any(operation.opening.callback is not None for operation, _ in self._new):
            # Now, as callbacks need the ids of their batches, and another round trip: before the feed's head is locked.
            self._record()

    def has_events(self) -> bool:
        return bool(self._events or self._new)

    def batches(self) -> set[int]:
        return {operation.batch for operation in self._changes} if self._events else set()

    def finish(self, position: int) -> list[feed.NewEvent]:
        """This may first run the waiting statements."""
        self._record()
        return self._events

    def _lock_parents(self) -> dict[Open, Any]:
        return {
            operation: nesting.lock_parent(self.pipeline.tx, operation.opening.parent)
            for operation in self._opens
            if operation.opening.parent is not None
        }

    def _change(self, found: _Found) -> None:
        """Judge extends and seals, and write the batches that they change."""
        current = dict(found.locked)
        issued: list[tuple[int, str, int, int, str | None]] = []
        for operation in self._changes:
            batch = current.get(operation.batch)
            try:
                if batch is None or found.now is None:
                    raise errors.BatchNotFound(operation.batch)
                if isinstance(operation, Seal):
                    result: Any = self._seal(batch, operation, found.now)
                else:
                    result = self._extend(batch, operation, found)
                    key = operation.extend_key()
                    if key is not None and not result.replayed:
                        facts = result.start, result.count, operation.digest
                        issued.append((batch.id, key, *facts))
                        found.extended[batch.id, key] = facts
            except errors.CoreError as error:
                self.outcomes[operation] = Done(error=error)
            else:
                current[batch.id] = result.batch
                self.outcomes[operation] = Done(result)
        changed = [(found.locked[id], batch) for id, batch in current.items() if batch is not found.locked[id]]
        dialect = dialects.of(self.pipeline.tx)
        batches_table, extends_table = (dialect.name(self.pipeline.tx, table) for table in ("batches", "extends"))
        self.pipeline.later(*batches.ROWS.updates(dialect, changed, batches_table))
        keys = [dialect.row(row) for row in issued]
        self.pipeline.later(*inserts(extends_table, "batch_id, idempotency_key, start, count, digest", keys))

    def _seal(self, batch: Batch, operation: Seal, now: datetime) -> Sealed:
        fingerprint = operation.fingerprint
        if batch.state is State.CANCELLED and batch.completed_by == fingerprint:
            return Sealed(batch, newly=False, newly_succeeded=False)  # this request's own effect
        judge("seal", batch.id, batch.state)
        if batch.state is not State.OPEN:
            newly = batch.complete and batch.completed_by == fingerprint
            return Sealed(batch, newly, batch.succeeded_by == fingerprint)
        after = self._sealed(batch, now, fingerprint)
        if after.state is State.CANCELLED:
            after = replace(after, completed_by=fingerprint)
        return Sealed(after, after.complete, after.succeeded)

    def _sealed(self, batch: Batch, now: datetime, fingerprint: bytes | None = None) -> Batch:
        """The open batch once it is sealed, by the request with this fingerprint or by itself; adds the events."""
        change = replace(batch, state=State.SEALED, sealed_at=now, updated_at=max(batch.updated_at, now))
        after, names = batches.settled(batch, change, now, fingerprint)
        if after.complete and batch.journal_next:
            folded = folding.fold(self.pipeline.tx, batch.id, batch.group_size, batch.items, batch.journal_next)
            after = replace(after, journal_next=folded)
        self._events += batches.events(after, ["sealed", *names])
        return after

    def _extend(self, batch: Batch, operation: Extend, found: _Found) -> Extended:
        extension = _extended(batch, operation, found)
        after = extension.batch
        if extension.replayed or after.state is not State.OPEN or after.items != after.seal_at:
            return extension
        assert found.now is not None
        return replace(extension, batch=self._sealed(after, found.now))

    def _open(self, found: _Found, parents: Mapping[Open, Any]) -> None:
        """Insert the batches of all opens whose key is new."""
        first_of: dict[str, Open] = {}
        new: list[Open] = []
        parent_columns: dict[str, Any] = {}
        now: datetime | None = None
        for operation in self._opens:
            key, parent = operation.open_key, operation.opening.parent
            try:
                if key is not None and key in found.opened:
                    self.outcomes[operation] = Done(_replayed(self.pipeline.tx, found.opened[key], operation))
                    continue
                if key is not None and key in first_of:
                    self._repeats.append((operation, first_of[key]))
                    continue
                if operation.opening.has_policies:
                    check_policies(self.pipeline.tx)
                if operation.opening.seal_at is not None:
                    check_policies(self.pipeline.tx, SEAL_AT)
                if operation.opening.deadline is not None:
                    now = now or tables.clock(self.pipeline.tx)
                    check_deadline(operation.opening.deadline, now)
                if parent is not None:
                    parent_columns = nesting.adopt(self.pipeline.tx, parent, parents[operation])
            except errors.CoreError as error:
                self.outcomes[operation] = Done(error=error)
                continue
            new.append(operation)
            if key is not None:
                first_of[key] = operation
        if new:
            self._insert(new, parent_columns)

    def _insert(self, opens: Sequence[Open], parent_columns: Mapping[str, Any]) -> None:
        """Insert the batches in the next round trip; `_record` makes their outcomes and events after it."""
        tx = self.pipeline.tx
        dialect = dialects.of(tx)
        now_literal = dialect.one_time(tx)
        self._new = [(operation, _new_batch(operation, parent_columns)) for operation in opens]
        rows = [_row(operation, batch) for operation, batch in self._new]
        texts = [
            f"({','.join([now_literal if value is _NOW else dialect.literal(value) for value in row.values()])})"
            for row in rows
        ]
        if parent_columns:
            self.pipeline.later(nesting.counted(parent_columns["parent_batch"]))
        for part in packets(texts):
            *earlier, text = dialect.insert_batches(tx, ", ".join(rows[0]), part)
            self.pipeline.later(*earlier)
            self._inserts.append((len(part), self.pipeline.query(text)))

    def _record(self) -> None:
        dialect = dialects.of(self.pipeline.tx)
        stamps: list[tuple[int, datetime]] = []
        for count, answer in self._inserts:
            ids = dialect.batch_ids(answer.rows(), count)
            stamps += [(id, as_time(answer.rows()[0][1])) for id in ids]
        opened = [
            (operation, _inserted(batch, id, now))
            for (operation, batch), (id, now) in zip(self._new, stamps, strict=True)
        ]
        wanted = {batch.id: callback for operation, batch in opened if (callback := _callback(operation))}
        issued = callbacks.insert(self.pipeline, wanted) if wanted else {}
        for operation, batch in opened:
            newly = batch.complete
            names = ["opened", *(["sealed"] if operation.opening.is_sealed else [])]
            names += ["completed", "succeeded"] if newly else []
            self._events += batches.events(batch, names)
            self.outcomes[operation] = Done(
                Opened(batch, 0, operation.opening.items, newly, replayed=False, callback=issued.get(batch.id))
            )
        for operation, original in self._repeats:
            batch = self.outcomes[original].value.batch
            try:
                self.outcomes[operation] = Done(_replayed(self.pipeline.tx, batch, operation))
            except errors.CoreError as error:
                self.outcomes[operation] = Done(error=error)
        self._new, self._inserts, self._repeats = [], [], []


@dataclass(slots=True)
class _Found:
    """What the first round trip has read."""

    locked: dict[int, Batch]
    now: datetime | None
    extended: dict[tuple[int, str], tuple[int, int, str | None]]
    """(start, count, digest) of earlier extends, by batch and key."""
    resolved: frozenset[ItemId]
    """Those of the items on whose behalf batches are extended that are not pending."""
    opened: dict[str, Batch]
    """The batches that were opened with these keys."""


def _look(pipeline: Pipeline, opens: Sequence[Open], changes: Sequence[Operation]) -> _Found:
    """Lock the batches of `changes`, look up all idempotency keys, and read the bits of items on whose behalf batches
    are extended, in one round trip; another one reads the journals of these batches."""
    dialect = dialects.of(pipeline.tx)
    expressions = batches.ROWS.expressions(dialect)
    batches_table, extends_table = (dialect.name(pipeline.tx, table) for table in ("batches", "extends"))
    extends = [operation for operation in changes if isinstance(operation, Extend)]
    extend_keys = {(extend.batch, key) for extend in extends if (key := extend.extend_key()) is not None}
    adding = {extend.by for extend in extends if extend.by is not None and extend.by.batch == extend.batch}
    open_keys = {key for operation in opens if (key := operation.open_key) is not None}
    columns, table = [*expressions, dialect.flat(dialect.now, "time")], dialect.by_primary_key(batches_table)
    locked = pipeline.query_keys(
        {operation.batch for operation in changes},
        lambda part: dialect.select(
            columns, f"{table} WHERE id IN ({','.join(map(str, part))}) ORDER BY id{dialect.for_update()}", 0
        ),
    )
    extended = pipeline.query_keys(
        extend_keys,
        lambda part: (
            f"SELECT batch_id, idempotency_key, start, count, digest FROM {extends_table} "  # noqa: S608
            f"WHERE {among(pipeline.tx, ('batch_id', 'idempotency_key'), part)}"
        ),
    )
    opened = pipeline.query_keys(
        open_keys,
        lambda part: dialect.select(
            [dialect.flat("open_key", "text"), *expressions],
            f"{batches_table} WHERE open_key IN ({','.join(map(dialect.literal, part))})",
            0,
        ),
    )
    adding_groups = items.ask(pipeline, adding)
    found = _Found({}, None, {}, frozenset(), {})
    for *record, time in locked.records():
        batch, found.now = batches.ROWS.from_record(record), found.now or as_time(time)
        if batch.state is not State.DELETING:
            found.locked[batch.id] = batch
    found.resolved = items.resolved(pipeline, adding_groups, found.locked, adding)
    for id, key, start, count, digest in extended.rows():
        found.extended[id, as_text(key) or ""] = start, count, as_text(digest)
    for digits, *record in opened.records():
        found.opened[bytes.fromhex(digits).decode()] = batches.ROWS.from_record(record)
    return found


def _extended(batch: Batch, operation: Extend, found: _Found) -> Extended:
    key, count, digest = operation.idempotency_key, operation.count, operation.digest
    if key is None and digest is not None:
        raise errors.InvalidRequest("body.digest", "expected an Idempotency-Key with it, whose repeats it is for")
    extend_key = operation.extend_key()
    before = None if extend_key is None else found.extended.get((batch.id, extend_key))
    if before is not None:
        start, before_count, before_digest = before
        if before_count != count:
            raise errors.IdempotencyKeyReused(key or "", f"it extended batch {batch.id} by {before_count}")
        if None not in (digest, before_digest) and digest != before_digest:
            raise errors.IdempotencyKeyReused(key or "", f"it extended batch {batch.id} with another digest")
        return Extended(batch, start, count, replayed=True)
    if operation.by is None:
        judge("extend", batch.id, batch.state)
    else:
        _check_pending(batch, operation.by, found.resolved)
        judge("extend on behalf of an item", batch.id, batch.state)
    start = batch.items
    if batch.seal_at is not None and start + count > batch.seal_at:
        raise errors.BatchFull(batch.id, start, batch.seal_at, count)
    if start + count > MAX_ITEMS:
        raise errors.InvalidRequest(
            "body.count",
            f"expected at most {MAX_ITEMS - start}: a batch holds at most 10^12 items, this one has {start}",
        )
    assert found.now is not None
    return Extended(
        replace(batch, items=start + count, updated_at=max(batch.updated_at, found.now)), start, count, replayed=False
    )


def _check_pending(batch: Batch, item: ItemId, resolved: Collection[ItemId]) -> None:
    """Raise `errors.InvalidRequest` for an item that the batch doesn't have, `errors.ItemResolved` for one that is not
    pending."""
    number = item.number(batch.group_size) if item.batch == batch.id else None
    if number is None or number >= batch.items:
        raise errors.InvalidRequest(
            "body.by", f"expected an item of batch {batch.id}, which has {batch.items} items, got {item}"
        )
    if item in resolved:
        raise errors.ItemResolved(item)


def check_policies(tx: Connection, revision: str = POLICIES) -> None:
    """Raise `errors.UpgradeNotFinished` while a release from before this revision, which would ignore a policy, may be
    running."""
    if not schema.serves_only(tx, revision):
        raise errors.UpgradeNotFinished(revision)


def check_deadline(deadline: datetime, now: datetime) -> None:
    """Raise `errors.InvalidRequest` for a deadline that has passed by `now`, the database's time."""
    if deadline <= now:
        raise errors.InvalidRequest(
            "body.deadline", f"expected a time in the future; the database's clock shows {now:%Y-%m-%dT%H:%M:%SZ}"
        )


def _replayed(tx: Connection, batch: Batch, operation: Open) -> Opened:
    if batch.open_hash != operation.opening.fingerprint():
        raise errors.IdempotencyKeyReused(operation.idempotency_key or "", f"it opened batch {batch.id}")
    newly = batch.completed_by == operation.fingerprint
    callback = None
    if operation.opening.callback is not None:
        callback = callbacks.of_batches(tx, [batch.id]).get(batch.id)
    return Opened(batch, 0, batch.open_count, newly, replayed=True, callback=callback)


def _callback(operation: Open) -> tuple[callbacks.Callback, str] | None:
    if operation.opening.callback is None:
        return None
    assert operation.secret is not None
    return operation.opening.callback, operation.secret


def _new_batch(operation: Open, parent_columns: Mapping[str, Any]) -> Batch:
    """The batch before its INSERT, which gives it an id and a time."""
    opening = operation.opening
    facts: dict[str, Any] = {name: getattr(opening, name) for name in _OPENED} | dict(parent_columns)
    batch = Batch(
        id=0,
        **facts,
        state=State.SEALED if opening.is_sealed else State.OPEN,
        sealed_at=_NOW if opening.is_sealed else None,
        open_hash=opening.fingerprint() if operation.idempotency_key is not None else None,
        open_count=opening.items,
        created_at=_NOW,
        updated_at=_NOW,
        traceparent=None if operation.trace is None else operation.trace.traceparent,
        tracestate=None if operation.trace is None else operation.trace.tracestate,
    )
    return batches.settled(batch, batch, _NOW, operation.fingerprint)[0] if opening.is_sealed else batch


def _row(operation: Open, batch: Batch) -> dict[str, Any]:
    """The values by column. Those of the columns that no `Batch` has are its key, when it was last seen, and how it got
    on."""
    more_values = {"open_key": operation.open_key, "seen_updated_at": _NOW, "history": history.begun()}
    values = batches.ROWS.values(batch) | more_values
    del values["id"]
    return values


def _inserted(batch: Batch, id: int, now: datetime) -> Batch:
    times = [name for name in ("created_at", "updated_at", "sealed_at", "ended_at") if getattr(batch, name) is _NOW]
    stamps: dict[str, Any] = dict.fromkeys(times, now)
    return replace(batch, id=id, **stamps)
