"""A producer process: `python -m tests.integrations.sqs.producer SQS QUEUE_URL CHUNK COUNT KEY`. It prints the number
of the body that it produces first in each chunk."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from lastbit.integrations import sqs
from tests.support.aws import sqs_client


def main(url: str, queue_url: str, chunk: int, count: int, key: str) -> None:
    def bodies() -> Iterator[str]:
        for number in range(count):
            if number % chunk == 0:
                print(number, flush=True)
            yield f"body {number}"

    batch = sqs.fan_out(sqs_client(url), queue_url, bodies(), key=key, idempotency_key=key, chunk=chunk, senders=2)
    print("batch", batch.id, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
