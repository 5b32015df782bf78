"""Handles a stream in parallel, in order per key, and commits the safe offset.

One reader (the calling thread) tracks each record and puts it into the lane of its key. A lane is a thread that handles
its records one after the other. One committer commits the floor. Things that could go wrong, and why they can't:

* A record is committed but was not handled. It is tracked before it is put into a lane, and acked after its handler has
  returned, so a floor at or above it means that it was handled. Filtered records and those sent to the dead letters are
  acked too; otherwise they would hold the floor forever.
* A failure loses finished work. When the stream ends with a failure (of a handler, the source or a commit, or by
  Ctrl-C), the safe floor is committed before the error is raised, and later records of the failed lane are not handled.
* One stuck key uses all memory. Its records wait in its lane and other lanes continue, until the window is full; then
  the reader stops reading the source. `on_stuck` receives the offset.
* A commit is overtaken by an older one. Commits are made one at a time, and each computes the floor when it starts.
* A handler still runs when the stream has ended and is started again. The lanes finish their current records before the
  failure is raised, within `grace` seconds.
* The stream gets another owner. A closed window accepts no more acks, and nothing is committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from lastbit._threads import join_started
from lastbit.streams._progress import (
    EVERY,
    LAST_PAUSE,
    LAST_TRIES,
    LOOK,
    Entry,
    Options,
    Progress,
    failed,
    log,
    uncommitted,
)
from lastbit.streams.errors import WindowClosed, WindowFull
from lastbit.streams.window import AckWindow

R = TypeVar("R")


def run_ordered(
    source: Iterable[tuple[Any, R] | None],
    handle: Callable[[R], object],
    *,
    key: Callable[[R], Hashable],
    lanes: int = 8,
    commit: Callable[[Any], object] | None = None,
    every: float = EVERY,
    window: AckWindow | None = None,
    wanted: Callable[[R], bool] | None = None,
    dead_letter: Callable[[R, Exception], object] | None = None,
    stuck_after: float = 60.0,
    on_stuck: Callable[[Any, float], object] | None = None,
    grace: float = 30.0,
) -> None:
    """Handle each record of `source`, those of one key in order, and return when all are done.

    `source` yields (offset, record) pairs. It may yield None when it has nothing at the moment, so that a failure is
    noticed although no record arrives. Offsets are either ascending integers or all opaque. `handle` is called from
    `lanes` threads; one thread handles all records of a key. The reader calls `key` and `wanted`; if `wanted` returns
    False, the record is skipped.

    `commit` is called with the offset up to which all records are done, at intervals of at least `every` seconds and
    never with a lower offset than before. The last call comes from the calling thread, at the end or after a failure.
    `commit` is called when the floor has moved or, if you pass a `window`, when anything was acked, so that it can
    store `window.snapshot()`. A failed commit is retried after an interval, with the floor at that time; the fifth
    failure in a row ends the stream (`CommitFailed`).

    `window`: a restored window skips the records that its snapshot contains as done. Without one, at most 8,192
    positions are above the floor; use a smaller window for large records.

    If `handle` raises, `dead_letter(record, error)` is called, and the record counts as done when that returns. Without
    `dead_letter`, or if it raises too, the stream ends with `RecordFailed`, which has the offset. `on_stuck(offset,
    seconds)` is called once for an offset that has held the floor for `stuck_after` seconds; by default a warning is
    logged. After a failure, running handlers get `grace` seconds to finish. A handler that takes longer is abandoned,
    and its ack does not affect the commit. Raises `WindowClosed` if the window was closed in the meantime.
    """
    options = Options(key, lanes, every, wanted, stuck_after, on_stuck, grace).checked()
    _Run(Progress(window, options), options, handle, commit, dead_letter).run(source)


class _Run(Generic[R]):
    def __init__(
        self,
        progress: Progress[R],
        options: Options[R],
        handle: Callable[[R], object],
        commit: Callable[[Any], object] | None,
        dead_letter: Callable[[R, Exception], object] | None,
    ) -> None:
        self._progress = progress
        self._window = progress.window
        self._options = options
        self._handle = handle
        self._commit = commit
        self._dead_letter = dead_letter
        self._lanes: list[SimpleQueue[Entry[R] | None]] = [SimpleQueue() for _ in range(options.lanes)]
        self._changed = threading.Condition()
        self._running = 0
        """Lanes whose threads have started and not ended."""
        self._failure: BaseException | None = None
        self._hurry = threading.Event()  # set when the stream has failed: commit now
        self._over = threading.Event()  # set to end the committer

    def run(self, source: Iterable[tuple[Any, R] | None]) -> None:
        committer = threading.Thread(target=self._commit_regularly, name="lastbit-commits", daemon=True)
        try:
            try:
                for number, lane in enumerate(self._lanes):
                    name = f"lastbit-lane-{number}"
                    threading.Thread(target=self._work, args=(lane,), name=name, daemon=True).start()
                    self._running += 1  # no lane ends before all have started
                committer.start()
                self._read(source)
                for lane in self._lanes:
                    lane.put(None)
                self._wait_for_lanes()
                self._end(committer)
            except BaseException as error:  # noqa: BLE001  # Ctrl-C too: it is raised after the last commit
                self._fail(error)
                self._wait_for_lanes()
                self._end(committer)
        finally:
            self._over.set()
        self._commit_at_the_end()
        if self._failure is not None:
            raise self._failure

    # The reader.

    def _read(self, source: Iterable[tuple[Any, R] | None]) -> None:
        for item in source:
            if self._failure is not None:
                return
            if item is None:
                continue
            offset, record = item
            position = self._progress.position_of(offset)
            is_new = self._track(position, offset)
            if is_new is None:
                return
            if is_new:
                self._route(Entry(position, offset, record))

    def _track(self, position: int, offset: Any) -> bool | None:
        """Whether to handle it; None if the stream failed while the window was full."""
        while self._failure is None:
            try:
                return self._progress.track(position, offset)
            except WindowFull:
                self._window.wait_for_room(LOOK)
        return None

    def _route(self, entry: Entry[R]) -> None:
        try:
            lane = self._progress.lane_of(entry.record)
        except Exception as error:  # noqa: BLE001  # the caller's `key` or `wanted` failed
            self._give_up(entry, error)
            lane = None
        if lane is None:
            self._window.ack(entry.position)
        else:
            self._lanes[lane].put(entry)

    # The lanes.

    def _work(self, lane: SimpleQueue[Entry[R] | None]) -> None:
        try:
            while (entry := lane.get()) is not None and self._failure is None:
                try:
                    if self._window.begins(entry.position):
                        self._handle(entry.record)
                except Exception as error:  # noqa: BLE001  # any exception means that the record failed
                    self._give_up(entry, error)
                except BaseException as error:
                    raise failed(entry.offset, error) from error
                self._window.ack(entry.position)
        except BaseException as error:  # noqa: BLE001  # the calling thread raises it
            self._fail(error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _give_up(self, entry: Entry[R], error: Exception) -> None:
        if self._dead_letter is None:
            raise failed(entry.offset, error) from error
        try:
            self._dead_letter(entry.record, error)
        except BaseException as worse:
            raise failed(entry.offset, worse) from worse

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()
        for lane in self._lanes:
            lane.put(None)
        self._hurry.set()

    def _wait_for_lanes(self) -> None:
        """Wait until the lanes have ended; after a failure, at most `grace` seconds."""
        until: float | None = None
        with self._changed:
            while self._running > 0:  # below 0 if a signal handler's exception came while a lane started
                if self._failure is None:
                    self._changed.wait()
                    continue
                until = until or time.monotonic() + self._options.grace
                seconds = until - time.monotonic()
                if seconds <= 0:
                    log.warning("%d handlers did not end within %g seconds", self._running, self._options.grace)
                    return
                self._changed.wait(seconds)

    # The committer.

    def _end(self, committer: threading.Thread) -> None:
        self._over.set()
        self._hurry.set()
        join_started([committer])

    def _commit_regularly(self) -> None:
        try:
            while True:
                is_last = self._hurry.wait(self._options.every)
                if self._over.is_set():
                    return
                self._progress.report_if_stuck()
                self._commit_once()
                if is_last:
                    self._over.wait()
                    return
        except BaseException as error:  # noqa: BLE001  # the calling thread raises it
            self._fail(error)

    def _commit_once(self) -> None:
        due = self._progress.due()
        if due is None or self._commit is None:
            return
        if self._window.closed:
            raise WindowClosed
        try:
            self._commit(due.offset)
        except Exception as error:  # noqa: BLE001  # tried again, or raised as the cause
            self._progress.commit_failed(due, error)
        else:
            self._progress.committed(due)

    def _commit_at_the_end(self) -> None:
        for tries_left in reversed(range(LAST_TRIES)):
            due = self._progress.due()
            if due is None or self._commit is None:
                return
            if self._window.closed:
                self._failure = self._failure or WindowClosed()
                return
            try:
                self._commit(due.offset)
            except Exception as error:  # noqa: BLE001  # tried again, or raised as the cause
                if tries_left:
                    time.sleep(min(LAST_PAUSE, self._options.every))
                else:
                    self._failure = uncommitted(self._failure, due, error)
            else:
                self._progress.committed(due)
