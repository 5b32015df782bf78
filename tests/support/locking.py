"""The order of a transaction's locks, checked statement by statement (see `core.storage.lock_order`)."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
import pytest
import sqlalchemy as sa

from core.storage.database import Database
from core.storage.lock_order import ORDER, UNDER
from tests.explorer.accesses import ADVISORY, Kind, Row, analyzed

_GROUPS: Final = re.compile(r"\(batch_id IN \(([\d,]+)\) AND group_no IN \(([\d,]+)\)\)")
_NEW_GROUPS: Final = re.compile(r"\((\d+),(\d+),")
_TUPLES: Final = re.compile(r"\(([^()]*'[^()]*)\)")
_FROM: Final = re.compile(r"\bFROM (?:\(.*\) )?(\w+)")
_BATCHES: Final = re.compile(r"(?:\bbatch_id`? = |VALUES \()(\d+)\b")
_RANKS: Final = {table: rank for rank, table in enumerate(ORDER)}


class LockOrder:
    """The locks of one transaction."""

    def __init__(self) -> None:
        self._held: set[Row] = set()
        self._tables: set[str] = set()
        self._journaled: set[str] = set()
        self._has_opened = False
        """It has opened a batch, which others don't see before the commit, nor its groups."""
        self._rank = -1
        self._last: tuple[tuple[int, int | str], ...] = ()
        """The highest key that was locked in the table with this rank."""
        self._statements: list[str] = []

    def check(self, text: str) -> str | None:
        """Why the next statement, whose parameters are written into it, breaks the order; None if it doesn't."""
        statement = analyzed(text)
        text = " ".join(text.split())
        self._statements.append(text[:300])
        if "ack_journal" in statement.tables:
            self._journaled.update(_BATCHES.findall(text))
        if statement.kind is Kind.READ or statement.tables == {ADVISORY}:
            return None
        table = statement.changed or _locked_table(text, statement.tables)
        rows = {"item_groups": _groups, "tally_sources": _sources}.get(table, lambda _: statement.rows)(text)
        problem = self._problem(table, text, rows)
        self._held.update(rows)
        self._tables.add(table)
        self._has_opened |= text.startswith("INSERT INTO batches")
        return None if problem is None else "\n".join([f"{problem}, in this transaction:", *self._statements])

    def _problem(self, table: str, text: str, rows: Sequence[Row]) -> str | None:
        if text.startswith("INSERT") and " ON DUPLICATE KEY " not in text and " ON CONFLICT " not in text:
            guards = UNDER.get(table)
            if guards is None or not self._tables.isdisjoint(guards):
                return None
            return f"a row of {table} is inserted without a lock of {' or '.join(guards)}"
        if table not in _RANKS or text.startswith("DELETE FROM batches"):
            return None
        others = [key for name, key in rows if (name, key) not in self._held]
        if table == "item_groups":
            others = [key for key in others if key[0] not in self._journaled]
        if rows and not others:
            return None
        if self._has_opened and table in ("item_groups", "batches"):
            return None
        if table == "inbox" and re.search("SET status ?= ?'retrying'", text) and "positions" in self._tables:
            return None  # events that are parked
        rank, keys = _RANKS[table], sorted(tuple(map(_order, key)) for key in others)
        problem = None
        if "SKIP LOCKED" not in text and rank < self._rank:
            problem = f"a row of {table} is locked after one of {ORDER[self._rank]}"
        elif "SKIP LOCKED" not in text and rank == self._rank and keys and keys[0] < self._last:
            problem = f"the rows of {table} are not locked in the order of their keys"
        if rank > self._rank:
            self._rank, self._last = rank, ()
        if rank == self._rank and keys:
            self._last = max(keys[-1], self._last)
        return problem


def _locked_table(text: str, names: frozenset[str]) -> str:
    """The table that a SELECT locks."""
    match = None if len(names) == 1 else _FROM.search(text)
    return match[1] if match else next(iter(names))


def _groups(text: str) -> Sequence[Row]:
    """The rows of `item_groups` that a statement of `group_rows` names."""
    if text.startswith("INSERT"):
        return [("item_groups", key) for key in _NEW_GROUPS.findall(text)]
    return [
        ("item_groups", (batch, group))
        for batches, groups in _GROUPS.findall(text)
        for batch in batches.split(",")
        for group in groups.split(",")
    ]


def _sources(text: str) -> Sequence[Row]:
    """The rows of `tally_sources` that a lock or an INSERT names: a lock begins with the places of the rows, an INSERT
    ends with their positions."""
    places = slice(0, -1) if text.startswith("INSERT") else slice(1, None)
    return [("tally_sources", tuple(values.split(",")[places])) for values in _TUPLES.findall(text)]


def _order(value: str) -> tuple[int, int | str]:
    return (0, int(value)) if value.isdigit() else (1, value)


def mogrified(cursor: Any, text: str, parameters: Any) -> str:
    """The statement with its parameters written into it."""
    if isinstance(cursor, psycopg.Cursor):
        return str(psycopg.ClientCursor(cursor.connection).mogrify(text, parameters))
    return str(cursor.mogrify(text, parameters)) if hasattr(cursor, "mogrify") else text


@contextmanager
def watched() -> Iterator[list[str]]:
    """The problems of all of core's transactions on servers, in all threads of this process."""
    problems: list[str] = []
    own = threading.local()
    once = Database._once

    def in_order(database: Database, work: Any, *args: Any, **options: Any) -> Any:
        is_ours = str(getattr(work, "__module__", "")).startswith("core.")
        own.order = LockOrder() if is_ours and database.dialect.locks_rows else None
        try:
            return once(database, work, *args, **options)
        finally:
            own.order = None

    def check(tx: Any, cursor: Any, text: str, parameters: Any, _: object, is_many: bool) -> None:
        order: LockOrder | None = getattr(own, "order", None)
        if order is not None:
            problem = order.check(text if not parameters or is_many else mogrified(cursor, text, parameters))
            problems.extend([problem] if problem is not None else [])

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Database, "_once", in_order)
        sa.event.listen(sa.Engine, "before_cursor_execute", check)
        try:
            yield problems
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", check)
