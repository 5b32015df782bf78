"""Tallies: sums over events that may be replayed, in which each event counts once.

A sum is not idempotent, and queues redeliver messages. So the total of a key is a sum of sub-counters, one for each
source (topic, partition, generation). Each has a guard: the position (offset, child) of the last message that it
counted. A message at or below the guard is a repeat. Possible failures, and why they can't happen:

*The same message counts twice.* A message at the guard is a repeat too. Ignoring only messages with `offset < guard`
would count the guard's own message again.

*The siblings of a flat map are dropped.* All messages that a republisher derives from one message have its offset, so
the order is (offset, child).

*Two sources alternate.* If one guard were reset whenever the source changes, all replays of the other source would
count again. So each source has its own guard. A topic that was deleted and created again starts at 0, so it gets a new
generation.

*A message is applied in part.* All entries of a call are applied in one transaction, and one statement changes both
guard and value.

*The response is lost, and the retry groups the entries differently.* Each entry belongs to one message and is compared
with the guard separately, so the grouping doesn't matter. A delta summed over several messages would have no position
of its own, and could count twice.

*Messages arrive out of order.* All this is exact only if the messages of one source reach a key in order. Otherwise a
late message looks like a replay. Within one call this is detected and refused (`errors.OutOfOrder`): the message is
above the guard from before the call, so it was never added, but a later one precedes it in the call. Across calls it
can't be detected.

*A total leaves the range of integers.* Sub-counters are locked separately, and reading all of them at each change would
cost more than the change. So the total is read when one of them is new, has doubled, becomes zero, changes its sign
or is large. The amount by which the others may grow without such a check is reserved. The total is read after the
write, and again with its rows locked if it is large: if two calls reach the limit at once, one of them then sees the
other's change.

*Calls share a transaction, and one is refused.* The rows of all calls are locked first. The calls are then applied in
memory, one after the other, each to the rows as the accepted ones before it left them. If the totals that are read
after the write show that a call must be refused, the write is undone (to a savepoint, so all locks are kept), and the
calls are applied again with these totals.

*These rounds never end.* A refusal may change which totals must be read, so the next round may refuse other calls. The
rows of all totals that were read stay locked, and are read again in each round. So a round either reads the total of
one more key, which can happen only once per key, or decides as the one before it. If it decides otherwise, another
transaction has inserted a sub-counter in the meantime, and the transaction begins again, like after any conflict.

*Deadlocks.* Rows are locked in primary-key order, and written in it. The rows of a large total are locked afterwards; a
deadlock there is retried (see `lock_order`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.commits.kind import Kind
from core.commits.operation import Done, Operation
from core.consumer_groups.positions import Fence
from core.storage import dialects, faults, statements, tables
from core.storage.statements import LIST, Pipeline, chunks, inserts, packets
from lastbit.ids import INTEGER_LIMIT
from lastbit.names import NO_NAMES

LONGEST: Final = 255
"""Maximum characters of a key or a topic."""
CHUNK: Final = 1000
"""Rows in one transaction of a deletion."""
LARGE: Final = 2**40
"""A sub-counter is large if it has at least this value. The total is read at each change of a large one."""
LOCKED: Final = INTEGER_LIMIT // 64
"""Totals from this value on are read with their rows locked. Below it, even 64 transactions that don't see each other's
changes stay within the limit."""


_tallies = tables.tallies.c


class Entry(NamedTuple):
    """The amount that one message adds to one key."""

    key: str
    delta: int
    topic: str
    partition: int
    generation: int
    offset: int
    child: int


@dataclass(frozen=True, slots=True)
class Applied:
    """The number of entries that were added, and of repeats."""

    applied: int
    repeated: int


@dataclass(frozen=True, slots=True)
class Source:
    """A sub-counter: the last position of its source, and its value."""

    topic: str
    partition: int
    generation: int
    offset: int
    child: int
    value: int


@dataclass(frozen=True, slots=True)
class Value:
    """A key and its total, and for a single key also its sub-counters."""

    key: str
    value: int
    sources: tuple[Source, ...] = ()


# Plain tuples, as a call makes thousands of them. Texts sort like their bytes in the database.
_Counter = tuple[str, str, str, int, int]
"""Identifies a sub-counter: tally, key, topic, partition, generation."""
_Key = tuple[str, str]
"""Identifies a total: tally, key."""
_Position = tuple[int, int]
"""Offset and child."""
_Row = tuple[_Position, int]
"""The guard, and the value."""
_EMPTY: Final[_Row] = ((-1, 0), 0)
_Places = dict[_Counter, list[int]]
"""The indexes of each sub-counter's entries in its call, in their order."""
Outcome: TypeAlias = Applied | errors.CoreError


@dataclass(slots=True, eq=False, kw_only=True)
class Apply(Operation):
    """Add entries to a tally, all or none; with a `fence`, only if it holds. Its result is an `Applied`. Errors:
    `InvalidRequest`, `OutOfOrder`, `StaleEpoch`, `ConsumerGroupNotFound`."""

    tally: str
    entries: Sequence[Entry]
    fence: Fence | None = None


class Additions(Kind):
    """Entries for tallies."""

    handles = (Apply,)
    locks = ("tallies",)

    def fences(self) -> list[Fence]:
        return [operation.fence for operation in self.operations if operation.fence is not None]

    def judge(self, refused: Mapping[Fence, errors.CoreError]) -> None:
        self.refuse(refused)
        operations = self.remaining()
        results = write(self.pipeline, [(operation.tally, operation.entries) for operation in operations])
        for operation, result in zip(operations, results, strict=True):
            self.outcomes[operation] = Done(error=result) if isinstance(result, errors.CoreError) else Done(result)


def write(pipeline: Pipeline, calls: Sequence[tuple[str, Sequence[Entry]]]) -> list[Outcome]:
    """Add the entries above their guards, in the order of the calls (a tally and its entries). The last statements wait
    in the pipeline.

    A call that can't be applied changes nothing. Its outcome is the reason: `errors.InvalidRequest` (an invalid key or
    topic, a sum beyond the limit, one message with two deltas for one key) or `errors.OutOfOrder`. Raises
    `faults.BeginAgain` if the transaction must be run again.
    """
    requests = [_Request(entries, _by_counter(tally, entries)) for tally, entries in calls]
    valid = [places for _, places in requests if not isinstance(places, errors.CoreError)]
    literals = _literals(pipeline.tx, sorted(set[_Counter]().union(*valid)))
    rows = _lock(pipeline, literals)
    others: dict[_Key, _Others] = {}
    judged = _judge(requests, rows, others)
    while judged.notable:
        pipeline.later("SAVEPOINT tallies")
        _write(pipeline, judged.after, rows, literals)
        earlier, others = others, _others(pipeline, judged, literals, rows, others)
        rejudged = _judge(requests, rows, others) if others else judged
        if rejudged.refused == judged.refused:
            return judged.outcomes
        if others.keys() == earlier.keys():
            raise faults.BeginAgain
        pipeline.later("ROLLBACK TO SAVEPOINT tallies")
        judged = rejudged
    _write(pipeline, judged.after, rows, literals)
    return judged.outcomes


class _Request(NamedTuple):
    """A call, and where its entries belong; or why it is invalid."""

    entries: Sequence[Entry]
    places: _Places | errors.CoreError


def _by_counter(tally: str, entries: Sequence[Entry]) -> _Places | errors.CoreError:
    counters: _Places = {}
    place = 0
    try:
        for place, (key, _, topic, partition, generation, _, _) in enumerate(entries):
            counter = (tally, key, topic, partition, generation)
            places = counters.get(counter)
            if places is not None:
                places.append(place)
                continue
            if key in NO_NAMES:
                return errors.InvalidRequest(f"body.entries[{place}].key", "expected a key other than . and ..")
            key.encode()
            topic.encode()
            counters[counter] = [place]
    except UnicodeEncodeError:
        return errors.InvalidRequest(f"body.entries[{place}]", "expected Unicode text")
    return counters


@dataclass(slots=True)
class _Judged:
    """The calls' effects: the rows that they change, as they will be, and the outcome of each call."""

    outcomes: list[Outcome] = field(default_factory=list)
    after: dict[_Counter, _Row] = field(default_factory=dict)
    notable: set[_Key] = field(default_factory=set)
    """Keys whose totals must be read; see the module."""
    moved: dict[_Key, int] = field(default_factory=dict)
    """The sum of the amounts by which the calls changed a notable key, without their signs."""

    @property
    def refused(self) -> list[bool]:
        return [isinstance(outcome, errors.CoreError) for outcome in self.outcomes]


def _judge(requests: Sequence[_Request], rows: Mapping[_Counter, _Row], others: Mapping[_Key, _Others]) -> _Judged:
    """Apply the calls one after the other, in memory. A call is refused if it brings a total of `others` beyond the
    limit."""
    judged = _Judged()
    after = judged.after
    for entries, places in requests:
        if isinstance(places, errors.CoreError):
            judged.outcomes.append(places)
            continue
        count = 0
        steps: dict[_Counter, _Row] = {}
        changes: dict[_Key, int] = {}
        notable: set[_Key] = set()
        try:
            for counter, counter_places in places.items():
                before = after.get(counter) or rows.get(counter, _EMPTY)
                row, added = _advance(before, counter_places, entries)
                if not added:
                    continue
                count += added
                steps[counter] = row
                key = counter[:2]
                changes[key] = changes.get(key, 0) + row[1] - before[1]
                if _is_notable(before[1], row[1]):
                    notable.add(key)
            judged.notable |= notable
            for key in sorted(notable & others.keys()):
                others[key].check(key, changes[key], steps, after, entries)
        except errors.CoreError as error:
            judged.outcomes.append(error)
            continue
        after |= steps
        for key in judged.notable & changes.keys():
            judged.moved[key] = judged.moved.get(key, 0) + abs(changes[key])
        judged.outcomes.append(Applied(count, len(entries) - count))
    return judged


def _advance(before: _Row, places: Sequence[int], entries: Sequence[Entry]) -> tuple[_Row, int]:
    """Compare the entries with the guard one after the other. Return the new row, and the number of added entries."""
    start, value = before
    guard = start
    deltas: dict[_Position, int] = {}
    for place in places:
        key, delta, _, _, _, offset, child = entries[place]
        position = offset, child
        if position > guard:
            guard = position
            value += delta
            deltas[position] = delta
        elif position > start:
            # It is above the stored guard, so it is only valid if this call has already added it.
            if position not in deltas:
                raise errors.OutOfOrder(f"body.entries[{place}]", key, position, guard)
            if deltas[position] != delta:
                raise errors.InvalidRequest(
                    f"body.entries[{place}].delta",
                    f"expected {deltas[position]}, the delta of the same message and key earlier in this call: a "
                    "message has one entry per key",
                )
    if not -INTEGER_LIMIT < value < INTEGER_LIMIT:
        raise errors.InvalidRequest(
            f"body.entries[{places[-1]}].delta",
            f"expected a sum within 2^53: this source's sum for {entries[places[-1]].key!r} would be {value}",
        )
    return (guard, value), len(deltas)


_PRIMARY_KEY: Final = ("tally", "tally_key", "topic", "partition_no", "generation")


def _literals(tx: Connection, counters: Iterable[_Counter]) -> dict[_Counter, str]:
    """The SQL of the sub-counters' primary keys, in the same order."""
    text = dialects.of(tx).text
    names: dict[str, str] = {}
    literals: dict[_Counter, str] = {}
    for counter in counters:
        tally, key, topic, partition, generation = counter
        for name in (tally, topic):
            if name not in names:
                names[name] = text(name.encode().hex())
        literals[counter] = f"{names[tally]},{text(key.encode().hex())},{names[topic]},{partition},{generation}"
    return literals


def _lock(pipeline: Pipeline, literals: Mapping[_Counter, str]) -> dict[_Counter, _Row]:
    """Lock the existing rows of these sub-counters, which are in primary-key order."""
    tx = pipeline.tx
    counters = list(literals)
    parts = list(packets([f"({place},{literal})" for place, literal in enumerate(literals.values())]))
    rows: dict[_Counter, _Row] = {}
    for record in pipeline.query(*(_select(tx, part) for part in parts)).records():
        place, offset, child, value = map(int, record)
        rows[counters[place]] = (offset, child), value
    return rows


def _select(tx: Connection, rows: Sequence[str]) -> str:
    """The guards and values of sub-counters, each with its place. They are looked up one by one: as a condition on
    ranges, a thousand primary keys take the server's optimizer longer than the reads."""
    dialect = dialects.of(tx)
    source = dialect.look_up(tx, "tallies", _PRIMARY_KEY, rows) + dialect.lock_looked_up("tallies")
    return statements.select(tx, ("place", "high_offset", "high_child", "value"), source, len(rows))


_VALUES: Final = ("high_offset", "high_child", "value")


def _write(
    pipeline: Pipeline,
    after: Mapping[_Counter, _Row],
    rows: Mapping[_Counter, _Row],
    literals: Mapping[_Counter, str],
) -> None:
    """Write the changed rows, in primary-key order. Only the existing ones are replaced: if another transaction has
    inserted the row of a new sub-counter, the transaction begins again."""
    old: list[str] = []
    new: list[str] = []
    for counter, literal in literals.items():
        if row := after.get(counter):
            (offset, child), value = row
            (old if counter in rows else new).append(f"({literal},{offset},{child},{value})")
    upsert = dialects.of(pipeline.tx).upsert(_PRIMARY_KEY, _VALUES)
    columns = ", ".join((*_PRIMARY_KEY, *_VALUES))
    pipeline.later(*inserts("tallies", columns, old, upsert), *inserts("tallies", columns, new))


def _is_notable(before: int, after: int) -> bool:
    """Whether the total must be read after a change of a sub-counter; see the module."""
    if abs(after) >= LARGE or after.bit_length() > before.bit_length():
        return True
    return (before > 0) != (after > 0) or (before < 0) != (after < 0)


@dataclass(frozen=True, slots=True)
class _Others:
    """A key's total and reserve without the sub-counters that the transaction may change, which are `counters`."""

    total: int
    room: int
    counters: Sequence[tuple[_Counter, int]]
    """With their values before the transaction."""

    def check(
        self,
        key: _Key,
        change: int,
        steps: Mapping[_Counter, _Row],
        after: Mapping[_Counter, _Row],
        entries: Sequence[Entry],
    ) -> None:
        """Raise `errors.InvalidRequest` if a call's `steps` bring the total beyond the limit. If it is beyond the limit
        already, a change towards zero is allowed."""
        values = [(steps.get(counter) or after.get(counter) or ((), value))[1] for counter, value in self.counters]
        total = self.total + sum(values)
        room = self.room + sum(map(_room, values))
        if abs(total) + room >= INTEGER_LIMIT and abs(total) > abs(total - change):
            place = max(place for place, entry in enumerate(entries) if entry.key == key[1])
            raise errors.InvalidRequest(
                f"body.entries[{place}].delta",
                f"expected a total within 2^53: the total of {entries[place].key!r} would be {total}",
            )


def _others(
    pipeline: Pipeline,
    judged: _Judged,
    counters: Iterable[_Counter],
    rows: Mapping[_Counter, _Row],
    before: Iterable[_Key],
) -> dict[_Key, _Others]:
    """Read the totals of the notable keys after the write, and lock the rows of those that may be beyond the limit, now
    or between two calls of the transaction. The keys of `before` are among these."""
    totals = _totals(pipeline, sorted(judged.notable))
    large = {key for key, (total, room) in totals.items() if abs(total) + room >= LOCKED}
    large |= {key for key, amount in judged.moved.items() if amount >= LOCKED} | set(before)
    if not large:
        return {}
    own: dict[_Key, list[tuple[_Counter, int]]] = {key: [] for key in large}
    others = dict.fromkeys(large, (0, 0)) | _totals(pipeline, sorted(large), locked=True)
    for counter in counters:
        key = counter[:2]
        if key in large:
            before_value = rows.get(counter, _EMPTY)[1]
            own[key].append((counter, before_value))
            value = judged.after[counter][1] if counter in judged.after else before_value
            others[key] = others[key][0] - value, others[key][1] - _room(value)
    return {key: _Others(*others[key], own[key]) for key in large}


def _room(value: int) -> int:
    """The amount by which a sub-counter may grow before `_is_notable` returns true."""
    return 0 if value == 0 or abs(value) >= LARGE else abs(value) - 1


_PART: Final = 2**32
_SUMS: Final = f"SUM((value - value % {_PART}) / {_PART})", f"SUM(value % {_PART})"
"""A sum in two parts, because SQLite's SUM fails beyond 64 bits. No division leaves a remainder, so the sums are
exact."""
_ROOM: Final = f"SUM(CASE WHEN value = 0 OR ABS(value) >= {LARGE} THEN 0 ELSE ABS(value) - 1 END)"
"""The sum of `_room`."""


def _total(high: Any, low: Any) -> int:
    return int(high) * _PART + int(low)


def _totals(pipeline: Pipeline, keys: Sequence[_Key], *, locked: bool = False) -> dict[_Key, tuple[int, int]]:
    """The totals of the keys and the reserves for their small sub-counters; unless they are `locked`, only of keys for
    which their sum is large."""
    tx = pipeline.tx
    high, low = _SUMS
    dialect = dialects.of(tx)
    results = f"tally_key, {high}, {low}, {_ROOM}"
    # Not exact, because divisions may round; half of `LOCKED` leaves ample room for that.
    having = f"HAVING ABS({high} + {low} / {_PART}) + {_ROOM} / {_PART} >= {LOCKED // _PART // 2}"
    parts = [
        (tally, part)
        for tally, group in itertools.groupby(keys, key=itemgetter(0))
        for part in chunks([key for _, key in group], LIST)
    ]
    answers = []
    for tally, part in parts:
        condition = statements.among(tx, ("tally", "tally_key"), [(tally, key) for key in part])
        if locked:
            names = [f"{tally}:{key}" for key in part]
            *locks, text = dialect.sum_locked(results, "tallies", condition, "tally_key", names)
            pipeline.later(*locks)
        else:
            source = f"{dialect.by_primary_key('tallies')} WHERE {condition}"
            text = f"SELECT {results} FROM {source} GROUP BY tally_key {having}"  # noqa: S608
        answers.append(pipeline.query(text))
    return {
        (tally, str(statements.as_text(key))): (_total(high, low), int(room))
        for (tally, _), answer in zip(parts, answers, strict=True)
        for key, high, low, room in answer.rows()
    }


def get(tx: Connection, tally: str, key: str) -> Value:
    """The total of a key and its sub-counters; 0 if nothing was ever added."""
    rows = tx.execute(
        sa.select(tables.tallies)
        .where(_tallies.tally == tally, _tallies.tally_key == key)
        .order_by(_tallies.topic, _tallies.partition_no, _tallies.generation)
    )
    sources = tuple(_source(row) for row in rows)
    return Value(key, sum(source.value for source in sources), sources)


def _source(row: Any) -> Source:
    return Source(row.topic, row.partition_no, row.generation, row.high_offset, row.high_child, row.value)


def page(tx: Connection, tally: str, prefix: str, after: str | None, limit: int) -> list[Value]:
    """The totals of at most `limit` keys that begin with `prefix` and are above `after`, ordered by the keys' bytes."""
    query = (
        sa.select(_tallies.tally_key, *map(sa.literal_column, _SUMS))
        .where(_tallies.tally == tally)
        .group_by(_tallies.tally_key)
        .order_by(_tallies.tally_key)
        .limit(limit)
    )
    if prefix:
        # Up to the highest key with this prefix.
        query = query.where(_tallies.tally_key.between(prefix, prefix.ljust(LONGEST, "\U0010ffff")))
    if after is not None:
        query = query.where(_tallies.tally_key > after)
    return [Value(key, _total(*sums)) for key, *sums in tx.execute(query)]


def remove_chunk(tx: Connection, tally: str) -> bool:
    """Remove a chunk of a tally's rows, lowest keys first. Return whether there may be more."""
    columns = (_tallies.tally_key, _tallies.topic, _tallies.partition_no, _tallies.generation)
    last = tx.execute(
        sa.select(*columns).where(_tallies.tally == tally).order_by(*columns).offset(CHUNK - 1).limit(1)
    ).first()
    query = sa.delete(tables.tallies).where(_tallies.tally == tally)
    if last is not None:
        query = query.where(_tallies.tally_key <= last.tally_key)
    tx.execute(query)
    return last is not None
