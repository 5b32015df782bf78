"""Checks the feed: each complete order has exactly one command, other orders have none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from examples.orders.shipping import NEEDED
from lastbit import Event


def order_of(event: Event) -> str | None:
    """The order that an event belongs to."""
    if event.type in ("card.charged", "items.reserved"):
        order: str = event.data["order"]
        return order
    return event.key if event.type in ("batch.completed", "command.ship") else None


def faults(events: Iterable[Event], complete: Collection[str], incomplete: Collection[str]) -> list[str]:
    """A sentence for each failed check."""
    positions: dict[str, dict[str, int]] = defaultdict(dict)
    shipments: dict[str, list[int]] = defaultdict(list)
    for event in events:
        order = order_of(event)
        if order is None:
            continue
        if event.type == "command.ship":
            shipments[order].append(event.position)
        else:
            positions[order].setdefault(event.type, event.position)
    problems = []
    for order in complete:
        if len(shipments[order]) != 1:
            problems.append(f"order {order} has {len(shipments[order])} commands, not 1")
        elif set(positions[order]) != set(NEEDED) or shipments[order][0] < max(positions[order].values()):
            problems.append(f"order {order} was shipped before all its events had arrived")
    problems += [f"order {order} was shipped, though it is not complete" for order in incomplete if shipments[order]]
    unknown_orders = set(shipments) - {*complete, *incomplete}
    return problems + [f"order {order} was shipped, but does not exist" for order in unknown_orders if shipments[order]]
