"""A stream handled in parallel, in order per key, with the offset that is safe to commit.

One reader (the calling thread) tracks each record and puts it into the lane of its key; a lane is a thread that handles
its records one after the other; one committer commits the floor. What could go wrong, and why it can't here:

* A record is committed that nobody handled. It is tracked before it is put into a lane, and acked after its handler has
  returned, so a floor at or above it means that it was handled. What was filtered out or sent to the dead letters is
  acked too, or it would hold the floor for ever.
* A failure loses what was done. Whatever ends the stream (a handler, the source, a commit, Ctrl-C), what is safe is
  committed before it is raised, and records behind the failed one of its lane are not handled.
* One stuck key takes all memory. Its records wait in its lane, others go on, until the window is full; then the source
  is not read any more. `on_stuck` names the offset.
* A commit is overtaken by an older one. They are made one at a time, and each takes the floor of its own moment.
* A handler still runs when the stream was ended and begun anew. The lanes finish what they have in hand before the
  failure is raised, for `grace` seconds at most.
* The stream was taken away. A window that was closed takes no more acks, and nothing is committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from lastbit.streams._progress import (
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
    every: float = 1.0,
    window: AckWindow | None = None,
    wanted: Callable[[R], bool] | None = None,
    dead_letter: Callable[[R, Exception], object] | None = None,
    stuck_after: float = 60.0,
    on_stuck: Callable[[Any, float], object] | None = None,
    grace: float = 30.0,
) -> None:
    """Handle each record of `source`, those of one key in order, and return when all are done.

    `source` yields (offset, record), and may yield None when it has nothing at the moment: then a failure is noticed
    though no record comes. Offsets are ascending integers, or all opaque. `handle` is called from `lanes` threads, for
    the records of a key by one of them. `key` and `wanted` (False: the record is passed over) are called by the reader.

    `commit` gets the offset up to which all is done, at most every `every` seconds and never a lower one than before;
    the last time by the calling thread, at the end and on failure. It is called when the floor has moved; with a
    `window` of yours, when anything was acked, so that it can store `window.snapshot()`. A commit that fails is tried
    again an interval later, with the floor of then; the fifth in a row ends the stream (`CommitFailed`).

    `window`: a restored one skips what its snapshot says is done. Without one, at most 8,192 positions are above the
    floor; a stream of records that are large wants fewer.

    A record that raises goes to `dead_letter(record, error)` and counts as done when that has returned. Without it, or
    when it raises too, the stream ends: `RecordFailed` bears the offset. `on_stuck(offset, seconds)` is called once for
    an offset that has held the floor for `stuck_after` seconds; without it a warning is logged. When the stream ends
    by a failure, handlers have `grace` seconds to come to their end; one that doesn't is left behind, and its ack has
    no effect on what is committed. Raises `WindowClosed` when the window was closed meanwhile.
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
        self._running = options.lanes
        self._failure: BaseException | None = None
        self._hurry = threading.Event()  # commit now: the stream has failed
        self._over = threading.Event()  # the committer's end

    def run(self, source: Iterable[tuple[Any, R] | None]) -> None:
        for number, lane in enumerate(self._lanes):
            threading.Thread(target=self._work, args=(lane,), name=f"lastbit-lane-{number}", daemon=True).start()
        committer = threading.Thread(target=self._commit_regularly, name="lastbit-commits", daemon=True)
        committer.start()
        try:
            try:
                self._read(source)
                for lane in self._lanes:
                    lane.put(None)
                self._wait_for_lanes()
            except BaseException as error:  # noqa: BLE001  # Ctrl-C too: it is raised when what is safe was committed
                self._fail(error)
                self._wait_for_lanes()
        finally:
            self._over.set()
            self._hurry.set()
        committer.join()
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
            wanted = self._track(position, offset)
            if wanted is None:
                return
            if wanted:
                self._route(Entry(position, offset, record))

    def _track(self, position: int, offset: Any) -> bool | None:
        """None: the stream has failed while it was full."""
        while self._failure is None:
            try:
                return self._progress.track(position, offset)
            except WindowFull:
                self._window.wait_for_room(LOOK)
        return None

    def _route(self, entry: Entry[R]) -> None:
        try:
            lane = self._progress.lane_of(entry.record)
        except Exception as error:  # noqa: BLE001  # a record of which not even the key can be told
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
                    self._handle(entry.record)
                except Exception as error:  # noqa: BLE001  # whatever it is, it is the record's
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
        """Until they have ended; from a failure on, only so long."""
        until: float | None = None
        with self._changed:
            while self._running:
                if self._failure is None:
                    self._changed.wait()
                    continue
                until = until or time.monotonic() + self._options.grace
                left = until - time.monotonic()
                if left <= 0:
                    log.warning("%d handlers did not end within %g seconds", self._running, self._options.grace)
                    return
                self._changed.wait(left)

    # The committer.

    def _commit_regularly(self) -> None:
        try:
            while True:
                hurried = self._hurry.wait(self._options.every)
                if self._over.is_set():
                    return
                self._progress.tell_if_stuck()
                self._commit_once()
                if hurried:
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
        for left in reversed(range(LAST_TRIES)):
            due = self._progress.due()
            if due is None or self._commit is None:
                return
            if self._window.closed:
                self._failure = self._failure or WindowClosed()
                return
            try:
                self._commit(due.offset)
            except Exception as error:  # noqa: BLE001  # tried again, or raised as the cause
                if left:
                    time.sleep(min(LAST_PAUSE, self._options.every))
                else:
                    self._failure = uncommitted(self._failure, due, error)
            else:
                self._progress.committed(due)
