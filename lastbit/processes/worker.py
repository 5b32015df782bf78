"""A worker of a process: it reads the feed once, handles each event for the instances in its partitions, and commits
the floor of each of its partitions.

Things that could go wrong, and why they cannot:

* *An event is skipped.* Each partition has a window over the feed's positions. The committed position is below the
  first event that is not handled. Events of other partitions, and of types that the process does not read, are skipped
  and never hold the floor. If a newly assigned partition has an older position, the worker reads from there.
* *The process was deleted and defined again*, perhaps with other partitions, while the worker was starting or
  suspended: it reads the definition after each assignment. If the process is defined again later, the epoch is stale.
* *An event is handled twice*, after a crash or beside a worker that has lost the partition: the service applies each
  event once (`core/processes/handling.py`).
* *The state is outdated.* States are cached between events, while the worker owns their partition at one epoch: another
  owner may finish an instance, and one that starts again later has the same versions. The service refuses effects that
  were computed from another version. Then the worker reads the instance and calls the function again.
* *Events of one instance overtake each other.* A partition has one lane. A call has at most one event of an instance,
  and the next one waits for the response. Events of different instances share calls, and lanes run in parallel.
* *The service is unreachable.* A started call is retried until it gets a response or the partition is lost.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from lastbit import _calls, errors
from lastbit._drivers import HasDriver
from lastbit._threads import join_started
from lastbit.models import Event
from lastbit.processes._lane import PAUSE, Job, Lane, Shared
from lastbit.processes._partition import Partition
from lastbit.processes._unnamed import UnnamedEvents
from lastbit.processes.calls import Processes
from lastbit.processes.definition import Process
from lastbit.processes.models import Definition
from lastbit.streams.group import Assignment, ConsumerGroup
from lastbit.streams.partitions import partition_of

log = logging.getLogger("lastbit.processes")

PAGE: Final = 500
"""Events per read."""
POLL: Final = 1.0
"""Seconds for which the service holds a read that finds nothing. A new partition may wait for this time."""
AHEAD: Final = 1000
"""Maximum events that are read but not handled yet."""
IDLE: Final = 15
"""Number of commit intervals after which a floor is committed if it advanced only over other partitions' events."""


class ProcessWorker:
    """A worker of a process manager, usually in an operating system process of its own. `worker`: its name in the
    consumer group. `lanes` calls are under way in parallel; floors are committed `every` seconds."""

    def __init__(
        self,
        process: Process,
        client: HasDriver,
        worker: str,
        *,
        partitions: int | None = None,
        ttl: float | None = None,
        release: float | None = None,
        lanes: int = 8,
        every: float = 1.0,
    ) -> None:
        if not isinstance(process, Process):
            raise errors.InvalidArgument(f"a worker needs a Process, made by @process, not {process!r}")
        if lanes < 1:
            raise errors.InvalidArgument(f"lanes must be at least 1, not {lanes!r}")
        self._process = process
        self._client = client
        self._driver = client.driver
        self._name = worker
        self._partitions = partitions
        self._times = (ttl, release)
        self._every = every
        self._shared = Shared(process, Processes(client.driver), worker, threading.Semaphore(AHEAD))
        self._lanes = [Lane(self._shared) for _ in range(lanes)]
        self._changed, self._stopping = self._shared.changed, self._shared.stopping
        self._unnamed = UnnamedEvents(process, self._shared.calls)
        self._ours: dict[int, Partition] = {}
        self._count = 0
        """The process's partitions, as of the last assignment."""
        self._defining = threading.Lock()
        self._defined: Definition | None = None
        self._defined_since = -math.inf
        """When the last read of the definition began."""
        self._head = 0
        self._group: ConsumerGroup | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Define the process and work until `stop` is called. Then release all partitions, leave, and return. Raises
        errors that make continuing impossible. If the service is unreachable, it keeps trying."""
        self._group = ConsumerGroup(self._client, self._define().group, self._name, follow=True)
        if self._stopping.is_set():
            return
        threads = [threading.Thread(target=self._guarded, args=(self._read,), name="lastbit-read", daemon=True)]
        threads.append(threading.Thread(target=self._guarded, args=(self._keep_floors,), daemon=True))
        for lane in self._lanes:
            threads.append(threading.Thread(target=self._guarded, args=(lane.run,), daemon=True))
        try:
            for thread in threads:
                thread.start()
            self._group.run(self._assigned, self._released)
        finally:
            self._stopping.set()
            with self._changed:
                self._changed.notify_all()
            for lane in self._lanes:
                lane.close()
            join_started(threads, POLL + self._driver.service.timeout)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Make `run` release all partitions and return. May be called from any thread or signal handler."""
        self._stopping.set()
        if self._group is not None:
            self._group.stop()

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # `run` raises it
            self._error = self._error or error
            self.stop()

    def _define(self) -> Definition:
        ttl, release = self._times
        return self._shared.calls.define(self._process.name, partitions=self._partitions, ttl=ttl, release=release)

    # Partitions

    def _assigned(self, assignment: Assignment) -> None:
        defined = self._defined_after(assignment)
        if defined is None:
            return
        # If the window is empty, nothing was committed: start at the process's first position.
        position = assignment.floor if assignment.window.high >= 0 else defined.after
        with self._changed:
            if assignment.lost:  # perhaps to a new process of this name, whose assignments have set the count
                return
            self._count = defined.partitions
            lanes_in_use = [partition.lane for partition in self._ours.values()]
            lane = min(range(len(self._lanes)), key=lanes_in_use.count)
            outstanding = set(assignment.window.outstanding)
            self._ours[assignment.partition] = Partition(assignment, position, lane, outstanding)
            if assignment.partition == 0:
                self._unnamed.begin(defined.unnamed_upto)
            self._changed.notify_all()

    def _defined_after(self, assignment: Assignment) -> Definition | None:
        """The process's definition, read after the assignment; None if the assignment is lost before it can be read.
        Partitions that are assigned at the same time share a read."""
        assigned = time.monotonic()
        with self._defining:
            while self._defined is None or self._defined_since <= assigned:
                if assignment.lost or self._stopping.is_set():
                    return None
                began = time.monotonic()
                try:
                    self._defined, self._defined_since = self._define(), began
                except errors.LastbitError as error:
                    if not error.is_temporary:
                        raise
                    self._stopping.wait(PAUSE)
            return self._defined

    def _released(self, assignment: Assignment) -> None:
        with self._changed:
            partition = self._ours.get(assignment.partition)
            if partition is None or partition.assignment is not assignment:
                return
            partition.open = False
            del self._ours[assignment.partition]
            # Jobs that have not started are left to the next owner. If the partition is lost, there is no need to wait.
            while partition.busy and not assignment.lost:
                self._changed.wait(0.1)
        if assignment.partition == 0 and not assignment.lost:
            with suppress(errors.LastbitError):  # the commit that follows fails too, and the next owner counts them
                self._unnamed.report()

    # Reading

    def _read(self) -> None:
        while not self._stopping.is_set():
            with self._changed:
                partitions = list(self._ours.values())
                if not partitions:
                    self._changed.wait(POLL)
                    continue
            after = min(each.reached for each in partitions)
            try:
                page = self._driver.run(_calls.events, after, self._process.types, None, POLL, PAGE)
            except errors.LastbitError as error:
                if not error.is_temporary:
                    raise
                self._stopping.wait(PAUSE)
                continue
            self._head = page.last
            for event in page.events:
                self._feed(event, partitions)
            for partition in partitions:
                partition.pass_over(page.next)

    def _feed(self, event: Event, partitions: Iterable[Partition]) -> None:
        """Pass an event to the partitions that have instances for it and have not received it."""
        instances: dict[int, list[str]] = defaultdict(list)
        for instance in self._process.instances_of(event):
            instances[partition_of(instance, self._count)].append(instance)
        for partition in partitions:
            if event.position <= partition.reached or partition.cut:
                continue
            if not instances and partition.assignment.partition == 0 and self._process.counts_unnamed:
                self._unnamed.add(event)
            own_instances = instances.get(partition.assignment.partition)
            if own_instances and partition.track(event.position, self._stopping):
                self._take_room()
                self._lanes[partition.lane].put(Job(partition, event, own_instances))
            partition.reached = event.position

    def _take_room(self) -> None:
        while not self._shared.room.acquire(timeout=PAUSE):
            if self._stopping.is_set():
                return

    # Floors

    def _keep_floors(self) -> None:
        while not self._stopping.wait(self._every):
            with self._changed:
                ours = list(self._ours.values())
            now = time.monotonic()
            due = [
                partition
                for partition in ours
                if partition.open
                and partition.assignment.uncommitted
                and (partition.handled or now - partition.committed >= IDLE * self._every)
            ]
            for partition in due:
                partition.handled, partition.committed = False, now
            assert self._group is not None
            try:
                self._unnamed.report()  # before their positions are committed, after which nobody reads them again
                self._group.commit([partition.assignment for partition in due], head=self._head)
            except errors.LastbitError as error:
                if not error.is_temporary:
                    raise
                # The next commit includes them. The group reports lost partitions.
                for partition in due:
                    partition.handled = True


def run(
    process: Process,
    client: HasDriver,
    worker: str,
    *,
    partitions: int | None = None,
    ttl: float | None = None,
    release: float | None = None,
    lanes: int = 8,
    every: float = 1.0,
) -> None:
    """Work on a process until Ctrl-C. To stop it in another way, use `ProcessWorker`. Workers with different names
    share a process; more workers than `partitions` are idle."""
    ProcessWorker(
        process, client, worker, partitions=partitions, ttl=ttl, release=release, lanes=lanes, every=every
    ).run()
