"""A producer and workers for tests to kill, and the test that kills them.

`python -m tests.integrations.killable ROLE QUEUE ADDRESS NAME FILE`, for one of `queues.QUEUES`. The role `produce`
fans out ROOTS pages of a crawl. A worker appends a line to FILE for each page that it handles. With the role `crawl`,
it adds the pages that it finds there to the batch; with `nest`, it opens a batch of them under the page's item, so
pages of pages of pages are in the fourth level. With `note`, the line has the batch, when the handler began
(`time.monotonic`), and whether it knew of the batch's end then. LASTBIT_URL is the service.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lastbit import Client
from lastbit.integrations import current_batch, current_batch_ended, current_item
from tests.integrations import crawling
from tests.integrations.queues import QUEUES
from tests.support.servers import ROOT

ROOTS = int(os.environ.get("TESTS_ROOTS", "4000"))
"""Of 4,000 pages about 10,000 are found."""
KEY = os.environ.get("TESTS_KEY", "run-1")
"""The producer's idempotency key, and its batch's key."""
CONSUMERS = 3


def main() -> None:
    role, queue_name, address, name, file = sys.argv[1:]
    queue = QUEUES[queue_name](address, name)
    notes = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def handle(page: str) -> None:
        line = f"{current_batch()} {time.monotonic()} {current_batch_ended():d}" if role == "note" else page
        time.sleep(0.02 if role == "note" else 0.002)  # work, so that kills and cancels find some
        os.write(notes, f"{line}\n".encode())
        links = crawling.links(page)
        if links and role == "crawl":
            queue.fan_out(links, by=current_item())
        elif links and role == "nest":
            queue.fan_out(links, parent=current_item())

    if role == "produce":
        options = {"parent": os.environ["TESTS_PARENT"]} if "TESTS_PARENT" in os.environ else {}
        queue.fan_out(slow_roots(), key=KEY, idempotency_key=KEY, chunk=500, **options)
    else:
        queue.work(handle)


def slow_roots() -> Iterator[str]:
    for number, page in enumerate(crawling.roots(ROOTS)):
        if number % 50 == 0:
            time.sleep(0.03)  # work of three seconds, so that kills find some
        yield page


class Process:
    """One role, with all of its processes. Their errors are in a file beside that of the notes."""

    def __init__(self, role: str, *arguments: str, **environment: str) -> None:
        self._role = role
        self._command = [sys.executable, "-m", "tests.integrations.killable", role, *arguments]
        self._errors = Path(arguments[-1]).with_name("errors")
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self.start()

    def start(self) -> None:
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Raises `AssertionError` for an error."""
        code = self._process.poll()
        assert not code, f"{self._role} has ended with exit code {code}: {self._errors.read_text()[-3000:]}"
        return code == 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)


def check_exact(
    queue: str,
    address: str,
    name: str,
    service_url: str,
    folder: Path,
    *,
    role: str = "crawl",
    pause: float = 1.0,
    seconds: float = 1700,
) -> None:
    """Producer and workers of a crawl are killed at random, and started again: when the batch is complete, every page
    was handled, and its item is acked once. `pause`: maximum seconds between two kills."""
    notes = folder / "notes"
    notes.touch()
    arguments = (queue, address, name, str(notes))
    deadline = time.monotonic() + seconds
    kills: Counter[str] = Counter()
    with Client(service_url) as client:
        producer = Process("produce", *arguments, LASTBIT_URL=service_url)
        workers = [Process(role, *arguments, LASTBIT_URL=service_url) for _ in range(CONSUMERS)]
        try:
            while True:
                assert time.monotonic() < deadline, (kills, client.counts())
                time.sleep(random.uniform(0.2, pause))  # the moment of a kill
                if kills["producer"] < 6 and not producer.has_ended():
                    producer.kill()
                    kills["producer"] += 1
                    producer.start()
                if producer.has_ended() and next(client.batches(key=KEY)).complete:
                    handled = notes.read_text().split()
                    break
                assert not any(worker.has_ended() for worker in workers)
                if kills["worker"] < 25:
                    victim = random.choice(workers)
                    victim.kill()
                    kills["worker"] += 1
                    victim.start()
        finally:
            for process in (producer, *workers):
                process.kill()
        batches = list(client.batches())
        crawling.check(list(map(client.batch, (batch.id for batch in batches))), ROOTS, handled)
    assert min(kills["producer"], kills["worker"]) >= 2, kills
    repeats = len(handled) - len(set(handled))
    print(f"{dict(kills)} killed, {len(batches):,} batches of {len(set(handled)):,} pages, {repeats:,} handled again")


if __name__ == "__main__":
    main()
