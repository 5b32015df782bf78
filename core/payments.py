"""Paying what ended batches owe the items that they are (see `nested`): after their commit, level by level, and again
by a sweep for what a crash left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from core import acks, errors, nested
from core.acks import Flushed
from core.calls import Unit
from core.db import Database
from core.held import Held
from core.nested import Due
from core.statements import chunks

Flush = Callable[[Sequence[Unit]], Flushed]
"""Apply units in one transaction and commit it. Raises what `Database.write` does."""

log = structlog.get_logger(__name__)


def pay(database: Database, flush: Flush, children: Sequence[int]) -> None:
    """Pay what these owe, then what their parents owe if that ended them, and so on. Doesn't raise: they have ended and
    that is committed, so whoever ended them must hear it; what can't be paid now is left to the sweep."""
    level = list(children)
    while level:
        above: list[int] = []
        try:
            for part in chunks(level, nested.PAGE):
                dues = database.read(lambda tx, part=part: nested.debts(tx, part))  # type: ignore[misc]
                above += _pay(database, flush, dues)
        except Exception:  # even a bug of ours must not keep the answer of what is committed
            log.exception("parents_left_to_the_sweep", children=level[:10])
        level = above


def sweep(database: Database, flush: Flush | None = None) -> int:
    """Pay all that is due; return how many debts there were. Raises `errors.Unavailable`."""
    if flush is None:
        held = Held()

        def flush(units: Sequence[Unit]) -> Flushed:
            return database.write(lambda tx: acks.flush(tx, units, held), repeatable=True)

    swept = after = 0
    while True:
        dues = database.read(lambda tx, after=after: nested.debts(tx, after=after))  # type: ignore[misc]
        if not dues:
            return swept
        swept, after = swept + len(dues), dues[-1].child
        pay(database, flush, _pay(database, flush, dues))


def _pay(database: Database, flush: Flush, dues: Sequence[Due]) -> list[int]:
    """Returns the parents that ended with it and owe something themselves."""
    if not dues:
        return []
    try:
        flushed = flush([unit for due in dues for unit in nested.payment(due).chunks()])
    except errors.CoreError as error:
        if len(dues) == 1:
            log.warning("parent_left_to_the_sweep", child=dues[0].child, item=str(dues[0].item), error=str(error))
            return []
        # One stuck parent must not keep the others waiting.
        return [parent for due in dues for parent in _pay(database, flush, [due])]
    database.write(lambda tx: nested.strike_out(tx, dues), repeatable=True)
    return flushed.owing
