"""Descendants: what the end of a batch, and its return, mean for the batches below it, at any depth.

A batch that is cancelled with its children, that expires, or that its failures cancel, ends its live descendants: they
become cancelled. A batch that is live again brings back those that its end has ended. Its other children, which ended
while it took no acks, resolve their items now. Neither fits into one transaction, as there may be a million children.
So the transaction that ends or reopens the batch writes a *duty* to its row (`children_due`). It is done in pages of
children, by the item that they stand for, and `children_told` is how far. Each page is a transaction that locks the
batch and then its children. A child that must pass it on gets a duty itself, in that transaction. After a crash, a
sweep continues.

What could go wrong, and why it can't:

*A child is opened in the meantime.* An open of a child locks the row of the parent, and is refused if the parent has
ended. The same holds one level below: a child that hasn't been reached yet takes children until it ends, and the pages
of its own children begin after that.

*The batch is reopened in the meantime.* That overwrites the duty, under the lock that each page holds.

*An ended child has live children*, since it was cancelled without them: it passes the duty on, and stays as it is.

*A child is locked by another session.* After a short wait it is passed over. `children_told` stays below it, so the
next sweep tries again.

*Pointless debts.* A child that ends here owes its parent nothing: the parent takes no acks.

*Two sweeps do the same.* The second one finds that the children have ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed
from core.batches import batch as batches
from core.batches import reopen
from core.batches.batch import Batch
from core.batches.lifecycle import LIVE, TERMINAL, Duty, State, is_overdue
from core.batches.settle import owed
from core.bits import items
from core.storage import dialects, statements, tables
from core.storage.database import Database
from core.storage.statements import Pipeline
from lastbit.ids import ItemId

PAGE: Final = 100
"""Children of one transaction. The event of each has its labels and the reason."""
LOCK_WAIT: Final = 0.1
"""Seconds that a page waits for a lock."""
PATIENCE: Final = 3.0
"""Seconds that a call waits for the end of the descendants. The rest is left to the sweep."""

_batches = tables.batches.c


@dataclass(slots=True)
class Done:
    """What was done: how many batches ended, which ones owe their parent's item an ack or a failure again, and which
    duties are left because of locked rows."""

    ended: int = 0
    owing: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Page:
    """`next_start` is the number of the item where the next page starts, None at the end; `passed_on` are the children
    with a duty now; `has_skipped` tells whether one was passed over."""

    next_start: int | None = None
    ended: int = 0
    owing: Sequence[int] = ()
    passed_on: Sequence[int] = ()
    has_skipped: bool = False


def settle(database: Database, parents: Iterable[int], *, seconds: float | None = None) -> Done:
    """Do the duties of these batches and those that follow below, for about `seconds` at most. Raises
    `errors.Unavailable`."""
    until = None if seconds is None else time.monotonic() + seconds
    result = Done()
    waiting = deque(parents)
    while waiting:
        parent = waiting.popleft()
        start: int | None = None
        has_skipped = False
        while True:
            if until is not None and time.monotonic() >= until:
                result.left += [parent, *waiting]
                return result
            try:
                page = _do_page(database, parent, start, has_skipped)
            except errors.LockTimeout:
                result.left.append(parent)
                break
            result.ended += page.ended
            result.owing += page.owing
            waiting += page.passed_on
            has_skipped = has_skipped or page.has_skipped
            start = page.next_start
            if start is None:
                result.left += [parent] if has_skipped else []
                break
    return result


def sweep(database: Database, *, seconds: float | None = None) -> Done:
    """Do all duties, for about `seconds` at most. Raises `errors.Unavailable`."""
    result = Done()
    until = None if seconds is None else time.monotonic() + seconds
    for parents in _duties(database):
        page_result = settle(database, parents, seconds=None if until is None else until - time.monotonic())
        result.ended += page_result.ended
        result.owing += page_result.owing
        result.left += page_result.left
        if until is not None and time.monotonic() >= until:
            break
    return result


def _duties(database: Database) -> Iterator[Sequence[int]]:
    """Pages of the batches with a duty, by id."""
    after = 0
    while True:
        # As for debts (see `nesting.debts`), by the index of the few rows.
        id = tables.without_index(_batches.id)
        query = sa.select(_batches.id).where(_batches.children_due > "", id > after).order_by(id).limit(PAGE)
        parents = database.read(lambda tx, query=query: tx.scalars(query).all())  # type: ignore[misc]
        if parents:
            yield parents
        if len(parents) < PAGE:
            return
        after = parents[-1]


def _do_page(database: Database, parent: int, start: int | None, has_skipped: bool) -> _Page:
    arguments = parent, start, has_skipped
    try:
        return database.write(_page, *arguments, False, lock_waits=0, lock_wait=LOCK_WAIT)
    except errors.LockTimeout:
        return database.write(_page, *arguments, True, lock_waits=0, lock_wait=LOCK_WAIT)


def _page(tx: Connection, parent_id: int, start: int | None, has_skipped: bool, skip_locked: bool) -> _Page:
    """One page of the batch's children, from the item `start` on; None: from where the last sweep came to.
    `has_skipped`: an earlier page has passed over a child."""
    parent = batches.lock_all(tx, [parent_id]).get(parent_id)
    if parent is None or parent.children_due is None:
        return _Page()
    start = parent.children_told if start is None else start
    columns = ("id", "parent_number", "state", "children", "parent_due", "ended_by")
    query = sa.select(*(_batches[name] for name in columns)).where(
        _batches.parent_batch == parent_id, _batches.parent_number >= start
    )
    rows = tx.execute(query.order_by(_batches.parent_number).limit(PAGE)).all()
    next_start = rows[-1].parent_number + 1 if len(rows) == PAGE else None
    if parent.children_due is Duty.END:
        child_ids = {row.id for row in rows if row.state in LIVE or (row.children and row.state in TERMINAL)}
    else:
        ended_rows = [row for row in rows if row.state in TERMINAL and parent.state in LIVE]
        child_ids = {row.id for row in ended_rows if row.ended_by is not None}
        child_ids |= _unresolved(tx, parent, [row for row in ended_rows if not row.parent_due])
    children = list(batches.lock_all(tx, child_ids, skip_locked=skip_locked).values()) if child_ids else []
    has_skipped = has_skipped or len(children) < len(child_ids)
    told_parent = parent
    if not has_skipped:
        is_last = next_start is None
        told_parent = replace(
            parent, children_due=None if is_last else parent.children_due, children_told=next_start or 0
        )
    result = _Page(next_start, has_skipped=has_skipped)
    if parent.children_due is Duty.END:
        return _end(tx, parent, told_parent, children, result)
    return _revive(tx, parent, told_parent, children, result)


def _end(tx: Connection, parent: Batch, told_parent: Batch, children: Sequence[Batch], page: _Page) -> _Page:
    """End those children that are live; all pass it on that have children."""
    ancestor = parent.id if parent.ended_by is None else parent.ended_by
    now = tables.clock(tx)
    changes = [(parent, told_parent)]
    events: list[feed.NewEvent] = []
    passed_on = []
    end_count = 0
    for child in children:
        if child.state in LIVE:
            end_count += 1
            result, news = batches.ending(child, State.CANCELLED, now, reason=parent.reason, ended_by=ancestor)
            changes.append((child, replace(result, parent_due=None)))
            events += news
        elif child.children:
            changes.append((child, replace(child, children_due=Duty.END, children_told=0)))
        if child.children:
            passed_on.append(child.id)
    statements.run(tx, *batches.ROWS.updates(dialects.of(tx), changes))
    feed.append(tx, events)
    return replace(page, ended=end_count, passed_on=passed_on)


def _revive(tx: Connection, parent: Batch, told_parent: Batch, children: Sequence[Batch], page: _Page) -> _Page:
    """Bring back those children that the end of a batch above them has ended, and write their debts to the others."""
    now = tables.clock(tx)
    changes = [(parent, told_parent)]
    events: list[feed.NewEvent] = []
    owing, passed_on = [], []
    for child in children:
        if child.ended_by is not None and not is_overdue(State.OPEN, child.deadline, now=now):
            result, news = reopen.revived(tx, child, now)
            changes.append((child, result))
            events += news
            passed_on.append(child.id)
        elif child.state in TERMINAL and child.parent_due is None:
            changes.append((child, replace(child, parent_due=owed(succeeded=child.succeeded))))
            owing.append(child.id)
    statements.run(tx, *batches.ROWS.updates(dialects.of(tx), changes))
    feed.append(tx, events)
    return replace(page, owing=owing, passed_on=passed_on)


def _unresolved(tx: Connection, parent: Batch, rows: Sequence[Any]) -> set[int]:
    """Those of the children (rows) whose item is pending. The parent's row is locked."""
    child_items = {row.id: ItemId(parent.id, *divmod(row.parent_number, parent.group_size)) for row in rows}
    pipeline = Pipeline(tx)
    asked = items.ask(pipeline, child_items.values())
    resolved = items.resolved(pipeline, asked, {parent.id: parent}, child_items.values())
    return {child for child, item in child_items.items() if item not in resolved}
