"""The calls of a work-horse, made by its worker: the worker's connection to the service is open, and a process that
lives for one job would have to open its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import TypeAlias

from lastbit import errors

log = logging.getLogger("lastbit.integrations")


@dataclass(frozen=True, slots=True)
class Ack:
    """The worker has taken it over as soon as it answers; the item is noted as unacked."""

    item: str
    queue: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The item is failed when the worker answers."""

    item: str
    reason: str


@dataclass(frozen=True, slots=True)
class Skip:
    """The item is skipped when the worker answers; it is noted as not skipped yet."""

    item: str
    queue: str
    reason: str | None


Request: TypeAlias = Ack | Fail | Skip


class Relay:
    """A pipe from one work-horse to its worker, made before the fork. A thread of the worker calls `take`."""

    def __init__(self, take: Callable[[Request], None]) -> None:
        self._take = take
        self._worker_end, self._horse_end = Pipe()

    def serve(self) -> None:
        """In the worker, after the fork: take requests until the work-horse ends."""
        self._horse_end.close()
        try:
            threading.Thread(target=self._serve, name="lastbit-relay", daemon=True).start()
        except RuntimeError as error:
            log.warning("a work-horse calls the service itself: %s", error)
            self._worker_end.close()  # or the work-horse would wait for an answer forever

    def _serve(self) -> None:
        with self._worker_end as pipe:
            while True:
                trouble: str | None = None
                try:
                    request = pipe.recv()
                    try:
                        self._take(request)
                    except errors.LastbitError as error:
                        trouble = str(error)
                    pipe.send(trouble)
                except (EOFError, OSError):  # the work-horse has ended
                    return

    def enter_horse(self) -> None:
        """In the work-horse, which gets an error when its worker has ended only if it holds no worker's end itself."""
        self._worker_end.close()

    def send(self, request: Request) -> None:
        """In the work-horse. Raises what `take` raises as a `LastbitError`, and `EOFError` or `OSError` if the worker
        has ended or does not serve."""
        self._horse_end.send(request)
        trouble = self._horse_end.recv()
        if trouble is not None:
            raise errors.LastbitError(trouble)
