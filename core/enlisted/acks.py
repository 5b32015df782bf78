"""Acks, failures and skips in a transaction that the caller commits.

The bits are flipped as in `core.acks.flush`, under the locks of their groups. But a caller's transaction may last for
seconds, so it never locks the row of a batch, which all other transactions of that batch need. What it changes of the
counts, it leaves in an outbox (see `mover`). So what completes the batch is another transaction, after the commit.

What could go wrong, and why it can't:

*An item is delivered twice.* The second transaction waits for the group until the first one has ended, and then finds
the bit. This needs READ COMMITTED: with an older snapshot, it might not (see `isolation`).

*A group without a row can't be locked*, and whoever inserts the row holds it until the end of the transaction. So a
short transaction of our own inserts empty rows before (`prepare`), and a caller's only updates rows. A flush that has
found no row looks again before it inserts one: otherwise it would wait for a caller, with the batch's row locked.

*The batch is journaled, or becomes so.* A journaled batch is changed under the lock of its row alone. `prepare` folds
the journal and marks the batch (`no_journal`), under that lock. The mark is never taken back.

*A caller that holds groups waits for `prepare`*, which waits for the batch's row, whose holder waits for these groups.
No database sees such a circle. So `prepare` runs before a caller locks a group of the batch; and once it has run, no
holder of the batch's row waits for a group.

*The batch ends between the read of its state and the commit.* It can't be known, as its row isn't locked. The item was
resolved at the same time as the batch ended: its bit and its count stay, and the batch doesn't change its end.

*A child is opened under the item at the same time.* That locks the group of the item as well (see `nesting`): either
the open finds the bit, or this finds the child.

*The transaction is rolled back, or a savepoint.* Its rows are undone with it. Nothing is remembered elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from core import errors
from core.acks import apply, ended, outbox
from core.acks.apply import FlushState, Seen
from core.acks.call import AckResult, Call, Outcome, Unit
from core.batches import batch as batches
from core.batches import nesting
from core.batches.lifecycle import State, Verb
from core.bits import bitfield, folding, group_rows
from core.bits.cache import Key
from core.storage import dialects, schema, statements
from core.storage.dialects import Rows
from core.storage.statements import LIST, chunks
from lastbit.ids import ItemId

SINCE: Final = "0028"
"""The revision of the schema that introduced this. An earlier release would journal the batch."""

Groups = Mapping[int, Sequence[int]]
"""By batch, the numbers of groups."""


@dataclass(slots=True)
class Resolved:
    """What a call did in the caller's transaction. Its `answer` has no completions: they are known after the commit."""

    answer: AckResult = field(default_factory=AckResult)
    changed: set[int] = field(default_factory=set)
    """The batches for which it leaves something."""
    resolving: set[int] = field(default_factory=set)
    """Those of them that it may complete: it resolved pending items, and not only redrove some."""
    named: set[int] = field(default_factory=set)
    """The batches of which the call named an issued item. The answer tells if they are complete."""


def resolve(tx: Any, call: Call) -> Resolved:
    """Apply the call in the caller's transaction, after `prepare` for its groups. Raises `errors.Contended` if they are
    not ready, `InconsistentBatch`, `Misconfigured`, and the driver's errors."""
    state, late_outcomes = _lock(tx, call)
    resolved = Resolved()
    for unit in call.units.values():
        outcome = late_outcomes.get(unit.batch)
        if outcome is None:
            outcome = apply.admit(state, unit)
            if outcome.admitted and state.seen[unit.batch].children:
                outcome = _withhold(tx, state, unit, outcome)
            if outcome.admitted:
                apply.apply(state, unit, outcome)
                resolved.named.add(unit.batch)
        resolved.answer.add(outcome)
    _write(tx, state)
    resolved.changed.update(state.deltas)
    resolved.resolving.update(batch for batch, delta in state.deltas.items() if delta.last_resolver is not None)
    return resolved


def is_resolved(tx: Any, item: ItemId) -> bool:
    """Whether the item is acked, so that an ack is a repeat. Without a lock: False may be outdated."""
    dialect = dialects.of(tx)
    columns = ", ".join(bitfield.Columns._fields)
    text = (
        f"SELECT (SELECT group_size FROM {dialect.name(tx, 'batches')} WHERE id = {item.batch}), {columns} "  # noqa: S608
        f"FROM {dialect.name(tx, 'item_groups')} WHERE batch_id = {item.batch} AND group_no = {item.group}"
    )
    [rows] = statements.run(tx, text)
    if not rows or rows[0][0] is None or item.index >= rows[0][0]:
        return False
    group = bitfield.Group.load(_columns(rows[0][1:]), rows[0][0])
    return bool(group.acked()[item.index])


def groups_of(call: Call) -> dict[int, list[int]]:
    """The groups for which `prepare` must have run before `resolve`."""
    return {unit.batch: sorted(unit.groups()) for unit in call.units.values() if unit.batch not in call.withheld}


def prepare(tx: Any, groups: Groups) -> dict[int, set[int]]:
    """Make these batches ready: without a journal, and with a row for each of these groups that has issued items.
    Returns the batches that exist, with these groups. Raises `errors.UpgradeNotFinished` while a release that knows no
    such batches may be running."""
    if not schema.serves_only(tx, SINCE):
        raise errors.UpgradeNotFinished(SINCE)
    # First without a lock: the caller may have opened or extended one of them, in a transaction that waits for this.
    looks = _look(tx, groups)
    if unready := _unready(looks, groups, _rows(tx, groups)):
        _make_ready(tx, unready)
    return {batch: {number for number in groups[batch] if _is_issued(look, number)} for batch, look in looks.items()}


def _make_ready(tx: Any, unready: Groups) -> None:
    dialect = dialects.of(tx)
    batches_table, groups_table = (dialect.name(tx, table) for table in ("batches", "item_groups"))
    locked_batches = batches.lock_all(tx, unready)
    for id, batch in sorted(locked_batches.items()):
        if batch.journal_next:
            folding.fold(tx, id, batch.group_size, batch.items, batch.journal_next)
        if not batch.no_journal:
            statements.run(tx, *statements.updates(batches_table, {id: {"no_journal": "1", "journal_next": "0"}}))
    rows = _rows(tx, unready)
    for id, batch in sorted(locked_batches.items()):
        empty = bitfield.Group.empty(batch.group_size)
        missing = [number for number in unready[id] if (id, number) not in rows]
        new = [group_rows.row(tx, (id, number), empty, 1) for number in missing]
        statements.run(tx, *group_rows.insert(new, groups_table))


def _rows(tx: Any, groups: Groups) -> set[Key]:
    """Those of the groups that have a row."""
    groups_by_batch = {batch: numbers for batch, numbers in groups.items() if numbers}
    if not groups_by_batch:
        return set()
    table = dialects.of(tx).name(tx, "item_groups")
    [rows] = statements.run(tx, f"SELECT batch_id, group_no FROM {table} WHERE {group_rows.among(groups_by_batch)}")  # noqa: S608
    return {(batch, number) for batch, number in rows}


def _lock(tx: Any, call: Call) -> tuple[FlushState, dict[int, Outcome]]:
    """The state of the batches, with the groups of the call locked and loaded; and the outcomes in batches that take no
    acks."""
    groups_by_batch = groups_of(call)
    rows, looks = _lock_and_look(tx, groups_by_batch)
    if _unready(looks, groups_by_batch, rows):
        raise errors.Contended("the batch has changed at the same time: repeat your transaction")
    state = FlushState(looks)
    for (batch, number), columns in rows.items():
        if batch in state.seen:
            group = bitfield.Group.load(columns, state.seen[batch].group_size)
            try:
                group.check(state.issued(batch, number))
            except bitfield.Inconsistent as error:
                raise errors.InconsistentBatch(batch, f"group {number}: {error}") from error
            state.groups[batch, number] = group
    late_outcomes = {unit.batch: _late(state, unit) for unit in call.units.values() if _has_ended(state, unit.batch)}
    return state, late_outcomes


def _unready(looks: Mapping[int, Seen], groups_by_batch: Groups, rows: Collection[Key]) -> dict[int, list[int]]:
    """The batches that must be prepared, with their groups that have no row."""
    unready = {}
    for batch, look in looks.items():
        missing = [
            number for number in groups_by_batch[batch] if _is_issued(look, number) and (batch, number) not in rows
        ]
        if missing or not look.no_journal:
            unready[batch] = missing
    return unready


def _is_issued(look: Seen, group: int) -> bool:
    return group * look.group_size < look.items


def _lock_and_look(tx: Any, groups_by_batch: Groups) -> tuple[dict[Key, bitfield.Columns], dict[int, Seen]]:
    """Lock those of the groups that have a row, and read them; then read the batches. Raises `errors.Misconfigured` for
    a wrong isolation level."""
    if not groups_by_batch:
        return {}, {}
    dialect = dialects.of(tx)
    columns = ", ".join(["batch_id", "group_no", *bitfield.Columns._fields])
    source = f"{dialect.name(tx, 'item_groups')} WHERE {group_rows.among(groups_by_batch)}"
    lock = f"SELECT {columns} FROM {source}{dialect.for_update('batch_id', 'group_no')}"  # noqa: S608
    group_records, batch_records = statements.run(tx, lock, _look_text(tx, groups_by_batch))
    groups = {(batch, number): _columns(values) for batch, number, *values in group_records}
    return groups, _looks(batch_records)


def _columns(values: Sequence[Any]) -> bitfield.Columns:
    """The columns of a row, whose blobs a driver may return as views."""
    plain: list[Any] = [bytes(value) if isinstance(value, memoryview | bytearray) else value for value in values]
    return bitfield.Columns(*plain)


def _look(tx: Any, batches: Collection[int]) -> dict[int, Seen]:
    """Read the batches. Raises `errors.Misconfigured` for a wrong isolation level."""
    return _looks(statements.run(tx, _look_text(tx, batches))[0]) if batches else {}


def _look_text(tx: Any, batches: Collection[int]) -> str:
    dialect = dialects.of(tx)
    columns = "id, state, group_size, items, journal_next, no_journal, children"
    source = f"{dialect.name(tx, 'batches')} WHERE id IN ({','.join(map(str, sorted(batches)))})"
    return f"SELECT {columns}, {dialect.isolation(tx)} FROM {source}"  # noqa: S608


def _looks(records: Rows) -> dict[int, Seen]:
    looks: dict[int, Seen] = {}
    for batch, state, size, items, journal_next, no_journal, children, isolation in records:
        check_isolation(statements.as_text(isolation))
        state = State(statements.as_text(state) or "")
        if state is not State.DELETING:
            looks[batch] = Seen(state, size, items, journal_next, bool(no_journal), children, owes=False)
    return looks


def check_isolation(level: str | None) -> None:
    """Raise `errors.Misconfigured` for another level than READ COMMITTED. None: the database knows no levels."""
    if level is None:
        return
    level = level.upper().replace("-", " ")
    if level != "READ COMMITTED":
        raise errors.Misconfigured(
            f"your transaction is {level}, in which an item that another transaction has just resolved would "
            "look pending: use READ COMMITTED (SQLAlchemy: create_engine(isolation_level='READ COMMITTED'); Django: "
            "OPTIONS = {'isolation_level': 'read committed'} for MySQL and MariaDB)"
        )


def _has_ended(state: FlushState, batch: int) -> bool:
    return batch in state.seen and state.seen[batch].has_ended


def _late(state: FlushState, unit: Unit) -> Outcome:
    """The outcome in a batch that ended without its pending items."""
    look = state.seen[unit.batch]
    empty = bitfield.Group.empty(look.group_size)
    groups = {number: state.groups.get((unit.batch, number), empty) for number in unit.groups()}
    return ended.outcome(unit, look, groups)


def _withhold(tx: Any, state: FlushState, unit: Unit, outcome: Outcome) -> Outcome:
    """The outcome without the items that children hold, or that in a batch that has ended."""
    look = state.seen[unit.batch]
    numbers: list[int] = []
    for group, selection in outcome.admitted.items():
        indexes = selection if isinstance(selection, list) else selection.search(1)
        numbers += [group * look.group_size + index for index in indexes]
    for batch, number, holder in nesting.holders(tx, {unit.batch: numbers}, ()):
        group, index = divmod(number, look.group_size)
        state.held.setdefault((batch, group), {})[index] = statements.as_text(holder) or ""
    # A batch may have ended after it was read, and then its children, which hold no item any more. So it is read again.
    latest_look = _look(tx, [unit.batch]).get(unit.batch)
    if latest_look is not None and latest_look.has_ended:
        state.seen[unit.batch] = latest_look
        return _late(state, unit)
    if state.held:
        apply.withhold(state, unit, outcome)
    return outcome


def _write(tx: Any, state: FlushState) -> None:
    """Write the changed groups and reasons, and leave the changes of the counts."""
    dialect = dialects.of(tx)
    rows = [
        group_rows.row(tx, (batch, number), state.groups[batch, number], state.issued(batch, number))
        for batch, numbers in sorted(state.changed.items())
        for number in sorted(numbers)
    ]
    texts = group_rows.upsert(tx, rows)
    for verb, (table, time) in {Verb.FAIL: ("failures", "failed_at"), Verb.SKIP: ("skips", "skipped_at")}.items():
        name, reasons = dialect.name(tx, table), state.reasons[verb]
        removed_numbers: dict[int, list[int]] = {}
        for batch, number in reasons.removed:
            removed_numbers.setdefault(batch, []).append(number)
        texts += [
            f"DELETE FROM {name} WHERE batch_id = {batch} AND number IN ({','.join(map(str, part))})"  # noqa: S608
            for batch, numbers in sorted(removed_numbers.items())
            for part in chunks(sorted(numbers), LIST)
        ]
        by_reason: dict[str, list[tuple[int, int]]] = {}
        for item, reason in sorted(reasons.new.items()):
            by_reason.setdefault(reason, []).append(item)
        for reason, items in by_reason.items():
            for inserts in dialect.insert_reason(f"{name} (batch_id, number, reason, {time})", reason, items):
                texts += inserts
    deltas = {batch: delta for batch, delta in state.deltas.items() if batch in state.changed}
    statements.run(tx, *texts, *outbox.leave(dialect.name(tx, "count_outbox"), deltas))
