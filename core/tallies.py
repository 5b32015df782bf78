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
cost more than the change. So the total is read when one of them is new, has doubled, changes its sign or is large. The
amount by which the others may grow without such a check is reserved. The total is read after the write, and again with
its rows locked if it is large: if two calls reach the limit at once, one of them then sees the other's change.

*Deadlocks.* Rows are locked in primary-key order, and written in it. The rows of a large total are locked afterwards; a
deadlock there is retried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from core import errors, tables
from core.storage import dialects, faults, statements
from core.storage.statements import LIST, chunks
from lastbit.ids import INTEGER_LIMIT
from lastbit.names import NO_NAMES

LONGEST: Final = 255
"""Maximum characters of a key or a topic."""
CHUNK: Final = 1000
"""Rows in one round trip, and in one transaction of a deletion."""
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


# Plain tuples, as a call makes thousands of them.
_Counter = tuple[str, str, int, int]
"""Identifies a sub-counter of the tally: key, topic, partition, generation. Texts are hexadecimal, which sorts like
their bytes."""
_Position = tuple[int, int]
"""Offset and child."""
_Row = tuple[_Position, int]
"""The guard, and the value."""
_EMPTY: Final[_Row] = ((-1, 0), 0)


def apply(tx: Connection, tally: str, entries: Sequence[Entry]) -> Applied:
    """Add the entries above their guards, in the order of the call.

    Raises `errors.InvalidRequest` (an invalid key or topic, a sum beyond the limit, one message with two deltas for one
    key), `errors.OutOfOrder`, `faults.BeginAgain` if it must be run again.
    """
    counters = _by_counter(entries)
    keys = sorted(counters)
    rows = _lock(tx, tally, keys)
    applied = 0
    changes: dict[str, int] = {}
    notable: set[str] = set()
    new: list[str] = []
    old: list[str] = []
    tally_literal = _literal(tx, tally.encode().hex())
    for counter in keys:
        before = rows.get(counter)
        after, count = _advance(before or _EMPTY, counters[counter], entries)
        if count:
            applied += count
            value = (before or _EMPTY)[1]
            changes[counter[0]] = changes.get(counter[0], 0) + after[1] - value
            if _is_notable(value, after[1]):
                notable.add(counter[0])
            (new if before is None else old).append(_values(tx, tally_literal, counter, after))
    upsert = dialects.of(tx).upsert(_KEY, _VALUES)
    _write(tx, [*(_INSERT + rows + upsert for rows in _lists(old)), *(_INSERT + rows for rows in _lists(new))])
    _check_totals(tx, tally_literal, {key: changes[key] for key in sorted(notable)}, entries)
    return Applied(applied, len(entries) - applied)


def _by_counter(entries: Sequence[Entry]) -> dict[_Counter, list[int]]:
    """The indexes of each sub-counter's entries, in their order."""
    counters: dict[_Counter, list[int]] = {}
    topics: dict[str, str] = {}
    for place, entry in enumerate(entries):
        if entry.key in NO_NAMES:
            raise errors.InvalidRequest(f"body.entries[{place}].key", "expected a key other than . and ..")
        try:
            topic = topics.get(entry.topic) or topics.setdefault(entry.topic, entry.topic.encode().hex())
            counter = (entry.key.encode().hex(), topic, entry.partition, entry.generation)
        except UnicodeEncodeError:
            raise errors.InvalidRequest(f"body.entries[{place}]", "expected Unicode text") from None
        counters.setdefault(counter, []).append(place)
    return counters


def _advance(before: _Row, places: Sequence[int], entries: Sequence[Entry]) -> tuple[_Row, int]:
    """Compare the entries with the guard one after the other. Return the new row, and the number of added entries."""
    start, value = before
    guard = start
    deltas: dict[_Position, int] = {}
    for place in places:
        entry = entries[place]
        position = entry.offset, entry.child
        if position > guard:
            guard = position
            value += entry.delta
            deltas[position] = entry.delta
        elif position > start:
            # It is above the stored guard, so it is only valid if this call has already added it.
            if position not in deltas:
                raise errors.OutOfOrder(f"body.entries[{place}]", entry.key, position, guard)
            if deltas[position] != entry.delta:
                raise errors.InvalidRequest(
                    f"body.entries[{place}].delta",
                    f"expected {deltas[position]}, the delta of the same message and key earlier in this call: a "
                    "message has one entry per key",
                )
    if abs(value) >= INTEGER_LIMIT:
        raise errors.InvalidRequest(
            f"body.entries[{places[-1]}].delta",
            f"expected a sum within 2^53: this source's sum for {entries[places[-1]].key!r} would be {value}",
        )
    return (guard, value), len(deltas)


def _lock(tx: Connection, tally: str, counters: Sequence[_Counter]) -> dict[_Counter, _Row]:
    """Lock the existing rows, in primary-key order."""
    rows_by_counter: dict[_Counter, _Row] = {}
    tally_literal = _literal(tx, tally.encode().hex())
    for part in chunks(list(counters), CHUNK):
        texts = [_select(tx, tally_literal, part_of_list) for part_of_list in chunks(part, LIST)]
        for rows in statements.run(tx, *texts):
            for key, topic, *numbers in statements.records(tx, rows):
                partition, generation, offset, child, value = map(int, numbers)
                rows_by_counter[key, topic, partition, generation] = (offset, child), value
    return rows_by_counter


_COLUMNS: Final = ("LOWER(HEX(tally_key))", "LOWER(HEX(topic))", "partition_no", "generation", "high_offset",
                   "high_child", "value")  # fmt: skip


def _select(tx: Connection, tally: str, counters: Sequence[_Counter]) -> str:
    """One statement for at most LIST sub-counters."""
    by_source: dict[tuple[str, int, int], list[str]] = {}
    for key, *source in counters:
        by_source.setdefault(tuple(source), []).append(key)  # type: ignore[arg-type]
    conditions = " OR ".join(
        f"(tally_key IN ({','.join(_literal(tx, key) for key in keys)}) AND topic = {_literal(tx, topic)} "
        f"AND partition_no = {partition} AND generation = {generation})"
        for (topic, partition, generation), keys in by_source.items()
    )
    # Force the primary key: a scan would wait for unrelated rows, and lock in another order.
    clause = f"WHERE tally = {tally} AND ({conditions})"
    dialect = dialects.of(tx)
    from_clause = f"{dialect.by_primary_key('tallies')} {clause}{dialect.for_update}"
    return statements.select(tx, _COLUMNS, from_clause, len(counters))


def _literal(tx: Connection, digits: str) -> str:
    """A literal from a text's bytes."""
    return dialects.of(tx).text(digits)


_INSERT: Final = (
    "INSERT INTO tallies (tally, tally_key, topic, partition_no, generation, high_offset, high_child, value) VALUES "
)
_KEY: Final = ("tally", "tally_key", "topic", "partition_no", "generation")
_VALUES: Final = ("high_offset", "high_child", "value")


def _values(tx: Connection, tally: str, counter: _Counter, row: _Row) -> str:
    key, topic, partition, generation = counter
    (offset, child), value = row
    texts = f"{tally},{_literal(tx, key)},{_literal(tx, topic)}"
    return f"({texts},{partition},{generation},{offset},{child},{value})"


def _lists(rows: list[str]) -> Iterator[str]:
    for part in chunks(rows, CHUNK):
        yield ",".join(part)


def _write(tx: Connection, texts: Iterable[str]) -> None:
    """Execute the statements. Raises `faults.BeginAgain` if another transaction has inserted the row of a new
    sub-counter."""
    try:
        for text in texts:
            statements.run(tx, text)
    except IntegrityError as error:
        if faults.is_duplicate(error):
            raise faults.BeginAgain from error
        raise


def _is_notable(before: int, after: int) -> bool:
    """Whether the total must be read after a change of a sub-counter; see the module."""
    return abs(after) >= LARGE or after.bit_length() > before.bit_length() or (before < 0) != (after < 0)


def _check_totals(tx: Connection, tally: str, changes: dict[str, int], entries: Sequence[Entry]) -> None:
    """Raise `errors.InvalidRequest` if the changes, which are already written, make the total of a key reach the limit.
    If a total is beyond the limit, a change towards zero is allowed."""
    large = [key for key, (total, room) in _totals(tx, tally, list(changes)).items() if abs(total) + room >= LOCKED]
    for key, (total, room) in _totals(tx, tally, sorted(large), locked=True).items():
        if abs(total) + room >= INTEGER_LIMIT and abs(total) > abs(total - changes[key]):
            place = max(place for place, entry in enumerate(entries) if entry.key.encode().hex() == key)
            raise errors.InvalidRequest(
                f"body.entries[{place}].delta",
                f"expected a total within 2^53: the total of {entries[place].key!r} would be {total}",
            )


_PART: Final = 2**32
_SUMS: Final = f"SUM((value - value % {_PART}) / {_PART})", f"SUM(value % {_PART})"
"""A sum in two parts, because SQLite's SUM fails beyond 64 bits. No division leaves a remainder, so the sums are
exact."""
_ROOM: Final = f"SUM(CASE WHEN value = 0 OR ABS(value) >= {LARGE} THEN 0 ELSE ABS(value) - 1 END)"
"""The amount by which the small sub-counters may grow before `_is_notable` returns true."""


def _total(high: Any, low: Any) -> int:
    return int(high) * _PART + int(low)


def _totals(tx: Connection, tally: str, keys: Sequence[str], *, locked: bool = False) -> dict[str, tuple[int, int]]:
    """The totals of the keys and the reserves for their small sub-counters, only of keys for which their sum is large.
    Texts are hexadecimal."""
    high, low = _SUMS
    dialect = dialects.of(tx)
    table = dialect.by_primary_key("tallies")
    # Not exact, because divisions may round; half of `LOCKED` leaves ample room for that.
    rest = f"GROUP BY tally_key HAVING ABS({high} + {low} / {_PART}) + {_ROOM} / {_PART} >= {LOCKED // _PART // 2}"
    rest += dialect.for_update if locked else ""
    texts = [
        f"SELECT LOWER(HEX(tally_key)), {high}, {low}, {_ROOM} FROM {table} "  # noqa: S608
        f"WHERE tally = {tally} AND tally_key IN ({','.join(_literal(tx, key) for key in part)}) {rest}"
        for part in chunks(list(keys), LIST)
    ]
    rows = (row for result in statements.run(tx, *texts) for row in result)
    return {key: (_total(high, low), int(room)) for key, high, low, room in rows}


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
