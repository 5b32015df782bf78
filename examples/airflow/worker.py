"""Handles the messages of the catalog until it is stopped: `python -m examples.airflow.worker FOLDER`.

It finds the service by LASTBIT_URL and LASTBIT_TOKEN. A message is removed only after its ack was committed, so a
worker may be killed at any time, and any number of workers may share the folder.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from lastbit import Client, ItemRejected


def render(text: str) -> None:
    """The work itself."""


def main(folder: Path) -> None:
    with Client() as client, client.acker() as acker:
        while True:
            acks = {}
            for path in sorted(folder.glob("*.message"))[:100]:
                try:
                    text = path.read_text()
                except FileNotFoundError:
                    continue  # another worker was faster
                render(text)
                acks[path] = acker.ack(path.stem)
            for path, ack in acks.items():
                try:
                    ack.result()
                except ItemRejected as error:  # its batch was cancelled, for example: nobody waits for it
                    print(error, file=sys.stderr)
                path.unlink(missing_ok=True)
            if not acks:
                time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
