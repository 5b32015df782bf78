"""`python -m tests.integrations.taskiq.produce TASK COUNT KEY`: a producer that may be killed and run again."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from lastbit.integrations.taskiq import fan_out
from tests.integrations import crawling
from tests.integrations.taskiq import app


async def main(task: Any, count: int, key: str) -> None:
    await app.broker.startup()
    await fan_out(task, ((page,) for page in crawling.roots(count)), key=key, idempotency_key=key)
    await app.broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main(getattr(app, sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
