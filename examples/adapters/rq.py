"""Renders a catalog with RQ. Start a service and a Redis, then a worker, and then the producer:

    rq worker --worker-class lastbit.integrations.rq.LastbitWorker
    python -m examples.adapters.rq

One picture fails for good. Set LASTBIT_URL, and for the worker RQ_REDIS_URL, for other addresses.
"""

from __future__ import annotations

import os

import redis
from rq import Queue, Retry

from lastbit.integrations.rq import fan_out


def render(product: int) -> None:
    if product == 19:
        raise ValueError(f"product {product} has no picture")


def main() -> None:
    queue = Queue(connection=redis.Redis.from_url(os.environ.get("RQ_REDIS_URL", "redis://127.0.0.1:6379")))
    calls = ((product,) for product in range(20))
    # The worker imports the function by this name; from this module, it would be that of `__main__`.
    batch = fan_out(queue, "examples.adapters.rq.render", calls, options={"retry": Retry(max=2)}, key="catalog-42")
    done = batch.wait(timeout=60)
    print(f"{done.acked} rendered, {done.failed} failed")
    for failed in batch.failed():
        for item, reason in failed.reasons.items():
            print(f"{item}: {reason}")


if __name__ == "__main__":
    main()
