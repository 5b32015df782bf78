"""The ack transaction: the one place where bits are flipped, and (in `completion`) the last of them is noticed.

What could go wrong, and why it can't:

*The last two acks race.* Two transactions resolve the last two items, in different groups, so their group locks don't
meet. If each then read the counts and judged, both or neither would see the end. So the counts live in the batch row;
each transaction adds its own changes to them *under that row's lock* and judges there. The second one sees what the
first one committed, or waits for it.

*An item is delivered twice.* A bit is flipped under its group's lock, and the counts move by the number of bits that
really changed, so the second delivery moves nothing. It must still be told when the batch is complete: for batches of
which nothing changed the row is read again, plainly, *after* the group locks were taken. Whoever flipped the bit before
us has committed, or we would not have the lock, and its completion was in the same commit.

*The batch ends under us* (cancelled, expired, being deleted) between the first look and the lock. The state is judged
again under the lock; if the batch takes no acks any more, everything is rolled back and begun again, and the first look
rejects.

*Two transactions make the same group's row.* A group without a row is all pending, and one can't lock a row that is not
there. Both insert; one gets a duplicate key, rolls back and begins again.

*Deadlocks.* Groups are locked in primary-key order by one statement, then batches by id: item_groups → batches, here
and everywhere.

Requests are merged: a flush carries units of many callers, applied in arrival order, each with an outcome of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa
from bitarray import bitarray
from bitarray.util import zeros
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from core import bitfield, completion, faults, tables
from core.batches import LIST, chunks
from core.calls import Outcome, Rejected, Unit, Verb
from core.completion import Touched
from core.lifecycle import TAKES_ACKS, State
from lastbit.ids import ItemId


@dataclass(slots=True)
class _Flush:
    """The state of one attempt; thrown away when it is rolled back."""

    seen: dict[int, Any]
    """The batches as they were at the first look: rows of id, state, group_size, items."""
    groups: dict[tuple[int, int], bitfield.Group] = field(default_factory=dict)
    missing: set[tuple[int, int]] = field(default_factory=set)
    """Groups without a row yet."""
    changed: set[tuple[int, int]] = field(default_factory=set)
    touched: dict[int, Touched] = field(default_factory=dict)
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    """(batch, number) → why it failed, to be written."""
    redriven: list[tuple[int, int]] = field(default_factory=list)

    def issued(self, batch: int, group: int) -> int:
        """How many items of the group have been issued."""
        row = self.seen[batch]
        return int(max(0, min(row.group_size, row.items - group * row.group_size)))

    def untouched(self) -> set[int]:
        """Batches of which all items were repeats."""
        return {batch for batch, _ in self.groups} - self.touched.keys()


def flush(tx: Connection, units: Sequence[Unit]) -> list[Outcome]:
    """Apply the units in their order and return an outcome for each. The caller commits.

    Raises `faults.BeginAgain` when it must be run again, `errors.InconsistentBatch` when counts and bits disagree.
    """
    work = _Flush(_look(tx, {unit.batch for unit in units}))
    outcomes = [_admit(work, unit) for unit in units]
    _lock_groups(tx, work)
    for unit, outcome in zip(units, outcomes, strict=True):
        if outcome.wanted:
            _apply(work, unit, outcome)
    _write_groups(tx, work)
    _write_reasons(tx, work)
    complete = completion.write(tx, work.touched)
    complete |= completion.look_again(tx, work.untouched())
    for unit, outcome in zip(units, outcomes, strict=True):
        if outcome.wanted and unit.batch in complete:
            outcome.completed = completion.told(complete[unit.batch], work.touched.get(unit.batch), unit)
    return outcomes


def _look(tx: Connection, ids: Iterable[int]) -> dict[int, Any]:
    """1. A plain read of the batches: do they exist, do they take acks, how many items are issued?"""
    found: dict[int, Any] = {}
    for part in chunks(sorted(ids), LIST):
        # Integers of our own parsing stand in the text, here and below: one form of statement for every driver.
        wanted = ", ".join(map(str, part))
        statement = f"SELECT id, state, group_size, items FROM batches WHERE id IN ({wanted})"  # noqa: S608
        for row in tx.exec_driver_sql(statement):
            if row.state != State.DELETING:
                found[row.id] = row
    return found


def _admit(work: _Flush, unit: Unit) -> Outcome:
    """Reject what was never issued or whose batch is gone; remember which groups are wanted."""
    row: Any = work.seen.get(unit.batch)
    if row is None or row.state not in TAKES_ACKS:
        reason = "unknown_batch" if row is None else str(row.state)
        rejected = [Rejected(reason, item=ItemId(unit.batch, g, i)) for g, i in unit.ids()]
        rejected += [
            Rejected(reason, group=(unit.batch, g), count=mask.count()) for g, mask in unit.masks.items() if mask.any()
        ]
        return Outcome(rejected=rejected)
    outcome = Outcome()
    for group, indexes in unit.indexes.items():
        issued = work.issued(unit.batch, group)
        good = [i for i in indexes if i < issued]
        if len(good) < len(indexes):
            outcome.rejected += [
                Rejected("unknown_item", item=ItemId(unit.batch, group, i)) for i in indexes if i >= issued
            ]
        if good:
            outcome.wanted[group] = good
    for group, mask in unit.masks.items():
        issued = work.issued(unit.batch, group)
        beyond = mask.count(1, issued)
        if beyond:
            outcome.rejected.append(Rejected("unknown_item", group=(unit.batch, group), count=beyond))
        good_mask = mask[: min(issued, row.group_size)]
        if good_mask.any():
            good_mask.extend(zeros(row.group_size - len(good_mask), bitfield.ENDIAN))
            alone = outcome.wanted.get(group)
            if isinstance(alone, list):
                good_mask |= bitfield.mask_of(alone, row.group_size)
            outcome.wanted[group] = good_mask
    for group in outcome.wanted:
        work.missing.add((unit.batch, group))
    return outcome


def _lock_groups(tx: Connection, work: _Flush) -> None:
    """2. Lock the groups that have a row, in primary-key order, by one statement."""
    by_batch: dict[int, list[int]] = {}
    for batch, group in sorted(work.missing):
        by_batch.setdefault(batch, []).append(group)
    if not by_batch:
        return
    wanted = " OR ".join(
        f"(batch_id = {batch} AND group_no IN ({', '.join(map(str, part))}))"
        for batch, groups in by_batch.items()
        for part in chunks(groups, LIST)
    )
    statement = (
        "SELECT batch_id, group_no, resolved, failed, resolved_count, failed_count FROM item_groups "  # noqa: S608
        f"WHERE {wanted} ORDER BY batch_id, group_no{_for_update(tx)}"
    )
    for batch, group, resolved, failed, resolved_count, failed_count in tx.exec_driver_sql(statement):
        work.groups[batch, group] = bitfield.Group.load(
            resolved, failed, resolved_count, failed_count, work.seen[batch].group_size
        )
        work.missing.discard((batch, group))
    for batch, group in work.missing:
        work.groups[batch, group] = bitfield.Group.empty(work.seen[batch].group_size)


def _for_update(tx: Connection) -> str:
    return "" if tx.dialect.name == "sqlite" else " FOR UPDATE"


def _apply(work: _Flush, unit: Unit, outcome: Outcome) -> None:
    """3. Flip one unit's bits, and count what really changed."""
    size = work.seen[unit.batch].group_size
    resolved_now = redriven_now = 0
    for number, wanted in outcome.wanted.items():
        group = work.groups[unit.batch, number]
        if isinstance(wanted, list) and len(wanted) <= 8:
            resolved, redriven, sent = _apply_few(work, unit, number, group, wanted)
        else:
            mask = bitfield.mask_of(wanted, size) if isinstance(wanted, list) else wanted
            resolved, redriven, sent = _apply_mask(work, unit, number, group, mask)
        outcome.applied += resolved + redriven
        outcome.repeated += sent - resolved - redriven
        if resolved or redriven:
            work.changed.add((unit.batch, number))
        resolved_now += resolved
        redriven_now += redriven
    if not resolved_now and not redriven_now:
        return
    touched = work.touched.setdefault(unit.batch, Touched())
    touched.last_changer = unit
    if resolved_now:
        touched.last_resolver = unit
    if unit.verb is Verb.ACK:
        touched.acked += resolved_now + redriven_now
        touched.failed -= redriven_now
    else:
        touched.failed += resolved_now
    if resolved_now:
        touched.filled |= any(work.groups[unit.batch, g].resolved_count == size for g in outcome.wanted)


def _apply_few(work: _Flush, unit: Unit, number: int, group: bitfield.Group, wanted: list[int]) -> tuple[int, int, int]:
    resolved = redriven = 0
    first = number * work.seen[unit.batch].group_size
    for index in wanted:
        if unit.verb is Verb.ACK:
            was_pending, was_failed = group.ack_one(index)
            resolved += was_pending
            if was_failed:
                redriven += 1
                _forget_reason(work, unit.batch, first + index)
        elif group.fail_one(index):
            resolved += 1
            if unit.reason is not None:
                work.reasons[unit.batch, first + index] = unit.reason
    return resolved, redriven, len(wanted)


def _apply_mask(work: _Flush, unit: Unit, number: int, group: bitfield.Group, mask: bitarray) -> tuple[int, int, int]:
    change = group.ack(mask) if unit.verb is Verb.ACK else group.fail(mask)
    first = number * work.seen[unit.batch].group_size
    redriven = 0
    if change.redriven is not None:
        for index in change.redriven.search(1):
            redriven += 1
            _forget_reason(work, unit.batch, first + index)
    if unit.verb is Verb.FAIL and unit.reason is not None:
        for index in change.resolved.search(1):
            work.reasons[unit.batch, first + index] = unit.reason
    return change.resolved.count(), redriven, mask.count()


def _forget_reason(work: _Flush, batch: int, number: int) -> None:
    """An acked item has no reason any more: neither one that this flush was to write nor one from before."""
    if work.reasons.pop((batch, number), None) is None:
        work.redriven.append((batch, number))


_INSERT: Final = "INSERT INTO item_groups (batch_id, group_no, resolved, failed, resolved_count, failed_count) VALUES "
_UPSERT: Final = {
    "mysql": " ON DUPLICATE KEY UPDATE resolved = VALUES(resolved), failed = VALUES(failed), "
    "resolved_count = VALUES(resolved_count), failed_count = VALUES(failed_count)",
    "sqlite": " ON CONFLICT (batch_id, group_no) DO UPDATE SET resolved = excluded.resolved, "
    "failed = excluded.failed, resolved_count = excluded.resolved_count, failed_count = excluded.failed_count",
}
_TEXT: Final = 500_000
"""About how many characters of rows go into one statement: half of the smallest limit that a server has by default."""


def _write_groups(tx: Connection, work: _Flush) -> None:
    new: list[str] = []
    old: list[str] = []
    for key in sorted(work.changed):
        row = _row(key, *work.groups[key].dump(work.issued(*key)))
        (new if key in work.missing else old).append(row)
    # These rows are ours, locked: the upsert is a multi-row update.
    for rows in _statements(old):
        tx.exec_driver_sql(_INSERT + rows + _UPSERT[tx.dialect.name])
    for rows in _statements(new):
        try:
            tx.exec_driver_sql(_INSERT + rows)
        except IntegrityError as error:
            if faults.is_duplicate(error):
                raise faults.BeginAgain from error
            raise


def _row(
    key: tuple[int, int], resolved: bytes | None, failed: bytes | None, resolved_count: int, failed_count: int
) -> str:
    """In the text, as hexadecimal digits: a driver takes ten times as long to quote a kilobyte."""
    bits = "NULL" if resolved is None else f"x'{resolved.hex()}'"
    failed_bits = "NULL" if failed is None else f"x'{failed.hex()}'"
    return f"({key[0]},{key[1]},{bits},{failed_bits},{resolved_count},{failed_count})"


def _statements(rows: list[str]) -> Iterator[str]:
    """The rows, in lists of about `_TEXT` characters."""
    first = size = 0
    for position, row in enumerate(rows):
        size += len(row)
        if size >= _TEXT:
            yield ",".join(rows[first : position + 1])
            first, size = position + 1, 0
    if first < len(rows):
        yield ",".join(rows[first:])


def _write_reasons(tx: Connection, work: _Flush) -> None:
    known = tables.failures.c
    by_batch: dict[int, list[int]] = {}
    for batch, number in work.redriven:
        by_batch.setdefault(batch, []).append(number)
    for batch, numbers in sorted(by_batch.items()):
        for part in chunks(sorted(numbers), LIST):
            tx.execute(sa.delete(tables.failures).where(known.batch_id == batch, known.number.in_(part)))
    if work.reasons:
        insert = sa.insert(tables.failures).values(failed_at=tables.utc_now())
        rows = [{"batch_id": b, "number": n, "reason": reason} for (b, n), reason in sorted(work.reasons.items())]
        tx.execute(insert, rows)
