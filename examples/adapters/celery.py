"""Renders a catalog with Celery. Start a service and a Redis, then a worker, and then the producer:

    celery -A examples.adapters.celery worker
    python -m examples.adapters.celery

`make demo-celery` does all of it. Some pictures are retried, one fails for good, and one crashes the process that
renders it. Set LASTBIT_URL and REDIS_URL for other addresses.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from celery import Celery

from lastbit import Completed
from lastbit.integrations.celery import Lastbit

PRODUCTS = 1000
BUSY, WITHOUT_PICTURE, CRASHES = range(0, PRODUCTS, 100), 13, 666

app = Celery("catalog", broker=os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"))
app.conf.update(task_acks_late=True, task_ignore_result=True, worker_prefetch_multiplier=64)


def publish(catalog: Completed) -> None:
    """Called in a worker, at least once for a complete catalog, unless the seal completes it."""
    pictures = "all pictures are there" if catalog.succeeded else "not all pictures are there"
    print(f"catalog {catalog.key} is complete, {pictures}", flush=True)


lastbit = Lastbit(app, on_completed=publish)


@app.task(name="render", bind=True, max_retries=3)  # type: ignore[untyped-decorator]
def render(self: Any, product: int) -> None:
    if product in BUSY and self.request.retries == 0:
        raise self.retry(countdown=0.1, exc=ConnectionError("the renderer is busy"))
    if product == WITHOUT_PICTURE:
        raise ValueError(f"product {product} has no picture")
    if product == CRASHES:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    batch = lastbit.fan_out((render.s(product) for product in range(PRODUCTS)), key="catalog-42", chunk=100)
    completed = batch.wait(timeout=120)
    print(f"{completed.acked} rendered, {completed.failed} failed")
    for failed in batch.failed():
        for item, reason in failed.reasons.items():
            print(f"{item}: {reason}")
    verification = batch.verify()
    print(f"recounted: {verification.counted.acked} acked, {verification.counted.failed} failed, ok: {verification.ok}")


if __name__ == "__main__":
    main()
