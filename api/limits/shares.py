"""What one tenant may take of a resource of the process.

A token that is limited to a prefix belongs to a tenant beside others. It gets a share of each resource, so that the
others always find the rest. So do strangers together, who have no token. All other tokens are limited by the resource
alone: often, one of them serves all consumers.
"""

from __future__ import annotations

from typing import Final

from lastbit.tokens import Token

CALLER: Final = "lastbit.caller"
"""The key of the caller in a request's ASGI scope."""
NOBODY: Final = Token("", frozenset(), b"")
"""The caller of a route that is open to everybody."""
OF_ALL: Final = 4
"""The share is one part of this many."""


def has_share(caller: Token) -> bool:
    """Whether the caller may only take a share."""
    return caller.prefix is not None or not caller.roles


class Shares:
    """What each limited token has taken of one resource. Belongs to one event loop."""

    def __init__(self, total: int) -> None:
        self.most = max(1, total // OF_ALL)
        self._taken: dict[bytes, int] = {}

    def has_room(self, caller: Token, amount: int) -> bool:
        """Whether the caller may take `amount`. It may always take the first one."""
        taken = self._taken.get(caller.digest, 0)
        return not has_share(caller) or not taken or taken + amount <= self.most

    def take(self, caller: Token, amount: int) -> None:
        if has_share(caller):
            self._taken[caller.digest] = self._taken.get(caller.digest, 0) + amount

    def give(self, caller: Token, amount: int) -> None:
        """Give back what was taken."""
        if has_share(caller):
            left = self._taken.pop(caller.digest, 0) - amount
            if left > 0:
                self._taken[caller.digest] = left
