"""Completion: what an ack transaction does last, under the locks of the batch rows.

This is where a batch becomes complete, and the only place beside seal. Everything is decided in Python from what the
lock shows, and absolute values are written (MariaDB assigns from left to right within an UPDATE, SQLite does not).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from core import errors, feed, tables
from core.acks.call import Completed, Unit
from core.batches import batch as batches
from core.batches import nesting
from core.batches.lifecycle import TAKES_ACKS, State, completes
from core.storage import dialects, faults, statements
from core.storage.statements import chunks

PREFIX_STEP: Final = 64
"""How many groups the full-prefix hint may advance in one transaction."""


@dataclass(slots=True)
class BatchDelta:
    """What a flush did to one batch."""

    acked: int = 0
    failed: int = 0
    filled: bool = False
    """A group became full."""
    last_resolver: Unit | None = None
    """The last unit that resolved a pending item; if the batch completes, this one completed it."""
    last_changer: Unit | None = None
    journal_next: int | None = None
    """Of a journaled batch, as this flush leaves it."""


@dataclass(slots=True)
class Complete:
    """A complete batch, as this transaction leaves it."""

    id: int
    key: str | None
    failed: int
    completed_by: bytes | None
    succeeded_by: bytes | None
    completed_now: bool = False
    succeeded_now: bool = False
    owes: bool = False
    """Something to the item that it is, since now."""


def write(
    tx: Connection,
    before: Sequence[str],
    touched_batches: Mapping[int, BatchDelta],
    untouched: Collection[int],
    locked: dict[int, Row],
    refused: Mapping[int, int],
) -> dict[int, Complete]:
    """Execute the statements `before`, lock the rows of the touched batches that aren't `locked`, judge their state
    again, decide, write. Returns the complete ones, and those of the `untouched`, of which all items were repeats.
    `refused`: of batches of which items were rejected as never issued, how many were issued then.

    Raises `faults.BeginAgain` where a batch takes no acks any more, became journaled, or has grown since items of it
    were rejected; `errors.InconsistentBatch`.
    """
    unlocked = touched_batches.keys() - locked.keys()
    unseen = set(untouched) - locked.keys()
    judged, seen = locked, locked
    if unlocked or unseen:
        # One round trip. The untouched are read plainly, and after the groups were locked: whoever resolved their items
        # has committed, or we would not have the lock.
        locking = dialects.of(tx).for_update
        looks = [select(tx, unlocked, locking)] if unlocked else []
        looks += [select(tx, unseen)] if unseen else []
        found = execute(tx, [*before, *looks])[len(before) :]
        before = ()
        if unlocked:
            judged = locked | rows(tx, found[0])
            if any(judged[batch].journal_next for batch in unlocked & judged.keys()):
                # What we have read of its groups isn't all (see `journal`).
                raise faults.BeginAgain
        if unseen:
            seen = locked | rows(tx, found[-1])
        again = judged | seen
        if any(batch in again and again[batch].items != items for batch, items in refused.items()):
            raise faults.BeginAgain
    complete = _look_again(seen, untouched, _named(tx, seen, untouched)) if untouched else {}
    if touched_batches:
        complete |= _judge(tx, before, judged, touched_batches)
    return complete


def select(tx: Connection, wanted: Collection[int], locking: str = "") -> str:
    """To be read with `rows`."""
    return statements.select(tx, _READ, f"batches WHERE id IN ({_ids(wanted)}){locking}", len(wanted))


def execute(tx: Connection, texts: Sequence[str]) -> list[dialects.Rows]:
    """Raises `faults.BeginAgain` where somebody else has made the row of a group that had none."""
    try:
        return statements.run(tx, *texts)
    except IntegrityError as error:
        if faults.is_duplicate(error):
            raise faults.BeginAgain from error
        raise


def _ids(wanted: Iterable[int]) -> str:
    return ",".join(map(str, sorted(wanted)))


_READ: Final = ("id", "state", "items", "acked", "failed", "full_prefix", "group_size", "journal_next")


class Row(NamedTuple):
    """What is to be known of a batch to judge it."""

    id: int
    state: str
    items: int
    acked: int
    failed: int
    full_prefix: int
    group_size: int
    journal_next: int


def rows(tx: Connection, found: dialects.Rows) -> dict[int, Row]:
    return {int(record[0]): _row(record) for record in statements.records(tx, found)}


def _row(record: Sequence[Any]) -> Row:
    return Row(int(record[0]), record[1], *map(int, record[2:]))


class _Names(NamedTuple):
    """What is to be told of a complete batch beside its row: read by itself, as few batches of a flush are."""

    failed: int
    key: str | None
    completed_by: bytes | None
    succeeded_by: bytes | None


_NAMED: Final = (
    *("id", "failed"),
    *(
        f"CASE WHEN {name} IS NULL THEN '-' ELSE HEX({name}) END"
        for name in ("batch_key", "completed_by", "succeeded_by")
    ),
)


def _named(tx: Connection, found: Mapping[int, Row], wanted: Iterable[int]) -> dict[int, _Names]:
    """Of those that were found complete. Raises `faults.BeginAgain` where one has been deleted since."""
    complete = [batch for batch in wanted if batch in found and found[batch].state == State.COMPLETE]
    if not complete:
        return {}
    text = statements.select(tx, _NAMED, f"batches WHERE id IN ({_ids(complete)})", len(complete))
    named = {}
    for batch, failed, *names in statements.records(tx, statements.run(tx, text)[0]):
        key, completed_by, succeeded_by = (None if each == "-" else bytes.fromhex(each) for each in names)
        named[int(batch)] = _Names(int(failed), None if key is None else key.decode(), completed_by, succeeded_by)
    if len(named) < len(complete):
        raise faults.BeginAgain
    return named


def _judge(
    tx: Connection, before: Sequence[str], found: Mapping[int, Row], touched_batches: Mapping[int, BatchDelta]
) -> dict[int, Complete]:
    """Under the locks of the rows. `before` is executed with what it writes."""
    if before and any(touched.filled for touched in touched_batches.values()):
        # The hint is moved over groups as they are in the table.
        execute(tx, before)
        before = ()
    complete: dict[int, Complete] = {}
    named = _named(tx, found, touched_batches)
    writes: list[_Written] = []
    for batch, touched in sorted(touched_batches.items()):
        row = found.get(batch)
        if row is None or row.state not in TAKES_ACKS:
            raise faults.BeginAgain
        state, acked, failed = State(row.state), row.acked + touched.acked, row.failed + touched.failed
        _check(row, state, acked, failed, touched)
        written = _Written(batch, acked, failed if touched.failed else None, journal_next=touched.journal_next)
        if touched.filled:
            prefix = _advance_prefix(tx, batch, row.full_prefix, row.group_size)
            written.full_prefix = prefix if prefix != row.full_prefix else None
        names = named.get(batch)
        key, completed_by, succeeded_by = names[1:] if names is not None else (None, None, None)
        if completed_now := completes(state, row.items, acked, failed):
            assert touched.last_resolver is not None
            state = State.COMPLETE
            written.completed_by = completed_by = touched.last_resolver.call.fingerprint()
        if succeeded_now := state is State.COMPLETE and failed == 0:
            assert touched.last_changer is not None
            written.succeeded_by = succeeded_by = touched.last_changer.call.fingerprint()
        if state is State.COMPLETE:
            complete[batch] = Complete(batch, key, failed, completed_by, succeeded_by, completed_now, succeeded_now)
        writes.append(written)
    execute(tx, [*before, *(_update(dialects.of(tx), part) for part in chunks(writes, _ROWS))])
    _announce(tx, [each for each in complete.values() if each.completed_now or each.succeeded_now])
    return complete


def _announce(tx: Connection, ended: Sequence[Complete]) -> None:
    """The events of the transitions, and what the batches owe their parents from here on."""
    if not ended:
        return
    rows = batches.by_id(tx, [each.id for each in ended])
    events = []
    for each in ended:
        row = rows[each.id]
        each.key = row.key
        if row.parent_batch is not None:
            batches.update(tx, each.id, parent_due=nesting.owed(State.COMPLETE, each.failed))
            each.owes = True
        happened = [*(["completed"] if each.completed_now else []), *(["succeeded"] if each.succeeded_now else [])]
        events += [batches.event(row, name) for name in happened]
    feed.append(tx, events)


_ROWS: Final = 64
"""Of one UPDATE. The server looks for a row's value among those of all rows, so the work grows with the square."""


@dataclass(slots=True)
class _Written:
    """What becomes of one batch row; None: as it is. `completed_by`: it completes now."""

    id: int
    acked: int
    failed: int | None
    full_prefix: int | None = None
    completed_by: bytes | None = None
    succeeded_by: bytes | None = None
    journal_next: int | None = None


def _update(dialect: dialects.Dialect, rows: Sequence[_Written]) -> str:
    """One statement for all, as each costs a round trip. The values are integers and bytes of our own, so they stand in
    the text."""
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
    wanted = ", ".join(str(row.id) for row in rows)
    return f"UPDATE batches SET {', '.join(assignments)} WHERE id IN ({wanted})"  # noqa: S608


def _check(row: Row, state: State, acked: int, failed: int, touched: BatchDelta) -> None:
    """Counts are never clamped: what doesn't add up is a bug, and is surfaced before it is written."""
    if acked < 0 or failed < 0 or acked + failed > row.items:
        raise errors.InconsistentBatch(row.id, f"{acked} acked and {failed} failed of {row.items} items")
    if state is State.COMPLETE and touched.last_resolver is not None:
        raise errors.InconsistentBatch(row.id, "it is complete, and an issued item was pending")


def _advance_prefix(tx: Connection, batch: int, prefix: int, group_size: int) -> int:
    """Move the hint over the full groups that follow it. Bits are never cleared, so it never goes back."""
    known = tables.item_groups.c
    rows = tx.execute(
        sa.select(known.group_no, known.resolved_count)
        .where(known.batch_id == batch, known.group_no >= prefix)
        .order_by(known.group_no)
        .limit(PREFIX_STEP)
    )
    for group, resolved in rows:
        if group != prefix or resolved < group_size:
            break
        prefix += 1
    return prefix


def _look_again(
    found: Mapping[int, Row], untouched: Collection[int], named: Mapping[int, _Names]
) -> dict[int, Complete]:
    """Of batches of which nothing changed, those that are complete.

    Raises `faults.BeginAgain` where one takes no acks any more: its items are then rejected, not repeats.
    """
    if any(batch not in found or found[batch].state not in TAKES_ACKS for batch in untouched):
        raise faults.BeginAgain
    return {
        batch: Complete(batch, each.key, each.failed, each.completed_by, each.succeeded_by)
        for batch, each in named.items()
    }


def told(batch: Complete, touched: BatchDelta | None, unit: Unit) -> Completed:
    """What one unit is told of a complete batch. `newly` is the unit's that did it, and its retry's."""
    newly = newly_succeeded = False
    if touched is not None and batch.completed_now and touched.last_resolver is not None:
        newly = touched.last_resolver.call is unit.call
    if touched is not None and batch.succeeded_now and touched.last_changer is not None:
        newly_succeeded = touched.last_changer.call is unit.call
    if unit.call.may_be_retry:
        mine = unit.call.fingerprint()
        newly = newly or batch.completed_by == mine
        newly_succeeded = newly_succeeded or batch.succeeded_by == mine
    return Completed(batch.id, batch.key, newly, batch.failed == 0, newly_succeeded)
