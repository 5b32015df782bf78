"""Completion: the last step of an ack transaction, under the locks of the batch rows.

A batch becomes complete, or its failures pass its tolerance, only here and when it is sealed. Everything is decided in
Python from the locked rows, and absolute values are written (MariaDB assigns from left to right within an UPDATE,
SQLite does not).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sqlalchemy.engine import Connection

from core import errors, feed
from core.acks import outbox
from core.acks.call import Completed, Unit
from core.acks.delta import BatchDelta
from core.batches import batch as batches
from core.batches import history, settle
from core.batches.batch import Batch
from core.batches.history import Point
from core.batches.lifecycle import TAKES_ACKS, State, Verb
from core.batches.settle import Standing, Transition
from core.batches.tolerance import OnExceeded, Tolerance
from core.bits import group_rows
from core.storage import dialects, faults, statements, tables
from core.storage.row_codec import RowCodec
from core.storage.statements import Answer, Pipeline
from core.traces import TraceContext

PREFIX_STEP: Final = 64
CATCH_UP: Final = 4096
"""One transaction reads `PREFIX_STEP` groups after the full-prefix hint, and twice those that it fills, at most
`CATCH_UP`. If all of them are full, the hint is behind, as after an item that was acked much later than others. Then it
counts `CATCH_UP` groups more, in a millisecond or two, and advances the hint if all are full."""


@dataclass(slots=True)
class Verdict:
    """A batch that is complete after this transaction, or that something else has happened to in it."""

    id: int
    transition: Transition
    key: str | None = None
    completed_by: bytes | None = None
    succeeded_by: bytes | None = None
    owes: bool = False
    """The batch owes its parent's item an ack or a failure, since this transaction or an earlier one."""
    trigger: TraceContext | None = None
    """The context of the request that changed the last bit."""

    @property
    def complete(self) -> bool:
        return self.transition.after.complete

    def fill(self, batch: _Complete) -> None:
        """Add what the response tells of a batch that was complete before."""
        self.key, self.completed_by, self.succeeded_by = batch.key, batch.completed_by, batch.succeeded_by


def write(
    pipeline: Pipeline,
    deltas: Mapping[int, BatchDelta],
    repeats: Collection[int],
    locked_rows: dict[int, Row],
    refusals: Mapping[int, int],
    inserts: Sequence[str] = (),
    missing: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> dict[int, Verdict]:
    """Lock the rows of changed batches that aren't in `locked_rows`, check their states again, execute `inserts`, and
    write the new counts and states. The statements that wait in `pipeline` are executed in the same round trips; the
    last ones wait there afterwards. Returns the verdicts, including those on complete batches among `repeats`: batches
    in which all items were repeats.
    `refusals`: batches with items rejected as never issued → the number of issued items at that time. `missing`: groups
    of batches in which callers ack, that had no row before. Under the lock nobody else inserts them, but a caller may
    hold one that was inserted since.

    Raises `faults.BeginAgain` if a batch accepts no more acks, became journaled or a parent, or has grown since items
    of it were rejected; `errors.InconsistentBatch`.
    """
    unlocked, unread = deltas.keys() - locked_rows.keys(), set(repeats) - locked_rows.keys()
    delta_rows = repeat_rows = locked_rows
    if unlocked or unread:
        newly_locked, read = _lock_and_read(pipeline, unlocked, unread)
        delta_rows, repeat_rows = locked_rows | newly_locked, locked_rows | read
        all_rows = delta_rows | repeat_rows
        if any(batch in all_rows and all_rows[batch].items != items for batch, items in refusals.items()):
            raise faults.BeginAgain
    if missing:
        text = f"SELECT 1 FROM item_groups WHERE {group_rows.among(missing)}"  # noqa: S608
        if pipeline.query(text).rows():
            raise faults.BeginAgain
    verdicts = _look_again(pipeline.tx, repeat_rows, repeats) if repeats else {}
    pipeline.later(*inserts)
    if deltas:
        _add_what_waits(pipeline, delta_rows, deltas)
        verdicts |= _judge(pipeline, delta_rows, deltas)
    return verdicts


def _lock_and_read(
    pipeline: Pipeline, unlocked: Collection[int], unread: Collection[int]
) -> tuple[dict[int, Row], dict[int, Row]]:
    """One round trip. Batches without changes are read without a lock, but after the groups were locked. So the
    transactions that resolved their items have committed: otherwise they would still hold the group locks."""
    to_lock = ask(pipeline, unlocked, dialects.of(pipeline.tx).for_update("id"))
    to_read = ask(pipeline, unread)
    newly_locked = rows(to_lock)
    if any(row.journal_next or row.children for row in newly_locked.values()):
        # The batch became journaled: some of its bits are in the journal, which was not read (see `journal`). Or it got
        # its first child, which may hold one of the items.
        raise faults.BeginAgain
    return newly_locked, rows(to_read)


def _add_what_waits(pipeline: Pipeline, rows_by_id: Mapping[int, Row], deltas: Mapping[int, BatchDelta]) -> None:
    """Add the counts that callers' transactions have left, where they may decide: if items change that had failed or
    were skipped, as a caller may have failed or skipped them, which the batch doesn't count yet; and before the batch
    ends or passes its tolerance, as a caller may have acked a failed item. Whoever resolved an item of this flush has
    committed, as its group is locked."""
    batches_to_ask = [
        id
        for id, delta in deltas.items()
        if not delta.is_moved
        and id in rows_by_id
        and rows_by_id[id].no_journal
        and (delta.overrides or not settle.settle(rows_by_id[id].standing, _changed(rows_by_id[id], delta)).is_quiet)
    ]
    has_more = bool(batches_to_ask)
    while has_more:
        counts = outbox.ask(pipeline, batches_to_ask, seals=False)
        for batch, waiting in outbox.take(pipeline, counts).items():
            deltas[batch].add(waiting.delta)
        has_more = len(counts.rows()) == outbox.PAGE


def ask(pipeline: Pipeline, ids: Collection[int], locking: str = "") -> Answer:
    """Let the next round trip read these rows. The answer is an argument of `rows`."""
    columns = _ROWS.expressions(dialects.of(pipeline.tx))
    source = f"batches WHERE id IN ({','.join(map(str, sorted(ids)))}){locking}"
    return pipeline.query(*([statements.select(pipeline.tx, columns, source, len(ids))] if ids else []))


OWES: Final = "CASE WHEN parent_due IS NULL THEN 0 ELSE 1 END"
"""1 for a batch that owes its parent's item an ack or a failure."""


class Row(NamedTuple):
    """The columns that decide whether a batch is complete, and whether its failures pass its tolerance."""

    id: int
    state: State
    items: int
    acked: int
    failed: int
    skipped: int
    full_prefix: int
    group_size: int
    journal_next: int
    no_journal: bool
    children: int
    tolerated_failures: int | None
    tolerated_failure_percentage: int | None
    on_exceeded: OnExceeded
    exceeded: bool
    parent_due: Verb | None
    updated_at: datetime | None
    """Its last change. It and the history are read only if the history's next point is due."""
    history: bytes | None

    @property
    def owes(self) -> bool:
        return self.parent_due is not None

    @property
    def standing(self) -> Standing:
        tolerance = Tolerance(self.tolerated_failures, self.tolerated_failure_percentage)
        counts = self.items, self.acked, self.failed, self.skipped
        return Standing(self.state, *counts, tolerance, self.on_exceeded, self.exceeded)


class _Complete(NamedTuple):
    """More columns of a complete batch, for the response. They are read separately, as few batches of a flush are
    complete."""

    id: int
    failed: int
    key: str | None
    completed_by: bytes | None
    succeeded_by: bytes | None


_ROWS: Final = RowCodec(Row, tables.batches, conditions=dict.fromkeys(("updated_at", "history"), history.is_due))
_COMPLETE: Final = RowCodec(_Complete, tables.batches, {"key": "batch_key"})


def rows(answer: Answer) -> dict[int, Row]:
    return {row.id: row for row in map(_ROWS.from_record, answer.records())}


def _complete(tx: Connection, rows_by_id: Mapping[int, Row], ids: Iterable[int]) -> dict[int, _Complete]:
    """Those of the batches that are complete. Raises `faults.BeginAgain` if one has since been deleted."""
    complete = [id for id in ids if id in rows_by_id and rows_by_id[id].state is State.COMPLETE]
    if not complete:
        return {}
    source = f"batches WHERE id IN ({','.join(map(str, sorted(complete)))})"
    text = statements.select(tx, _COMPLETE.expressions(dialects.of(tx)), source, len(complete))
    (result,) = statements.run(tx, text)
    details = {detail.id: detail for detail in map(_COMPLETE.from_record, statements.records(tx, result))}
    if len(details) < len(complete):
        raise faults.BeginAgain
    return details


def _judge(pipeline: Pipeline, rows_by_id: Mapping[int, Row], deltas: Mapping[int, BatchDelta]) -> dict[int, Verdict]:
    """Decide which batches are complete or exceeded, and write their rows, which are locked."""
    tx = pipeline.tx
    prefixes = _full_prefixes(
        pipeline,
        [(rows_by_id[id], delta.filled) for id, delta in sorted(deltas.items()) if delta.filled and id in rows_by_id],
    )
    dialect = dialects.of(tx)
    verdicts: dict[int, Verdict] = {}
    complete = _complete(tx, rows_by_id, deltas)
    changes: dict[int, dict[str, str]] = {}
    touched = f"{dialect.greatest}(updated_at, {dialect.now})"
    for batch, delta in sorted(deltas.items()):
        row = rows_by_id.get(batch)
        if row is None or (row.state not in TAKES_ACKS and not delta.is_moved):
            raise faults.BeginAgain
        before, change = row.standing, _changed(row, delta)
        try:
            _check(batch, change, delta)
        except errors.InconsistentBatch:
            # If another transaction has inserted the row of a group first, the batch row, which was locked after the
            # groups, already counts that transaction's items. Then a waiting INSERT finds a duplicate key.
            pipeline.flush()
            raise
        transition = settle.settle(before, change)
        columns = _columns(row, delta, transition)
        if prefixes.get(batch, row.full_prefix) != row.full_prefix:
            columns["full_prefix"] = prefixes[batch]
        if row.updated_at is not None:
            point = Point(row.updated_at, before.resolved, before.failed)
            columns["history"] = history.extended(row.history, point)
        literals = {name: dialect.now if value is _NOW else dialect.literal(value) for name, value in columns.items()}
        changes[batch] = {"updated_at": touched, **literals}
        if not transition.is_quiet:
            verdict = verdicts[batch] = Verdict(batch, transition, owes=row.owes)
            if batch in complete:
                verdict.fill(complete[batch])
            verdict.completed_by = columns.get("completed_by", verdict.completed_by)
            verdict.succeeded_by = columns.get("succeeded_by", verdict.succeeded_by)
            verdict.trigger = None if delta.last_changer is None else delta.last_changer.call.trace
    pipeline.later(*statements.updates("batches", changes))
    _announce(pipeline, [verdict for verdict in verdicts.values() if verdict.transition.events()])
    return verdicts


def _changed(row: Row, delta: BatchDelta) -> Standing:
    """The batch's standing with the new counts, before it is judged."""
    return row.standing._replace(
        acked=row.acked + delta.acked, failed=row.failed + delta.failed, skipped=row.skipped + delta.skipped
    )


_NOW: Final = object()
"""Stands for the database's time."""


def _columns(row: Row, delta: BatchDelta, transition: Transition) -> dict[str, Any]:
    """The changed columns of the batch's row. `_announce` writes what it owes its parent."""
    after = transition.after
    columns: dict[str, Any] = {"acked": after.acked}
    if delta.failed:
        columns["failed"] = after.failed
    if delta.skipped:
        columns["skipped"] = after.skipped or None
    if delta.journal_next is not None:
        columns["journal_next"] = delta.journal_next
    if transition.is_quiet:
        return columns
    columns |= transition.columns(_NOW, is_nested=False, has_children=row.children > 0)
    if transition.completed and delta.last_resolver is not None:
        columns["completed_by"] = delta.last_resolver.call.fingerprint()
    if transition.succeeded and delta.last_changer is not None:
        columns["succeeded_by"] = delta.last_changer.call.fingerprint()
    return columns


def _announce(pipeline: Pipeline, verdicts: Sequence[Verdict]) -> None:
    """Write the events of the transitions, and the debts of the batches to their parents."""
    if not verdicts:
        return
    dialect = dialects.of(pipeline.tx)
    announced = pipeline.query(*batches.selects(dialect, [verdict.id for verdict in verdicts]))

    def events(_: int) -> list[feed.NewEvent]:
        stored = {batch.id: batch for batch in map(batches.ROWS.from_record, announced.records())}
        new: list[feed.NewEvent] = []
        debts: list[tuple[Batch, Batch]] = []
        for verdict in verdicts:
            batch = stored[verdict.id]
            verdict.key = batch.key
            debt = verdict.transition.debt()
            if batch.parent_batch is not None and debt is not None:
                debts.append((batch, replace(batch, parent_due=debt)))
                verdict.owes = True
            new += batches.events(batch, verdict.transition.events(), trigger=verdict.trigger)
        pipeline.later(*batches.ROWS.updates(dialect, debts))
        return new

    feed.write(pipeline, events, batches=[verdict.id for verdict in verdicts])


def _check(batch: int, change: Standing, delta: BatchDelta) -> None:
    """Raise `errors.InconsistentBatch` if the new counts are impossible. Counts are never clamped: a contradiction is a
    bug."""
    acked, failed, skipped_count = change.acked, change.failed, change.skipped
    if min(acked, failed, skipped_count) < 0 or change.resolved > change.items:
        raise errors.InconsistentBatch(
            batch, f"{acked} acked, {failed} failed and {skipped_count} skipped of {change.items} items"
        )
    if change.complete and delta.resolved:
        raise errors.InconsistentBatch(batch, "it is complete, but an issued item was pending")


def _full_prefixes(pipeline: Pipeline, filled_groups: Sequence[tuple[Row, int]]) -> dict[int, int]:
    """The full-prefix hints of these batches, each with the number of groups that were filled, advanced over the full
    groups that follow them. They are computed from the table, so the statements that write groups are executed first.
    Bits are never cleared, so a hint never goes back."""
    limits = [min(PREFIX_STEP + 2 * count, CATCH_UP) for _, count in filled_groups]
    questions = [
        pipeline.query(
            "SELECT group_no, resolved_count FROM item_groups "  # noqa: S608
            f"WHERE batch_id = {row.id} AND group_no >= {row.full_prefix} ORDER BY group_no LIMIT {limit}"
        )
        for (row, _), limit in zip(filled_groups, limits, strict=True)
    ]
    prefixes: dict[int, int] = {}
    lagging_rows: list[Row] = []
    for (row, _), limit, groups in zip(filled_groups, limits, questions, strict=True):
        prefix = row.full_prefix
        for group, resolved in groups.rows():
            if group != prefix or resolved < row.group_size:
                break
            prefix += 1
        prefixes[row.id] = prefix
        if prefix == row.full_prefix + limit:
            lagging_rows.append(row)
    counts = [
        pipeline.query(group_rows.count_full(row.id, row.group_size, prefixes[row.id], prefixes[row.id] + CATCH_UP))
        for row in lagging_rows
    ]
    for row, answer in zip(lagging_rows, counts, strict=True):
        [(count,)] = answer.rows()
        prefixes[row.id] += CATCH_UP if count == CATCH_UP else 0
    return prefixes


def _look_again(tx: Connection, rows_by_id: Mapping[int, Row], repeats: Collection[int]) -> dict[int, Verdict]:
    """The complete batches among `repeats`, which have no changes.

    Raises `faults.BeginAgain` if a batch accepts no more acks: its items must be rejected, and are no repeats.
    """
    if any(batch not in rows_by_id or rows_by_id[batch].state not in TAKES_ACKS for batch in repeats):
        raise faults.BeginAgain
    verdicts = {}
    for id, batch in _complete(tx, rows_by_id, repeats).items():
        # It is newer than the row. The items and the tolerance of a complete batch never change.
        standing = rows_by_id[id].standing._replace(failed=batch.failed)
        verdicts[id] = Verdict(id, Transition(standing, standing), owes=rows_by_id[id].owes)
        verdicts[id].fill(batch)
    return verdicts


def completed_for(batch: Verdict, delta: BatchDelta | None, unit: Unit) -> Completed:
    """The part of a unit's response about a complete batch. `newly` is true for the unit that completed the batch, and
    for its retry."""
    newly = newly_succeeded = False
    if delta is not None and batch.transition.completed and delta.last_resolver is not None:
        newly = delta.last_resolver.call is unit.call
    if delta is not None and batch.transition.succeeded and delta.last_changer is not None:
        newly_succeeded = delta.last_changer.call is unit.call
    if unit.call.may_be_retry:
        fingerprint = unit.call.fingerprint()
        newly = newly or batch.completed_by == fingerprint
        newly_succeeded = newly_succeeded or batch.succeeded_by == fingerprint
    return Completed(batch.id, batch.key, newly, batch.transition.after.succeeded, newly_succeeded)
