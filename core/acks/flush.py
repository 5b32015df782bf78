"""The ack transaction: the only place where bits are flipped (in `apply`), and where the last one completes a batch (in
`completion`).

What could go wrong, and why it can't:

*The last two acks race.* Two transactions resolve the last two items, in different groups, so their group locks don't
conflict. If each then read the counts without a common lock, both or neither would complete the batch. So the counts
are in the batch row. Each transaction adds its own changes to them *under the lock of that row*, and decides there
whether the batch is complete. The second transaction waits for the first one's commit, and sees its changes.

*An item is delivered twice.* A bit is flipped under the lock of its group, and the counts change by the number of bits
that really changed, so the second delivery changes nothing. Its response must still report whether the batch is
complete. So the row of a batch without changes is read (again, if necessary) *after* the group locks were acquired. The
transaction that flipped the bit has committed by then, or its lock would still exist, and its completion was part of
the same commit. On MariaDB and MySQL, that commit is on disk by then only if there is a binary log: without one,
InnoDB releases the locks first (see `checks.mariadb`).

*The batch grows in the meantime.* A producer extends it, and other transactions ack the new items, while this one waits
for a group. The number of issued items is read after all group locks are granted, so no bit of a locked row is beyond
it. And a bitfield is never written narrower than its highest set bit (see `bitfield`).

*An item is issued just after it was rejected.* The batch row is locked, or read again, later than the number of issued
items. If items were rejected as never issued, and the batch has grown in between, the transaction begins again:
otherwise one part of the response would be true before the extend, and another part only after it.

*The batch ends in the meantime* (cancelled, expired, being deleted): between the first read and the lock of its row, if
these are separate. The state is checked again under the lock. If it accepts no more acks, the transaction is rolled
back and begins again, and then the first read rejects the items that are pending (see `ended`).

*A child is opened under an item in the meantime.* The item is then held: its acks are rejected, but for the child's own
(see `nesting`). An open of a child locks the row of the parent and counts the child there. So this is decided under
that lock: a parent's row, once known as such, is locked right after the groups, and a batch that has become a parent
when its row is locked last lets the transaction begin again.

*Two transactions insert the row of the same group.* A group without a row is all pending, and a row that doesn't exist
can't be locked. Each inserts it under the lock of the batch row, so one after the other. The second one gets a
duplicate key, at the latest in the packet of its COMMIT, rolls back and begins again. Until then its counts may be
wrong. So if they seem impossible, it first inserts the row: with a duplicate key there, it begins again instead of
reporting an inconsistency. If both fail the same item with a reason, the row comes before the reason.

*A bitfield in memory is outdated*, since another process has changed the group. The counts of the locked row determine
its bits, and the counts in memory must be the same (see `cache`).

*Acks arrive out of order*, so that each bit is in a different row. Such batches are journaled: their transactions lock
the batch row and no groups, and write the resolved items to the journal (see `journal`).

*A caller acks in its own transaction at the same time* (see `core.enlisted`). It locks groups and never the row of the
batch, so it wouldn't notice that the batch becomes journaled. So the batch is marked before (`no_journal`), under the
lock of its row, and a flush that takes it for a journaled one finds that mark under this lock.

*Deadlocks.* The existing rows of all groups are locked by one statement, then those of all batches by another one. Only
then rows are inserted, or groups of journaled batches written (see `lock_order`).

Requests are merged: a flush has units of many callers. They are applied in arrival order, and each unit has its own
outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy.engine import Connection

from core import errors
from core.acks import apply, completion, ended
from core.acks.apply import FlushState, Seen
from core.acks.call import Outcome, Unit
from core.batches import nesting
from core.batches.lifecycle import State, Verb, completes
from core.bits import bitfield, group_rows, journal
from core.bits.cache import SKIPS, BitfieldCache, Key
from core.storage import dialects, faults, statements
from core.storage.statements import LIST, Answer, Pipeline, chunks

REDRIVEN: Final = 8192
"""The approximate maximum of reasons of redriven items that one transaction removes."""
FEW_CHILDREN: Final = 64
"""Up to this number of items of a group, their children are looked for by a list of numbers; above it, as a range."""
FEW_REASONS: Final = 64
"""Up to this number, a group's reasons are removed with a list of numbers; above it, as a range."""


class Flushed(NamedTuple):
    """The result of a flush, for use after its commit."""

    outcomes: list[Outcome]
    groups: Mapping[Key, bitfield.Group]
    """The new content of their rows; for `BitfieldCache.put`, with the next two."""
    journal_states: Mapping[int, journal.JournalState]
    era: int
    owing: list[int]
    """Nested batches of the units that owe their parent's item an ack or a failure, since this flush or an earlier one
    whose payment was lost with its process; for `parents`."""


def flush(tx: Connection, units: Sequence[Unit], cache: BitfieldCache) -> Flushed:
    """Apply the units in order. The caller commits.

    Raises `faults.BeginAgain` if the transaction must be run again, `errors.InconsistentBatch` if counts and bits
    disagree.
    """
    era = cache.era
    locks = _begin(tx, units, cache)
    state = locks.state
    units, rests = _cut(units, locks)
    refused_units = _judge_ended(tx, state, units) | _refuse_skips(tx, units, cache)
    outcomes = [refused_units.get(unit) or apply.admit(state, unit) for unit in units]
    _load_journaled(tx, state, locks)
    _load(tx, state, cache, locks.groups)
    _look_for_children(tx, state, units, outcomes)
    for unit, outcome in zip(units, outcomes, strict=True):
        if outcome.admitted:
            if state.held and not unit.call.pays:
                apply.withhold(state, unit, outcome)
            apply.apply(state, unit, outcome)
    new_reasons = _write_reasons(tx, state)
    pipeline = Pipeline(tx)
    new_groups = _write_groups(pipeline, state)
    verdicts = completion.write(
        pipeline,
        state.deltas,
        state.unchanged_batches(units, outcomes),
        state.locked_rows,
        state.refused_batches(units, outcomes),
        [*new_groups, *new_reasons],
        _missing_beside_callers(state),
    )
    for batch, numbers in state.changed.items():
        if batch not in state.journal_states:
            for number in numbers:
                state.groups[batch, number].mark_stored(state.issued(batch, number))
    if candidates := _scattered(state):
        cache.journal(candidates if cache.may_journal(tx) else ())
    if any(verdict.complete for verdict in verdicts.values()):
        for unit, outcome in zip(units, outcomes, strict=True):
            verdict = verdicts.get(unit.batch)
            if outcome.admitted and verdict is not None and verdict.complete:
                outcome.completed = completion.completed_for(verdict, state.deltas.get(unit.batch), unit)
    for outcome, rest in zip(outcomes, rests, strict=True):
        outcome.rest = rest
    pipeline.finish()
    uncached = state.journal_states.keys() | {batch for batch, look in state.seen.items() if look.no_journal}
    groups = state.groups
    if uncached:
        groups = {key: group for key, group in groups.items() if key[0] not in uncached}
    owing = {batch for batch, verdict in verdicts.items() if verdict.owes}
    owing |= {batch for batch, look in state.seen.items() if look.owes}
    return Flushed(outcomes, groups, state.journal_states, era, sorted(owing))


class _Counts(NamedTuple):
    """A locked group row."""

    batch: int
    number: int
    resolved: int
    failed: int
    skipped: int


class _Locked(NamedTuple):
    """The result of the first round trip."""

    state: FlushState
    groups: Sequence[_Counts]
    journal_states: Mapping[int, journal.JournalState | None]
    """The state of each journaled batch in memory."""
    entries: Mapping[int, Sequence[Sequence[Any]]]
    """Journal entries newer than these states, of the batches for which they were read."""


def _begin(tx: Connection, units: Sequence[Unit], cache: BitfieldCache) -> _Locked:
    """Lock groups, then batches, and read the batches' states and numbers of issued items, and journals. No statement
    depends on the result of another, so this is one round trip.

    The batches are read after the groups are locked. An earlier read could be outdated when the locks are granted: an
    item that is resolved in a locked row might seem never issued.

    The journal is read under the lock of its batch. If there is one, or little work until the commit, the read of the
    batches also locks their rows, which saves a round trip. Otherwise they are locked last, so that other transactions
    wait for a shorter time.
    """
    journal_batches = {unit.batch for unit in units if cache.is_journaled(unit.batch)}
    journal_states = {batch: cache.take_state(batch) for batch in journal_batches}
    direct = [unit for unit in units if unit.batch not in journal_states] if journal_states else units
    shared = {
        batch: journal_state for batch, journal_state in journal_states.items() if journal.reads_ahead(journal_state)
    }
    batches = {unit.batch for unit in units}
    locking = _for_update(tx, "id")
    little = bool(journal_states) or _is_little(direct)
    pipeline = Pipeline(tx)
    locked_groups = _lock(pipeline, direct)
    locked_batches = completion.ask(pipeline, batches if little else (), locking)
    seen_batches = _look(pipeline, () if little else batches)
    newer_entries = pipeline.query(*([journal.select(shared)] if shared else []))
    groups = [_Counts(*map(int, record)) for record in locked_groups.records()]
    state = FlushState(_seen(seen_batches))
    state.take(completion.rows(locked_batches))
    if any(look.children for look in state.seen.values()) and not little:
        # Which items are held is decided under the lock of the batch row, before anything is applied.
        state.take(completion.rows(completion.ask(pipeline, state.seen, locking)))
    never_journaled = [batch for batch in journal_states if batch in state.seen and state.seen[batch].no_journal]
    if never_journaled:
        cache.keep_groups(never_journaled)
        raise faults.BeginAgain
    newly_journaled = [batch for batch, look in state.seen.items() if look.journal_next and batch not in journal_states]
    if newly_journaled:
        cache.journal(newly_journaled)
        raise faults.BeginAgain
    entries: dict[int, list[Sequence[Any]]] = {batch: [] for batch in shared}
    for entry in newer_entries.rows():
        entries[entry[0]].append(entry)
    return _Locked(state, groups, journal_states, entries)


def _cut(units: Sequence[Unit], locks: _Locked) -> tuple[Sequence[Unit], Sequence[Unit | None]]:
    """Divide each unit into a part for this transaction and the rest for the next one, so that this transaction removes
    at most about `REDRIVEN` reasons. The numbers of failed and skipped items of a group are known only under its
    lock."""
    overridable = {
        (group.batch, group.number): group.failed + group.skipped
        for group in locks.groups
        if group.failed or group.skipped
    }
    in_journaled = {
        batch: locks.state.locked_rows[batch].failed + locks.state.locked_rows[batch].skipped
        for batch in locks.journal_states
        if batch in locks.state.locked_rows
    }
    if not overridable and not any(in_journaled.values()):
        return units, [None] * len(units)
    pieces: list[Unit] = []
    rests: list[Unit | None] = []
    budget = REDRIVEN
    for unit in units:
        piece, rest = unit, None
        if unit.verb is not Verb.FAIL:
            redriven = {
                group: min(unit.count(group), overridable.get((unit.batch, group), in_journaled.get(unit.batch, 0)))
                for group in unit.groups()
            }
            total = sum(redriven.values())
            if total > budget:
                piece, rest = unit.part(redriven, budget, at_least=budget == REDRIVEN)
                total = sum(redriven[group] for group in piece.groups())
            budget = max(0, budget - total)
        pieces.append(piece)
        rests.append(rest)
    return pieces, rests


def _is_little(units: Sequence[Unit]) -> bool:
    """Whether each unit has only a few ids. Masks and thousands of ids take longer than a round trip."""
    return not any(unit.masks or unit.size for unit in units)


def _look(pipeline: Pipeline, batches: Collection[int]) -> Answer:
    """Let the next round trip read these batches without a lock; for `_seen`."""
    source = f"batches WHERE id IN ({','.join(map(str, sorted(batches)))})"
    columns = ("id", "state", "group_size", "items", "journal_next", "no_journal", "children", completion.OWES)
    return pipeline.query(*([statements.select(pipeline.tx, columns, source, len(batches))] if batches else []))


def _seen(answer: Answer) -> dict[int, Seen]:
    return {
        int(batch): Seen(
            state, int(size), int(items), int(journal_next), bool(int(no_journal)), int(children), bool(int(owes))
        )
        for batch, state, size, items, journal_next, no_journal, children, owes in answer.records()
        if state != State.DELETING
    }


def _lock(pipeline: Pipeline, units: Sequence[Unit]) -> Answer:
    """Let the next round trip lock the existing rows of the groups, in primary-key order. The records are `_Counts`."""
    tx = pipeline.tx
    by_batch: dict[int, set[int]] = {}
    for unit in units:
        by_batch.setdefault(unit.batch, set()).update(unit.groups())
    columns = ("batch_id", "group_no", "resolved_count", "failed_count", "COALESCE(skipped_count, 0)")
    source = f"item_groups WHERE {group_rows.among(by_batch)}{_for_update(tx, 'batch_id', 'group_no')}"
    texts = [statements.select(tx, columns, source, sum(map(len, by_batch.values())))] if units else []
    return pipeline.query(*texts)


def _for_update(tx: Connection, *key: str) -> str:
    return dialects.of(tx).for_update(*key)


def _judge_ended(tx: Connection, state: FlushState, units: Sequence[Unit]) -> dict[Unit, Outcome]:
    """The outcomes of units whose batch is cancelled or expired."""
    by_batch: dict[int, list[Unit]] = {}
    for unit in units:
        look = state.seen.get(unit.batch)
        if look is not None and look.has_ended and unit.batch not in unit.call.withheld:
            by_batch.setdefault(unit.batch, []).append(unit)
    return {
        unit: outcome
        for batch, late_units in by_batch.items()
        for unit, outcome in ended.judge(tx, batch, state.seen[batch], late_units).items()
    }


def _refuse_skips(tx: Connection, units: Sequence[Unit], cache: BitfieldCache) -> dict[Unit, Outcome]:
    """The outcomes of skips, if an earlier release may be running."""
    skips = [unit for unit in units if unit.verb is Verb.SKIP]
    if not skips or cache.may_skip(tx):
        return {}
    return {unit: Outcome(error=errors.UpgradeNotFinished(SKIPS)) for unit in skips}


def _load_journaled(tx: Connection, state: FlushState, locks: _Locked) -> None:
    """Load the groups of admitted items in journaled batches, whose rows are locked."""
    by_batch: dict[int, list[Key]] = {batch: [] for batch in locks.journal_states if batch in state.locked_rows}
    for key in state.missing:
        if key[0] in by_batch:
            by_batch[key[0]].append(key)
    for batch, keys in by_batch.items():
        row = state.locked_rows[batch]
        numbers = [number for _, number in keys]
        journal_state = journal.catch_up(
            tx, batch, row.group_size, locks.journal_states[batch], row.journal_next, locks.entries.get(batch)
        )
        for number in journal.fetch(tx, batch, row.group_size, journal_state, numbers):
            _check((batch, number), journal_state.groups[number], state.issued(batch, number))
        state.journal_states[batch] = journal_state
        state.acked[batch] = []
        state.missing.difference_update(keys)
        state.groups |= zip(keys, map(journal_state.groups.__getitem__, numbers), strict=True)


def _look_for_children(tx: Connection, state: FlushState, units: Sequence[Unit], outcomes: Sequence[Outcome]) -> None:
    """Record which of the admitted items are held. The rows of parents are locked, so until the commit no other item
    becomes held."""
    numbers: dict[int, set[int]] = {}
    ranges: set[tuple[int, int, int]] = set()
    for unit, outcome in zip(units, outcomes, strict=True):
        row = state.locked_rows.get(unit.batch)
        if row is None or not row.children or unit.call.pays:
            continue
        for number, selection in outcome.admitted.items():
            first = number * row.group_size
            count = len(selection) if isinstance(selection, list) else selection.count()
            if count > FEW_CHILDREN:
                ranges.add((unit.batch, first, first + row.group_size))
            else:
                indexes = selection if isinstance(selection, list) else selection.search(1)
                numbers.setdefault(unit.batch, set()).update(first + index for index in indexes)
    if not numbers and not ranges:
        return
    for batch, number, holder in nesting.holders(tx, numbers, ranges):
        group, index = divmod(number, state.seen[batch].group_size)
        state.held.setdefault((batch, group), {})[index] = holder


def _missing_beside_callers(state: FlushState) -> dict[int, list[int]]:
    """The changed groups without a row, in batches in which callers ack too."""
    missing: dict[int, list[int]] = {}
    for batch, number in state.missing:
        if state.seen[batch].no_journal and number in state.changed.get(batch, ()):
            missing.setdefault(batch, []).append(number)
    return missing


def _scattered(state: FlushState) -> list[int]:
    """The batches that should be journaled from now on."""
    candidates = []
    for batch, numbers in state.changed.items():
        groups = len(numbers)
        look = state.seen[batch]
        if groups < journal.SCATTERED or look.no_journal or batch in state.journal_states:
            continue
        delta = state.deltas[batch]
        if journal.is_worthwhile(look.group_size, -(-look.items // look.group_size), groups, delta.resolved):
            candidates.append(batch)
    return candidates


def _load(tx: Connection, state: FlushState, cache: BitfieldCache, groups: Sequence[_Counts]) -> None:
    """Load the groups of admitted items: from memory if the counts are those of the locked row, else from the table."""
    unread: dict[int, set[int]] = {}
    for batch, number, *counts in groups:
        version = counts[0], counts[1], counts[2]
        key = batch, number
        if key not in state.missing:
            continue  # all items of this group were rejected
        state.missing.discard(key)
        group = None if state.seen[batch].no_journal else cache.take(key, version)
        if group is None and version == (state.seen[batch].group_size, 0, 0):
            group = bitfield.Group.full(version[0])
        if group is None:
            unread.setdefault(batch, set()).add(number)
        else:
            state.groups[key] = group
    for batch, number in state.missing:
        state.groups[batch, number] = bitfield.Group.empty(state.seen[batch].group_size)
    if unread:
        # A plain read: the rows are locked, so they haven't changed.
        names = ", ".join(bitfield.Columns._fields)
        text = f"SELECT batch_id, group_no, {names} FROM item_groups WHERE {group_rows.among(unread)}"  # noqa: S608
        for batch, number, *columns in statements.run(tx, text)[0]:
            key = batch, number
            group = bitfield.Group.load(bitfield.Columns(*columns), state.seen[batch].group_size)
            _check(key, group, state.issued(*key))
            state.groups[key] = group


def _check(key: Key, group: bitfield.Group, issued: int) -> None:
    """Raise `errors.InconsistentBatch` if the counts and bits of the group disagree."""
    try:
        group.check(issued)
    except bitfield.Inconsistent as error:
        raise _inconsistent(key, error) from error


def _row(tx: Connection, key: Key, group: bitfield.Group, issued: int) -> str:
    """The VALUES of the group's row. Raises `errors.InconsistentBatch` if its counts and bits disagree."""
    try:
        return group_rows.row(tx, key, group, issued)
    except bitfield.Inconsistent as error:
        raise _inconsistent(key, error) from error


def _inconsistent(key: Key, error: bitfield.Inconsistent) -> errors.InconsistentBatch:
    return errors.InconsistentBatch(key[0], f"group {key[1]}: {error}")


def _write_groups(pipeline: Pipeline, state: FlushState) -> list[str]:
    """Write the changed groups that have a row, if possible in the next round trip of the pipeline. Returns the
    statements that insert the rows of the others, under the locks of their batches."""
    tx = pipeline.tx
    dialect = dialects.of(tx)
    texts, old = _write_journaled(tx, state) if state.journal_states else ([], [])
    new: list[str] = []
    patches: list[group_rows.Patch] = []
    direct = sorted(state.changed.keys() - state.journal_states.keys())
    for key in ((batch, number) for batch in direct for number in sorted(state.changed[batch])):
        group, issued = state.groups[key], state.issued(*key)
        if key in state.missing:
            new.append(_row(tx, key, group, issued))
        elif dialect.patches_blobs and (changes := group.patches(issued)) is not None:
            _check(key, group, issued)
            patches.append((key, group, changes))
        else:
            old.append(_row(tx, key, group, issued))
    pipeline.later(*texts, *group_rows.patch(tx, patches), *group_rows.upsert(tx, old))
    return group_rows.insert(new)


def _write_journaled(tx: Connection, state: FlushState) -> tuple[list[str], list[str]]:
    """The statements and the group rows to write for journaled batches. Their batch rows are locked, so no other
    transaction writes these groups."""
    texts: list[str] = []
    rows: list[str] = []
    for batch in sorted(state.deltas.keys() & state.journal_states.keys()):
        row, delta, journal_state = state.locked_rows[batch], state.deltas[batch], state.journal_states[batch]
        change = journal.Change(
            batch,
            row.group_size,
            groups=-(-row.items // row.group_size),
            changed=state.changed[batch],
            acked=state.acked.get(batch),
            ends=completes(row.state, row.items, row.standing.resolved + delta.resolved),
        )
        journal_texts, numbers = journal.write(tx, journal_state, change)
        texts += journal_texts
        delta.journal_next = journal_state.next
        delta.filled = sum(journal_state.groups[number].resolved_count == row.group_size for number in numbers)
        for number in numbers:
            key, group, issued = (batch, number), journal_state.groups[number], state.issued(batch, number)
            rows.append(_row(tx, key, group, issued))
    return texts, rows


def _write_reasons(tx: Connection, state: FlushState) -> list[str]:
    """Remove the reasons of overridden failures and skips, and insert the reasons of items whose groups have a row:
    they are locked, so a reason that is there already is a contradiction. Returns the statements that insert the other
    reasons, after the rows of their groups."""
    new: list[str] = []
    for verb, reasons in state.reasons.items():
        if not reasons.new and not reasons.removed:
            continue
        if reasons.removed:
            _remove_reasons(tx, state, verb, reasons.removed)
        by_reason: dict[tuple[bool, str], list[tuple[int, int]]] = {}
        for (batch, number), reason in sorted(reasons.new.items()):
            is_new = (batch, number // state.seen[batch].group_size) in state.missing
            by_reason.setdefault((is_new, reason), []).append((batch, number))
        for (is_new, reason), items in by_reason.items():
            for texts in dialects.of(tx).insert_reason(
                f"{_TABLES[verb]} (batch_id, number, reason, {_TIMES[verb]})", reason, items
            ):
                if is_new:
                    new += texts
                else:
                    statements.run(tx, *texts)
    return new


_TABLES: Final = {Verb.FAIL: "failures", Verb.SKIP: "skips"}
"""The tables of reasons."""
_TIMES: Final = {Verb.FAIL: "failed_at", Verb.SKIP: "skipped_at"}
"""Their columns with the time."""


def _remove_reasons(tx: Connection, state: FlushState, verb: Verb, items: Sequence[tuple[int, int]]) -> None:
    by_group: dict[Key, list[int]] = {}
    for batch, number in items:
        by_group.setdefault((batch, number // state.seen[batch].group_size), []).append(number)
    single: dict[int, list[int]] = {}
    ranges: list[_Range] = []
    for (batch, group), numbers in sorted(by_group.items()):
        size = state.seen[batch].group_size
        bits = state.groups[batch, group]
        has_more = bits.failed_count if verb is Verb.FAIL else bits.skipped_count
        if len(numbers) <= FEW_REASONS or has_more:
            single.setdefault(batch, []).extend(sorted(numbers))
        elif ranges and ranges[-1].batch == batch and ranges[-1].end == group * size:
            ranges[-1] = ranges[-1]._replace(end=(group + 1) * size)
        else:
            ranges.append(_Range(batch, group * size, (group + 1) * size))
    texts = [
        f"DELETE FROM {_TABLES[verb]} WHERE batch_id = {batch} AND number IN ({','.join(map(str, part))})"  # noqa: S608
        for batch, numbers in single.items()
        for part in chunks(numbers, LIST)
    ]
    statements.run(tx, *texts, *_remove_ranges(tx, _TABLES[verb], ranges))


class _Range(NamedTuple):
    """The numbers first .. end-1 of a batch."""

    batch: int
    first: int
    end: int


def _remove_ranges(tx: Connection, table: str, ranges: Sequence[_Range]) -> list[str]:
    """DELETEs of all reasons in these ranges, whose groups no longer have such items. This is several times faster than
    lists of numbers.

    The rows are counted first, so that a DELETE stops at the last one. Otherwise InnoDB would also lock the next row,
    which belongs to another group, and might wait for another transaction.
    """
    sources = [
        f"FROM {table} WHERE batch_id = {batch} AND number >= {first} AND number < {end}"
        for batch, first, end in ranges
    ]
    if not dialects.of(tx).locks_gaps:
        return [f"DELETE {source}" for source in sources]
    counts = statements.run(tx, *(f"SELECT COUNT(*) {source}" for source in sources))
    return [
        f"DELETE {source} ORDER BY number LIMIT {count}"
        for source, ((count,),) in zip(sources, counts, strict=True)
        if count
    ]
