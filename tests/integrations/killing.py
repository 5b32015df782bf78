"""A fan-out of 10,000 messages whose producer and workers are killed at random moments. All adapters must pass it."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from lastbit import Client, WaitTimeout
from lastbit.batch import BatchHandle
from tests.integrations.workers import Workers
from tests.support.servers import ROOT

COUNT = 10_000
KILLS = 4
"""How often the producer and the workers are killed."""


def fan_out_among_kills(
    producer: Sequence[str],
    worker: Callable[[], AbstractContextManager[Workers]],
    client: Client,
    *,
    idle: float = 180,
    repair: Callable[[BatchHandle], object] | None = None,
) -> BatchHandle:
    """The batch, when it has ended. `producer` is a module with arguments, to which the number of messages and the
    batch's key, which is also the idempotency key, are added. `repair` is called if no item was resolved for
    `idle` seconds, for brokers that lose messages of killed workers."""
    key = str(uuid.uuid4())
    with killed(worker) as moments:
        command = [sys.executable, "-m", *producer, str(COUNT), key]
        for _ in range(KILLS):
            process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moments.uniform(0.5, 2))
            process.kill()
            process.wait()
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=600)
        (batch_found,) = client.batches(key=key)
        batch = client.batch(batch_found.id)
        try:
            wait_while_it_proceeds(batch, idle)
        except WaitTimeout:
            if repair is None:
                raise
            repair(batch)
            wait_while_it_proceeds(batch, 180)
        return batch


@contextlib.contextmanager
def killed(worker: Callable[[], AbstractContextManager[Workers]], kills: int = KILLS) -> Iterator[random.Random]:
    """Within the block, workers run that are killed at random moments, so many times. It gets the generator of these
    moments."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # shown if the test fails
    moments = random.Random(seed)
    ended = threading.Event()
    killer = threading.Thread(target=_kill_workers, args=(worker, moments, ended, kills))
    killer.start()
    try:
        yield moments
    finally:
        ended.set()
        killer.join()


def wait_while_it_proceeds(batch: BatchHandle, idle: float) -> None:
    """Until the batch has ended, however slow the machine is. Raises `WaitTimeout` if no item is resolved for `idle`
    seconds."""
    while True:
        pending = batch.refresh().pending
        try:
            batch.wait(idle)
            return
        except WaitTimeout:
            if batch.refresh().pending == pending:
                raise


def _kill_workers(
    worker: Callable[[], AbstractContextManager[Workers]], moments: random.Random, ended: threading.Event, kills: int
) -> None:
    for _ in range(kills):
        with worker() as workers:
            ended.wait(moments.uniform(0.2, 2))
            workers.kill()
    with worker():
        ended.wait()


def check(batch: BatchHandle) -> None:
    """Everything succeeded, and nothing counted twice."""
    info = batch.refresh()
    assert (info.items, info.acked, info.failed, info.pending, info.state) == (COUNT, COUNT, 0, 0, "complete")
    assert batch.verify().ok
