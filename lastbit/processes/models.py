"""The service's responses about processes, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from lastbit._shapes import timestamp, timestamp_or_none
from lastbit.models import Json


@dataclass(frozen=True, slots=True)
class Definition:
    """A process. `group` is the consumer group of its workers. In a partition without a committed position, they begin
    after the position `after`. Up to the position `unnamed_upto`, `unnamed` events of its types named no instance."""

    name: str
    group: str
    partitions: int
    after: int
    created_at: datetime
    unnamed: int
    unnamed_upto: int

    @classmethod
    def _fields(cls, data: Json) -> dict[str, Any]:
        fields = {name: data[name] for name in ("name", "group", "partitions", "after")}
        fields |= {name: data.get(name, 0) for name in ("unnamed", "unnamed_upto")}  # an earlier release has none
        return {**fields, "created_at": timestamp(data["created_at"])}

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data))


@dataclass(frozen=True, slots=True)
class ProcessSummary(Definition):
    """A process with the numbers of its `running` and `finished` instances, of its `parked` events and of its `timers`.
    All events up to the position `floor` were handled."""

    running: int
    finished: int
    parked: int
    timers: int
    floor: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        counts = {name: data[name] for name in ("running", "finished", "parked", "timers", "floor")}
        return cls(**cls._fields(data), **counts)


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance. `status` is `running` or `finished`. `version` increases with every handled event. `parked` is the
    number of events whose handler failed."""

    process: str
    instance: str
    status: str
    version: int
    state: Any
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    parked: int

    @classmethod
    def _fields(cls, data: Json) -> dict[str, Any]:
        fields = {name: data[name] for name in ("process", "instance", "status", "version", "state", "parked")}
        times = {"created_at": timestamp(data["created_at"]), "updated_at": timestamp(data["updated_at"])}
        return {**fields, **times, "finished_at": timestamp_or_none(data["finished_at"])}

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data))


@dataclass(frozen=True, slots=True)
class Received:
    """An event of an instance, with its status: `handled`, `parked`, `retrying` or `late`."""

    event: str
    position: int
    status: str
    error: str | None
    at: datetime

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["event"], data["position"], data["status"], data["error"], timestamp(data["at"]))


@dataclass(frozen=True, slots=True)
class PendingTimer:
    timer: str
    due_at: datetime
    data: Any

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["timer"], timestamp(data["due_at"]), data["data"])


@dataclass(frozen=True, slots=True)
class IssuedCommand:
    """A command that was issued. Its `id` is derived from process, instance and step. Execute each id once."""

    id: str
    position: int
    process: str
    instance: str
    step: str
    type: str
    data: Any
    at: datetime

    @classmethod
    def from_json(cls, data: Json) -> Self:
        names = ("id", "position", "process", "instance", "step", "type", "data")
        return cls(**{name: data[name] for name in names}, at=timestamp(data["at"]))


@dataclass(frozen=True, slots=True)
class CommandPage:
    """Commands in the order of the feed. `next`: the position to continue after; `last`: the feed's last position. With
    a filter, a page may be empty while `next` is below `last`."""

    commands: tuple[IssuedCommand, ...]
    next: int
    last: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(tuple(map(IssuedCommand.from_json, data["commands"])), data["next"], data["last"])


@dataclass(frozen=True, slots=True)
class InstanceDetails(Instance):
    """An instance with its newest events and commands, newest first, and its timers."""

    history: tuple[Received, ...]
    timers: tuple[PendingTimer, ...]
    commands: tuple[IssuedCommand, ...]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(
            **cls._fields(data),
            history=tuple(map(Received.from_json, data["history"])),
            timers=tuple(map(PendingTimer.from_json, data["timers"])),
            commands=tuple(map(IssuedCommand.from_json, data["commands"])),
        )


@dataclass(frozen=True, slots=True)
class Issued:
    """A command of a `handle` call. `repeated`: an earlier call issued it."""

    id: str
    step: str
    position: int
    repeated: bool

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["id"], data["step"], data["position"], data["repeated"])


@dataclass(frozen=True, slots=True)
class Handled:
    """The status of an event, as in `Received.status`. `repeated`: it had this status before the call. `instance` is
    None if the service has removed the instance since."""

    status: str
    repeated: bool
    instance: Instance | None
    commands: tuple[Issued, ...]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        instance = None if data["instance"] is None else Instance.from_json(data["instance"])
        return cls(data["status"], data["repeated"], instance, tuple(map(Issued.from_json, data["commands"])))
