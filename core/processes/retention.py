"""Removes instances of processes that finished long ago, with their commands, so that tables don't grow without limit.

A finished instance stays as a tombstone, by which late events are recognized. Without it, a late event would start the
instance again, and commands could be issued again. A tombstone is removed `keep` after the instance finished. Possible
failures, and why they can't happen:

* *An event that was appended in time isn't handled yet*, because no worker was running: the tombstone stays until all
  partitions have handled the events appended within `keep` of the end. The feed keeps these events until then. If there
  are no such events, the feed is held while the clock is read, so that none is being appended with an earlier time.
* *An event is read again*: its inbox row, or `pruned`, shows that it is a repeat before the instance is looked up.
* *A parked event is retried*: an instance with parked events is not removed.
* *A command isn't pulled yet*, or is issued again while the feed has an event with its id: outbox rows are removed
  together with their instance, and the instance stays until the feed was trimmed past the last of them.
* *Another janitor has removed the instance, and a late event has started it again*: an instance is locked, and judged
  again, before it is removed.

So an event that is appended more than `keep` after the end starts the instance again.

When a process is deleted, its instances are removed at once, but its commands only after the feed was trimmed past
them. Until then the commands can be read. And if the process is defined again, it reads the events that led to these
commands, and must not issue them again.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import feed
from core.processes import definitions, inbox
from core.processes.instances import Status
from core.storage import tables
from core.storage.database import Database
from core.storage.statements import LIST

CHUNK: Final = LIST
"""Instances that are removed in one transaction."""
SCAN: Final = 10_000
"""Finished instances among which one transaction looks for old ones. No index has the times, so a search among all
would take long, and each chunk would begin it again."""
UNSETTLED: Final = (inbox.Status.PARKED, inbox.Status.RETRYING)

_processes = tables.processes.c
_inbox = tables.inbox.c
_outbox = tables.outbox.c
_feed = tables.feed.c


def forget(database: Database, keep: timedelta) -> int:
    """Remove the instances that finished longer than `keep` ago. Return the number of instances."""
    count = 0
    for process in database.read(definitions.all_of):
        ended_by = database.write(_handled_until, process) - keep
        end: str | None = ""
        while end is not None:
            start, end = end, database.read(_last_of_scan, process.name, end)
            count += database.write_in_chunks(_remove, process.name, ended_by, start, end)
    return count


def forget_orphans(database: Database) -> int:
    """Remove the commands whose events were trimmed and whose instances were removed with their process. Return the
    number of commands."""
    count = 0
    after: int | None = 0
    while after is not None:
        after, chunk = database.write(_remove_orphans, after)
        count += chunk
    return count


def _remove_orphans(tx: Connection, after: int) -> tuple[int | None, int]:
    """Remove the orphans in a chunk of commands after the position `after`. Return the `after` of the next chunk (None
    at the end), and the number of removed commands."""
    same_instance = sa.and_(_processes.name == _outbox.name, _processes.instance == _outbox.instance)
    query = (
        sa.select(_outbox.position, _outbox.command_id, _processes.instance)
        .join_from(tables.outbox, tables.processes, same_instance, isouter=True)
        .where(_outbox.position > after, _outbox.position <= _gone(tx))
        .order_by(_outbox.position)
        .limit(CHUNK)
    )
    rows = tx.execute(query).all()
    orphans = sorted(row.command_id for row in rows if row.instance is None)
    if orphans:
        # A command that was issued again since then has a later position.
        same_rows = _outbox.command_id.in_(orphans), _outbox.position <= rows[-1].position
        tx.execute(sa.delete(tables.outbox).where(*same_rows))
    return rows[-1].position if len(rows) == CHUNK else None, len(orphans)


def _gone(tx: Connection) -> int:
    """The position up to which events were removed. `trimmed` may be higher for a while, because it is committed before
    the removal."""
    first: int | None = tx.scalar(sa.select(sa.func.min(_feed.position)))
    trimmed = feed.trimmed(tx)
    return trimmed if first is None else min(trimmed, first - 1)


def _handled_until(tx: Connection, process: definitions.Definition) -> datetime:
    """The time before which all appended events were handled."""
    feed.hold(tx)
    not_handled = _feed.position > definitions.floor(tx, process)
    first = sa.select(_feed.appended_at).where(not_handled).order_by(_feed.position).limit(1)
    until: datetime | None = tx.scalar(first) or tx.scalar(sa.select(tables.utc_now()))
    assert until is not None
    return until


def _last_of_scan(tx: Connection, name: str, start: str) -> str | None:
    """The last of the next `SCAN` finished instances after `start`; None if there are fewer."""
    finished = _processes.name == name, _processes.status == Status.FINISHED, _processes.instance > start
    query = sa.select(_processes.instance).where(*finished).order_by(_processes.instance)
    return tx.scalar(query.offset(SCAN - 1).limit(1))


def _remove(tx: Connection, name: str, ended_by: datetime, start: str, end: str | None) -> int:
    """Remove a chunk of the instances after `start` and up to `end` (None: all). Return the number of instances; 0 also
    if another janitor has just removed the chunk."""
    unsettled = sa.exists().where(
        _inbox.name == name, _inbox.instance == _processes.instance, _inbox.status.in_(UNSETTLED)
    )
    in_the_feed = sa.exists().where(
        _outbox.name == name, _outbox.instance == _processes.instance, _outbox.position > _gone(tx)
    )
    has_ended = (_processes.name == name, _processes.status == Status.FINISHED, _processes.finished_at < ended_by)
    query = sa.select(_processes.instance).order_by(_processes.instance)
    scanned = _processes.instance > start, *(() if end is None else (_processes.instance <= end,))
    candidates = tx.scalars(query.where(*has_ended, *scanned, ~unsettled, ~in_the_feed).limit(CHUNK)).all()
    # A finished instance only becomes more settled, but one that was started again is not finished.
    locking = query.where(_processes.instance.in_(candidates), *has_ended).with_for_update()
    chunk = tx.scalars(locking).all() if candidates else []
    if chunk:
        tx.execute(sa.delete(tables.processes).where(_processes.name == name, _processes.instance.in_(chunk)))
        tx.execute(sa.delete(tables.outbox).where(_outbox.name == name, _outbox.instance.in_(chunk)))
    return len(chunk)
