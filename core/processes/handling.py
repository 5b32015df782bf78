"""Applying handlings: many, of one instance or of many, in one transaction with few statements.

A pure function in a worker computes the effects of an event on an instance. They are written here in one transaction:
fence → inbox → instance → timers → commands into the outbox and the feed. One round trip locks all rows in this order.
Then the handlings are judged one by one, in the order of their arrival, each by the state that the ones before it left.
A refused handling changes nothing and doesn't affect the others. At the end, one statement for each kind of change
writes the rows. Possible failures, and why they can't happen:

* *The same event twice*: it has an inbox row, or after pruning it is at or below `pruned`. In one transaction, the
  second handling finds the status that the first one has recorded.
* *Two workers with one instance*: the partition has one owner at one epoch, in a row that stays locked until the
  commit. A worker that has lost its partition is refused, even if it hasn't noticed.
* *A state computed from an old one*: the version that it was computed from must be the instance's current version.
* *A command twice*: its id is derived from process, instance and step, and each id is issued once.
* *A command that is lost as a repeat of another one*: a handling that issues a step of another event is refused.
* *A restart by a late event*: a finished instance is kept as a tombstone, see `retention`.
* *An event that the feed has lost*, in a failover or a restore, while a worker held it: the handling is refused unless
  the feed has an event of this id at this position. The position may be beyond the feed's end, or have another event by
  now. The event's row in the feed is read in this transaction. It is removed only by `feed.trim`, below the floors of
  all partitions, so the event of a valid handling stays. A database with this transaction's commit also has the earlier
  one of the append: no later failover can lose the event alone. A retried event is not checked: its row in the inbox
  was marked in the transaction that appended it again.
* *An event whose handler always fails*: it is parked with the error, for that instance only. Other instances continue;
  if the process is strict, later events of the instance wait (see `waiting`).

Outbox rows are only inserted, and no other transaction can insert them while the partition is locked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

import structlog

from core import errors, feed, metrics
from core.commits.kind import Kind
from core.commits.operation import Done, Operation, shared_number
from core.consumer_groups.positions import Fence
from core.processes import definitions, inbox, outbox
from core.processes.instances import Handled, Handling, Instance, LockedInstances, Status
from core.processes.timers import TimerChanges
from core.processes.waiting import Waiting
from core.storage import dialects
from core.storage.statements import Pipeline, as_time
from lastbit.streams.partitions import partition_of

COST: Final = 16
"""The cost of a handling without data."""
PART: Final = 2048
"""The approximate maximum cost of an operation with many handlings: half of a flush."""

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class Handle(Operation):
    """Apply an event's effects on an instance once. Its result is a `Handled`. Errors: `ProcessNotFound`, `StaleEpoch`,
    `VersionConflict`, `InvalidRequest`, `StepReused`."""

    handling: Handling


def handle_of(handling: Handling) -> Handle:
    """The operation. All operations of an instance have one `batch`, so they are applied in the order of arrival."""
    texts = [handling.state, *(command.data for command in handling.commands), *(t.data for t in handling.timers)]
    size = sum([len(text) for text in texts if text is not None])
    parts = len(handling.commands) + len(handling.timers)
    digest = hashlib.blake2b(json.dumps([handling.process, handling.instance]).encode(), digest_size=7).digest()
    return Handle(
        batch=-1 - int.from_bytes(digest),
        size=size,
        cost=COST + 4 * parts + size // 1024,
        handling=handling,
    )


@dataclass(slots=True, eq=False, kw_only=True)
class HandleMany(Operation):
    """Many handlings. Its result is a list of the outcomes of the `handles`, in order."""

    handles: Sequence[Handle]


def handle_many_of(handlings: Sequence[Handling]) -> list[HandleMany]:
    """The operations of one call, usually a single one; a costly call is cut, as its transaction would delay all other
    calls. Calls of a worker are in one queue: they take turns with other calls, however many events they have."""
    operations: list[HandleMany] = []
    part: list[Handle] = []
    size = cost = 0
    for place, handle in enumerate(map(handle_of, handlings), 1):
        part.append(handle)
        size, cost = size + handle.size, cost + handle.cost
        if cost >= PART or place == len(handlings):
            worker = f"{handle.handling.process}:{handle.handling.worker}"
            operations.append(HandleMany(batch=shared_number("handlings", worker), size=size, cost=cost, handles=part))
            part, size, cost = [], 0, 0
    return operations


class Handlings(Kind):
    """The next round trip locks and reads all rows that the handlings need, after their partitions."""

    handles = (Handle, HandleMany)
    locks = ("inbox", "processes", "timers")

    def __init__(self, pipeline: Pipeline, operations: Sequence[Handle | HandleMany]) -> None:
        super().__init__(pipeline, operations)
        self._handles = [
            handle
            for operation in operations
            for handle in ([operation] if isinstance(operation, Handle) else operation.handles)
        ]
        self._fences = _fences(pipeline, self._handles)
        self._timers = TimerChanges()
        self._now: datetime
        self._handled: dict[Handle, tuple[Handled, list[outbox.Issue]]] = {}

    def fences(self) -> list[Fence]:
        return list(self._fences.values())

    def prepare(self) -> None:
        pipeline = self.pipeline
        handlings = [handle.handling for handle in self._handles]
        self._inbox = inbox.LockedEvents(
            pipeline,
            {_event_key(handling) for handling in handlings},
            {handling.position for handling in handlings},
            {handling.position for handling in handlings if handling.error is not None or handling.strict},
        )
        self._waiting = Waiting(
            pipeline, {(handling.process, handling.instance) for handling in handlings if handling.strict}
        )
        self._instances = LockedInstances(pipeline, {(handling.process, handling.instance) for handling in handlings})
        self._outbox = outbox.Issues(
            pipeline,
            {
                outbox.command_id(handling.process, handling.instance, command.step)
                for handling in handlings
                for command in handling.commands
            },
        )
        # After the locks: a statement that waits for a lock has the time before the wait.
        self._clock = pipeline.query(f"SELECT {dialects.of(pipeline.tx).clock}")

    def judge(self, refused: Mapping[Fence, errors.CoreError]) -> None:
        """Judge the handlings in order, and write the changes, except for the commands."""
        self._now = as_time(self._clock.rows()[0][0])
        self._inbox.load()
        self._waiting.load()
        self._outbox.load()
        for handle in self._handles:
            try:
                fence = self._fences.get(handle)
                refusal = None if fence is None else refused.get(fence)
                # It may have been deleted since the fences were looked up.
                if fence is None or isinstance(refusal, errors.ConsumerGroupNotFound):
                    raise errors.ProcessNotFound(handle.handling.process)
                if refusal is not None:
                    raise refusal
                self._handled[handle] = self._judge(handle.handling)
            except errors.CoreError as error:
                self.outcomes[handle] = Done(error=error)
        self._inbox.write(self._now)
        self._waiting.write()
        self._instances.write()
        self._timers.write(self.pipeline, self._now)

    def has_events(self) -> bool:
        return bool(self._outbox.events()) or self._waiting.has_events()

    def finish(self, position: int) -> list[feed.NewEvent]:
        """Write the commands, whose events have the positions above `position`."""
        if self._handled:
            self._outbox.write(position, self._now)
        for handle, (handled, issues) in self._handled.items():
            self.outcomes[handle] = Done(replace(handled, commands=[self._outbox.issued(issue) for issue in issues]))
        for operation in self.operations:
            if isinstance(operation, HandleMany):
                self.outcomes[operation] = Done([self.outcomes[handle] for handle in operation.handles])
        return [*self._outbox.events(), *self._waiting.events()]

    def _judge(self, handling: Handling) -> tuple[Handled, list[outbox.Issue]]:
        key = _event_key(handling)
        before = self._inbox.status(key, handling.position)
        instance = self._instances.get(handling.process, handling.instance)
        if before is not None:
            return Handled(before, True, instance, []), []
        if instance is not None and instance.status is Status.FINISHED:
            self._inbox.record(key, handling.position, inbox.Status.LATE)
            self._waiting.settle(key)
            return Handled(inbox.Status.LATE, False, instance, []), []
        if handling.strict and self._waiting.is_behind(key, handling.position):
            self._inbox.park(key, handling.position, None)
            self._waiting.park(key, handling.position, waits=True)
            return Handled(inbox.Status.PARKED, False, instance, []), []
        version = 0 if instance is None else instance.version
        if handling.version != version:
            raise errors.VersionConflict(handling.process, handling.instance, handling.version, version)
        if instance is None:
            instance = Instance(
                handling.process, handling.instance, Status.RUNNING, 0, None, self._now, self._now, None
            )
        if handling.error is not None:
            self._inbox.park(key, handling.position, handling.error)
            if handling.strict:
                self._waiting.park(key, handling.position, waits=False)
            if self._instances.get(handling.process, handling.instance) is None:
                self._instances.put(instance)
            return Handled(inbox.Status.PARKED, False, instance, []), []
        # Before any change: it may refuse the handling.
        issues = self._outbox.issue(handling.process, handling.instance, handling.event, handling.commands)
        self._inbox.record(key, handling.position, inbox.Status.HANDLED)
        self._waiting.settle(key)
        instance = replace(
            instance,
            state=handling.state,
            version=version + 1,
            status=Status.FINISHED if handling.finish else Status.RUNNING,
            updated_at=self._now,
            finished_at=self._now if handling.finish else None,
        )
        self._instances.put(instance)
        if handling.finish:
            self._timers.cancel_all(handling.process, handling.instance)
        else:
            self._timers.change(handling.process, handling.instance, handling.timers)
        return Handled(inbox.Status.HANDLED, False, instance, []), issues


def _fences(pipeline: Pipeline, operations: Sequence[Handle]) -> dict[Operation, Fence]:
    """The fences of the operations, without those of processes that don't exist."""
    counts = definitions.partition_counts(pipeline.tx, {operation.handling.process for operation in operations})
    found: dict[Operation, Fence] = {}
    for operation in operations:
        handling = operation.handling
        if handling.process in counts:
            group, count = definitions.group_of(handling.process), counts[handling.process]
            partition = partition_of(handling.instance, count)
            found[operation] = Fence(group, partition, handling.worker, handling.epoch)
    return found


def _event_key(handling: Handling) -> inbox.Key:
    return handling.process, handling.instance, handling.event


def report(handle: Handle, outcome: Done) -> None:
    """Count a committed handling, and log a parked event."""
    if outcome.error is not None:
        return
    handling, handled = handle.handling, outcome.value
    metrics.PROCESS_EVENTS["repeated" if handled.repeated else handled.status].inc()
    if handled.status is inbox.Status.PARKED and not handled.repeated and handling.error is not None:
        log.warning(
            "event_parked",
            process=handling.process,
            instance=handling.instance,
            event_id=handling.event,
            error=handling.error,
        )
