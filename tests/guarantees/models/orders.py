"""A process for the tests. It does what the SDK's workers do, but step by step: an order ships once its card is
charged, its items are reserved and its batch is complete."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from core import errors, feed
from core.consumer_groups.leases import Caller
from core.consumer_groups.positions import Fence
from core.processes import outbox, timers
from core.processes.instances import Handled, Handling
from core.service import Service
from lastbit.streams.partitions import partition_of
from lastbit.streams.snapshot import Snapshot

NEEDED = ("charged", "reserved", "complete")
PROCESS = "ship-order"
GROUP = f"process.{PROCESS}"
PARTITIONS = 4

sessions = itertools.count()


@dataclass
class Outcome:
    """The result of a process function for one event."""

    state: Any
    commands: list[outbox.NewCommand] = field(default_factory=list)
    timers: list[timers.TimerChange] = field(default_factory=list)
    finish: bool = False


Function = Callable[[Any, feed.Event], Outcome]


def ship(state: Any, event: feed.Event) -> Outcome:
    """Ship once all needed events have come, in any order; the state is the set of event types so far."""
    types = sorted({*(state or []), event.type})
    if set(NEEDED) <= set(types):
        return Outcome(types, [outbox.NewCommand("ship", "ship", json.dumps({"order": event.key}))], finish=True)
    return Outcome(types)


def ship_again_and_again(state: Any, event: feed.Event) -> Outcome:
    """Never finish, and issue the step again with each event after the last needed one, though once is enough."""
    outcome = ship(state, event)
    return Outcome(outcome.state, [replace(command, once=True) for command in outcome.commands])


def ship_in_time(state: Any, event: feed.Event) -> Outcome:
    """Cancel the order when its time-out fires."""
    if event.type == timers.event_type(PROCESS):
        return Outcome(state, [outbox.NewCommand("cancel", "cancel")], finish=True)
    outcome = ship(state, event)
    if state is None and not outcome.finish:
        outcome.timers = [timers.TimerChange("payment", timedelta(seconds=60))]
    return outcome


def poisoned(state: Any, event: feed.Event) -> Outcome:
    if event.type == "reserved":
        raise ValueError("no such item")
    return ship(state, event)


class Worker:
    """A worker that owns all partitions until another worker is created."""

    def __init__(self, service: Service, name: str = "w1", function: Function = ship, *, strict: bool = False) -> None:
        self.service = service
        self.strict = strict
        self.name = name
        self.function = function
        self.session = f"session-{next(sessions)}"
        service.processes.define(PROCESS, partitions=PARTITIONS)
        self.epochs = {
            partition.partition: partition.epoch
            for partition in service.consumer_groups.sync(GROUP, Caller(name, self.session)).assigned
        }
        assert len(self.epochs) == PARTITIONS

    def compute(self, instance: str, event: feed.Event) -> Handling:
        """Handle the event on the instance's current state, without storing the result."""
        try:
            before = self.service.processes.instance(PROCESS, instance).instance
            version, state = before.version, json.loads(before.state or "null")
        except errors.InstanceNotFound:
            version, state = 0, None
        epoch = self.epochs[partition_of(instance, PARTITIONS)]
        fence_values = (PROCESS, instance, event.id, event.position, self.name, epoch, version)
        try:
            outcome = self.function(state, event)
        except ValueError as error:
            return Handling(*fence_values, error=repr(error), strict=self.strict)
        effects = (json.dumps(outcome.state), outcome.commands, outcome.timers, outcome.finish)
        return Handling(*fence_values, *effects, strict=self.strict)

    def deliver(self, event: feed.Event, instance: str | None = None) -> Handled:
        """Handle the event and store the result; compute it again whenever another event changed the instance in
        between."""
        if event.type == f"{feed.RETRY}.{PROCESS}":
            inner = json.loads(event.data or "")
            parked = inner["event"]
            event = feed.Event(parked["position"], parked["id"], parked["type"], None, parked["key"], None, event.at)
            instance = inner["instance"]
        while True:
            try:
                return self.service.processes.handle(self.compute(instance or event.key or "", event))
            except errors.VersionConflict:
                continue

    def commit(self, partition: int, floor: int) -> None:
        self.service.consumer_groups.commit(
            Fence(GROUP, partition, self.name, self.epochs[partition]), Snapshot(floor, floor)
        )

    def leave(self) -> None:
        self.service.consumer_groups.leave(GROUP, self.name, self.session)


def append(service: Service, *events: tuple[str, str]) -> list[feed.Event]:
    """Append (instance, type) pairs; return the events as the feed stores them."""
    positions = service.feed.append([feed.NewEvent(f"{key}:{type}", type, key) for key, type in events])
    events_by_position = {event.position: event for event in everything(service)}
    return [events_by_position[position.position] for position in positions]


def everything(service: Service) -> list[feed.Event]:
    events: list[feed.Event] = []
    after: int | None = None
    while True:
        page = service.feed.read(after, 1000)
        events += page.events
        if page.next == page.last:
            return events
        after = page.next


def commands(service: Service) -> list[tuple[str, str]]:
    """The (instance, type) pair of each issued command; each must also be in the feed at its position."""
    issued = service.processes.commands(0, 1000).commands
    events_by_position = {event.position: event for event in everything(service)}
    for command in issued:
        event = events_by_position[command.position]
        assert (event.id, event.type) == (f"command:{command.id}", f"command.{command.type}")
    assert sum(event.type.startswith("command.") for event in events_by_position.values()) == len(issued)
    return [(command.instance, command.type) for command in issued]


def run(service: Service, request: dict[str, Any]) -> None:
    """Run a handling, given as a dictionary, in a process that dies at some point of it (see `dying`)."""
    arguments = dict(request["handling"])
    issued = [outbox.NewCommand(**command) for command in arguments.pop("commands")]
    service.processes.handle(Handling(**arguments | {"commands": issued}))
