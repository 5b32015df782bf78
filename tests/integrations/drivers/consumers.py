"""Runs the `consume` of an adapter in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.integrations.drivers import Link, Until
from tests.integrations.workers import wait_until


def consumed(consume: Callable[..., None], link: Link, until: Until, **options: Any) -> BaseException | None:
    """Run it until `until()` is true, or it ends; returns its error."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(consume, stop=stop, lastbit=link.client, **options)
        try:
            wait_until(lambda: future.done() or until(), "the messages are handled")
        finally:
            stop.set()
        return future.exception(60)
