"""The producer: opens the batch, extends it chunk by chunk, publishes each file with its item id, seals.

It can be killed anywhere and run again. Open and extend bear idempotency keys that follow from the work itself, so the
second run gets the same batch and the same ids; a small file says how many chunks were published. A chunk that was
published just before the file was written is published twice, which costs a few duplicates and nothing else.
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
"""Smaller than the default, so that even some hundred files make several groups."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--progress-file", required=True, type=Path)
    parser.add_argument("--seal-when-left", required=True, type=int)
    given = parser.parse_args()
    published = int(given.progress_file.read_text()) if given.progress_file.exists() else 0

    with Client(given.url) as client, Publisher(given.broker) as queue:
        batch = client.open(key="standard-library", group_size=GROUP_SIZE, idempotency_key="standard-library")
        say(opened=batch.id, replayed=batch.replayed)
        for number, files in enumerate(uneven_chunks(standard_library())):
            if number < published:
                continue
            ids = batch.extend(len(files), idempotency_key=f"chunk-{number}")
            say(extended=number, first=ids[0], last=ids[-1], count=len(ids))
            # Whoever reads this may want to kill us here, between an extend and its publishing; so wait for a word.
            if not sys.stdin.readline():
                return
            queue.publish([(item, str(path)) for item, path in zip(ids, files, strict=True)])
            _keep(given.progress_file, number + 1)
        # Any moment is right to seal. This one is chosen so that the seal races the last acks.
        queue.until_left(given.seal_when_left)
        sealed = batch.seal()
        say(sealed=True, newly=sealed.newly, pending=sealed.pending)


def _keep(path: Path, published: int) -> None:
    """Replaced in one step: killed in the middle, the old number stands."""
    new = path.with_suffix(".new")
    new.write_text(str(published))
    os.replace(new, path)  # noqa: PTH105  # named for what it does


if __name__ == "__main__":
    main()
