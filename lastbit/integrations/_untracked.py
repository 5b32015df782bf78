"""Messages without an item's id. Other producers send them; and a script that moves dead letters back sends their
bodies, mostly without the attribute or header that holds the id. Then they are handled, and their items stay pending.

Tasks of Celery, Dramatiq, taskiq and RQ can't lose it, as the id is the task's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from typing import Final, Literal, get_args

from lastbit.errors import InvalidArgument
from lastbit.integrations._messages import item_of

log = logging.getLogger("lastbit.integrations")

WhenUntracked = Literal["handle", "warn", "refuse"]

NO_ITEM: Final = "the message carries no item's id"
"""Why a message was refused."""
_WHAT_FOLLOWS: Final = {"warn": "handled, and no item is resolved", "refuse": "refused"}


class UntrackedMessages:
    """Those of one consumer. `source`: where it gets its messages, for the log. Raises `InvalidArgument`."""

    def __init__(self, when: WhenUntracked, source: str) -> None:
        if when not in get_args(WhenUntracked):
            raise InvalidArgument(f"untracked is 'handle', 'warn' or 'refuse', not {when!r}")
        self._when = when
        self._source = source
        self._seen: Iterator[int] = count()

    def refuses(self, item: str | None) -> bool:
        """Whether the message with this item is refused. The first message without one is logged, on demand; so is a
        malformed id."""
        if self._when == "handle" or item_of(item) is not None:
            return False
        if next(self._seen) == 0:
            log.warning(
                "messages of %s carry no item's id, and are %s: they were sent without one, or have lost it as they "
                "were moved",
                self._source,
                _WHAT_FOLLOWS[self._when],
            )
        return self._when == "refuse"
