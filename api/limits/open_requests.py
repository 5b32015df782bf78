"""The requests in progress of one token. Each holds a connection: a stream or a long poll as long as it wants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from starlette.types import Scope

from api.limits.shares import Shares
from api.metrics import REFUSED
from api.problems import Problem
from lastbit.tokens import Token

OPEN: Final = "lastbit.open_request"
"""The key of the `OpenRequest` in a request's ASGI scope."""


class OpenRequest:
    """A request in progress."""

    __slots__ = ("_caller", "_shares")

    def __init__(self, shares: Shares, caller: Token) -> None:
        self._shares: Shares | None = shares
        self._caller = caller
        shares.take(caller, 1)

    def end(self) -> None:
        """The request has its response, or its connection is lost: a long poll may go on without one. May be called
        again."""
        if self._shares is not None:
            self._shares.give(self._caller, 1)
            self._shares = None


class OpenRequests:
    """The requests in progress of one event loop."""

    def __init__(self, most_connections: int) -> None:
        self._shares = Shares(most_connections)

    def begin(self, caller: Token) -> OpenRequest | None:
        """A new request; None if the caller has too many."""
        return OpenRequest(self._shares, caller) if self._shares.has_room(caller, 1) else None

    @contextlib.contextmanager
    def one_of(self, caller: Token, scope: Scope) -> Iterator[None]:
        """A request in progress. Raises `Problem`: `rate_limited`."""
        request = scope[OPEN] = self.begin(caller)
        if request is None:
            REFUSED.labels("share").inc()
            most = self._shares.most
            raise Problem(
                "rate_limited",
                f"the token {caller.name} has {most:,} requests in progress, as many as a limited token may have",
                headers={"Retry-After": "1"},
            )
        try:
            yield
        finally:
            request.end()
