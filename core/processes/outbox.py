"""The outbox: the commands of process managers, each issued once, in the feed's order.

A command's id is derived from its process, instance and step, so a command that is computed again has the same id and
is a repeat. The transaction that issues a command also appends it to the feed, and the command has that event's
position. So commands can be delivered by webhooks or pulled, in commit order (see `feed`).

A step that *another* event issues again is an error of the function (`errors.StepReused`): as a repeat, its command
would be lost, though the function wants another one. So each row has the event that issued it; neither the inbox nor
the feed keep it for as long. A command may ask for the step to be issued once, whichever event does it.

The id of an issued command is kept as long as its instance; their rows are removed together. If the process is deleted,
it is kept as long as the feed has the command's event (`retention`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed
from core.storage import dialects, limits, tables
from core.storage.statements import Pipeline, as_text, inserts

NAMESPACE: Final = uuid.UUID("6b1a5b0e-6c1f-5d0b-9a53-0d2a3a2c7b11")
"""The namespace of command ids. Arbitrary, but it must never change."""

LONGEST_STEP: Final = 255
"""Maximum characters of a step."""

_outbox = tables.outbox.c


@dataclass(frozen=True, slots=True)
class NewCommand:
    """A command to be issued. `data` is JSON as text. `once`: if its step was issued before, it is a repeat, whichever
    event issued it."""

    step: str
    type: str
    data: str | None = None
    once: bool = False


class _New(NamedTuple):
    """A command that was not issued before, and the event that issues it."""

    process: str
    instance: str
    event: str
    command: NewCommand


class Issue(NamedTuple):
    """A command that is issued, and may not have a position yet."""

    id: str
    step: str
    repeated: bool


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


def step_of(type: str, number: int, event: str) -> str:
    """The step of a command without a step of its own: the `number`th one of this type that the event issues. Neither
    types nor ids of events have blanks, so no other command has it."""
    step = f"{type} {number} {event}"
    return step if len(step) <= LONGEST_STEP else f"{type} {number} {uuid.uuid5(NAMESPACE, event)}"


class Issues:
    """Commands of locked instances, issued in one transaction: `issue` in memory first, and `write` stores those that
    were not issued before. No other transaction issues commands of these instances. `ids` are those of all commands."""

    def __init__(self, pipeline: Pipeline, ids: Collection[str]) -> None:
        self._pipeline = pipeline
        literal = dialects.of(pipeline.tx).literal
        self._issued = pipeline.query_keys(
            ids,
            lambda part: (
                "SELECT command_id, position, event_id FROM outbox "  # noqa: S608
                f"WHERE command_id IN ({','.join(map(literal, part))})"
            ),
        )
        self._positions: dict[str, int] = {}
        self._issuers: dict[str, str | None] = {}
        """The events that issued the commands, by the commands' ids. Earlier releases didn't store them: None."""
        self._new: dict[str, _New] = {}

    def load(self) -> None:
        """Take what the round trip has read."""
        for id, position, event in self._issued.rows():
            command = as_text(id) or ""
            self._positions[command], self._issuers[command] = position, as_text(event)

    def issue(self, process: str, instance: str, event: str, commands: Sequence[NewCommand]) -> list[Issue]:
        """Issue the commands that were not issued before. Raises `errors.StepReused`, and then issues none of them."""
        issues: list[Issue] = []
        new: dict[str, _New] = {}
        for place, command in enumerate(commands):
            id = command_id(process, instance, command.step)
            issuer = event if id in new else self._issuers.get(id)
            # A process that was defined again may get the same event again.
            if issuer is not None and not command.once and (issuer != event or id in new):
                raise errors.StepReused(f"body.commands[{place}].step", command.step, issuer, event)
            is_repeat = id in new or id in self._issuers
            if not is_repeat:
                new[id] = _New(process, instance, event, command)
            issues.append(Issue(id, command.step, is_repeat))
        self._new |= new
        self._issuers |= dict.fromkeys(new, event)
        return issues

    def events(self) -> list[feed.NewEvent]:
        """The events of the new commands."""
        return [_event(id, new) for id, new in self._new.items()]

    def write(self, position: int, now: datetime) -> None:
        """Store the new commands. Their events have the positions above `position`."""
        dialect, rows = dialects.of(self._pipeline.tx), []
        for place, (id, (process, instance, event, command)) in enumerate(self._new.items(), position + 1):
            self._positions[id] = place
            rows.append(
                dialect.row((id, place, process, instance, command.step, command.type, command.data, now, event))
            )
        columns = "command_id, position, name, instance, step, type, data, created_at, event_id"
        self._pipeline.later(*inserts("outbox", columns, rows))

    def issued(self, issue: Issue) -> Issued:
        """The issued command with its position. Call it after `write`."""
        return Issued(issue.id, issue.step, self._positions[issue.id], issue.repeated)


def _event(id: str, new: _New) -> feed.NewEvent:
    command = new.command
    facts = {"command": id, "process": new.process, "instance": new.instance, "step": command.step}
    head = json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
    data = f'{head[:-1]},"data":{command.data or "null"}}}'
    return feed.NewEvent(f"{feed.COMMAND}:{id}", f"{feed.COMMAND}.{command.type}", new.instance, data)


def read(
    snapshot: Connection, after: int, limit: int, *, types: Sequence[str] = (), process: str | None = None
) -> CommandPage:
    """Commands after the position `after`; with 0, all commands whose events are in the feed. `snapshot` must be a
    snapshot, so that trimmed events don't look like a gap. A page with a filter examines at most `feed.EXAMINED`
    positions of the feed. Raises `errors.PositionTrimmed`, `errors.InvalidRequest` for a position beyond the feed's
    end."""
    last, trimmed = feed.head(snapshot), feed.trimmed(snapshot)
    if 0 < after < trimmed:
        raise errors.PositionTrimmed(after, trimmed)
    if after > last:
        raise errors.InvalidRequest("query.after", f"expected at most {last}, the feed's last position")
    begin, end = max(after, trimmed), last
    query = sa.select(tables.outbox).order_by(_outbox.position)
    if types or process is not None:
        end = min(last, begin + feed.EXAMINED)
        query = query.where(_outbox.position <= end)
    if types:
        query = query.where(_outbox.type.in_(types))
    if process is not None:
        query = query.where(_outbox.name == process)

    def above(before: Command | None, count: int) -> list[Command]:
        start = begin if before is None else before.position
        return [_command(row) for row in snapshot.execute(query.where(_outbox.position > start).limit(count))]

    rows = limits.stepwise(above, _size, limit, first=feed.STEP)
    commands, is_cut = limits.within(rows, _size, limit)
    return CommandPage(commands, commands[-1].position if is_cut else end, last)


def _size(command: Command) -> int:
    return limits.size_of_json(command.data)


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
