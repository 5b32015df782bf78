"""Completion: the last step of an ack transaction, under the locks of the batch rows.

A batch becomes complete only here and when it is sealed. Everything is decided in Python from the locked rows, and
absolute values are written (MariaDB assigns from left to right within an UPDATE, SQLite does not).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed, tables
from core.acks.call import Completed, Unit
from core.batches import batch as batches
from core.batches import batch_rows, nesting
from core.batches.lifecycle import TAKES_ACKS, State, completes
from core.storage import dialects, faults, statements
from core.storage.statements import Pipeline, chunks

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
class Complete:
    """A batch that is complete after this transaction."""

    id: int
    key: str | None
    failed: int
    completed_by: bytes | None
    succeeded_by: bytes | None
    completed_now: bool = False
    succeeded_now: bool = False
    owes: bool = False
    """This transaction made the batch owe its parent's item an ack or a failure."""


def write(
    pipeline: Pipeline,
    deltas: Mapping[int, BatchDelta],
    repeats: Collection[int],
    locked_rows: dict[int, Row],
    refusals: Mapping[int, int],
) -> dict[int, Complete]:
    """Lock the rows of changed batches that aren't in `locked_rows`, check their states again, and write the new counts
    and states. The statements that wait in `pipeline` are executed in the same round trips; the last ones wait there
    afterwards. Returns the complete batches, including those among `repeats`: batches in which all items were repeats.
    `refusals`: batches with items rejected as never issued → the number of issued items at that time.

    Raises `faults.BeginAgain` if a batch accepts no more acks, became journaled, or has grown since items of it were
    rejected; `errors.InconsistentBatch`.
    """
    tx = pipeline.tx
    to_lock = deltas.keys() - locked_rows.keys()
    to_read = set(repeats) - locked_rows.keys()
    delta_rows, repeat_rows = locked_rows, locked_rows
    if to_lock or to_read:
        # One round trip. Batches without changes are read without a lock, but after the groups were locked. So the
        # transactions that resolved their items have committed: otherwise they would still hold the group locks.
        locking = dialects.of(tx).for_update
        queries = [select(tx, to_lock, locking)] if to_lock else []
        queries += [select(tx, to_read)] if to_read else []
        results = pipeline.ask(*queries)
        if to_lock:
            delta_rows = locked_rows | rows(tx, results[0])
            if any(delta_rows[batch].journal_next for batch in to_lock & delta_rows.keys()):
                # The batch became journaled: some of its bits are in the journal, which was not read (see `journal`).
                raise faults.BeginAgain
        if to_read:
            repeat_rows = locked_rows | rows(tx, results[-1])
        all_rows = delta_rows | repeat_rows
        if any(batch in all_rows and all_rows[batch].items != items for batch, items in refusals.items()):
            raise faults.BeginAgain
    complete = _look_again(repeat_rows, repeats, _read_details(tx, repeat_rows, repeats)) if repeats else {}
    if deltas:
        complete |= _judge(pipeline, delta_rows, deltas)
    return complete


def select(tx: Connection, ids: Collection[int], locking: str = "") -> str:
    """A SELECT whose result is an argument of `rows`."""
    return statements.select(tx, _READ, f"batches WHERE id IN ({_ids(ids)}){locking}", len(ids))


def _ids(ids: Iterable[int]) -> str:
    return ",".join(map(str, sorted(ids)))


_READ: Final = ("id", "state", "items", "acked", "failed", "full_prefix", "group_size", "journal_next")


class Row(NamedTuple):
    """The columns that decide whether a batch is complete."""

    id: int
    state: str
    items: int
    acked: int
    failed: int
    full_prefix: int
    group_size: int
    journal_next: int


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


_DETAIL_COLUMNS: Final = (
    "id",
    "failed",
    *(
        f"CASE WHEN {name} IS NULL THEN '-' ELSE HEX({name}) END"
        for name in ("batch_key", "completed_by", "succeeded_by")
    ),
)


def _read_details(tx: Connection, rows_by_id: Mapping[int, Row], ids: Iterable[int]) -> dict[int, _Details]:
    """The details of those batches that are complete. Raises `faults.BeginAgain` if one has since been deleted."""
    complete = [batch for batch in ids if batch in rows_by_id and rows_by_id[batch].state == State.COMPLETE]
    if not complete:
        return {}
    text = statements.select(tx, _DETAIL_COLUMNS, f"batches WHERE id IN ({_ids(complete)})", len(complete))
    details = {}
    for batch, failed, *names in statements.records(tx, statements.run(tx, text)[0]):
        key, completed_by, succeeded_by = (None if value == "-" else bytes.fromhex(value) for value in names)
        details[int(batch)] = _Details(int(failed), None if key is None else key.decode(), completed_by, succeeded_by)
    if len(details) < len(complete):
        raise faults.BeginAgain
    return details


def _judge(pipeline: Pipeline, rows_by_id: Mapping[int, Row], deltas: Mapping[int, BatchDelta]) -> dict[int, Complete]:
    """Decide which batches are complete, and write their rows, which are locked."""
    tx = pipeline.tx
    if any(delta.filled for delta in deltas.values()):
        # The hint is computed from the table, so the groups must be written first.
        pipeline.flush()
    complete: dict[int, Complete] = {}
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
        if delta.filled:
            prefix = _advance_prefix(tx, batch, row.full_prefix, row.group_size)
            change.full_prefix = prefix if prefix != row.full_prefix else None
        detail = details.get(batch)
        key, completed_by, succeeded_by = detail[1:] if detail is not None else (None, None, None)
        if completed_now := completes(state, row.items, acked, failed):
            assert delta.last_resolver is not None
            state = State.COMPLETE
            change.completed_by = completed_by = delta.last_resolver.call.fingerprint()
        if succeeded_now := state is State.COMPLETE and failed == 0:
            assert delta.last_changer is not None
            change.succeeded_by = succeeded_by = delta.last_changer.call.fingerprint()
        if state is State.COMPLETE:
            complete[batch] = Complete(batch, key, failed, completed_by, succeeded_by, completed_now, succeeded_now)
        writes.append(change)
    pipeline.later(*(_update(dialects.of(tx), part) for part in chunks(writes, _ROWS)))
    _announce(
        pipeline, [batch_row for batch_row in complete.values() if batch_row.completed_now or batch_row.succeeded_now]
    )
    return complete


def _announce(pipeline: Pipeline, endings: Sequence[Complete]) -> None:
    """Write the events of the transitions, and the debts of the batches to their parents."""
    if not endings:
        return
    dialect = dialects.of(pipeline.tx)
    answers = pipeline.query(*batches.selects(dialect, [ending.id for ending in endings]))

    def events(_: int) -> list[feed.NewEvent]:
        ended = {batch.id: batch for answer in answers for batch in batches.from_rows(dialect, answer.rows())}
        new: list[feed.NewEvent] = []
        debts: list[tuple[batches.Batch, batches.Batch]] = []
        for ending in endings:
            batch = ended[ending.id]
            ending.key = batch.key
            if batch.parent_batch is not None:
                debts.append((batch, replace(batch, parent_due=nesting.owed(State.COMPLETE, ending.failed))))
                ending.owes = True
            names = ["completed"] if ending.completed_now else []
            new += batches.events(batch, [*names, "succeeded"] if ending.succeeded_now else names)
        pipeline.later(*batch_rows.updates(debts))
        return new

    feed.write(pipeline, events, [])


_ROWS: Final = 64
"""Maximum rows of one UPDATE. The server searches the CASE for each row, so the cost grows with the square of it."""


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


def _update(dialect: dialects.Dialect, rows: Sequence[_RowChange]) -> str:
    """One UPDATE of all rows. The values are our own integers and bytes, so they can be part of the text."""
    now, latest = dialect.now, dialect.greatest
    values: dict[str, dict[int, str]] = {}
    for row in rows:
        changes = {"acked": str(row.acked)}
        if row.failed is not None:
            changes["failed"] = str(row.failed)
        if row.full_prefix is not None:
            changes["full_prefix"] = str(row.full_prefix)
        if row.journal_next is not None:
            changes["journal_next"] = str(row.journal_next)
        if row.completed_by is not None:
            changes["state"] = f"'{State.COMPLETE}'"
            changes["ended_at"] = now
            changes["completed_by"] = f"x'{row.completed_by.hex()}'"
        if row.succeeded_by is not None:
            changes["succeeded_by"] = f"x'{row.succeeded_by.hex()}'"
        for column, value in changes.items():
            values.setdefault(column, {})[row.id] = value
    assignments = [f"updated_at = {latest}(updated_at, {now})"]
    for column, by_id in values.items():
        if len(rows) == 1:
            assignments.append(f"{column} = {by_id[rows[0].id]}")
        else:
            cases = " ".join(f"WHEN {batch} THEN {value}" for batch, value in by_id.items())
            assignments.append(f"{column} = CASE id {cases} ELSE {column} END")
    ids = ", ".join(str(row.id) for row in rows)
    return f"UPDATE batches SET {', '.join(assignments)} WHERE id IN ({ids})"  # noqa: S608


def _check(row: Row, state: State, acked: int, failed: int, delta: BatchDelta) -> None:
    """Raise `errors.InconsistentBatch` if the new counts are impossible. Counts are never clamped: a contradiction is a
    bug."""
    if acked < 0 or failed < 0 or acked + failed > row.items:
        raise errors.InconsistentBatch(row.id, f"{acked} acked and {failed} failed of {row.items} items")
    if state is State.COMPLETE and delta.last_resolver is not None:
        raise errors.InconsistentBatch(row.id, "it is complete, but an issued item was pending")


def _advance_prefix(tx: Connection, batch: int, prefix: int, group_size: int) -> int:
    """The full-prefix hint, advanced over the full groups that follow it. Bits are never cleared, so it never goes
    back."""
    columns = tables.item_groups.c
    rows = tx.execute(
        sa.select(columns.group_no, columns.resolved_count)
        .where(columns.batch_id == batch, columns.group_no >= prefix)
        .order_by(columns.group_no)
        .limit(PREFIX_STEP)
    )
    for group, resolved in rows:
        if group != prefix or resolved < group_size:
            break
        prefix += 1
    return prefix


def _look_again(
    rows_by_id: Mapping[int, Row], repeats: Collection[int], details: Mapping[int, _Details]
) -> dict[int, Complete]:
    """The complete batches among `repeats`, which have no changes.

    Raises `faults.BeginAgain` if a batch accepts no more acks: its items must be rejected, and are no repeats.
    """
    if any(batch not in rows_by_id or rows_by_id[batch].state not in TAKES_ACKS for batch in repeats):
        raise faults.BeginAgain
    return {
        batch: Complete(batch, detail.key, detail.failed, detail.completed_by, detail.succeeded_by)
        for batch, detail in details.items()
    }


def completed_for(batch: Complete, delta: BatchDelta | None, unit: Unit) -> Completed:
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
    return Completed(batch.id, batch.key, newly, batch.failed == 0, newly_succeeded)
