"""Ids, as adapters find them in messages: of items, and of messages at the end of a batch."""

from __future__ import annotations

import re
from typing import Any, Final

from lastbit.ids import InvalidItemId, ItemId

ENDING: Final = re.compile(r"batch:([1-9][0-9]{0,15}):(?:succeeded|completed|expired|cancelled)(?::[0-9]+)?")
"""The id of the event that ends a batch, and of the message that it leads to."""


def item_of(message_id: Any) -> str | None:
    """The id, if it is an item's; None for messages that belong to no batch."""
    try:
        ItemId.check(message_id)
    except InvalidItemId:
        return None
    return str(message_id)


def ended_batch_of(message_id: Any) -> int | None:
    """The batch at whose end the message was sent; None for all other messages."""
    ending = ENDING.fullmatch(message_id) if isinstance(message_id, str) else None
    return None if ending is None else int(ending[1])
