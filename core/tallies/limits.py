"""The limit of totals, and when they are read; see the package."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from core import errors
from core.storage import dialects, statements
from core.storage.statements import LIST, Pipeline, chunks
from core.tallies.model import EMPTY, Call, Counter, Judged, Key, Row, Stored
from lastbit.ids import INTEGER_LIMIT

LARGE: Final = 2**40
"""A sub-counter is large if it has at least this value. The total is read at each change of a large one."""
LOCKED: Final = INTEGER_LIMIT // 64
"""Totals from this value on are read with their rows locked. Below it, even 64 transactions that don't see each other's
changes stay within the limit."""


def is_notable(before: int, after: int) -> bool:
    """Whether the total must be read after a change of a sub-counter; see the package."""
    if abs(after) >= LARGE or after.bit_length() > before.bit_length():
        return True
    return (before > 0) != (after > 0) or (before < 0) != (after < 0)


@dataclass(frozen=True, slots=True)
class Others:
    """A key's total and reserve without the sub-counters that the transaction may change, which are `counters`."""

    total: int
    room: int
    counters: Sequence[tuple[Counter, int]]
    """With their values before the transaction."""

    def check(
        self,
        key: Key,
        change: int,
        steps: Mapping[Counter, Row],
        after: Mapping[Counter, Row],
        call: Call,
    ) -> None:
        """Raise `errors.InvalidRequest` if a call's `steps` bring the total beyond the limit. If it is beyond the limit
        already, a change towards zero is allowed."""
        values = [(steps.get(counter) or after.get(counter) or ((), value))[1] for counter, value in self.counters]
        total = self.total + sum(values)
        room = self.room + sum(map(_room, values))
        if abs(total) + room >= INTEGER_LIMIT and abs(total) > abs(total - change):
            raise errors.InvalidRequest(
                call.place_of(key[1]), f"expected a total within 2^53: the total of {key[1]!r} would be {total}"
            )


def read_others(
    pipeline: Pipeline,
    judged: Judged,
    counters: Iterable[Counter],
    rows: Stored,
    before: Iterable[Key],
) -> dict[Key, Others]:
    """Read the totals of the notable keys after the write, and lock the rows of those that may be beyond the limit, now
    or between two calls of the transaction. The keys of `before` are among these."""
    totals = _totals(pipeline, sorted(judged.notable))
    large = {key for key, (total, room) in totals.items() if abs(total) + room >= LOCKED}
    large |= {key for key, amount in judged.moved.items() if amount >= LOCKED} | set(before)
    if not large:
        return {}
    own: dict[Key, list[tuple[Counter, int]]] = {key: [] for key in large}
    others = dict.fromkeys(large, (0, 0)) | _totals(pipeline, sorted(large), locked=True)
    for counter in counters:
        key = counter[:2]
        if key in large:
            before_value = rows.counters.get(counter, EMPTY)[1]
            own[key].append((counter, before_value))
            value = judged.after.counters.get(counter, (EMPTY[0], before_value))[1]
            others[key] = others[key][0] - value, others[key][1] - _room(value)
    return {key: Others(*others[key], own[key]) for key in large}


def _room(value: int) -> int:
    """The amount by which a sub-counter may grow before `is_notable` returns true."""
    return 0 if value == 0 or abs(value) >= LARGE else abs(value) - 1


_PART: Final = 2**32
SUMS: Final = f"SUM((value - value % {_PART}) / {_PART})", f"SUM(value % {_PART})"
"""A sum in two parts, because SQLite's SUM fails beyond 64 bits. No division leaves a remainder, so the sums are
exact."""
_ROOM: Final = f"SUM(CASE WHEN value = 0 OR ABS(value) >= {LARGE} THEN 0 ELSE ABS(value) - 1 END)"
"""The sum of `_room`."""


def total_of(high: Any, low: Any) -> int:
    return int(high) * _PART + int(low)


def _totals(pipeline: Pipeline, keys: Sequence[Key], *, locked: bool = False) -> dict[Key, tuple[int, int]]:
    """The totals of the keys and the reserves for their small sub-counters; unless they are `locked`, only of keys for
    which their sum is large."""
    tx = pipeline.tx
    high, low = SUMS
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
            *locks, text = dialect.sum_locked(tx, results, "tallies", condition, "tally_key", names)
            pipeline.later(*locks)
        else:
            source = f"{dialect.by_primary_key('tallies')} WHERE {condition}"
            text = f"SELECT {results} FROM {source} GROUP BY tally_key {having}"  # noqa: S608
        answers.append(pipeline.query(text))
    return {
        (tally, str(statements.as_text(key))): (total_of(high, low), int(room))
        for (tally, _), answer in zip(parts, answers, strict=True)
        for key, high, low, room in answer.rows()
    }
