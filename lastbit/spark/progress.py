"""Shows how far a call of `ack` is, and labels its Spark jobs.

Numbers come from Spark, in a classic session and over Connect: the tasks of the running stage from its status tracker
or the server's progress messages, and what was sent from the tasks that have ended.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from lastbit.spark._partitions import is_connect

TAG: Final = "lastbit.ack"
"""The description of the call's jobs in a classic session, and the tag of its operations on Connect."""

_POLL: Final = 0.25
_DESCRIPTION: Final = "spark.job.description"
_GROUP: Final = "spark.jobGroup.id"


@dataclass(frozen=True, slots=True)
class AckProgress:
    """How far a call of `ack` is.

    `stage`: the number of Spark's running stage, None before the first one; `tasks` and `completed_tasks` are those of
    this stage. `rows` and `groups`: what the tasks that have ended read and sent; zero until the last stage, which
    sends.
    """

    stage: int | None = None
    tasks: int = 0
    completed_tasks: int = 0
    rows: int = 0
    groups: int = 0


Watcher = Callable[[AckProgress], object]


class Progress:
    """The latest state of a call, for one watcher. Threads may update it.

    An error of the watcher must not lose tasks' results: it ends the watching, and `error` keeps it.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.error: Exception | None = None
        self._watcher = watcher
        self._state = AckProgress()
        self._lock = threading.Lock()

    def stage(self, number: int, tasks: int, completed: int) -> None:
        self._update(stage=number, tasks=tasks, completed_tasks=completed)

    def sent(self, rows: int, groups: int) -> None:
        """In total."""
        self._update(rows=rows, groups=groups)

    def _update(self, **changes: int) -> None:
        with self._lock:
            state = replace(self._state, **changes)
            if state == self._state or self.error is not None:
                return
            self._state = state
            try:
                self._watcher(state)
            except Exception as error:  # noqa: BLE001  # `raise_error` raises it
                self.error = error

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


@contextmanager
def labelled(session: Any) -> Iterator[None]:
    """Give the jobs of this thread the description "lastbit.ack", unless they have one, or tag them on Connect."""
    if is_connect(session):
        if TAG in session.getTags():
            yield
            return
        session.addTag(TAG)
        try:
            yield
        finally:
            session.removeTag(TAG)
        return
    with _local_property(session.sparkContext, _DESCRIPTION, TAG):
        yield


@contextmanager
def _local_property(context: Any, name: str, value: str) -> Iterator[str]:
    """Set a property of the thread's jobs unless it has a value. Yields the property's value."""
    present = context.getLocalProperty(name)
    if present is not None:
        yield present
        return
    context.setLocalProperty(name, value)
    try:
        yield value
    finally:
        context.setLocalProperty(name, None)


@contextmanager
def stages(session: Any, progress: Progress | None) -> Iterator[None]:
    """Pass the stages of the jobs that this thread runs to `progress`."""
    if progress is None:
        yield
    elif is_connect(session):
        with _messages(session, progress):
            yield
    else:
        context = session.sparkContext
        own_group = f"lastbit-{uuid.uuid4().hex}"
        with _local_property(context, _GROUP, own_group) as group, _polled(context.statusTracker(), group, progress):
            yield


@contextmanager
def _messages(session: Any, progress: Progress) -> Iterator[None]:
    caller = threading.get_ident()

    def receive(stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
        # A session calls its handlers for the operations of all threads.
        begun_stages = [stage for stage in stages or () if stage.num_tasks]
        if begun_stages and threading.get_ident() == caller:
            running = [stage for stage in begun_stages if stage.num_completed_tasks < stage.num_tasks]
            stage = max(running or begun_stages, key=lambda info: info.stage_id)
            progress.stage(stage.stage_id, stage.num_tasks, stage.num_completed_tasks)

    session.registerProgressHandler(receive)
    try:
        yield
    finally:
        session.removeProgressHandler(receive)


@contextmanager
def _polled(tracker: Any, group: str, progress: Progress) -> Iterator[None]:
    earlier = set(tracker.getJobIdsForGroup(group))
    end = threading.Event()

    def poll() -> None:
        while not end.wait(_POLL):
            with suppress(Exception):  # the session is being stopped, or the tracker has dropped the job
                running = _running_stage(tracker, set(tracker.getJobIdsForGroup(group)) - earlier)
                if running is not None:
                    progress.stage(*running)

    thread = threading.Thread(target=poll, name="lastbit-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _running_stage(tracker: Any, jobs: set[int]) -> tuple[int, int, int] | None:
    latest = None
    for job in jobs:
        info = tracker.getJobInfo(job)
        for number in info.stageIds if info else ():
            stage = tracker.getStageInfo(number)
            # A skipped or future stage has no active or completed task.
            if stage and (stage.numActiveTasks or stage.numCompletedTasks) and (latest is None or number > latest[0]):
                latest = (number, stage.numTasks, stage.numCompletedTasks)
    return latest


@contextmanager
def watched(watching: AbstractContextManager[Watcher]) -> Iterator[Progress]:
    """The progress for a watcher."""
    with watching as watcher:
        progress = Progress(watcher)
        yield progress
    progress.raise_error()
