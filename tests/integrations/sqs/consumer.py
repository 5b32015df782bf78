"""A consumer process: `python -m tests.integrations.sqs.consumer SQS QUEUE_URL WORD`. It prints each body that it
handles, unless WORD is `quiet`. A body that contains WORD is handled forever. With `before-deletion` it kills itself
instead of deleting."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from lastbit.integrations import sqs
from tests.support.aws import sqs_client


def main(url: str, queue_url: str, word: str) -> None:
    client = sqs_client(url)
    if word == "before-deletion":
        client.delete_message_batch = lambda **_: os.kill(os.getpid(), signal.SIGKILL)

    def handle(message: Any) -> None:
        if word != "quiet":
            os.write(1, f"{message['Body']}\n".encode())  # whole, although several threads write
        if word in message["Body"]:
            threading.Event().wait()

    print("consuming", file=sys.stderr, flush=True)
    sqs.consume(client, queue_url, handle, workers=2, wait_seconds=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
