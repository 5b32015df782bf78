"""The end of a batch as the outcome of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastbit.integrations.airflow._airflow import AirflowException, AirflowFailException
from lastbit.models import Batch


def summary(batch: Batch) -> dict[str, Any]:
    """The batch as a task's XCom: `{id, key, state, items, acked, failed, skipped, pending,
    succeeded}`."""
    names = ("id", "key", "state", "items", "acked", "failed", "skipped", "pending", "succeeded")
    return {name: getattr(batch, name) for name in names}


def check(batch: Mapping[str, Any], *, fail_on_failed_items: bool, by_key: bool) -> None:
    """Raise the exception that ends the task, if the ended batch isn't what the task waited for.

    After an `AirflowFailException` the task isn't tried again: a batch with this id will never complete. With a key, a
    later try may find another batch; and failed items may be acked before it.
    """
    name = f"batch {batch['id']}" if batch["key"] is None else f"batch {batch['id']} (key {batch['key']!r})"
    counts = f"{batch['pending']:,} of {batch['items']:,} items were pending"
    final = AirflowException if by_key else AirflowFailException
    if batch["state"] == "cancelled":
        raise final(f"{name} was cancelled: {counts}")
    if batch["state"] == "expired":
        raise final(f"{name} has expired, because nothing happened to it for too long: {counts}")
    if fail_on_failed_items and batch["failed"]:
        raise AirflowException(f"{name} is complete, but {batch['failed']:,} of {batch['items']:,} items failed")
