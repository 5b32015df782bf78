"""The process: an order ships once its card was charged, its items were reserved and its batch is complete."""

from __future__ import annotations

from typing import Any

from lastbit.models import Event
from lastbit.processes import Command, Finish, process

NEEDED = ("batch.completed", "card.charged", "items.reserved")


@process("ship-order", correlate={"card.charged": "order", "items.reserved": "order", "batch.completed": "key"})
def ship_order(state: Any, event: Event) -> Any:
    """What has come is the state, in whatever order it came."""
    seen = sorted({*(state or []), event.type})
    if len(seen) < len(NEEDED):
        return seen, []
    return Finish([Command("ship", {"after": seen})], seen)
