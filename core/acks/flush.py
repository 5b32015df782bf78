"""The ack transaction: the one place where bits are flipped (in `apply`), and the last of them is noticed (in
`completion`).

What could go wrong, and why it can't:

*The last two acks race.* Two transactions resolve the last two items, in different groups, so their group locks don't
meet. If each then read the counts and judged, both or neither would see the end. So the counts live in the batch row;
each transaction adds its own changes to them *under that row's lock* and judges there. The second one sees what the
first one committed, or waits for it.

*An item is delivered twice.* A bit is flipped under its group's lock, and the counts move by the number of bits that
really changed, so the second delivery moves nothing. It must still be told when the batch is complete: the row of a
batch of which nothing changed is read, or read again, *after* the group locks were taken. Whoever flipped the bit
before us has committed, or we would not have the lock, and its completion was in the same commit.

*The batch grows under us.* A producer extends it, and others ack the new items, while we wait for a group. How many
items are issued is read after all group locks are granted, so no bit of a locked row is beyond it; and a bitfield is
never written narrower than its highest set bit, whatever was read (see `bitfield`).

*An item is issued just after it was rejected.* The batch row is locked, or read again, later than the look that said
how many items there are. Where items were rejected as never issued, and the batch has grown in between, the transaction
begins again: otherwise one part of the answer would be true before the extend, another part only after it.

*The batch ends under us* (cancelled, expired, being deleted) between the look and the lock of its row, where
these are not the same. The state is judged again under the lock; if the batch takes no acks any more, everything is
rolled back and begun again, and the look rejects.

*Two transactions make the same group's row.* A group without a row is all pending, and one can't lock a row that is not
there. Both insert, before they judge; one gets a duplicate key, rolls back and begins again.

*A bitfield kept in memory is not the row's any more*, since another process was there. The counts of the locked row
name its bits exactly, and those of the kept one must be the same (see `cache`).

*Acks come in no order*, and each bit is another row's. Such batches are journaled: their transactions lock the batch
row first and no groups, and leave what they resolved in the journal (see `journal`).

*Deadlocks.* Groups are locked in primary-key order by one statement, then batches by id: item_groups → batches →
feed_head, here and everywhere; the rows of journaled batches before all of them, by id.

Requests are merged: a flush carries units of many callers, applied in arrival order, each with an outcome of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy.engine import Connection

from core import errors
from core.acks import apply, completion
from core.acks.apply import FlushState, Seen
from core.acks.call import Outcome, Unit
from core.batches.lifecycle import State, Verb, completes
from core.bits import bitfield, group_rows, journal
from core.bits.cache import BitfieldCache, Key
from core.storage import dialects, faults, statements
from core.storage.statements import LIST, chunks

REDRIVEN: Final = 8192
"""About how many reasons of items that had failed one transaction removes."""
FEW_REASONS: Final = 64
"""Up to as many of a group are removed by their numbers."""


class Flushed(NamedTuple):
    """What came of a flush, to be used after its commit."""

    outcomes: list[Outcome]
    groups: Mapping[Key, bitfield.Group]
    """As their rows are now: for `BitfieldCache.put`, with the era."""
    known: Mapping[int, journal.JournalState]
    era: int
    owing: list[int]
    """Batches that ended, and owe something to the item that they are: for `parents`."""


def flush(tx: Connection, units: Sequence[Unit], held: BitfieldCache) -> Flushed:
    """Apply the units in their order, with an outcome for each. The caller commits.

    Raises `faults.BeginAgain` when it must be run again, `errors.InconsistentBatch` when counts and bits disagree.
    """
    era = held.era
    begun = _begin(tx, units, held)
    work = begun.work
    units, rests = _cut(units, begun)
    outcomes = [apply.admit(work, unit) for unit in units]
    _load_journaled(tx, work, begun)
    _load(tx, work, held, begun.groups)
    for unit, outcome in zip(units, outcomes, strict=True):
        if outcome.wanted:
            apply.apply(work, unit, outcome)
    _write_reasons(tx, work)
    complete = completion.write(
        tx,
        _write_groups(tx, work),
        work.touched,
        work.untouched(units, outcomes),
        work.locked,
        work.refused(units, outcomes),
    )
    for key in work.changed:
        if key[0] not in work.known:
            work.groups[key].written(work.issued(*key))
    if scattered := _scattered(work):
        held.journal(scattered if held.may_journal(tx) else ())
    if complete:
        for unit, outcome in zip(units, outcomes, strict=True):
            if outcome.wanted and unit.batch in complete:
                outcome.completed = completion.told(complete[unit.batch], work.touched.get(unit.batch), unit)
    for outcome, rest in zip(outcomes, rests, strict=True):
        outcome.rest = rest
    groups = work.groups
    if work.known:
        groups = {key: group for key, group in groups.items() if key[0] not in work.known}
    return Flushed(outcomes, groups, work.known, era, [each.id for each in complete.values() if each.owes])


class _Locked(NamedTuple):
    """What the first round trip found."""

    work: FlushState
    groups: Sequence[Sequence[Any]]
    """The rows of groups that are locked: batch, group and both counts."""
    held: Mapping[int, journal.JournalState | None]
    """By journaled batch, what is known of it in memory."""
    entries: dialects.Rows
    """Those that are missing to it."""


def _begin(tx: Connection, units: Sequence[Unit], held: BitfieldCache) -> _Locked:
    """Lock the rows of journaled batches, then groups, and look at the batches: do they exist, do they take acks,
    how many items are issued? Nothing of a statement depends on what those before it find, so it is one round trip.

    The look comes after the locks of the groups: an item that is resolved in a locked row was issued before, so the
    look sees it issued. Taken before, it would be out of date by the time that the locks are granted.

    Where little is to be done until the commit, the look locks their rows too, which spares a round trip; where much
    is, others shall not wait for it, and they are locked last. In the order of locks batches come after groups.
    """
    journaled = {unit.batch for unit in units if held.journaled(unit.batch)}
    known = {batch: held.take_state(batch) for batch in journaled}
    direct = [unit for unit in units if unit.batch not in known] if known else units
    texts = []
    if known:
        texts += [completion.select(tx, known, _for_update(tx)), journal.select(known)]
    little = _is_little(direct)
    if direct:
        batches = {unit.batch for unit in direct}
        texts += [_lock(tx, direct), completion.select(tx, batches, _for_update(tx)) if little else _look(tx, batches)]
    found = statements.run(tx, *texts)
    work = FlushState({})
    groups: Sequence[Sequence[Any]] = ()
    if direct:
        locked, looked = found[-2:]
        groups = statements.records(tx, locked)
        if little:
            work.take(completion.rows(tx, looked))
        else:
            work.seen = _seen(tx, looked)
    others = [batch for batch, seen in work.seen.items() if seen.journal_next]
    if others:
        held.journal(others)
        raise faults.BeginAgain
    if known:
        work.take(completion.rows(tx, found[0]))
    return _Locked(work, groups, known, found[1] if known else ())


def _cut(units: Sequence[Unit], begun: _Locked) -> tuple[Sequence[Unit], Sequence[Unit | None]]:
    """What of the units this transaction applies, and what of each is left for the next one, so that it removes some
    `REDRIVEN` reasons at most. How many items of a group have failed is known once it is locked."""
    failed = {(int(row[0]), int(row[1])): int(row[3]) for row in begun.groups if row[3] not in (0, "0")}
    journaled = {batch: begun.work.locked[batch].failed for batch in begun.held if batch in begun.work.locked}
    if not failed and not any(journaled.values()):
        return units, [None] * len(units)
    now: list[Unit] = []
    rests: list[Unit | None] = []
    left = REDRIVEN
    for unit in units:
        piece, rest = unit, None
        if unit.verb is Verb.ACK:
            redriven = {
                group: min(unit.count(group), failed.get((unit.batch, group), journaled.get(unit.batch, 0)))
                for group in unit.groups()
            }
            total = sum(redriven.values())
            if total > left:
                piece, rest = unit.part(redriven, left, at_least=left == REDRIVEN)
                total = sum(redriven[group] for group in piece.groups())
            left = max(0, left - total)
        now.append(piece)
        rests.append(rest)
    return now, rests


def _is_little(units: Sequence[Unit]) -> bool:
    """A few ids of each caller; to apply masks and thousands of ids takes longer than a round trip."""
    return not any(unit.masks or unit.size for unit in units)


def _look(tx: Connection, batches: Collection[int]) -> str:
    wanted = f"batches WHERE id IN ({','.join(map(str, sorted(batches)))})"
    return statements.select(tx, ("id", "state", "group_size", "items", "journal_next"), wanted, len(batches))


def _seen(tx: Connection, rows: dialects.Rows) -> dict[int, Seen]:
    return {
        int(batch): Seen(state, int(size), int(items), int(journal_next))
        for batch, state, size, items, journal_next in statements.records(tx, rows)
        if state != State.DELETING
    }


def _lock(tx: Connection, units: Sequence[Unit]) -> str:
    """The groups that have a row, in primary-key order, by one statement."""
    by_batch: dict[int, set[int]] = {}
    for unit in units:
        by_batch.setdefault(unit.batch, set()).update(unit.groups())
    columns = ("batch_id", "group_no", "resolved_count", "failed_count")
    wanted = f"item_groups WHERE {group_rows.among(by_batch)}{_for_update(tx)}"
    return statements.select(tx, columns, wanted, sum(map(len, by_batch.values())))


def _for_update(tx: Connection) -> str:
    return dialects.of(tx).for_update


def _load_journaled(tx: Connection, work: FlushState, begun: _Locked) -> None:
    """The bits of the wanted groups of journaled batches, whose rows are locked."""
    entries: dict[int, list[Sequence[Any]]] = {batch: [] for batch in begun.held}
    for each in begun.entries:
        entries[each[0]].append(each)
    wanted: dict[int, list[int]] = {batch: [] for batch in begun.held if batch in work.locked}
    for batch, number in work.missing:
        if batch in wanted:
            wanted[batch].append(number)
    for batch, numbers in wanted.items():
        row = work.locked[batch]
        known = journal.catch_up(tx, batch, row.group_size, begun.held[batch], row.journal_next, entries[batch])
        journal.fetch(tx, batch, row.group_size, known, numbers)
        work.known[batch] = known
        work.acked[batch] = []
        for number in numbers:
            work.missing.discard((batch, number))
            _check((batch, number), known.groups[number], work.issued(batch, number))
            work.groups[batch, number] = known.groups[number]


def _scattered(work: FlushState) -> list[int]:
    """The batches that should be journaled from now on."""
    changed: dict[int, int] = {}
    for batch, _ in work.changed:
        changed[batch] = changed.get(batch, 0) + 1
    found = []
    for batch, groups in changed.items():
        if groups < journal.SCATTERED or batch in work.known:
            continue
        touched, seen = work.touched[batch], work.seen[batch]
        items = touched.acked + touched.failed
        if journal.pays(seen.group_size, -(-seen.items // seen.group_size), groups, items):
            found.append(batch)
    return found


def _load(tx: Connection, work: FlushState, held: BitfieldCache, rows: Sequence[Sequence[Any]]) -> None:
    """The bits of the wanted groups: from memory where they are those of the locked row, else read."""
    unread: dict[int, set[int]] = {}
    counts: dict[Key, tuple[int, int]] = {}
    for row in rows:
        batch, number, resolved, failed = map(int, row)
        key = batch, number
        if key not in work.missing:
            continue  # all that is wanted of it was rejected
        work.missing.discard(key)
        counts[key] = resolved, failed
        group = held.take(key, resolved, failed)
        if group is None and resolved == work.seen[batch].group_size and not failed:
            group = bitfield.Group.full(resolved)
        if group is None:
            unread.setdefault(batch, set()).add(number)
        else:
            work.groups[key] = group
    for batch, number in work.missing:
        work.groups[batch, number] = bitfield.Group.empty(work.seen[batch].group_size)
    if unread:
        # Plain: the rows are locked, so they are still as they were.
        text = f"SELECT batch_id, group_no, resolved, failed FROM item_groups WHERE {group_rows.among(unread)}"  # noqa: S608
        for batch, number, blob, failed_blob in statements.run(tx, text)[0]:
            key = batch, number
            size = work.seen[batch].group_size
            group = bitfield.Group.load(blob, failed_blob, *counts[key], size)
            _check(key, group, work.issued(*key))
            work.groups[key] = group


def _check(key: Key, group: bitfield.Group, issued: int) -> None:
    """Raise `errors.InconsistentBatch` where the group's counts and bits disagree."""
    try:
        group.check(issued)
    except bitfield.Inconsistent as error:
        raise errors.InconsistentBatch(key[0], f"group {key[1]}: {error}") from error


def _write_groups(tx: Connection, work: FlushState) -> list[str]:
    """The statements that write what has changed; all but those that fill the last round trip have been executed."""
    dialect = dialects.of(tx)
    texts, old = _write_journaled(tx, work) if work.known else ([], [])
    new: list[str] = []
    patched: list[group_rows.Patch] = []
    for key in sorted(key for key in work.changed if key[0] not in work.known):
        group, issued = work.groups[key], work.issued(*key)
        _check(key, group, issued)
        if key in work.missing:
            new.append(group_rows.row(key, group, issued))
        elif dialect.patches_blobs and (patches := group.patches(issued)) is not None:
            patched.append((key, group, patches))
        else:
            old.append(group_rows.row(key, group, issued))
    texts += group_rows.patch(patched) + group_rows.upsert(tx, old) + group_rows.insert(new)
    while len(texts) > 1 and sum(map(len, texts)) > 2 * group_rows.TEXT:
        completion.execute(tx, [texts.pop(0)])
    if not work.locked.keys().isdisjoint(batch for batch, _ in work.missing & work.changed):
        # Groups that have a row by now, as others were quicker, must be found out before the counts are judged: the
        # batch's row, which we got after them, has their items already.
        completion.execute(tx, texts)
        return []
    return texts


def _write_journaled(tx: Connection, work: FlushState) -> tuple[list[str], list[str]]:
    """Statements, and rows of groups to write, for the journaled batches that have changed. Their own rows are locked,
    so nobody else writes these."""
    texts: list[str] = []
    rows: list[str] = []
    for batch in sorted(work.touched.keys() & work.known.keys()):
        row, touched, known = work.locked[batch], work.touched[batch], work.known[batch]
        change = journal.Change(
            batch,
            row.group_size,
            groups=-(-row.items // row.group_size),
            changed={number for of, number in work.changed if of == batch},
            acked=work.acked.get(batch),
            ends=completes(State(row.state), row.items, row.acked + touched.acked, row.failed + touched.failed),
        )
        more, written = journal.write(tx, known, change)
        texts += more
        touched.journal_next = known.next
        touched.filled = any(known.groups[number].resolved_count == row.group_size for number in written)
        for number in written:
            key, group, issued = (batch, number), known.groups[number], work.issued(batch, number)
            _check(key, group, issued)
            rows.append(group_rows.row(key, group, issued))
    return texts, rows


def _write_reasons(tx: Connection, work: FlushState) -> None:
    """Remove the reasons of redriven items, and insert those of failed ones."""
    if work.redriven:
        _remove_reasons(tx, work)
    by_reason: dict[str, list[tuple[int, int]]] = {}
    for item, reason in sorted(work.reasons.items()):
        by_reason.setdefault(reason, []).append(item)
    for reason, items in by_reason.items():
        dialects.of(tx).insert_reason(tx, reason, items)


def _remove_reasons(tx: Connection, work: FlushState) -> None:
    by_group: dict[Key, list[int]] = {}
    for batch, number in work.redriven:
        by_group.setdefault((batch, number // work.seen[batch].group_size), []).append(number)
    single: dict[int, list[int]] = {}
    ranges: list[tuple[int, int, int]] = []
    for (batch, group), numbers in sorted(by_group.items()):
        size = work.seen[batch].group_size
        if len(numbers) <= FEW_REASONS or work.groups[batch, group].failed_count:
            single.setdefault(batch, []).extend(sorted(numbers))
        elif ranges and ranges[-1][::2] == (batch, group * size):
            ranges[-1] = batch, ranges[-1][1], (group + 1) * size
        else:
            ranges.append((batch, group * size, (group + 1) * size))
    texts = [
        f"DELETE FROM failures WHERE batch_id = {batch} AND number IN ({','.join(map(str, part))})"  # noqa: S608
        for batch, numbers in single.items()
        for part in chunks(numbers, LIST)
    ]
    statements.run(tx, *texts, *_remove_ranges(tx, ranges))


def _remove_ranges(tx: Connection, ranges: Sequence[tuple[int, int, int]]) -> list[str]:
    """Statements that remove all reasons of these groups, (batch, first number, end): none of their items is failed any
    more. That takes a fraction of what lists of their numbers take.

    They stop at the last row, which is why the rows are counted. To see that there is none left, InnoDB would lock the
    row after it: another group's, for whose transaction this one would wait.
    """
    wanted = [
        f"FROM failures WHERE batch_id = {batch} AND number >= {first} AND number < {end}"
        for batch, first, end in ranges
    ]
    if not dialects.of(tx).locks_rows:
        return [f"DELETE {each}" for each in wanted]
    counts = statements.run(tx, *(f"SELECT COUNT(*) {each}" for each in wanted))
    return [
        f"DELETE {each} ORDER BY number LIMIT {count}"
        for each, ((count,),) in zip(wanted, counts, strict=True)
        if count
    ]
