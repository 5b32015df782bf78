"""The producer: opens the batch, extends it chunk by chunk, publishes each file with its item id, and seals it.

It can be killed anywhere and restarted. Open and extend use idempotency keys derived from the work, so the second run
gets the same batch and the same ids. A small file contains the number of published chunks. If the producer is killed
after it has published a chunk but before it has written the file, the chunk is published twice: only duplicates result.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from examples.demo.broker import Publisher
from examples.demo.files import standard_library, uneven_chunks
from examples.speech import say
from lastbit import Client

GROUP_SIZE = 256
"""Smaller than the default, so that a few hundred files make several groups."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--progress-file", required=True, type=Path)
    parser.add_argument("--seal-when-left", required=True, type=int)
    arguments = parser.parse_args()
    chunks_published = int(arguments.progress_file.read_text()) if arguments.progress_file.exists() else 0

    with Client(arguments.url) as client, Publisher(arguments.broker) as queue:
        batch = client.open(key="standard-library", group_size=GROUP_SIZE, idempotency_key="standard-library")
        say(opened=batch.id, replayed=batch.replayed)
        for number, files in enumerate(uneven_chunks(standard_library())):
            if number < chunks_published:
                continue
            ids = batch.extend(len(files), idempotency_key=f"chunk-{number}")
            say(extended=number, first=ids[0], last=ids[-1], count=len(ids))
            # The demo may kill this process here, between extend and publish, so wait for its permission to continue.
            if not sys.stdin.readline():
                return
            queue.publish([(item, str(path)) for item, path in zip(ids, files, strict=True)])
            _keep(arguments.progress_file, number + 1)
        # A seal is correct at any time. At this time it races the last acks.
        queue.until_left(arguments.seal_when_left)
        sealed = batch.seal()
        say(sealed=True, newly=sealed.newly, pending=sealed.pending)


def _keep(path: Path, chunks: int) -> None:
    """Replace the file in one step: if the process is killed, the old number remains."""
    new = path.with_suffix(".new")
    new.write_text(str(chunks))
    os.replace(new, path)  # noqa: PTH105  # named for what it does


if __name__ == "__main__":
    main()
