"""Renders a catalog with Dramatiq. Start a service and a Redis, then a worker, and then the producer:

    dramatiq examples.adapters.dramatiq
    python -m examples.adapters.dramatiq

One picture fails once and is retried, and one fails for good. Set LASTBIT_URL and REDIS_URL for other addresses.
"""

from __future__ import annotations

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage

from lastbit import Completed
from lastbit.integrations.dramatiq import LastbitMiddleware, fan_out


def publish(catalog: Completed) -> None:
    """Called in a worker, at least once for a complete catalog."""
    print(
        f"catalog {catalog.key} is complete, {'all' if catalog.succeeded else 'not all'} pictures are there", flush=True
    )


broker = RedisBroker(url=os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"))  # type: ignore[no-untyped-call]
broker.add_middleware(CurrentMessage())
broker.add_middleware(LastbitMiddleware(on_completed=publish))
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3, min_backoff=100)
def render(product: int) -> None:
    message = CurrentMessage.get_current_message()
    if product == 13 and message is not None and "retries" not in message.options:
        raise ConnectionError("the renderer is busy")


@dramatiq.actor(throws=(ValueError,))
def render_without_picture(product: int) -> None:
    raise ValueError(f"product {product} has no picture")


def main() -> None:
    messages = [render.message(product) for product in range(99)] + [render_without_picture.message(99)]
    batch = fan_out(messages, key="catalog-42")
    done = batch.wait(timeout=60)
    print(f"{done.acked} rendered, {done.failed} failed")
    for failed in batch.failed():
        for item, reason in failed.reasons.items():
            print(f"{item}: {reason}")


if __name__ == "__main__":
    main()
