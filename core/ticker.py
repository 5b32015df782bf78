"""Runs background work of a process at intervals until it is stopped.

The work itself is a `run_once()` that can be tested alone. The pause is randomized, so that replicas that started
together don't run at the same times. An error is logged, and the next round tries again.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Final

import structlog

from core import errors

PATIENCE: Final = 5.0
"""Seconds that the end waits for the current round. A round of the janitor may take an hour. It consists of
transactions after each of which the process may be killed, so the rest is left to the next process."""

log = structlog.get_logger(__name__)


@contextlib.contextmanager
def ticking(name: str, work: Callable[[], object], seconds: float) -> Iterator[None]:
    """Run `work` about every `seconds` in its own thread while the context lasts. Leaving the context waits
    `PATIENCE` seconds for the current round."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds * random.uniform(0.75, 1.25)):  # noqa: S311  # jitter, no secret
            try:
                work()
            except errors.Unavailable as error:
                log.warning("background_work_failed", work=name, error=str(error))
            except Exception:  # the next round may succeed
                log.exception("background_work_failed", work=name)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE)
