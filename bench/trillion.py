"""What a batch of a trillion items costs, as one worker sends it in masks of 8,192 items.

A part of the batch is really sent: its first hundredth undisturbed, then the rest by a worker that is killed three
times and goes on at the watermark. What the rest would take is foretold from the hundredth, and compared. The last
column is the whole batch at the speed of the rest. A mask that was sent twice, because its worker was killed before the
answer arrived, changes nothing, but takes its time.

`python -m bench trillion` sends a tenth; `python -m bench.trillion --share 0.001` another part.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import measure
from bench.measure import Scale
from lastbit import Client
from lastbit.batch import BatchHandle
from tests.support.servers import ROOT, MariaDB, ServiceProcess

ITEMS: Final = 10**12
GROUP: Final = 8_192
MASKS: Final = -(-ITEMS // GROUP)
CALL: Final = 4_096 * GROUP
"""Items that the worker hands to its client at a time; a request takes about 4,096 masks."""
KILLS: Final = 3
WORKER: Final = """
import sys
from lastbit import Client
from lastbit.ids import ItemIds

batch, group_size, last, step = map(int, sys.argv[2:])
with Client(sys.argv[1]) as client:
    for start in range(client.batch(batch).watermark().watermark, last, step):
        client.ack(ItemIds(batch, group_size, range(start, min(start + step, last))))
"""


@dataclass(frozen=True)
class Cost:
    """Of a part of the batch: seconds, bytes of redo, and bytes of the database's files."""

    masks: int
    seconds: float
    redo: int
    files: int

    def times(self, masks: int) -> Cost:
        """The same for so many masks."""
        factor = masks / self.masks
        return Cost(masks, self.seconds * factor, round(self.redo * factor), round(self.files * factor))

    def minus(self, other: Cost) -> Cost:
        return Cost(
            self.masks - other.masks, self.seconds - other.seconds, self.redo - other.redo, self.files - other.files
        )


class Sending:
    """A batch of a trillion items, and the worker that acks it."""

    def __init__(self, server: MariaDB, service: ServiceProcess, batch: BatchHandle) -> None:
        self._server = server
        self._service = service
        self._batch = batch
        self._start = self._counted(0, 0.0)
        self._seconds = 0.0
        self.worker_memory = 0.0
        """The peak of the worker's resident memory in MB."""

    def send(self, last: int, *, killed: bool = False) -> Cost:
        """Ack the items below `last`; with `killed`, kill the worker once, half of the way."""
        start = time.monotonic()
        half = (self.watermark + last) // 2
        arguments = [self._service.url, str(self._batch.id), str(GROUP), str(last), str(CALL)]
        with subprocess.Popen([sys.executable, "-c", WORKER, *arguments], cwd=ROOT) as worker:
            while worker.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(0.5)
                with contextlib.suppress(OSError, IndexError):  # it has just ended
                    self.worker_memory = max(self.worker_memory, measure.memory(worker.pid, "VmHWM"))
                if killed and self.watermark >= half:
                    worker.kill()
            if worker.returncode and not killed:
                raise RuntimeError(f"the worker ended with {worker.returncode}")
        self._seconds += time.monotonic() - start
        return self._counted(self.watermark // GROUP, self._seconds).minus(self._start)

    @property
    def watermark(self) -> int:
        return self._batch.watermark().watermark

    def _counted(self, masks: int, seconds: float) -> Cost:
        with contextlib.closing(self._server.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_os_log_written'")
            ((_, redo),) = cursor.fetchall()
        files = sum(path.stat().st_size for path in Path(self._server.folder).rglob("*.ibd"))
        return Cost(masks, seconds, int(redo), files)


def run(scale: Scale, share: float | None = None) -> None:
    sent = round(MASKS * (share or (0.1 if scale.items > 1_000_000 else 0.000_5))) * GROUP
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(measure.mariadb())
        service = stack.enter_context(measure.lastbit_on(server))
        client = stack.enter_context(Client(service.url, timeout=3600))  # seconds: the batch is verified in the end
        batch = client.open(key="a trillion items", items=ITEMS, group_size=GROUP, sealed=True)
        sending = Sending(server, service, batch)
        first = sending.send(sent // 100 // GROUP * GROUP)
        for _ in range(KILLS):
            sending.send(sent, killed=True)
        everything = sending.send(sent)
        rest = everything.minus(first)
        if batch.refresh().acked != sent or not batch.verify().ok:
            raise RuntimeError(f"{batch.refresh().acked} items are acked instead of {sent}")
        assert service.process is not None
        memory = measure.memory(service.process.pid, "VmHWM")
    columns = [first, first.times(rest.masks), rest, rest.times(MASKS)]
    measure.show(
        f"{ITEMS:,} items in {MASKS:,} masks: {everything.masks:,} sent by a worker that is killed {KILLS} times",
        ["", "the first of them", "the rest, foretold", "the rest, measured", "all, extrapolated"],
        [
            ["masks", *(f"{cost.masks:,}" for cost in columns)],
            ["minutes", *(f"{cost.seconds / 60:.2f}" for cost in columns)],
            ["masks a second", *(f"{cost.masks / cost.seconds:,.0f}" for cost in columns)],
            ["redo, MB", *(f"{cost.redo / 1e6:,.0f}" for cost in columns)],
            ["files, MB", *(f"{cost.files / 1e6:,.0f}" for cost in columns)],
        ],
        f"peaks of memory: the worker {sending.worker_memory:.0f} MB, the service {memory:.0f} MB",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.trillion", description=__doc__)
    parser.add_argument("--share", type=float, default=0.1, help="of the batch that is sent (0.1)")
    run(Scale.full(), parser.parse_args().share)


if __name__ == "__main__":
    main()
