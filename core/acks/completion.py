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
from core.batches import nesting
from core.batches.lifecycle import LIVE, TAKES_ACKS, State, completes
from core.batches.tolerance import NONE, OnExceeded, Tolerance
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
    """A batch that is complete after this transaction, or whose failures have passed its tolerance in it."""

    id: int
    key: str | None
    succeeded: bool
    completed_by: bytes | None = None
    succeeded_by: bytes | None = None
    complete: bool = True
    completed_now: bool = False
    succeeded_now: bool = False
    exceeded_now: bool = False
    cancelled_now: bool = False
    owes: bool = False
    """The batch owes its parent's item an ack or a failure, since this transaction or an earlier one."""
    trigger: TraceContext | None = None
    """The context of the request that changed the last bit."""

    def events(self) -> list[str]:
        """The names of the transitions of this transaction."""
        transitions = {
            "failures_exceeded": self.exceeded_now,
            str(State.CANCELLED): self.cancelled_now,
            "completed": self.completed_now,
            "succeeded": self.succeeded_now,
        }
        return [name for name, happened in transitions.items() if happened]


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
    verdicts = _look_again(repeat_rows, repeats, _read_details(tx, repeat_rows, repeats)) if repeats else {}
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
    f"CASE WHEN on_exceeded = '{OnExceeded.CANCEL}' THEN 1 ELSE 0 END",
    OWES,
)


class Row(NamedTuple):
    """The columns that decide whether a batch is complete, and whether its failures pass its tolerance."""

    id: int
    state: str
    items: int
    acked: int
    failed: int
    full_prefix: int
    group_size: int
    journal_next: int
    children: int
    tolerated_failures: int
    """-1: no limit; also in the next field."""
    tolerated_failure_percentage: int
    exceeded: int
    cancels: int
    """1 if the batch is cancelled when its failures pass its tolerance."""
    owes: int

    @property
    def tolerance(self) -> Tolerance:
        failures, percentage = self.tolerated_failures, self.tolerated_failure_percentage
        return Tolerance(None if failures < 0 else failures, None if percentage < 0 else percentage)


def rows(tx: Connection, result: dialects.Rows) -> dict[int, Row]:
    return {int(record[0]): _row(record) for record in statements.records(tx, result)}


def _row(record: Sequence[Any]) -> Row:
    return Row(int(record[0]), record[1], *map(int, record[2:]))


class _Details(NamedTuple):
    """More columns of a complete batch, for the response. They are read separately, as few batches of a flush are
    complete."""

    failed: int
    key: str | None
    completed_by: bytes | None
    succeeded_by: bytes | None


def _read_details(tx: Connection, rows_by_id: Mapping[int, Row], ids: Iterable[int]) -> dict[int, _Details]:
    """The details of those batches that are complete. Raises `faults.BeginAgain` if one has since been deleted."""
    complete = [batch for batch in ids if batch in rows_by_id and rows_by_id[batch].state == State.COMPLETE]
    if not complete:
        return {}
    flat = dialects.of(tx).flat
    hashes = (flat(name, "bytes", nullable=True) for name in ("completed_by", "succeeded_by"))
    columns = ("id", "failed", flat("batch_key", "text", nullable=True), *hashes)
    text = statements.select(tx, columns, f"batches WHERE id IN ({_ids(complete)})", len(complete))
    details = {}
    for batch, failed, *names in statements.records(tx, statements.run(tx, text)[0]):
        key, completed_by, succeeded_by = (None if value == "-" else bytes.fromhex(value) for value in names)
        details[int(batch)] = _Details(int(failed), None if key is None else key.decode(), completed_by, succeeded_by)
    if len(details) < len(complete):
        raise faults.BeginAgain
    return details


def _judge(pipeline: Pipeline, rows_by_id: Mapping[int, Row], deltas: Mapping[int, BatchDelta]) -> dict[int, Verdict]:
    """Decide which batches are complete or exceeded, and write their rows, which are locked."""
    tx = pipeline.tx
    prefixes = _full_prefixes(
        pipeline, [rows_by_id[id] for id in sorted(deltas.keys() & rows_by_id.keys()) if deltas[id].filled]
    )
    verdicts: dict[int, Verdict] = {}
    details = _read_details(tx, rows_by_id, deltas)
    writes: list[_RowChange] = []
    for batch, delta in sorted(deltas.items()):
        row = rows_by_id.get(batch)
        if row is None or row.state not in TAKES_ACKS:
            raise faults.BeginAgain
        state, acked, failed = State(row.state), row.acked + delta.acked, row.failed + delta.failed
        try:
            _check(row, state, acked, failed, delta)
        except errors.InconsistentBatch:
            # If another transaction has inserted the row of a group first, the batch row, which was locked after the
            # groups, already counts that transaction's items. Then a waiting INSERT finds a duplicate key.
            pipeline.flush()
            raise
        change = _RowChange(batch, acked, failed if delta.failed else None, journal_next=delta.journal_next)
        if prefixes.get(batch, row.full_prefix) != row.full_prefix:
            change.full_prefix = prefixes[batch]
        detail = details.get(batch)
        key, completed_by, succeeded_by = detail[1:] if detail is not None else (None, None, None)
        if completed_now := completes(state, row.items, acked, failed):
            assert delta.last_resolver is not None
            state = State.COMPLETE
            change.completed_by = completed_by = delta.last_resolver.call.fingerprint()
        tolerance = row.tolerance if failed or row.failed else NONE
        succeeded = state is State.COMPLETE and tolerance.succeeds(row.items, failed)
        # A complete batch may have succeeded before: it is redriven within its tolerance.
        succeeded_now = succeeded and (completed_now or not tolerance.succeeds(row.items, row.failed))
        if succeeded_now:
            assert delta.last_changer is not None
            change.succeeded_by = succeeded_by = delta.last_changer.call.fingerprint()
        is_passed = tolerance.is_passed(row.items, failed, sealed=state is not State.OPEN)
        change.exceeded = is_passed and not row.exceeded
        change.cancelled = is_passed and bool(row.cancels) and state in LIVE
        if state is State.COMPLETE or change.exceeded or change.cancelled:
            verdicts[batch] = Verdict(
                batch,
                key,
                succeeded,
                completed_by,
                succeeded_by,
                state is State.COMPLETE,
                completed_now,
                succeeded_now,
                change.exceeded,
                change.cancelled,
                bool(row.owes),
            )
            if delta.last_changer is not None:
                verdicts[batch].trigger = delta.last_changer.call.trace
        writes.append(change)
    pipeline.later(*_updates(dialects.of(tx), writes))
    _announce(pipeline, [verdict for verdict in verdicts.values() if verdict.events()])
    return verdicts


def _announce(pipeline: Pipeline, verdicts: Sequence[Verdict]) -> None:
    """Write the events of the transitions, and the debts of the batches to their parents."""
    if not verdicts:
        return
    dialect = dialects.of(pipeline.tx)
    answers = pipeline.query(*batches.selects(dialect, [verdict.id for verdict in verdicts]))

    def events(_: int) -> list[feed.NewEvent]:
        stored = {batch.id: batch for answer in answers for batch in batches.from_rows(dialect, answer.rows())}
        new: list[feed.NewEvent] = []
        debts: list[tuple[batches.Batch, batches.Batch]] = []
        for verdict in verdicts:
            batch = stored[verdict.id]
            verdict.key = batch.key
            if batch.parent_batch is not None and (verdict.complete or verdict.cancelled_now):
                debts.append((batch, replace(batch, parent_due=nesting.owed(succeeded=verdict.succeeded))))
                verdict.owes = True
            new += batches.events(batch, verdict.events(), trigger=verdict.trigger)
        pipeline.later(*batches.ROWS.updates(dialect, debts))
        return new

    feed.write(pipeline, events, [])


@dataclass(slots=True)
class _RowChange:
    """The new values of one batch row. None: unchanged. With `completed_by`, the batch becomes complete."""

    id: int
    acked: int
    failed: int | None
    full_prefix: int | None = None
    completed_by: bytes | None = None
    succeeded_by: bytes | None = None
    journal_next: int | None = None
    exceeded: bool = False
    """The failures have passed the tolerance now."""
    cancelled: bool = False


def _updates(dialect: dialects.Dialect, rows: Sequence[_RowChange]) -> list[str]:
    now = dialect.now
    changes: dict[int, dict[str, str]] = {}
    for row in rows:
        literals = {"updated_at": f"{dialect.greatest}(updated_at, {now})", "acked": str(row.acked)}
        if row.failed is not None:
            literals["failed"] = str(row.failed)
        if row.full_prefix is not None:
            literals["full_prefix"] = str(row.full_prefix)
        if row.journal_next is not None:
            literals["journal_next"] = str(row.journal_next)
        if row.completed_by is not None:
            literals |= {"state": f"'{State.COMPLETE}'", "ended_at": now}
            literals["completed_by"] = dialect.literal(row.completed_by)
        if row.succeeded_by is not None:
            literals["succeeded_by"] = dialect.literal(row.succeeded_by)
        if row.exceeded:
            literals["exceeded"] = "1"
        if row.cancelled:
            literals |= {"state": f"'{State.CANCELLED}'", "ended_at": now}
        changes[row.id] = literals
    return statements.updates("batches", changes)


def _check(row: Row, state: State, acked: int, failed: int, delta: BatchDelta) -> None:
    """Raise `errors.InconsistentBatch` if the new counts are impossible. Counts are never clamped: a contradiction is a
    bug."""
    if acked < 0 or failed < 0 or acked + failed > row.items:
        raise errors.InconsistentBatch(row.id, f"{acked} acked and {failed} failed of {row.items} items")
    if state is State.COMPLETE and delta.last_resolver is not None:
        raise errors.InconsistentBatch(row.id, "it is complete, but an issued item was pending")


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


def _look_again(
    rows_by_id: Mapping[int, Row], repeats: Collection[int], details: Mapping[int, _Details]
) -> dict[int, Verdict]:
    """The complete batches among `repeats`, which have no changes.

    Raises `faults.BeginAgain` if a batch accepts no more acks: its items must be rejected, and are no repeats.
    """
    if any(batch not in rows_by_id or rows_by_id[batch].state not in TAKES_ACKS for batch in repeats):
        raise faults.BeginAgain
    verdicts = {}
    for batch, detail in details.items():
        # The detail is newer than the row. The items and the tolerance of a complete batch never change.
        row = rows_by_id[batch]
        succeeded = row.tolerance.succeeds(row.items, detail.failed)
        verdicts[batch] = Verdict(
            batch, detail.key, succeeded, detail.completed_by, detail.succeeded_by, owes=bool(row.owes)
        )
    return verdicts


def completed_for(batch: Verdict, delta: BatchDelta | None, unit: Unit) -> Completed:
    """The part of a unit's response about a complete batch. `newly` is true for the unit that completed the batch, and
    for its retry."""
    newly = newly_succeeded = False
    if delta is not None and batch.completed_now and delta.last_resolver is not None:
        newly = delta.last_resolver.call is unit.call
    if delta is not None and batch.succeeded_now and delta.last_changer is not None:
        newly_succeeded = delta.last_changer.call is unit.call
    if unit.call.may_be_retry:
        fingerprint = unit.call.fingerprint()
        newly = newly or batch.completed_by == fingerprint
        newly_succeeded = newly_succeeded or batch.succeeded_by == fingerprint
    return Completed(batch.id, batch.key, newly, batch.succeeded, newly_succeeded)
