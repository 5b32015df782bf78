"""The process: an order ships when its card is charged, its items are reserved and its batch is complete."""

from __future__ import annotations

from typing import Any

from lastbit.models import Event
from lastbit.processes import Command, Finish, process

NEEDED = ("batch.completed", "card.charged", "items.reserved")


@process("ship-order", correlate={"card.charged": "order", "items.reserved": "order", "batch.completed": "key"})
def ship_order(state: Any, event: Event) -> Any:
    """The state is the set of event types so far, in any order of arrival."""
    types = sorted({*(state or []), event.type})
    if len(types) < len(NEEDED):
        return types, []
    return Finish([Command("ship", {"after": types})], types)
