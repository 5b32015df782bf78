"""A lane of a worker: a thread that handles the events of some of its partitions.

For each instance of an event, the lane computes the effects from the instance's state, and stores them with a call. A
call has effects for many instances, but at most one event of each: the next one waits for the response.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lastbit import errors
from lastbit.models import Event
from lastbit.processes._partition import Partition
from lastbit.processes.calls import Processes, handling
from lastbit.processes.definition import Process

if TYPE_CHECKING:
    from lastbit.processes.models import Handled, Instance

log = logging.getLogger("lastbit.processes")

KEPT: Final = 10_000
"""Maximum instances whose states a worker caches between events."""
MANY: Final = 100
"""Maximum events in one call, as the service accepts."""
CALL: Final = 4 * 2**20
"""Approximate maximum bytes of one call: half of what the service accepts."""
BEYOND: Final = re.compile(r"body\.event|body\.commands\[\d+\]\.once|body\.strict")
"""Places that the service names for reasons beyond the function: the feed doesn't have the event at its position, or
the service is of an earlier release, which doesn't know the field."""
PAUSE: Final = 0.5
"""Seconds to wait after a temporary refusal by the service."""


class _Cached(NamedTuple):
    """An instance's state as JSON, which is valid only at this epoch of its partition."""

    epoch: int
    version: int
    state: str


_NEW: Final = 0, "null"
"""The version and the state of an instance that doesn't exist."""


@dataclass(eq=False)
class Shared:
    """What the threads of a worker share."""

    process: Process
    calls: Processes
    worker: str
    room: threading.Semaphore
    """For events that are read but not handled yet."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Guards the partitions, and is notified of their changes."""
    stopping: threading.Event = field(default_factory=threading.Event)
    states: OrderedDict[str, _Cached] = field(default_factory=OrderedDict)
    """By instance. Each instance belongs to one lane, and the operations of the dictionary are atomic."""


@dataclass(eq=False)
class Job:
    """An event and its instances in one partition. Only the partition's lane changes it."""

    partition: Partition
    event: Event
    instances: Sequence[str]
    left: int = 0
    """The number of instances for which it is not over yet."""
    is_handled: bool = True
    """Whether it was handled for each instance for which it is over."""


@dataclass(eq=False)
class _Task:
    """An event that must be handled for one instance."""

    job: Job
    instance: str
    body: dict[str, Any] = field(default_factory=dict)
    """Its entry in the last call."""
    refusal: str | None = None
    """Why the service has refused the function's result."""
    is_over: bool = False
    is_handled: bool = False
    """If it is over, but not handled, it is left to the partition's next owner."""

    @property
    def partition(self) -> Partition:
        return self.job.partition

    def event(self, retry_type: str) -> Event:
        event = self.job.event
        return Event.from_json(event.data["event"]) if event.type == retry_type else event


def _places(error: errors.LastbitError) -> list[str]:
    """The places in the request that the service has refused."""
    return [fault.get("place", "") for fault in error.errors] if isinstance(error, errors.InvalidRequest) else []


class Lane:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._process = shared.process
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: dict[str, deque[_Task]] = {}
        """By instance, its tasks in the order of their events."""

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Make `run` return once the jobs so far are over."""
        self._jobs.put(None)

    def run(self) -> None:
        """Handle events, with one call for those of different instances that are ready at the same time."""
        is_ending = False
        while self._waiting or not is_ending:
            jobs = [] if self._waiting else [self._jobs.get()]
            # Also the next jobs, without waiting for more.
            with suppress(queue.Empty):
                while len(jobs) + len(self._waiting) < MANY:
                    jobs.append(self._jobs.get_nowait())
            for job in jobs:
                if job is None:
                    is_ending = True
                    continue
                job.left = len(job.instances)
                for instance in job.instances:
                    self._waiting.setdefault(instance, deque()).append(_Task(job, instance))
            self._handle()

    def _handle(self) -> None:
        """Handle the first event of each of the waiting instances, and remove those that are over."""
        tasks: list[_Task] = []
        with self._shared.changed:
            for instance, queued in list(self._waiting.items()):
                while queued and not queued[0].partition.keeps_events:
                    self._end(queued.popleft())
                if not queued:
                    del self._waiting[instance]
                elif len(tasks) < MANY:
                    tasks.append(queued[0])
                    queued[0].partition.busy += 1
        try:
            self._store(tasks)
            for task in tasks:
                if task.is_over:
                    self._waiting[task.instance].popleft()
                    self._end(task)
        finally:
            with self._shared.changed:
                for task in tasks:
                    task.partition.busy -= 1
                self._shared.changed.notify_all()

    def _end(self, task: _Task) -> None:
        """The task is over. If the event is handled for all of its instances now, it is acked."""
        job = task.job
        job.left -= 1
        job.is_handled = job.is_handled and task.is_handled
        if job.left:
            return
        self._shared.room.release()
        if job.is_handled:
            job.partition.ack(job.event.position)

    def _store(self, tasks: Sequence[_Task]) -> None:
        """Compute the tasks' effects, and store them with as few calls as possible."""
        part: list[_Task] = []
        size = 0
        for task in tasks:
            task.body = self._body(task)
            length = len(json.dumps(task.body))
            if part and size + length > CALL:
                self._send(part)
                part, size = [], 0
            part.append(task)
            size += length
        if part:
            self._send(part)

    def _body(self, task: _Task) -> dict[str, Any]:
        event = task.event(self._process.retry_type)
        epoch, cached = task.partition.assignment.epoch, self._shared.states.get(task.instance)
        version, state = _NEW if cached is None or cached.epoch != epoch else cached[1:]
        outcome = self._process.decide(state, event) if task.refusal is None else {"error": task.refusal}
        body = handling(event.id, event.position, self._shared.worker, epoch, version, outcome)
        # A service of an earlier release doesn't know the field.
        strict = {"strict": True} if self._process.strict else {}
        return {"instance": task.instance, **body, **strict}

    def _send(self, tasks: Sequence[_Task]) -> None:
        """Store the effects of these tasks with one call. Those that aren't over then must be tried again."""
        results: Sequence[Handled | errors.LastbitError]
        try:
            results = self._shared.calls.handle_many(self._process.name, [task.body for task in tasks])
        except (errors.InvalidRequest, errors.InvalidArgument) as error:
            if len(tasks) > 1:
                # One of them may be the cause.
                for task in tasks:
                    self._send([task])
                return
            results = [error]
        except (errors.ServiceError, errors.ServiceUnreachable, errors.UnexpectedAnswer) as error:
            results = [error] * len(tasks)
        must_pause = False
        for task, result in zip(tasks, results, strict=True):
            if not isinstance(result, errors.LastbitError):
                self._remember(task, result.instance)
                task.is_over = task.is_handled = True
                if result.status == "parked" and not result.repeated and "error" in task.body:
                    log.warning("parked event %s for %s %r", task.body["event"]["id"], self._process, task.instance)
            elif isinstance(result, errors.VersionConflict):
                must_pause |= not self._refresh(task)
            elif isinstance(result, errors.StaleEpoch):
                # A commit reports the stale epoch to the group, which ends the assignment.
                with suppress(errors.LastbitError):
                    task.partition.assignment.commit()
                task.is_over = True
            elif any(BEYOND.fullmatch(place) for place in _places(result)):
                raise result  # a worker that starts again reads what the feed has now, perhaps from a newer service
            elif isinstance(result, errors.InvalidRequest | errors.InvalidArgument) and task.refusal is None:
                # If the service refuses the function's result, park the event, as if the function had raised.
                task.refusal = str(result)
            elif result.is_temporary:
                must_pause = True
            else:
                raise result
        if must_pause:
            self._shared.stopping.wait(PAUSE)

    def _refresh(self, task: _Task) -> bool:
        """Read the instance's state. Returns False if the service can't answer now."""
        try:
            self._remember(task, self._look(task.instance))
        except errors.LastbitError as error:
            if not error.is_temporary:
                raise
            return False
        return True

    def _look(self, instance: str) -> Instance | None:
        try:
            return self._shared.calls.get(self._process.name, instance)
        except errors.InstanceNotFound:
            return None

    def _remember(self, task: _Task, details: Instance | None) -> None:
        states = self._shared.states
        if details is None or details.status == "finished":
            states.pop(task.instance, None)
            return
        epoch = task.partition.assignment.epoch
        states[task.instance] = _Cached(epoch, details.version, json.dumps(details.state))
        if len(states) > KEPT:
            with suppress(KeyError):
                states.popitem(last=False)
