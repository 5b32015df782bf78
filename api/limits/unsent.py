"""The bytes of responses that clients haven't read yet. They stay in memory until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from api.limits.shares import OF_ALL, has_share
from api.metrics import REFUSED
from lastbit.tokens import Token

LIMIT: Final = 128 * 2**20
"""Maximum bytes in all. A limited token has a share of it."""


class Connection(Protocol):
    def abort(self) -> None: ...


class Unsent:
    """The connections of one event loop whose clients don't read as fast as the service writes. Beyond the limit, the
    token with the most unsent bytes loses the connections that have waited the longest. So a client that reads slowly
    loses its connection only to the clients of its own token."""

    def __init__(self, call_soon: Callable[..., Any], limit: int = LIMIT) -> None:
        self._call_soon = call_soon
        self._limit = limit
        self._total = 0
        self._waiting: dict[Token, dict[Connection, int]] = {}
        """The bytes of each connection, oldest first."""

    def add(self, connection: Connection, caller: Token, size: int) -> None:
        """The client of `connection` stopped reading; `size` bytes are unsent."""
        self.remove(connection, caller)
        self._waiting.setdefault(caller, {})[connection] = size
        self._total += size
        while has_share(caller) and self._of(caller) > self._limit // OF_ALL:
            self._abort_oldest(caller)
        while self._total > self._limit:
            self._abort_oldest(max(self._waiting, key=self._of))

    def remove(self, connection: Connection, caller: Token) -> None:
        """The client reads again, or has left."""
        waiting = self._waiting.get(caller, {})
        self._total -= waiting.pop(connection, 0)
        if not waiting:
            self._waiting.pop(caller, None)

    def _of(self, caller: Token) -> int:
        return sum(self._waiting.get(caller, {}).values())

    def _abort_oldest(self, caller: Token) -> None:
        connection = next(iter(self._waiting[caller]))
        self.remove(connection, caller)
        REFUSED.labels("unread").inc()
        self._call_soon(connection.abort)  # it may be in the middle of a write
