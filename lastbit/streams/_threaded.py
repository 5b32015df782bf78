"""A stream whose records threads handle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

from lastbit.streams._progress import Options, Progress, failed
from lastbit.streams._schedule import Entry, Schedule
from lastbit.streams._steps import Failures, Stream, run_steps

R = TypeVar("R")


class ThreadedStream(Generic[R]):
    """`put(stream, key)` makes a thread call `work(key)`. `call_later(seconds, function)` makes one call a function."""

    def __init__(
        self,
        progress: Progress[R],
        options: Options[R],
        handle: Callable[[Any], object],
        commit: Callable[[Any], object] | None,
        dead_letter: Callable[[R, Exception], object] | None,
        put: Callable[[ThreadedStream[R], Hashable], object],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._progress = progress
        self._options = options
        self._schedule: Schedule[R] = Schedule(partial(put, self), call_later, options.batch or 1, options.linger)
        self._stream = Stream(progress, self._schedule, options, commit, dead_letter, time.sleep)
        self._handle = handle
        self._lock = threading.Lock()
        self._working = 0
        """The number of threads that handle records. Once the stream has failed, it only falls."""

    def accept(self, offset: Any, record: R) -> None:
        """A record has come. Raises `WindowFull`: call it again once the window has room."""
        position = self._progress.position_of(offset)
        if not self._progress.track(position, offset):
            return
        entry = Entry(position, offset, record)
        try:
            key = self._stream.key_of(record)
        except Exception as error:  # noqa: BLE001  # the caller's `key` or `wanted` failed
            run_steps(self._stream.give_up(entry, error))
        else:
            self._stream.add(entry, key)

    def work(self, key: Hashable) -> None:
        """Handle the next records of a key, unless the stream has failed."""
        with self._lock:
            if self._stream.failure is not None:
                return
            self._working += 1
        try:
            self._handle_next(key)
        except BaseException as error:  # noqa: BLE001  # it ends the stream, which raises it
            self._fail(error)
        with self._lock:
            self._working -= 1
            # Not by the thread that handled the last record: others may still be counted here.
            if not self._working:
                self._rested()

    def _handle_next(self, key: Hashable) -> None:
        work = self._stream.take(key)
        failures: Failures[R]
        try:
            result = self._handle(work.argument) if work.live_entries else None
        except Exception as error:  # noqa: BLE001  # any exception means that the records failed
            failures = [(entry, error) for entry in work.live_entries]
        except BaseException as error:
            raise failed(work.live_entries[0].offset, error) from error
        else:
            failures = self._stream.failures_in(work, result)
        if failures:
            run_steps(self._stream.partly_done(work, failures))
        else:
            self._stream.done(work)

    def _fail(self, error: BaseException) -> None:
        """No further records are handled."""
        with self._lock:
            self._stream.fail(error)

    def _rested(self) -> None:
        """No thread handles records at the moment. Called with the lock."""
