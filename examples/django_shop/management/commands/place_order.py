from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from examples.django_shop.orders import place_order


class Command(BaseCommand):
    help = "Place an order, and have its parcels charged"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("parcels", nargs="+")

    def handle(self, *_: Any, parcels: list[str], **__: Any) -> None:
        self.stdout.write(f"order {place_order(parcels).pk}")
