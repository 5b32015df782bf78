"""Orders and charges."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    batch = models.BigIntegerField(unique=True)
    parcels = models.JSONField()
    """The names of the parcels. The item of each has its position in this list as its number."""


class Charge(models.Model):
    order = models.ForeignKey(Order, models.CASCADE)
    parcel = models.CharField(max_length=200)
