"""The worker's tasks. A worker that is forked has connections of its own, Django's and Lastbit's."""

from __future__ import annotations

import os
from typing import Any

import django
from celery import Celery

django.setup()

from django.db import OperationalError  # noqa: E402

from examples.django_shop.models import Charge  # noqa: E402
from lastbit.embedded import Lastbit  # noqa: E402

app = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"))
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, task_ignore_result=True)

lastbit = Lastbit.from_django()


@app.task(autoretry_for=[OperationalError], retry_backoff=True, max_retries=None)  # type: ignore[untyped-decorator]
def charge(item: str, order: int, parcel: str) -> None:
    """Delivered at least once; charges once. A deadlock or a lost connection is an `OperationalError`."""

    def effect(tx: Any) -> None:
        Charge.objects.create(order_id=order, parcel=parcel)

    result = lastbit.once(item, effect)
    if any(batch.newly for batch in result.completed):
        print(f"order {order} is complete", flush=True)
