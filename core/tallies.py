"""Tallies: sums of events that are replayed, in which each event counts once.

A sum is not idempotent, and queues replay. So the total of a key is a sum of sub-counters, one for each source (topic,
partition, generation), and each has a guard: the position (offset, child) of the last message that it took in. A
message at or below the guard came before. What could go wrong, and why it can't:

*The same message counts twice.* `offset < guard` alone is "earlier", and lets the guard's own message in again; what is
at the guard is a repeat.

*The siblings of a flat map are dropped.* What a republisher makes of one message has that message's offset, so the
order is (offset, child).

*Two sources take turns.* A guard that starts over when the source changes counts all replays of the other one again.
There is a guard for each source. A topic that was deleted and made again begins at 0: its generation tells it apart.

*A part of a message is applied.* Entries of a call are applied in one transaction. The guard moves in the statement
that adds to the value.

*The answer is lost, and the retry is cut otherwise.* An entry is one message's, and each is held against the guard by
itself; which ones travel together makes no difference. A delta that had been added up over several messages would have
no position of its own, and count twice.

*An earlier message comes later.* All this is exact only if the messages of one source come to one key in their order:
an earlier one that comes for the first time after a later one looks like a replay. Where the call itself shows that it
is none, it is refused (`errors.OutOfOrder`): it is above the guard that stood before the call, so it was never added,
and yet a later one has come before it. What came in an earlier call can't be told apart any more.

*A total leaves the range of integers.* Its sub-counters change under locks of their own, and to read them all at each
change would cost more than the change. So the total is read when one of them is new, is twice as large as it was,
changes its sign or is large; what the others may grow by until then is kept free. It is read after the write, and again
with its rows locked if it is large: of two calls that reach the limit together, one then sees the other.

*Deadlocks.* Rows are locked in primary-key order, and written in it. Those of a large total are locked after that; a
deadlock of these is retried.
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
"""Characters of a key or a topic."""
CHUNK: Final = 1000
"""Rows of one round trip, and of one transaction of a deletion."""
LARGE: Final = 2**40
"""Sub-counters from here on are large: each of their changes has the total read."""
LOCKED: Final = INTEGER_LIMIT // 64
"""Totals from here on are read with their rows locked: 64 transactions that don't see each other's changes stay below
the limit."""


_tallies = tables.tallies.c


class Entry(NamedTuple):
    """What one message adds to one key."""

    key: str
    delta: int
    topic: str
    partition: int
    generation: int
    offset: int
    child: int


@dataclass(frozen=True, slots=True)
class Applied:
    """How many entries were added, and how many had been before."""

    applied: int
    repeated: int


@dataclass(frozen=True, slots=True)
class Source:
    """A sub-counter: up to where its source was taken in, and what came of it."""

    topic: str
    partition: int
    generation: int
    offset: int
    child: int
    value: int


@dataclass(frozen=True, slots=True)
class Value:
    """A key and its total; of a single key also where it comes from."""

    key: str
    value: int
    sources: tuple[Source, ...] = ()


# Plain tuples: a call makes thousands of them.
_Counter = tuple[str, str, int, int]
"""A sub-counter of the tally: key, topic, partition, generation. Texts are their bytes in hexadecimal, which sort as
these do."""
_Position = tuple[int, int]
"""Offset and child."""
_Row = tuple[_Position, int]
"""The guard, and the value."""
_EMPTY: Final[_Row] = ((-1, 0), 0)


def apply(tx: Connection, tally: str, entries: Sequence[Entry]) -> Applied:
    """Add those entries that are above their guard, in the order of the call, all in the caller's transaction.

    Raises `errors.InvalidRequest` (a key or topic that can't be one, a sum beyond the limit, one message with two
    deltas for one key), `errors.OutOfOrder`, `faults.BeginAgain` when it must be run again.
    """
    counters = _by_counter(entries)
    wanted = sorted(counters)
    rows = _lock(tx, tally, wanted)
    applied = 0
    changes: dict[str, int] = {}
    notable: set[str] = set()
    new: list[str] = []
    old: list[str] = []
    named = _literal(tx, tally.encode().hex())
    for counter in wanted:
        before = rows.get(counter)
        after, count = _advance(before or _EMPTY, counters[counter], entries)
        if count:
            applied += count
            value = (before or _EMPTY)[1]
            changes[counter[0]] = changes.get(counter[0], 0) + after[1] - value
            if _is_notable(value, after[1]):
                notable.add(counter[0])
            (new if before is None else old).append(_values(tx, named, counter, after))
    upsert = dialects.of(tx).upsert(_KEY, _VALUES)
    _write(tx, [*(_INSERT + rows + upsert for rows in _lists(old)), *(_INSERT + rows for rows in _lists(new))])
    _check_totals(tx, named, {key: changes[key] for key in sorted(notable)}, entries)
    return Applied(applied, len(entries) - applied)


def _by_counter(entries: Sequence[Entry]) -> dict[_Counter, list[int]]:
    """The places of each sub-counter's entries, in their order."""
    counters: dict[_Counter, list[int]] = {}
    known: dict[str, str] = {}
    for place, entry in enumerate(entries):
        if entry.key in NO_NAMES:
            raise errors.InvalidRequest(f"body.entries[{place}].key", "expected a key other than . and ..")
        try:
            topic = known.get(entry.topic) or known.setdefault(entry.topic, entry.topic.encode().hex())
            counter = (entry.key.encode().hex(), topic, entry.partition, entry.generation)
        except UnicodeEncodeError:
            raise errors.InvalidRequest(f"body.entries[{place}]", "expected Unicode text") from None
        counters.setdefault(counter, []).append(place)
    return counters


def _advance(before: _Row, places: Sequence[int], entries: Sequence[Entry]) -> tuple[_Row, int]:
    """One after the other against the guard: the row as it is then, and how many were added."""
    start, value = before
    reached = start
    added: dict[_Position, int] = {}
    for place in places:
        entry = entries[place]
        position = entry.offset, entry.child
        if position > reached:
            reached = position
            value += entry.delta
            added[position] = entry.delta
        elif position > start:
            # It is new to us, so it has to be one that this very call has added already.
            if position not in added:
                raise errors.OutOfOrder(f"body.entries[{place}]", entry.key, position, reached)
            if added[position] != entry.delta:
                raise errors.InvalidRequest(
                    f"body.entries[{place}].delta",
                    f"expected {added[position]}, as the same message has brought the same key before: what one "
                    "message adds to a key is one entry",
                )
    if abs(value) >= INTEGER_LIMIT:
        raise errors.InvalidRequest(
            f"body.entries[{places[-1]}].delta",
            f"expected a sum within 2^53: what this source brings to {entries[places[-1]].key!r} would be {value}",
        )
    return (reached, value), len(added)


def _lock(tx: Connection, tally: str, wanted: Sequence[_Counter]) -> dict[_Counter, _Row]:
    """Lock the rows that are there, in primary-key order."""
    found: dict[_Counter, _Row] = {}
    named = _literal(tx, tally.encode().hex())
    for part in chunks(list(wanted), CHUNK):
        texts = [_select(tx, named, some) for some in chunks(part, LIST)]
        for rows in statements.run(tx, *texts):
            for key, topic, *numbers in statements.records(tx, rows):
                partition, generation, offset, child, value = map(int, numbers)
                found[key, topic, partition, generation] = (offset, child), value
    return found


_COLUMNS: Final = ("LOWER(HEX(tally_key))", "LOWER(HEX(topic))", "partition_no", "generation", "high_offset",
                   "high_child", "value")  # fmt: skip


def _select(tx: Connection, tally: str, wanted: Sequence[_Counter]) -> str:
    """One statement for at most LIST sub-counters."""
    by_source: dict[tuple[str, int, int], list[str]] = {}
    for key, *source in wanted:
        by_source.setdefault(tuple(source), []).append(key)  # type: ignore[arg-type]
    among = " OR ".join(
        f"(tally_key IN ({','.join(_literal(tx, key) for key in keys)}) AND topic = {_literal(tx, topic)} "
        f"AND partition_no = {partition} AND generation = {generation})"
        for (topic, partition, generation), keys in by_source.items()
    )
    # Forced: a scan would wait for rows that are nobody's business, and lock in another order.
    where = f"WHERE tally = {tally} AND ({among})"
    dialect = dialects.of(tx)
    found = f"{dialect.by_primary_key('tallies')} {where}{dialect.for_update}"
    return statements.select(tx, _COLUMNS, found, len(wanted))


def _literal(tx: Connection, digits: str) -> str:
    """A text by its bytes."""
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
    """Raises `faults.BeginAgain` where somebody else has made the row of a sub-counter that had none."""
    try:
        for text in texts:
            statements.run(tx, text)
    except IntegrityError as error:
        if faults.is_duplicate(error):
            raise faults.BeginAgain from error
        raise


def _is_notable(before: int, after: int) -> bool:
    """Whether a change of a sub-counter has the total read; see the module."""
    return abs(after) >= LARGE or after.bit_length() > before.bit_length() or (before < 0) != (after < 0)


def _check_totals(tx: Connection, tally: str, changes: dict[str, int], entries: Sequence[Entry]) -> None:
    """Raise `errors.InvalidRequest` if the changes, which are written already, bring the total of a key to the limit.
    One that was beyond it before may come nearer."""
    large = [key for key, (total, room) in _totals(tx, tally, list(changes)).items() if abs(total) + room >= LOCKED]
    for key, (total, room) in _totals(tx, tally, sorted(large), locked=True).items():
        if abs(total) + room >= INTEGER_LIMIT and abs(total) > abs(total - changes[key]):
            place = max(place for place, entry in enumerate(entries) if entry.key.encode().hex() == key)
            raise errors.InvalidRequest(
                f"body.entries[{place}].delta",
                f"expected a total within 2^53: that of {entries[place].key!r} would be {total}",
            )


_PART: Final = 2**32
_SUMS: Final = f"SUM((value - value % {_PART}) / {_PART})", f"SUM(value % {_PART})"
"""A sum in two parts, as SQLite's own fails beyond 64 bits. No division leaves a rest, so all are exact."""
_ROOM: Final = f"SUM(CASE WHEN value = 0 OR ABS(value) >= {LARGE} THEN 0 ELSE ABS(value) - 1 END)"
"""What the small ones may grow by before `_is_notable` says so."""


def _total(high: Any, low: Any) -> int:
    return int(high) * _PART + int(low)


def _totals(tx: Connection, tally: str, keys: Sequence[str], *, locked: bool = False) -> dict[str, tuple[int, int]]:
    """The totals of the keys and what is kept free for their small sub-counters, where these are large together. Texts
    are their bytes in hexadecimal."""
    high, low = _SUMS
    dialect = dialects.of(tx)
    table = dialect.by_primary_key("tallies")
    # Not exact, as divisions may round; `LOCKED` is far above what that amounts to.
    rest = f"GROUP BY tally_key HAVING ABS({high} + {low} / {_PART}) + {_ROOM} / {_PART} >= {LOCKED // _PART // 2}"
    rest += dialect.for_update if locked else ""
    texts = [
        f"SELECT LOWER(HEX(tally_key)), {high}, {low}, {_ROOM} FROM {table} "  # noqa: S608
        f"WHERE tally = {tally} AND tally_key IN ({','.join(_literal(tx, key) for key in part)}) {rest}"
        for part in chunks(list(keys), LIST)
    ]
    rows = (row for found in statements.run(tx, *texts) for row in found)
    return {key: (_total(high, low), int(room)) for key, high, low, room in rows}


def get(tx: Connection, tally: str, key: str) -> Value:
    """The total of a key, and its sub-counters; 0 without any where nothing was ever added."""
    found = tx.execute(
        sa.select(tables.tallies)
        .where(_tallies.tally == tally, _tallies.tally_key == key)
        .order_by(_tallies.topic, _tallies.partition_no, _tallies.generation)
    )
    sources = tuple(_source(row) for row in found)
    return Value(key, sum(source.value for source in sources), sources)


def _source(row: Any) -> Source:
    return Source(row.topic, row.partition_no, row.generation, row.high_offset, row.high_child, row.value)


def page(tx: Connection, tally: str, prefix: str, after: str | None, limit: int) -> list[Value]:
    """The totals of the keys that begin with `prefix`, above `after`, by the bytes of their keys."""
    query = (
        sa.select(_tallies.tally_key, *map(sa.literal_column, _SUMS))
        .where(_tallies.tally == tally)
        .group_by(_tallies.tally_key)
        .order_by(_tallies.tally_key)
        .limit(limit)
    )
    if prefix:
        # The last key that can begin so.
        query = query.where(_tallies.tally_key.between(prefix, prefix.ljust(LONGEST, "\U0010ffff")))
    if after is not None:
        query = query.where(_tallies.tally_key > after)
    return [Value(key, _total(*sums)) for key, *sums in tx.execute(query)]


def remove_chunk(tx: Connection, tally: str) -> bool:
    """Remove some of a tally's rows, from the lowest; whether there may be more."""
    known = (_tallies.tally_key, _tallies.topic, _tallies.partition_no, _tallies.generation)
    last = tx.execute(
        sa.select(*known).where(_tallies.tally == tally).order_by(*known).offset(CHUNK - 1).limit(1)
    ).first()
    query = sa.delete(tables.tallies).where(_tallies.tally == tally)
    if last is not None:
        query = query.where(_tallies.tally_key <= last.tally_key)
    tx.execute(query)
    return last is not None
