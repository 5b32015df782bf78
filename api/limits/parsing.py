"""The threads in which large bodies are parsed: one for each token."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from lastbit.tokens import Token

T = TypeVar("T")


class Parsing:
    """Parses the large bodies of one event loop. A parser rarely releases the GIL, so each thread that parses slows the
    event loop down. So the bodies of a token are parsed one after the other, however many have arrived, and beside
    those of others."""

    def __init__(self) -> None:
        self._of_tokens: weakref.WeakValueDictionary[bytes, anyio.CapacityLimiter] = weakref.WeakValueDictionary()

    async def run(self, caller: Token, parse: Callable[[bytes], T], content: bytes) -> T:
        one_at_a_time = self._of_tokens.get(caller.digest)
        if one_at_a_time is None:
            one_at_a_time = self._of_tokens[caller.digest] = anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(parse, content, limiter=one_at_a_time)
