"""Forgetting the instances of processes that ended long ago, with what they issued: tables must not only grow.

A tombstone makes late events late; without it one would begin the instance anew, and what was issued could be issued
again. An instance goes when it ended longer than `keep` ago. What could go wrong then, and why it can't:

* *An event that came in time is still to be handled*, as no worker was there: the tombstone stays until all partitions
  have handled whatever was appended within `keep` of the end. The feed keeps events until then.
* *An event is read again*: its row in the inbox, or `pruned`, says that it is a repeat, before anybody looks for the
  instance.
* *A parked event is handled again*: while there is one its instance stays.
* *A command is still to be pulled*, or to be issued again while its event has its id in the feed: the outbox's rows go
  with their instance, and it stays until the feed was trimmed past the last of them.

So what bounds it is `keep`: an event that is appended longer than that after the end begins the instance anew.

A process that is deleted loses its instances at once, and its commands later: until the feed was trimmed past them they
can still be pulled, and a process that is defined again reads the events that led to them, and must not issue them
again.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import feed, tables
from core.processes import definitions, inbox
from core.processes.instances import Status
from core.storage.database import Database
from core.storage.statements import LIST

CHUNK: Final = LIST
"""Instances that one transaction removes."""
UNSETTLED: Final = (inbox.Status.PARKED, inbox.Status.RETRYING)

_processes = tables.processes.c
_inbox = tables.inbox.c
_outbox = tables.outbox.c
_feed = tables.feed.c


def forget(database: Database, keep: timedelta) -> int:
    """Remove the instances that ended longer than `keep` ago; how many."""
    removed = 0
    for process in database.read(definitions.all_of):
        ended_by = database.snapshot(_handled_until, process) - keep
        removed += database.write_in_chunks(_remove, process.name, ended_by)
    return removed


def forget_orphans(database: Database) -> int:
    """Remove the commands whose events are gone from the feed and whose instances went with their process; how many."""
    removed = 0
    after: int | None = 0
    while after is not None:
        after, chunk = database.write(_remove_orphans, after, repeatable=True)
        removed += chunk
    return removed


def _remove_orphans(tx: Connection, after: int) -> tuple[int | None, int]:
    """Among a chunk of the commands above the position `after`. Where the next chunk begins, or None at the end, and
    how many were removed."""
    this = sa.and_(_processes.name == _outbox.name, _processes.instance == _outbox.instance)
    query = (
        sa.select(_outbox.position, _outbox.command_id, _processes.instance)
        .join_from(tables.outbox, tables.processes, this, isouter=True)
        .where(_outbox.position > after, _outbox.position <= _gone(tx))
        .order_by(_outbox.position)
        .limit(CHUNK)
    )
    rows = tx.execute(query).all()
    orphans = sorted(row.command_id for row in rows if row.instance is None)
    if orphans:
        tx.execute(sa.delete(tables.outbox).where(_outbox.command_id.in_(orphans)))
    return rows[-1].position if len(rows) == CHUNK else None, len(orphans)


def _gone(tx: Connection) -> int:
    """The position up to which the feed has no events any more, with their ids: a pass that trims it says first how far
    it will go, and then goes."""
    first: int | None = tx.scalar(sa.select(sa.func.min(_feed.position)))
    trimmed = feed.trimmed(tx)
    return trimmed if first is None else min(trimmed, first - 1)


def _handled_until(tx: Connection, process: definitions.Definition) -> datetime:
    """What was appended before that was handled."""
    above = _feed.position > definitions.floor(tx, process)
    first = sa.select(_feed.appended_at).where(above).order_by(_feed.position).limit(1)
    until: datetime | None = tx.scalar(first) or tx.scalar(sa.select(tables.utc_now()))
    assert until is not None
    return until


def _remove(tx: Connection, name: str, ended_by: datetime) -> int:
    """A chunk. Nothing happens to a finished instance any more, so it need not be locked."""
    unsettled = sa.exists().where(
        _inbox.name == name, _inbox.instance == _processes.instance, _inbox.status.in_(UNSETTLED)
    )
    in_the_feed = sa.exists().where(
        _outbox.name == name, _outbox.instance == _processes.instance, _outbox.position > _gone(tx)
    )
    these = (_processes.name == name, _processes.status == Status.FINISHED, _processes.finished_at < ended_by)
    query = sa.select(_processes.instance).where(*these, ~unsettled, ~in_the_feed)
    found = tx.scalars(query.order_by(_processes.instance).limit(CHUNK)).all()
    if found:
        tx.execute(sa.delete(tables.processes).where(_processes.name == name, _processes.instance.in_(found)))
        tx.execute(sa.delete(tables.outbox).where(_outbox.name == name, _outbox.instance.in_(found)))
    return len(found)
