"""What an operator does to a batch in the tests of redrives."""

from __future__ import annotations

from lastbit import BatchHandle, Client
from lastbit.failures import Redrive


def redriven(client: Client, batch: BatchHandle) -> Redrive:
    """Redrive all failed items, and return the request as a producer gets it."""
    return next(iter(client.redrives(after=batch.redrive().position - 1, batch=batch.id)))
