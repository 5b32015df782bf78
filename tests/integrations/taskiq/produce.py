"""`python -m tests.integrations.taskiq.produce COUNT KEY`: a producer that may be killed and run again."""

from __future__ import annotations

import asyncio
import sys

from lastbit.integrations.taskiq import fan_out
from tests.integrations.taskiq import app


async def main(count: int, key: str) -> None:
    await app.broker.startup()
    await fan_out(app.succeeds, ((number,) for number in range(count)), key=key, idempotency_key=key)
    await app.broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
