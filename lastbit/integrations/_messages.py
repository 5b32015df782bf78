"""Item ids and reasons, as adapters find them in messages and exceptions."""

from __future__ import annotations

from typing import Any, Final

from lastbit.ids import InvalidItemId, ItemId

MOST_REASON: Final = 500
"""Maximum characters of a reason that comes from an exception. The rest is in the worker's log."""


def item_of(message_id: Any) -> str | None:
    """The id, if it is an item's; None for messages that belong to no batch."""
    try:
        ItemId.parse(message_id)
    except InvalidItemId:
        return None
    return str(message_id)


def reason_of(error: BaseException) -> str:
    """The reason for an item that failed with this exception."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text[:MOST_REASON].encode(errors="replace").decode()
