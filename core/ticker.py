"""Background work of a process: run it, wait a while, run it again, until it is told to stop.

The work itself is a `run_once()` that can be tested without any of this. The pause is jittered, so that replicas that
started together don't work together for ever. An error is logged and the next round tries again.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import structlog

log = structlog.get_logger(__name__)


@contextlib.contextmanager
def ticking(name: str, work: Callable[[], object], seconds: float) -> Iterator[None]:
    """Run `work` about every `seconds`, in a thread of its own, while the context lasts. Its end waits for the round
    that is under way."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds * random.uniform(0.75, 1.25)):  # noqa: S311  # jitter, no secret
            try:
                work()
            except Exception:  # whatever it was, the next round is worth trying
                log.exception("background_work_failed", work=name)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
