"""The memory for bodies of requests."""

from __future__ import annotations

from api.limits.shares import Shares
from api.metrics import REFUSED
from api.problems import Problem
from lastbit.tokens import Token


class Room:
    """The memory for bodies that are being read or wait to be handled. It is limited, so that many large bodies can't
    fill the process's memory. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes."""
        self.limit = limit
        self.used = 0
        self._shares = Shares(limit)

    def take(self, caller: Token, size: int) -> None:
        """Reserve `size` bytes. Raises `Problem` (`unavailable`) if there is no room. A single body always has room."""
        if (self.used and self.used + size > self.limit) or not self._shares.has_room(caller, size):
            REFUSED.labels("bytes").inc()
            raise Problem(
                "unavailable",
                "too many large bodies are being read at the moment",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        self.used += size
        self._shares.take(caller, size)

    def give(self, caller: Token, size: int) -> None:
        """Release `size` bytes."""
        self.used -= size
        self._shares.give(caller, size)
