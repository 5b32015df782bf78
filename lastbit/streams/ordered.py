"""Handles a stream in parallel, in order per key, and commits the safe offset.

One reader (the calling thread) tracks each record and adds it to the queue of its key (`_schedule`). `lanes` threads
handle the next record of any key. One committer commits the floor. Things that could go wrong, and why they can't:

* A record is committed but was not handled. It is tracked before it is queued, and acked after its handler has
  returned, so a floor at or above it means that it was handled. Filtered records and those sent to the dead letters are
  acked too; otherwise they would hold the floor forever.
* A failure loses finished work. When the stream ends with a failure (of a handler, the source or a commit, or by
  Ctrl-C), the safe floor is committed before the error is raised, and later records of the failed key are not handled.
* One stuck key uses all memory. Its records wait in its queue and other keys continue, until the window is full; then
  the reader stops reading the source. `on_stuck` receives the offset. A record that waits for a retry occupies no lane.
* A commit is overtaken by an older one. Commits are made one at a time, and each computes the floor when it starts.
* A handler still runs when the stream has ended and is started again. The lanes finish their current records before the
  failure is raised, within `grace` seconds.
* The stream gets another owner. A closed window accepts no more acks, and nothing is committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from lastbit._threads import join_started
from lastbit.streams._progress import EVERY, LOOK, NAME, Options, Progress, log
from lastbit.streams._steps import run_steps
from lastbit.streams._threaded import ThreadedStream
from lastbit.streams._workers import Workers
from lastbit.streams.errors import WindowFull
from lastbit.streams.window import AckWindow

R = TypeVar("R")


def run_ordered(
    source: Iterable[tuple[Any, R] | None],
    handle: Callable[[Any], object],
    *,
    key: Callable[[R], Hashable] | None = None,
    ordered: bool = True,
    lanes: int = 8,
    batch: int | None = None,
    linger: float = 0.0,
    retry: Callable[[Exception, int], float | None] | None = None,
    dead_letter: Callable[[R, Exception], object] | None = None,
    commit: Callable[[Any], object] | None = None,
    every: float = EVERY,
    window: AckWindow | None = None,
    wanted: Callable[[R], bool] | None = None,
    stuck_after: float = 60.0,
    on_stuck: Callable[[Any, float], object] | None = None,
    grace: float = 30.0,
    name: str = NAME,
) -> None:
    """Handle each record of `source`, those of one key in order, and return when all are done.

    `source` yields (offset, record) pairs. It may yield None when it has nothing at the moment, so that a failure is
    noticed although no record arrives. Offsets are either ascending integers or all opaque. `handle` is called from
    `lanes` threads; any of them handles the next record of a key. Records whose key is None have no order, nor has any
    with `ordered=False`. The reader calls `key` and `wanted`; if `wanted` returns False, the record is skipped.

    `batch`: `handle` gets a list of up to so many records, all of one key if they are ordered. It returns None, or the
    failures among them as (record, error) pairs; if it raises, all have failed. Records wait up to `linger` seconds
    until so many have come.

    If a record fails, `retry(error, tries)` returns the seconds until it is tried again, or None to give it up; `tries`
    is how often it was tried. `Backoff` is such a function. Until then it holds the later records of its key, and no
    others. Once it is given up, or without `retry`, `dead_letter(record, error)` is called, and the record counts as
    done when that returns. Without `dead_letter`, or if it raises too, the stream ends with `RecordFailed`, which has
    the offset. A record that waits for a retry when the stream ends otherwise stays outstanding.

    `commit` is called with the offset up to which all records are done, at intervals of at least `every` seconds and
    never with a lower offset than before. The last call comes from the calling thread, at the end or after a failure.
    `commit` is called when the floor has moved or, if you pass a `window`, when anything was acked, so that it can
    store `window.snapshot()`. A failed commit is retried after an interval, with the floor at that time; the fifth
    failure in a row ends the stream (`CommitFailed`).

    `window`: a restored window skips the records that its snapshot contains as done. Without one, at most 8,192
    positions are above the floor; use a smaller window for large records.

    `on_stuck(offset, seconds)` is called once for an offset that has held the floor for `stuck_after` seconds; by
    default a warning is logged. After a failure, running handlers get `grace` seconds to finish. A handler that takes
    longer is abandoned, and its ack does not affect the commit. `name` is the stream's in `lastbit.streams.metrics`.
    Raises `WindowClosed` if the window was closed in the meantime.
    """
    options = Options(
        key, lanes, ordered, batch, linger, retry, every, wanted, stuck_after, on_stuck, grace, name
    ).checked()
    _Run(Progress(window, options), options.checked(), handle, commit, dead_letter).run(source)


class _Run(ThreadedStream[R]):
    def __init__(
        self,
        progress: Progress[R],
        options: Options[R],
        handle: Callable[[Any], object],
        commit: Callable[[Any], object] | None,
        dead_letter: Callable[[R, Exception], object] | None,
    ) -> None:
        self._workers = Workers()
        to_workers = self._workers.put, self._workers.call_later
        super().__init__(progress, options, handle, commit, dead_letter, *to_workers)
        self._window = progress.window
        self._changed = threading.Condition(self._lock)
        self._hurry = threading.Event()  # set when the stream has failed: commit now
        self._over = threading.Event()  # set to end the committer

    def run(self, source: Iterable[tuple[Any, R] | None]) -> None:
        committer = threading.Thread(target=self._commit_regularly, name="lastbit-commits", daemon=True)
        try:
            try:
                self._workers.start(self._options.lanes)
                committer.start()
                self._read(source)
                self._schedule.flush()
                self._wait_for_records()
                self._end(committer)
            except BaseException as error:  # noqa: BLE001  # Ctrl-C too: it is raised after the last commit
                self._fail(error)
                self._wait_for_records()
                self._end(committer)
        finally:
            self._over.set()
            self._stream.leave_the_metrics()
        run_steps(self._stream.commit_at_the_end())
        if self._stream.failure is not None:
            raise self._stream.failure

    # The reader.

    def _read(self, source: Iterable[tuple[Any, R] | None]) -> None:
        for item in source:
            if self._stream.failure is not None:
                return
            if item is not None:
                self._accept_with_room(*item)

    def _accept_with_room(self, offset: Any, record: R) -> None:
        """Unless the stream fails while the window is full."""
        while self._stream.failure is None:
            try:
                self.accept(offset, record)
                return
            except WindowFull:
                self._window.wait_for_room(LOOK)

    # The lanes.

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        with self._changed:
            self._changed.notify_all()
        self._hurry.set()

    def _rested(self) -> None:
        self._changed.notify_all()

    def _wait_for_records(self) -> None:
        """Wait until all are done; after a failure, at most `grace` seconds for those that are being handled."""
        until: float | None = None
        with self._changed:
            while self._working or (self._schedule.left and self._stream.failure is None):
                if self._stream.failure is None:
                    self._changed.wait()
                    continue
                until = until or time.monotonic() + self._options.grace
                seconds = until - time.monotonic()
                if seconds <= 0:
                    log.warning("%d handlers did not end within %g seconds", self._working, self._options.grace)
                    return
                self._changed.wait(seconds)

    # The committer.

    def _end(self, committer: threading.Thread) -> None:
        self._workers.stop(wait=not self._working)
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
                run_steps(self._stream.commit_once())
                if is_last:
                    self._over.wait()
                    return
        except BaseException as error:  # noqa: BLE001  # the calling thread raises it
            self._fail(error)
