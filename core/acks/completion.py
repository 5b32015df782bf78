"""Completion: the last step of an ack transaction, under the locks of the batch rows.

A batch becomes complete, or its failures pass its tolerance, only here and when it is sealed. Everything is decided in
Python from the locked rows, and absolute values are written (MariaDB assigns from left to right within an UPDATE,
SQLite does not).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from sqlalchemy.engine import Connection

from core import errors, feed
from core.acks.call import Completed, Unit
from core.batches import batch as batches
from core.batches.batch import Batch
from core.batches.lifecycle import TAKES_ACKS, State
from core.batches.settle import Standing, Transition, settle
from core.batches.tolerance import OnExceeded, Tolerance
from core.storage import dialects, faults, statements
from core.storage.statements import Pipeline
from core.traces import TraceContext

PREFIX_STEP: Final = 64
"""The maximum number of groups by which one transaction advances the full-prefix hint."""


@dataclass(slots=True)
class BatchDelta:
    """The changes of a flush to one batch."""

    acked: int = 0
    failed: int = 0
    filled: bool = False
    """A group became full."""
    last_resolver: Unit | None = None
    """The last unit that resolved a pending item. If the batch completes, this unit completed it."""
    last_changer: Unit | None = None
    journal_next: int | None = None
    """The new `journal_next` of a journaled batch."""


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

    def fill(self, batch: Batch) -> None:
        """Add what the response tells of a batch that was complete before."""
        self.key, self.completed_by, self.succeeded_by = batch.key, batch.completed_by, batch.succeeded_by


def write(
    pipeline: Pipeline,
    deltas: Mapping[int, BatchDelta],
    repeats: Collection[int],
    locked_rows: dict[int, Row],
    refusals: Mapping[int, int],
    inserts: Sequence[str] = (),
) -> dict[int, Verdict]:
    """Lock the rows of changed batches that aren't in `locked_rows`, check their states again, execute `inserts`, and
    write the new counts and states. The statements that wait in `pipeline` are executed in the same round trips; the
    last ones wait there afterwards. Returns the verdicts, including those on complete batches among `repeats`: batches
    in which all items were repeats.
    `refusals`: batches with items rejected as never issued → the number of issued items at that time.

    Raises `faults.BeginAgain` if a batch accepts no more acks, became journaled or a parent, or has grown since items
    of it were rejected; `errors.InconsistentBatch`.
    """
    tx = pipeline.tx
    to_lock = deltas.keys() - locked_rows.keys()
    to_read = set(repeats) - locked_rows.keys()
    delta_rows, repeat_rows = locked_rows, locked_rows
    if to_lock or to_read:
        # One round trip. Batches without changes are read without a lock, but after the groups were locked. So the
        # transactions that resolved their items have committed: otherwise they would still hold the group locks.
        locking = dialects.of(tx).for_update("id")
        queries = [select(tx, to_lock, locking)] if to_lock else []
        queries += [select(tx, to_read)] if to_read else []
        results = pipeline.ask(*queries)
        if to_lock:
            delta_rows = locked_rows | rows(tx, results[0])
            newly_locked = [delta_rows[batch] for batch in to_lock & delta_rows.keys()]
            if any(row.journal_next or row.children for row in newly_locked):
                # The batch became journaled: some of its bits are in the journal, which was not read (see `journal`).
                # Or it got its first child, which may hold one of the items.
                raise faults.BeginAgain
        if to_read:
            repeat_rows = locked_rows | rows(tx, results[-1])
        all_rows = delta_rows | repeat_rows
        if any(batch in all_rows and all_rows[batch].items != items for batch, items in refusals.items()):
            raise faults.BeginAgain
    verdicts = _look_again(tx, repeat_rows, repeats) if repeats else {}
    pipeline.later(*inserts)
    if deltas:
        verdicts |= _judge(pipeline, delta_rows, deltas)
    return verdicts


def select(tx: Connection, ids: Collection[int], locking: str = "") -> str:
    """A SELECT whose result is an argument of `rows`."""
    return statements.select(tx, _READ, f"batches WHERE id IN ({_ids(ids)}){locking}", len(ids))


def _ids(ids: Iterable[int]) -> str:
    return ",".join(map(str, sorted(ids)))


OWES: Final = "CASE WHEN parent_due IS NULL THEN 0 ELSE 1 END"
"""1 for a batch that owes its parent's item an ack or a failure."""
_READ: Final = (
    *("id", "state", "items", "acked", "failed", "full_prefix", "group_size", "journal_next", "children"),
    *("COALESCE(tolerated_failures, -1)", "COALESCE(tolerated_failure_percentage, -1)", "exceeded"),
    "on_exceeded",
    OWES,
)


class Row(NamedTuple):
    """The columns that decide whether a batch is complete, and whether its failures pass its tolerance."""

    id: int
    state: State
    items: int
    acked: int
    failed: int
    full_prefix: int
    group_size: int
    journal_next: int
    children: int
    tolerance: Tolerance
    exceeded: bool
    on_exceeded: OnExceeded
    owes: bool

    @property
    def standing(self) -> Standing:
        counts = self.items, self.acked, self.failed
        return Standing(self.state, *counts, self.tolerance, self.on_exceeded, self.exceeded)


def rows(tx: Connection, result: dialects.Rows) -> dict[int, Row]:
    return {int(record[0]): _row(record) for record in statements.records(tx, result)}


def _row(record: Sequence[Any]) -> Row:
    id, state, *counts, failures, percentage, exceeded, on_exceeded, owes = record
    items, acked, failed, full_prefix, group_size, journal_next, children = map(int, counts)
    return Row(
        int(id),
        State(state),
        items,
        acked,
        failed,
        full_prefix,
        group_size,
        journal_next,
        children,
        Tolerance(_limit(failures), _limit(percentage)),
        exceeded=int(exceeded) == 1,
        on_exceeded=OnExceeded(on_exceeded),
        owes=int(owes) == 1,
    )


def _limit(value: Any) -> int | None:
    return None if int(value) < 0 else int(value)


def _complete(tx: Connection, rows_by_id: Mapping[int, Row], ids: Iterable[int]) -> dict[int, Batch]:
    """Those of the batches that are complete, with what a response tells of them. They are read separately, as few
    batches of a flush are complete. Raises `faults.BeginAgain` if one has since been deleted."""
    wanted = [id for id in ids if id in rows_by_id and rows_by_id[id].state is State.COMPLETE]
    complete = batches.by_id(tx, wanted)
    if len(complete) < len(wanted):
        raise faults.BeginAgain
    return complete


def _judge(pipeline: Pipeline, rows_by_id: Mapping[int, Row], deltas: Mapping[int, BatchDelta]) -> dict[int, Verdict]:
    """Decide which batches are complete or exceeded, and write their rows, which are locked."""
    tx = pipeline.tx
    prefixes = _full_prefixes(
        pipeline, [rows_by_id[id] for id in sorted(deltas.keys() & rows_by_id.keys()) if deltas[id].filled]
    )
    dialect = dialects.of(tx)
    verdicts: dict[int, Verdict] = {}
    complete = _complete(tx, rows_by_id, deltas)
    changes: dict[int, dict[str, str]] = {}
    touched = f"{dialect.greatest}(updated_at, {dialect.now})"
    for batch, delta in sorted(deltas.items()):
        row = rows_by_id.get(batch)
        if row is None or row.state not in TAKES_ACKS:
            raise faults.BeginAgain
        change = row.standing._replace(acked=row.acked + delta.acked, failed=row.failed + delta.failed)
        try:
            _check(batch, change, delta)
        except errors.InconsistentBatch:
            # If another transaction has inserted the row of a group first, the batch row, which was locked after the
            # groups, already counts that transaction's items. Then a waiting INSERT finds a duplicate key.
            pipeline.flush()
            raise
        transition = settle(row.standing, change)
        columns = _columns(delta, transition)
        if prefixes.get(batch, row.full_prefix) != row.full_prefix:
            columns["full_prefix"] = prefixes[batch]
        literals = {name: dialect.now if value is _NOW else dialect.literal(value) for name, value in columns.items()}
        changes[batch] = {"updated_at": touched, **literals}
        if transition.after.complete or transition.events():
            verdict = verdicts[batch] = Verdict(batch, transition, owes=row.owes)
            if batch in complete:
                verdict.fill(complete[batch])
            verdict.completed_by = columns.get("completed_by", verdict.completed_by)
            verdict.succeeded_by = columns.get("succeeded_by", verdict.succeeded_by)
            verdict.trigger = None if delta.last_changer is None else delta.last_changer.call.trace
    pipeline.later(*statements.updates("batches", changes))
    _announce(pipeline, [verdict for verdict in verdicts.values() if verdict.transition.events()])
    return verdicts


_NOW: Final = object()
"""Stands for the database's time."""


def _columns(delta: BatchDelta, transition: Transition) -> dict[str, Any]:
    """The changed columns of the batch's row. `_announce` writes what it owes."""
    after = transition.after
    columns = {"acked": after.acked, **transition.columns(_NOW, is_nested=False)}
    if delta.failed:
        columns["failed"] = after.failed
    if delta.journal_next is not None:
        columns["journal_next"] = delta.journal_next
    if transition.completed:
        assert delta.last_resolver is not None
        columns["completed_by"] = delta.last_resolver.call.fingerprint()
    if transition.succeeded:
        assert delta.last_changer is not None
        columns["succeeded_by"] = delta.last_changer.call.fingerprint()
    return columns


def _announce(pipeline: Pipeline, verdicts: Sequence[Verdict]) -> None:
    """Write the events of the transitions, and the debts of the batches to their parents."""
    if not verdicts:
        return
    dialect = dialects.of(pipeline.tx)
    answers = pipeline.query(*batches.selects(dialect, [verdict.id for verdict in verdicts]))

    def events(_: int) -> list[feed.NewEvent]:
        stored = {batch.id: batch for answer in answers for batch in batches.from_rows(dialect, answer.rows())}
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

    feed.write(pipeline, events)


def _check(batch: int, change: Standing, delta: BatchDelta) -> None:
    """Raise `errors.InconsistentBatch` if the new counts are impossible. Counts are never clamped: a contradiction is a
    bug."""
    acked, failed = change.acked, change.failed
    if acked < 0 or failed < 0 or acked + failed > change.items:
        raise errors.InconsistentBatch(batch, f"{acked} acked and {failed} failed of {change.items} items")
    if change.complete and delta.last_resolver is not None:
        raise errors.InconsistentBatch(batch, "it is complete, but an issued item was pending")


def _full_prefixes(pipeline: Pipeline, batch_rows: Sequence[Row]) -> dict[int, int]:
    """The full-prefix hints of these batches, advanced over the full groups that follow them. They are computed from
    the table, so the statements that write groups are executed first. Bits are never cleared, so a hint never goes
    back."""
    queries = [
        f"SELECT group_no, resolved_count FROM item_groups WHERE batch_id = {row.id} AND group_no >= {row.full_prefix} "  # noqa: S608
        f"ORDER BY group_no LIMIT {PREFIX_STEP}"
        for row in batch_rows
    ]
    prefixes: dict[int, int] = {}
    for row, groups in zip(batch_rows, pipeline.ask(*queries) if queries else (), strict=True):
        prefix = row.full_prefix
        for group, resolved in groups:
            if group != prefix or resolved < row.group_size:
                break
            prefix += 1
        prefixes[row.id] = prefix
    return prefixes


def _look_again(tx: Connection, rows_by_id: Mapping[int, Row], repeats: Collection[int]) -> dict[int, Verdict]:
    """The complete batches among `repeats`, which have no changes.

    Raises `faults.BeginAgain` if a batch accepts no more acks: its items must be rejected, and are no repeats.
    """
    if any(batch not in rows_by_id or rows_by_id[batch].state not in TAKES_ACKS for batch in repeats):
        raise faults.BeginAgain
    verdicts = {}
    for id, batch in _complete(tx, rows_by_id, repeats).items():
        # It is newer than the row.
        verdicts[id] = Verdict(id, Transition(batch.standing, batch.standing), owes=rows_by_id[id].owes)
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
