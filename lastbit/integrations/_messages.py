"""Item ids, as adapters find them in messages."""

from __future__ import annotations

from typing import Any

from lastbit.ids import InvalidItemId, ItemId


def item_of(message_id: Any) -> str | None:
    """The id, if it is an item's; None for messages that belong to no batch."""
    try:
        ItemId.check(message_id)
    except InvalidItemId:
        return None
    return str(message_id)
