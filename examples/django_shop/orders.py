"""Places orders, and sends their messages."""

from __future__ import annotations

from django.db import connection, transaction

from examples.django_shop.models import Order
from examples.django_shop.tasks import charge, lastbit


def place_order(parcels: list[str]) -> Order:
    """Commit an order with its batch, and send a message for each parcel."""
    with transaction.atomic():
        batch = lastbit.open(connection, key="order", items=len(parcels), sealed=True)
        order: Order = Order.objects.create(batch=batch.id, parcels=parcels)
        transaction.on_commit(lambda: send_parcels(order))
    return order


def send_parcels(order: Order) -> int:
    """Send a message for each parcel that is pending: once more, if it has been sent before. Returns how many."""
    sent = 0
    for pending in lastbit.client().batch(order.batch).pending():
        for item, parcel in zip(pending.ids, order.parcels[pending.start : pending.end], strict=True):
            charge.delay(item, order.pk, parcel)
            sent += 1
    return sent
