"""The memory for bodies of requests."""

from __future__ import annotations

from api.metrics import REFUSED
from api.problems import Problem


class Room:
    """The memory for bodies that are being read or wait to be handled. It is limited, so that many large bodies can't
    fill the process's memory. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes."""
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> None:
        """Reserve `size` bytes. Raises `Problem` (`unavailable`) if there is no room. A single body always has room."""
        if self.used and self.used + size > self.limit:
            REFUSED.labels("bytes").inc()
            raise Problem(
                "unavailable",
                "too many large bodies are being read at the moment",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        self.used += size

    def give(self, size: int) -> None:
        """Release `size` bytes."""
        self.used -= size
