"""What must hold in the end, looked at in the feed alone: each complete order has one command, no other has any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from examples.orders.shipping import NEEDED
from lastbit import Event


def order_of(event: Event) -> str | None:
    """The order that an event of the feed is about."""
    if event.type in ("card.charged", "items.reserved"):
        order: str = event.data["order"]
        return order
    return event.key if event.type in ("batch.completed", "command.ship") else None


def faults(events: Iterable[Event], complete: Collection[str], incomplete: Collection[str]) -> list[str]:
    """What does not hold, in words."""
    came: dict[str, dict[str, int]] = defaultdict(dict)
    shipped: dict[str, list[int]] = defaultdict(list)
    for event in events:
        order = order_of(event)
        if order is None:
            continue
        if event.type == "command.ship":
            shipped[order].append(event.position)
        else:
            came[order].setdefault(event.type, event.position)
    found = []
    for order in complete:
        if len(shipped[order]) != 1:
            found.append(f"order {order} has {len(shipped[order])} commands, not 1")
        elif set(came[order]) != set(NEEDED) or shipped[order][0] < max(came[order].values()):
            found.append(f"order {order} was shipped before all that it needs had come")
    found += [f"order {order} was shipped, though it is not complete" for order in incomplete if shipped[order]]
    unknown = set(shipped) - {*complete, *incomplete}
    return found + [f"order {order} was shipped, and nobody knows it" for order in unknown if shipped[order]]
