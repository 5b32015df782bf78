"""The acks of a work-horse, sent by its worker: the worker's connection to the service is open, and a process that
lives for one job would have to open its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing import Pipe

from lastbit import errors
from lastbit.integrations._settler import Resolution
from lastbit.models import AckResult


class Relay:
    """A pipe from one work-horse to its worker, made before the fork. A thread of the worker calls `resolve`."""

    def __init__(self, resolve: Callable[[Resolution], AckResult]) -> None:
        self._resolve = resolve
        self._worker_end, self._horse_end = Pipe()

    def serve(self) -> None:
        """In the worker, after the fork: resolve items until the work-horse ends."""
        self._horse_end.close()
        threading.Thread(target=self._serve, name="lastbit-relay", daemon=True).start()

    def _serve(self) -> None:
        with self._worker_end as pipe:
            while True:
                answer: AckResult | str
                try:
                    resolution = pipe.recv()
                    try:
                        answer = self._resolve(resolution)
                    except errors.LastbitError as error:
                        answer = str(error)
                    pipe.send(answer)
                except (EOFError, OSError):  # the work-horse has ended
                    return

    def enter_horse(self) -> None:
        """In the work-horse, which gets an error when its worker has ended only if it holds no worker's end itself."""
        self._worker_end.close()

    def send(self, resolution: Resolution) -> AckResult:
        """In the work-horse: have an item resolved. Raises what `resolve` raises as a `LastbitError`, and `EOFError` or
        `OSError` if the worker has ended."""
        self._horse_end.send(resolution)
        answer = self._horse_end.recv()
        if isinstance(answer, str):
            raise errors.LastbitError(answer)
        result: AckResult = answer
        return result
