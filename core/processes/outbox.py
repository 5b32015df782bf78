"""The outbox: the commands of process managers, each issued once, in the feed's order.

A command's id is derived from its process, instance and step, so a command that is computed again has the same id and
is a repeat. The transaction that issues a command also appends it to the feed, and the command has that event's
position. So commands can be delivered by webhooks or pulled, in commit order (see `feed`).

The id of an issued command is kept as long as its instance; their rows are removed together. If the process is deleted,
it is kept as long as the feed has the command's event (`retention`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed, tables
from core.storage import limits
from core.storage.statements import LIST, chunks

NAMESPACE: Final = uuid.UUID("6b1a5b0e-6c1f-5d0b-9a53-0d2a3a2c7b11")
"""The namespace of command ids. Arbitrary, but it must never change."""

_outbox = tables.outbox.c


@dataclass(frozen=True, slots=True)
class NewCommand:
    """A command to be issued. `data` is JSON as text."""

    step: str
    type: str
    data: str | None = None


@dataclass(frozen=True, slots=True)
class Issued:
    """An issued command and its position. `repeated`: an earlier call issued it."""

    id: str
    step: str
    position: int
    repeated: bool


@dataclass(frozen=True, slots=True)
class Command:
    """A command that was issued."""

    id: str
    position: int
    process: str
    instance: str
    step: str
    type: str
    data: str | None
    at: datetime


@dataclass(frozen=True, slots=True)
class CommandPage:
    """Commands in ascending order. `next` and `last` are as in `feed.EventPage`."""

    commands: list[Command]
    next: int
    last: int


def command_id(process: str, instance: str, step: str) -> str:
    # JSON gives different triples different texts.
    return str(uuid.uuid5(NAMESPACE, json.dumps([process, instance, step])))


def issue(tx: Connection, process: str, instance: str, commands: Sequence[NewCommand]) -> list[Issued]:
    """Issue the commands that were not issued before, and return the position of each command. Locks the feed's head.
    The instance is already locked, so no other transaction issues the same commands."""
    ids = {command.step: command_id(process, instance, command.step) for command in commands}
    positions: dict[str, int] = {}
    for part in chunks(sorted(ids.values()), LIST):
        rows_found = tx.execute(sa.select(_outbox.command_id, _outbox.position).where(_outbox.command_id.in_(part)))
        positions |= {row.command_id: row.position for row in rows_found}
    fresh: dict[str, NewCommand] = {}
    for command in commands:
        if ids[command.step] not in positions:
            fresh.setdefault(ids[command.step], command)
    events = [_event(id, process, instance, command) for id, command in fresh.items()]
    new = dict(zip(fresh, feed.append(tx, events), strict=True))
    if fresh:
        rows = [
            {
                "command_id": id,
                "position": new[id],
                "name": process,
                "instance": instance,
                "step": command.step,
                "type": command.type,
                "data": command.data,
            }
            for id, command in fresh.items()
        ]
        tx.execute(sa.insert(tables.outbox).values(created_at=tables.utc_now()), rows)
    issued: list[Issued] = []
    for command in commands:
        id = ids[command.step]
        issued.append(Issued(id, command.step, positions.get(id) or new[id], repeated=id in positions))
        positions.setdefault(id, new.get(id, 0))
    return issued


def _event(id: str, process: str, instance: str, command: NewCommand) -> feed.NewEvent:
    facts = {"command": id, "process": process, "instance": instance, "step": command.step}
    head = json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
    data = f'{head[:-1]},"data":{command.data or "null"}}}'
    return feed.NewEvent(f"{feed.COMMAND}:{id}", f"{feed.COMMAND}.{command.type}", instance, data)


def read(
    snapshot: Connection, after: int, limit: int, *, types: Sequence[str] = (), process: str | None = None
) -> CommandPage:
    """Commands after the position `after`; with 0, all commands whose events are in the feed. `snapshot` must be a
    snapshot, so that trimmed events don't look like a gap. Raises `errors.PositionTrimmed`, `errors.InvalidRequest` for
    a position beyond the feed's end."""
    last, trimmed = feed.head(snapshot), feed.trimmed(snapshot)
    if 0 < after < trimmed:
        raise errors.PositionTrimmed(after, trimmed)
    if after > last:
        raise errors.InvalidRequest("query.after", f"expected at most {last}, the feed's last position")
    query = sa.select(tables.outbox).order_by(_outbox.position)
    if types:
        query = query.where(_outbox.type.in_(types))
    if process is not None:
        query = query.where(_outbox.name == process)

    def above(before: Command | None, count: int) -> list[Command]:
        start = max(after, trimmed) if before is None else before.position
        return [_command(row) for row in snapshot.execute(query.where(_outbox.position > start).limit(count))]

    rows = limits.stepwise(above, _size, first=min(limit, feed.FIRST))
    commands, is_cut = limits.within(rows, _size, limit)
    return CommandPage(commands, commands[-1].position if is_cut else last, last)


def _size(command: Command) -> int:
    return len(command.data or "")


def of_instance(snapshot: Connection, process: str, instance: str, limit: int) -> list[Command]:
    """The newest commands of an instance, newest first."""
    query = (
        sa.select(tables.outbox)
        .where(_outbox.name == process, _outbox.instance == instance)
        .order_by(_outbox.position.desc())
        .limit(limit)
    )
    return [_command(row) for row in snapshot.execute(query)]


def _command(row: Any) -> Command:
    return Command(
        *(row.command_id, row.position, row.name, row.instance, row.step, row.type, row.data, row.created_at)
    )
