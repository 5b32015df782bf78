"""Renders a catalog with taskiq. Start a service and a Redis, then a worker, and then the producer:

    taskiq worker examples.adapters.taskiq:broker
    python -m examples.adapters.taskiq

One picture fails for good. Set LASTBIT_URL and REDIS_URL for other addresses.
"""

from __future__ import annotations

import asyncio
import os

from taskiq import SimpleRetryMiddleware
from taskiq_redis import RedisStreamBroker

from lastbit import Completed
from lastbit.integrations.taskiq import LastbitMiddleware, fan_out


async def publish(catalog: Completed) -> None:
    """Called in a worker, at least once for a complete catalog."""
    print(
        f"catalog {catalog.key} is complete, {'all' if catalog.succeeded else 'not all'} pictures are there", flush=True
    )


broker = RedisStreamBroker(
    os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"), consumer_id="0", unacknowledged_lock_timeout=60
)
broker.add_middlewares(SimpleRetryMiddleware(), LastbitMiddleware(on_completed=publish))


@broker.task("render", retry_on_error=True, max_retries=3)
async def render(product: int) -> None:
    if product == 99:
        raise ValueError(f"product {product} has no picture")


async def main() -> None:
    await broker.startup()
    batch = await fan_out(render, ((product,) for product in range(100)), key="catalog-42")
    done = await batch.wait(timeout=60)
    print(f"{done.acked} rendered, {done.failed} failed")
    async for failed in batch.failed():
        for item, reason in failed.reasons.items():
            print(f"{item}: {reason}")
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
