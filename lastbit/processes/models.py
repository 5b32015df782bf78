"""The service's answers about processes, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from lastbit._shapes import timestamp, timestamp_or_none
from lastbit.models import Json


@dataclass(frozen=True, slots=True)
class Definition:
    """A process. `group` is the consumer group of its workers, who begin above the position `after` where a partition
    has none of its own yet."""

    name: str
    group: str
    partitions: int
    after: int
    created_at: datetime

    @classmethod
    def _fields(cls, data: Json) -> dict[str, Any]:
        fields = {name: data[name] for name in ("name", "group", "partitions", "after")}
        return {**fields, "created_at": timestamp(data["created_at"])}

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data))


@dataclass(frozen=True, slots=True)
class ProcessSummary(Definition):
    """A process with the numbers of its instances that are `running` and `finished`, of its `parked` events and its
    `timers`; all events up to the position `floor` were handled."""

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
    """An instance; `status` is `running` or `finished`, `version` goes up with every event that was handled, and
    `parked` counts the events whose handler failed."""

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
    """An event that came to an instance, and what became of it: `handled`, `parked`, `retrying` or `late`."""

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
    """A command that was issued. Its `id` is made of process, instance and step: whoever acts on it does so once."""

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
    """Commands in the order of the feed. `next`: where to go on after; `last`: the feed's last position."""

    commands: tuple[IssuedCommand, ...]
    next: int
    last: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(tuple(map(IssuedCommand.from_json, data["commands"])), data["next"], data["last"])


@dataclass(frozen=True, slots=True)
class InstanceDetails(Instance):
    """An instance with the newest events that came to it and commands that it issued, newest first, and its timers."""

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
    """A command of a `handle` call; `repeated`: it had been issued before."""

    id: str
    step: str
    position: int
    repeated: bool

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["id"], data["step"], data["position"], data["repeated"])


@dataclass(frozen=True, slots=True)
class Handled:
    """The outcome of an event, as in `Received.status`. `repeated`: it had this outcome before the call. `instance` is
    None where the event came so long ago that nothing is known of it but that."""

    status: str
    repeated: bool
    instance: Instance | None
    commands: tuple[Issued, ...]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        instance = None if data["instance"] is None else Instance.from_json(data["instance"])
        return cls(data["status"], data["repeated"], instance, tuple(map(Issued.from_json, data["commands"])))
