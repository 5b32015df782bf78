"""The thread in which large bodies are parsed, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


class Parsing:
    """Parses the large bodies of one event loop. A parser rarely releases the GIL. So one thread at a time competes
    with the event loop for it, however many large bodies have arrived."""

    def __init__(self) -> None:
        self._one_at_a_time = anyio.CapacityLimiter(1)

    async def run(self, parse: Callable[[bytes], T], content: bytes) -> T:
        return await anyio.to_thread.run_sync(parse, content, limiter=self._one_at_a_time)
