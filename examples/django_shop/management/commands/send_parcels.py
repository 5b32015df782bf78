from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from examples.django_shop.models import Charge, Order
from examples.django_shop.orders import send_parcels


class Command(BaseCommand):
    help = "Send the pending parcels of an order again, and count its charges"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("order", type=int)

    def handle(self, *_: Any, order: int, **__: Any) -> None:
        sent = send_parcels(Order.objects.get(pk=order))
        charges = Charge.objects.filter(order=order).count()
        self.stdout.write(f"{sent} sent, {charges} charged")
