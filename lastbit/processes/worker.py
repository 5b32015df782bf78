"""A worker of a process: it reads the feed once, handles each event for the instances in its partitions, and commits
the floor of each of its partitions.

Things that could go wrong, and why they cannot:

* *An event is skipped.* Each partition has a window over the feed's positions. The committed position is below the
  first event that is not handled. Events of other partitions, and of types that the process does not read, are skipped
  and never hold the floor. If a newly assigned partition has an older position, the worker reads from there.
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

import json
import logging
import queue
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lastbit import _calls, errors
from lastbit._drivers import HasDriver
from lastbit.models import Event
from lastbit.processes.calls import Processes, handling
from lastbit.processes.definition import Process
from lastbit.streams.errors import WindowClosed, WindowFull
from lastbit.streams.group import Assignment, ConsumerGroup
from lastbit.streams.partitions import partition_of

if TYPE_CHECKING:
    from lastbit.processes.models import Handled, Instance

log = logging.getLogger("lastbit.processes")

PAGE: Final = 500
"""Events per read."""
POLL: Final = 1.0
"""Seconds for which the service holds a read that finds nothing. A new partition may wait for this time."""
AHEAD: Final = 1000
"""Maximum events that are read but not handled yet."""
KEPT: Final = 10_000
"""Maximum instances whose states are cached between events."""
IDLE: Final = 15
"""Number of commit intervals after which a floor is committed if it advanced only over other partitions' events."""
MANY: Final = 100
"""Maximum events in one call, as the service accepts."""
CALL: Final = 4 * 2**20
"""Approximate maximum bytes of one call: half of what the service accepts."""
PAUSE: Final = 0.5
"""Seconds to wait after a temporary refusal by the service."""


@dataclass(eq=False)
class _Partition:
    """A partition owned by this worker, with the position up to which events were passed to it."""

    assignment: Assignment
    reached: int
    lane: int
    left: set[int]
    """Positions that were outstanding at the last commit and have not been read again."""
    open: bool = True
    """Whether it is not released yet."""
    cut: bool = False
    """Whether an event was not accepted. Then no later event may be skipped."""
    busy: int = 0
    """Number of events being handled."""
    handled: bool = False
    """Whether an event was handled since the last commit."""
    committed: float = field(default_factory=time.monotonic)


class _Cached(NamedTuple):
    """An instance's state as JSON, which is valid only at this epoch of its partition."""

    epoch: int
    version: int
    state: str


_NEW: Final = 0, "null"
"""The version and the state of an instance that doesn't exist."""


@dataclass(eq=False)
class _Job:
    """An event and its instances in one partition. Only the partition's lane changes it."""

    partition: _Partition
    position: int
    event: Event
    instances: list[str]
    left: int = 0
    """The number of instances for which it is not over yet."""
    is_handled: bool = True
    """Whether it was handled for each instance for which it is over."""


@dataclass(eq=False)
class _Task:
    """An event that must be handled for one instance."""

    job: _Job
    instance: str
    body: dict[str, Any] = field(default_factory=dict)
    """Its entry in the last call."""
    refusal: str | None = None
    """Why the service has refused the function's result."""
    is_over: bool = False
    is_handled: bool = False
    """If it is over, but not handled, it is left to the partition's next owner."""

    @property
    def partition(self) -> _Partition:
        return self.job.partition

    def event(self, retry_type: str) -> Event:
        event = self.job.event
        return Event.from_json(event.data["event"]) if event.type == retry_type else event


def _end(task: _Task, ahead: threading.Semaphore) -> None:
    """The task is over. If the event is handled for all of its instances now, it is acked."""
    job = task.job
    job.left -= 1
    job.is_handled = job.is_handled and task.is_handled
    if job.left:
        return
    ahead.release()
    if job.is_handled:
        with suppress(WindowClosed):
            job.partition.assignment.window.ack(job.position)
            job.partition.handled = True


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
        self._processes = Processes(client.driver)
        self._name = worker
        self._partitions = partitions
        self._times = (ttl, release)
        self._every = every
        self._lanes: list[queue.SimpleQueue[_Job | None]] = [queue.SimpleQueue() for _ in range(lanes)]
        self._ahead = threading.Semaphore(AHEAD)
        self._changed = threading.Condition()
        self._ours: dict[int, _Partition] = {}
        self._states: OrderedDict[str, _Cached] = OrderedDict()
        self._head = 0
        self._stopping = threading.Event()
        self._group: ConsumerGroup | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Define the process and work until `stop` is called. Then release all partitions, leave, and return. Raises
        errors that make continuing impossible. If the service is unreachable, it keeps trying."""
        ttl, release = self._times
        defined = self._processes.define(self._process.name, partitions=self._partitions, ttl=ttl, release=release)
        self._count, self._after = defined.partitions, defined.after
        self._group = ConsumerGroup(self._client, defined.group, self._name)
        if self._stopping.is_set():
            return
        threads = [threading.Thread(target=self._guarded, args=(self._read,), name="lastbit-read", daemon=True)]
        threads.append(threading.Thread(target=self._guarded, args=(self._keep_floors,), daemon=True))
        for lane in self._lanes:
            threads.append(
                threading.Thread(target=self._guarded, args=(lambda lane=lane: self._work(lane),), daemon=True)
            )
        for thread in threads:
            thread.start()
        try:
            self._group.run(self._assigned, self._released)
        finally:
            self._stopping.set()
            with self._changed:
                self._changed.notify_all()
            for lane in self._lanes:
                lane.put(None)
            for thread in threads:
                thread.join(POLL + self._driver.service.timeout)
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

    # Partitions

    def _assigned(self, assignment: Assignment) -> None:
        # If the window is empty, nothing was committed: start at the process's first position.
        position = assignment.floor if assignment.window.high >= 0 else self._after
        with self._changed:
            lanes_in_use = [instance.lane for instance in self._ours.values()]
            lane = min(range(len(self._lanes)), key=lanes_in_use.count)
            outstanding = set(assignment.window.outstanding)
            self._ours[assignment.partition] = _Partition(assignment, position, lane, outstanding)
            self._changed.notify_all()

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
            except (errors.ServiceError, errors.ServiceUnreachable, errors.UnexpectedAnswer) as error:
                if not _passes(error):
                    raise
                self._stopping.wait(PAUSE)
                continue
            self._head = page.last
            for event in page.events:
                self._feed(event, partitions)
            for partition in partitions:
                _pass_over(partition, page.next)

    def _feed(self, event: Event, partitions: Iterable[_Partition]) -> None:
        """Pass an event to the partitions that have instances for it and have not received it."""
        instances: dict[int, list[str]] = defaultdict(list)
        for instance in self._process.instances_of(event):
            instances[partition_of(instance, self._count)].append(instance)
        if not instances:
            log.warning(
                "event %s (%s) at position %d names no instance of %s",
                event.id,
                event.type,
                event.position,
                self._process,
            )
        for partition in partitions:
            if event.position <= partition.reached or partition.cut:
                continue
            own_instances = instances.get(partition.assignment.partition)
            if own_instances and self._track(partition, event.position):
                self._take_room()
                self._lanes[partition.lane].put(_Job(partition, event.position, event, own_instances))
            partition.reached = event.position

    def _track(self, partition: _Partition, position: int) -> bool:
        """Whether to handle the event. If the partition is being released, it is cut off here."""
        while partition.open and not self._stopping.is_set():
            try:
                is_new = partition.assignment.window.track(position, timeout=PAUSE)
            except WindowFull as full:
                log.warning("partition %d waits for its event at %d", partition.assignment.partition, full.oldest)
            except WindowClosed:
                break
            else:
                partition.left.discard(position)
                return is_new
        partition.cut = True
        return False

    def _take_room(self) -> None:
        while not self._ahead.acquire(timeout=PAUSE):
            if self._stopping.is_set():
                return

    # Handling

    def _work(self, lane: queue.SimpleQueue[_Job | None]) -> None:
        """Handle the lane's events, with one call for those of different instances that are ready at the same time."""
        waiting: dict[str, deque[_Task]] = {}
        is_ending = False
        while waiting or not is_ending:
            jobs = [] if waiting else [lane.get()]
            # Also the next jobs, without waiting for more.
            with suppress(queue.Empty):
                while len(jobs) + len(waiting) < MANY:
                    jobs.append(lane.get_nowait())
            for job in jobs:
                if job is None:
                    is_ending = True
                    continue
                job.left = len(job.instances)
                for instance in job.instances:
                    waiting.setdefault(instance, deque()).append(_Task(job, instance))
            self._handle(waiting)

    def _handle(self, waiting: dict[str, deque[_Task]]) -> None:
        """Handle the first event of each of these instances, and remove those that are done. Events of partitions that
        were lost or are being released are left to the next owner."""
        tasks: list[_Task] = []
        with self._changed:
            for instance, queued in list(waiting.items()):
                while queued and not (queued[0].partition.open and not queued[0].partition.assignment.lost):
                    _end(queued.popleft(), self._ahead)
                if not queued:
                    del waiting[instance]
                elif len(tasks) < MANY:
                    tasks.append(queued[0])
                    queued[0].partition.busy += 1
        try:
            self._store(tasks)
            for task in tasks:
                if task.is_over:
                    waiting[task.instance].popleft()
                    _end(task, self._ahead)
        finally:
            with self._changed:
                for task in tasks:
                    task.partition.busy -= 1
                self._changed.notify_all()

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
        epoch, cached = task.partition.assignment.epoch, self._states.get(task.instance)
        version, state = _NEW if cached is None or cached.epoch != epoch else cached[1:]
        outcome = self._process.decide(json.loads(state), event) if task.refusal is None else {"error": task.refusal}
        body = handling(event.id, event.position, self._name, epoch, version, outcome)
        return {"instance": task.instance, **body}

    def _send(self, tasks: Sequence[_Task]) -> None:
        """Store the effects of these tasks with one call. Those that aren't over then must be tried again."""
        try:
            bodies = [task.body for task in tasks]
            results: Sequence[Handled | errors.LastbitError] = self._processes.handle_many(self._process.name, bodies)
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
                if result.status == "parked" and not result.repeated:
                    log.warning("parked event %s for %s %r", task.body["event"]["id"], self._process, task.instance)
            elif isinstance(result, errors.VersionConflict):
                must_pause |= not self._refresh(task)
            elif isinstance(result, errors.StaleEpoch):
                # A commit reports the stale epoch to the group, which ends the assignment.
                with suppress(errors.LastbitError):
                    task.partition.assignment.commit()
                task.is_over = True
            elif isinstance(result, errors.InvalidRequest | errors.InvalidArgument) and task.refusal is None:
                # If the service refuses the function's result, park the event, as if the function had raised.
                task.refusal = str(result)
            elif _passes(result):
                must_pause = True
            else:
                raise result
        if must_pause:
            self._stopping.wait(PAUSE)

    def _refresh(self, task: _Task) -> bool:
        """Read the instance's state. Returns False if the service can't answer now."""
        try:
            self._remember(task, self._look(task.instance))
        except (errors.ServiceError, errors.ServiceUnreachable, errors.UnexpectedAnswer) as error:
            if not _passes(error):
                raise
            return False
        return True

    def _look(self, instance: str) -> Instance | None:
        try:
            return self._processes.get(self._process.name, instance)
        except errors.InstanceNotFound:
            return None

    def _remember(self, task: _Task, details: Instance | None) -> None:
        # Each instance belongs to one lane. The lanes share only the dictionary, whose operations are atomic.
        if details is None or details.status == "finished":
            self._states.pop(task.instance, None)
            return
        epoch = task.partition.assignment.epoch
        self._states[task.instance] = _Cached(epoch, details.version, json.dumps(details.state))
        if len(self._states) > KEPT:
            with suppress(KeyError):
                self._states.popitem(last=False)

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
                self._group.commit([partition.assignment for partition in due], head=self._head)
            except errors.LastbitError:
                # The next commit includes them. The group reports lost partitions.
                for partition in due:
                    partition.handled = True


def _pass_over(partition: _Partition, position: int) -> None:
    """Advance the window to `position`, up to which all events were read. Positions that were outstanding and were not
    read again are acked."""
    if position < partition.reached or partition.cut:
        return
    window = partition.assignment.window
    # A full window needs no place for `position`: a later one takes the floor beyond it.
    with suppress(WindowClosed, WindowFull):
        for offset in sorted(each for each in partition.left if each <= position):
            window.ack(offset)  # of an event type that an earlier version of the process read
            partition.left.discard(offset)
        if position > window.high and window.track(position):
            window.ack(position)
    partition.reached = position


def _passes(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, errors.ServiceError):
        return error.status >= 500 or isinstance(error, errors.RateLimited)
    return isinstance(error, errors.ServiceUnreachable | errors.UnexpectedAnswer)


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
