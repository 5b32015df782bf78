"""Finding batches: pages of those to which a filter applies, newest first, and their number by state.

Both take bounded time, however many batches there are. If no index narrows a filter to few batches, a page examines at
most `SCAN` rows, so it may be empty and not the last. Counts examine at most `MOST` rows, and report whether these
were all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.batches.batch import ROWS, Batch
from core.batches.history import Point
from core.batches.lifecycle import LIVE, State
from core.storage import limits, tables
from lastbit.ids import MAX_GROUP_SIZE, MAX_ITEMS, MIN_GROUP_SIZE, ItemId

SCAN: Final = 10_000
"""Maximum rows that a page examines for a filter without an index."""
MOST: Final = 200_000
"""Maximum rows that counts examine, and entries of an index that a page does."""
FEW: Final = 5_000
"""Maximum batches that a page selects through the index of keys, parents or times, and sorts."""
COUNTED: Final = [state for state in State if state is not State.DELETING]
FIRST: Final = 32
"""Rows of the first statement of a page: their labels may take a quarter of a mebibyte."""

_table = tables.batches.c


class Outcome(StrEnum):
    """How a complete batch has ended; or, in any state, whether its failures are or were beyond its tolerance."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXCEEDED = "exceeded"

    @property
    def needs_completion(self) -> bool:
        return self is not Outcome.EXCEEDED


@dataclass(frozen=True, slots=True)
class Filter:
    """The conditions for a batch; all that are given must hold. A batch has all of `labels`, and perhaps others.
    `parent` is a batch's id, or one of its items. `opened_after` is inclusive, `opened_before` exclusive.
    `unchanged_for`: seconds for which a live batch has not changed. `failed`: it has failed items. `prefix` is the one
    that the caller is limited to."""

    state: State | None = None
    key: str | None = None
    key_prefix: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    opened_after: datetime | None = None
    opened_before: datetime | None = None
    outcome: Outcome | None = None
    parent: int | ItemId | None = None
    unchanged_for: int | None = None
    failed: bool = False
    prefix: str | None = None

    def check(self) -> None:
        """Raise `errors.InvalidRequest` if no batch can ever meet all conditions."""
        if self.key is not None and self.key_prefix is not None and not self.key.startswith(self.key_prefix):
            raise errors.InvalidRequest(
                "query.key_prefix", f"expected the beginning of the key {self.key!r}, or no key"
            )
        if self._is_complete and self.state not in (None, State.COMPLETE):
            raise errors.InvalidRequest(
                "query.outcome",
                f"expected no state but complete beside it: a batch that is {self.state} has no outcome",
            )
        if self.unchanged_for is not None and (self._is_complete or self.state not in (None, *LIVE)):
            raise errors.InvalidRequest(
                "query.unchanged_for", "expected no state but open or sealed, and no result, beside it"
            )
        if self.opened_after is not None and self.opened_before is not None and self.opened_before <= self.opened_after:
            raise errors.InvalidRequest("query.opened_before", "expected a time later than opened_after")

    def states(self) -> list[sa.ColumnElement[bool]]:
        """The conditions for the state."""
        state = State.COMPLETE if self._is_complete else self.state
        if state is None and self.unchanged_for is not None:
            return [_table.state.in_(sorted(LIVE))]
        if state is None:
            return [tables.without_index(_table.state) != State.DELETING]
        if self.times():
            # For an equality, MariaDB would look up all batches of this state that are newer than the period.
            return [_table.state >= state, _table.state <= state]
        return [_table.state == state]

    def keys(self, *, by_index: bool = True) -> list[sa.ColumnElement[bool]]:
        """The conditions for the key. `by_index`: the database may look them up in the index of keys."""
        column = _table.batch_key if by_index else tables.without_index(_table.batch_key)
        conditions = [tables.begins(column, text) for text in (self.key_prefix, self.prefix) if text is not None]
        return conditions if self.key is None else [*conditions, column == self.key]

    def parents(self, *, by_index: bool = True) -> list[sa.ColumnElement[bool]]:
        """The conditions for the parent. `by_index` as for `keys`."""
        if self.parent is None:
            return []
        if isinstance(self.parent, ItemId):
            return _stands_for(self.parent)
        column = _table.parent_batch if by_index else tables.without_index(_table.parent_batch)
        return [column == self.parent]

    def times(self, *, by_index: bool = True) -> list[sa.ColumnElement[bool]]:
        """The conditions for the time of the opening. `by_index` as for `keys`."""
        column = _table.created_at if by_index else tables.without_index(_table.created_at)
        conditions = []
        if self.opened_after is not None:
            conditions.append(column >= self.opened_after)
        if self.opened_before is not None:
            conditions.append(column < self.opened_before)
        return conditions

    def examined(self, tx: Connection) -> list[sa.ColumnElement[bool]]:
        """The conditions for which rows must be read."""
        conditions = [_has_label(name, value) for name, value in self.labels.items()]
        if self.unchanged_for is not None:
            conditions.append(_table.updated_at <= tables.clock(tx) - timedelta(seconds=self.unchanged_for))
        if self.failed:
            conditions.append(_table.failed > 0)
        if self.outcome is Outcome.SUCCEEDED:
            conditions.append(_succeeds())
        elif self.outcome is Outcome.FAILED:
            conditions.append(sa.not_(_succeeds()))
        elif self.outcome is Outcome.EXCEEDED:
            conditions.append(_table.exceeded == 1)
        return conditions

    @property
    def _is_complete(self) -> bool:
        return self.outcome is not None and self.outcome.needs_completion

    @property
    def is_wide(self) -> bool:
        """Whether there is no index that leaves out most batches."""
        selective = (self.key, self.key_prefix, self.prefix, self.parent, self.opened_after, self.opened_before)
        return all(value is None for value in selective)


def _stands_for(item: ItemId) -> list[sa.ColumnElement[bool]]:
    """The conditions for the child of this item."""
    if item.group * MIN_GROUP_SIZE >= MAX_ITEMS or item.index >= MAX_GROUP_SIZE:
        return [sa.false()]  # there is no such item, and the product below could be too large for a database
    size = _table.parent_group_size
    # Without its type, PostgreSQL would compute with 32 bits, like the size's column.
    number = sa.literal(item.group, sa.BigInteger) * size + item.index
    return [_table.parent_batch == item.batch, _table.parent_number == number, size > item.index]


def _has_label(name: str, value: str) -> sa.ColumnElement[bool]:
    # Labels are stored as JSON: {"a": "b", "c": "d"}. Within a name or a value, a quotation mark comes after a
    # backslash, so one after a brace or a blank belongs to no name and no value.
    # Earlier releases stored other characters than ASCII as \uXXXX.
    pairs = {json.dumps({name: value}, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)}
    return sa.or_(*(tables.holds(_table.labels, before + pair) for pair in sorted(pairs) for before in ("{", " ")))


def _succeeds() -> sa.ColumnElement[bool]:
    """`Tolerance.succeeds` in SQL. It is never NULL."""
    most, percentage = _table.tolerated_failures, _table.tolerated_failure_percentage
    return sa.or_(
        _table.failed == 0,
        sa.and_(
            sa.or_(most.is_not(None), percentage.is_not(None)),
            sa.or_(most.is_(None), _table.failed <= most),
            sa.or_(percentage.is_(None), _table.failed * 100 <= percentage * _table["items"]),
        ),
    )


@dataclass(frozen=True, slots=True)
class BatchPage:
    """The next page has the ids below `before`; None at the end. `histories`: how the batches got on, by id, if the
    caller wants it."""

    batches: list[Batch]
    before: int | None
    histories: Mapping[int, Sequence[Point]] = field(default_factory=dict)


class Counts(NamedTuple):
    """The number of batches in each state. `exact`: all batches were examined."""

    by_state: dict[State, int]
    exact: bool


def page(tx: Connection, chosen: Filter, *, before: int | None = None, limit: int = 100) -> BatchPage:
    """At most `limit` batches with an id below `before`, newest first; fewer if their labels or reasons are large."""
    indexed, examined = chosen.states(), chosen.examined(tx)
    spans: list[_Span] = []
    are_few = False
    # Many batches may have a prefix that a caller is limited to.
    most_keys = FEW if chosen.key is None else MOST
    for lookup, most in ((chosen.keys, most_keys), (chosen.parents, MOST), (chosen.times, MOST)):
        conditions = lookup()
        if not conditions:
            continue
        span = _span(tx, conditions, most)
        if span.batches == 0:
            return BatchPage([], None)
        if span.batches <= most:
            spans.append(span)
        # Sorting more batches by their ids takes longer than examining the newest ones.
        if span.batches <= FEW:
            are_few = True
            indexed += conditions
        else:
            examined += lookup(by_index=False)
    # Few batches must not be looked for along all ids.
    id = tables.without_index(_table.id) if are_few else _table.id
    indexed += [id.between(span.oldest, span.newest) for span in spans]
    floor = _floor(tx, indexed, before) if examined and not are_few else None
    query = sa.select(*ROWS.columns).where(*indexed, *examined).order_by(id.desc())
    if floor is not None:
        query = query.where(id >= floor)

    def below(last: Batch | None, count: int) -> list[Batch]:
        start = before if last is None else last.id
        part = query if start is None else query.where(id < start)
        return [ROWS.from_row(row) for row in tx.execute(part.limit(count)).mappings()]

    rows = limits.stepwise(below, _text_bytes, limit + 1, first=FIRST)
    matches, has_more = limits.within(rows, _text_bytes, limit + 1)
    if has_more:
        shown = matches[:limit]
        return BatchPage(shown, shown[-1].id)
    return BatchPage(matches, floor)


class _Span(NamedTuple):
    """The least and the greatest id of the batches that meet some conditions, and their number."""

    oldest: int | None
    newest: int | None
    batches: int


def _span(tx: Connection, conditions: list[sa.ColumnElement[bool]], most: int) -> _Span:
    """The span of at most `most` + 1 batches that meet the conditions, by their index."""
    ids = sa.select(_table.id).where(*conditions).limit(most + 1).subquery()
    row = tx.execute(sa.select(sa.func.min(ids.c.id), sa.func.max(ids.c.id), sa.func.count())).one()
    return _Span(*row)


def _floor(tx: Connection, indexed: list[sa.ColumnElement[bool]], before: int | None) -> int | None:
    """The id of the last row that a page may examine; None if there are fewer than `SCAN` rows."""
    query = sa.select(_table.id).where(*indexed).order_by(_table.id.desc())
    if before is not None:
        query = query.where(_table.id < before)
    floor: int | None = tx.scalar(query.offset(SCAN - 1).limit(1))
    return floor


def counts(tx: Connection, chosen: Filter) -> Counts:
    """How many batches there are in each state. If there are too many to examine, those that were opened last are
    counted; with a filter that has an index, any of them."""
    conditions = [*chosen.states(), *chosen.keys(), *chosen.parents(), *chosen.times()]
    examined, is_exact = chosen.examined(tx), True
    if chosen.is_wide:
        first, last = tx.execute(sa.select(sa.func.min(_table.id), sa.func.max(_table.id))).one()
        if first is not None and first <= last - MOST:
            conditions.append(_table.id > last - MOST)
            is_exact = False
            if not examined:
                # Each state is a range of the index. MariaDB would read the whole index for any other condition.
                conditions.append(_table.state.in_(COUNTED))
        # In the order of the index of states, MariaDB would look up each row by itself.
        state = tables.without_index(_table.state) if examined else _table.state
        query = sa.select(state, sa.func.count()).where(*conditions, *examined).group_by(state)
        results = [(state, count) for state, count in tx.execute(query)]
    else:
        match = sa.case((sa.and_(*examined), 1), else_=0) if examined else sa.literal_column("1")
        rows = sa.select(_table.state, match.label("is_match")).where(*conditions).limit(MOST + 1).subquery()
        totals = sa.select(rows.c.state, sa.func.sum(rows.c.is_match), sa.func.count()).group_by(rows.c.state)
        answers = tx.execute(totals).all()
        results = [(state, int(count)) for state, count, _ in answers]
        is_exact = sum(total for *_, total in answers) <= MOST
    by_state = dict.fromkeys(COUNTED, 0)
    return Counts(by_state | {State(state): count for state, count in results}, is_exact)


def _text_bytes(batch: Batch) -> int:
    return limits.size_as_json(batch.reason) + sum(
        limits.size_as_json(name) + limits.size_as_json(value) for name, value in batch.labels.items()
    )
