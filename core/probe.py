"""Uses of the database for probes and scrapes, which must be answered in time even if the database is silent."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import structlog

from core import errors, threads

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Probe(Generic[T]):
    """Runs a read, or a write, in a separate thread, since an unreachable database can block its caller for a long
    time. Callers wait for up to `patience` seconds. Those that come while it runs share it, and so do those that come
    within `fresh` seconds of its beginning."""

    def __init__(
        self,
        name: str,
        read: Callable[[], T],
        *,
        patience: float,
        fresh: float = 0.0,
        silence: str = "the database has not answered",
    ) -> None:
        """`silence` says what has not happened when the patience is over."""
        self._name = name
        self._read = read
        self._patience = patience
        self._fresh = fresh
        self._silence = silence
        self._lock = threading.Lock()
        self._reading: Future[T] | None = None
        self._begun = 0.0

    def begin(self) -> None:
        """Run it unless it runs or is fresh, and don't wait. Its error is left to `result`."""
        with contextlib.suppress(errors.Unavailable):
            self._latest()

    def result(self) -> T:
        """Raises the read's error, or `errors.Unavailable`."""
        reading, begun = self._latest()
        try:
            return reading.result(max(0.0, begun + self._patience - time.monotonic()))
        except TimeoutError:
            raise errors.Unavailable(f"{self._silence} within {self._patience:g} seconds") from None

    def _latest(self) -> tuple[Future[T], float]:
        with self._lock:
            now = time.monotonic()
            if self._reading is None or (self._reading.done() and now - self._begun >= self._fresh):
                reading: Future[T] = Future()
                threads.start(self._run, reading, name=self._name)
                self._reading, self._begun = reading, now
            return self._reading, self._begun

    def _run(self, reading: Future[T]) -> None:
        try:
            reading.set_result(self._read())
        except Exception as error:  # it is reported to the waiting callers
            if not isinstance(error, errors.CoreError):
                log.exception("probe_failed", probe=self._name)
                error = errors.Unavailable("the database can't be read")
            reading.set_exception(error)
