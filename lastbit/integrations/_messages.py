"""Item ids and reasons, as adapters find them in messages and exceptions."""

from __future__ import annotations

from typing import Any, Final

from lastbit.ids import InvalidItemId, ItemId
from lastbit.integrations._resolving import reason_of as described

MOST_REASON: Final = 500
"""Maximum characters of a reason that comes from an exception. The rest is in the worker's log."""


def item_of(message_id: Any) -> str | None:
    """The id, if it is an item's; None for messages that belong to no batch."""
    try:
        ItemId.check(message_id)
    except InvalidItemId:
        return None
    return str(message_id)


def reason_of(error: BaseException) -> str:
    """The reason for an item that failed with this exception."""
    return (described(error) or "failed")[:MOST_REASON]
