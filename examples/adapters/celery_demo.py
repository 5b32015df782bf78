"""`make demo-celery`: the catalog of `examples.adapters.celery`, with a private Redis and service, and a worker that is
killed in the middle. Exit status: 0 the batch has ended exactly, 1 it has not, 130 interrupted."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from celery.canvas import Signature

from examples.adapters.celery import PRODUCTS, app, lastbit, render
from examples.processes import ENDING, Failed, Process, Processes, start_service
from lastbit import Batch, Client, WaitTimeout

LONGEST = 120
"""Seconds after which the demo gives up."""
IDLE = 15
"""Seconds in which worker 2 has run everything that Redis has."""

# The messages of a killed worker are delivered again after this time, when another worker starts or within 100 seconds.
# The default of an hour is too long for a demo, and this is too short for anything else.
app.conf.broker_transport_options = {"visibility_timeout": 1}


def start_redis(processes: Processes, folder: Path) -> str:
    """Its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.start("redis", "examples.adapters.private_redis", str(port), str(folder))
    return f"redis://127.0.0.1:{port}"


def start_worker(processes: Processes, number: int) -> Process:
    command = ("celery", "-A", "examples.adapters.celery_demo", "worker", "--concurrency", "2", "--without-mingle")
    return processes.start(f"worker {number}", *command)


def run(folder: Path) -> bool:
    os.environ["TMPDIR"] = str(folder)  # a worker that is killed leaves files
    with Processes(folder) as processes:
        os.environ["REDIS_URL"] = app.conf.broker_url = start_redis(processes, folder)
        _, os.environ["LASTBIT_URL"] = start_service(processes, folder / "lastbit.db", LONGEST)
        print(f"Redis at {os.environ['REDIS_URL']}, Lastbit at {os.environ['LASTBIT_URL']}.")
        batch = lastbit.fan_out(tasks(), key="catalog-42", chunk=100)
        print(f"Batch {batch.id} has {PRODUCTS:,} items, each with a Celery task of the same id.")
        worker = start_worker(processes, 1)
        state = wait_until_resolved(batch.id, PRODUCTS // 3)
        worker.kill()
        print(
            f"Worker 1 is killed (SIGKILL) after {state.resolved} items. Its messages go to worker 2 in some seconds."
        )
        start_worker(processes, 2)
        try:
            done = batch.wait(timeout=IDLE)
        except WaitTimeout:
            count = lastbit.republish(batch, tasks())
            print(f"Redis has lost {count} of the messages that the killed worker held. They are published again.")
            done = batch.wait(timeout=LONGEST)
        print(f"Batch {batch.id} is complete: {done.acked} pictures rendered, {done.failed} failed.")
        for failed in batch.failed():
            for item, reason in failed.reasons.items():
                print(f"    {item}  {reason}")
        verification = batch.verify()
        counted = verification.counted
        print(f"Recounted: {counted.acked} + {counted.failed} = {counted.acked + counted.failed}.")
        return verification.ok and (counted.acked, counted.failed) == (PRODUCTS - 2, 2)


def tasks() -> Iterator[Signature]:
    return (render.s(product) for product in range(PRODUCTS))


def wait_until_resolved(batch: int, count: int) -> Batch:
    """The first state with this many resolved items."""
    with Client() as client:
        end = time.monotonic() + LONGEST
        while time.monotonic() < end:
            state = client.batch(batch).refresh()
            if state.resolved >= count:
                return state
            time.sleep(0.02)  # a batch has no event for a part of it
    raise Failed(f"no {count} items were resolved within {LONGEST} s")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    for number in ENDING:
        signal.signal(number, interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="lastbit-demo-celery-") as folder:
            is_exact = run(Path(folder))
    except KeyboardInterrupt:
        print("lastbit demo-celery: interrupted; nothing is left behind", file=sys.stderr)
        return 130
    except Failed as error:
        print(f"lastbit demo-celery: {error}", file=sys.stderr)
        return 1
    print("Each item was counted once." if is_exact else "The figures are WRONG.")
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
