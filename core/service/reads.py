"""Reads of batches that share statements. Reads that arrive during a statement wait, and the next one serves them all.

Each read is as fresh as if it were alone: its statement starts after it has arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from core import errors
from core.batches import batch as batches
from core.batches.batch import Batch
from core.storage.database import Database

MAX_WAITING: Final = 2000
"""Reads that may wait before callers are refused."""


class BatchRead:
    """One read. When it is finished, it has either a `state` or an `error`."""

    __slots__ = ("batch", "error", "state", "to")

    def __init__(self, batch: int, receiver: Any) -> None:
        self.batch = batch
        self.to = receiver
        """The receiver of the result; opaque here."""
        self.state: Batch | None = None
        self.error: Exception | None = None


Deliver = Callable[[Sequence[BatchRead]], None]
"""Receives finished reads. Called in the reader's thread; it must not block or raise."""


class ReadService:
    """One thread reads for all callers."""

    def __init__(self, database: Database, max_waiting: int = MAX_WAITING) -> None:
        self._database = database
        self._max_waiting = max_waiting
        self._wake = threading.Condition()
        self._waiting: list[tuple[BatchRead, Deliver]] = []
        self._stopping = False
        self._thread: threading.Thread | None = None

    def submit(self, read: BatchRead, deliver: Deliver) -> None:
        """Queue the read; `deliver` is called when it is finished, perhaps with others. Raises `errors.Overloaded`."""
        with self._wake:
            if self._stopping:
                raise errors.Unavailable("the service is stopping")
            if len(self._waiting) >= self._max_waiting:
                raise errors.Overloaded("too many requests are waiting")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="reads", daemon=True)
                self._thread.start()
            self._waiting.append((read, deliver))
            if len(self._waiting) == 1:
                self._wake.notify()

    def stop(self) -> None:
        """Finish the waiting reads, and accept no more."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._stopping)
                part, self._waiting = self._waiting, []
            if not part:
                return
            self._read([read for read, _ in part])
            by_receiver: dict[Deliver, list[BatchRead]] = {}
            for read, deliver in part:
                by_receiver.setdefault(deliver, []).append(read)
            for deliver, reads in by_receiver.items():
                deliver(reads)

    def _read(self, reads: Sequence[BatchRead]) -> None:
        try:
            states = self._database.read(batches.by_id, {read.batch for read in reads})
        except Exception as error:  # noqa: BLE001  # it is passed to the callers
            for read in reads:
                read.error = error
            return
        for read in reads:
            read.state = states.get(read.batch)
            if read.state is None:
                read.error = errors.BatchNotFound(read.batch)
