"""The cost of acking a pipeline's output through Spark, compared with the time in which Spark groups the same ids by
their group and counts them: by the group's numbers, which must be parsed, and by the text before the last colon, which
is the least possible work with an id.

The processor time is that of everything that takes part: Spark, its Python workers, the service and MariaDB. Other work
on the machine changes it less than the seconds.

`python -m bench.spark --items 20000000` measures one size, `--random` with ids in random order, `--connect` through
Spark Connect; `--billion` opens a batch of a billion items, acks all of them through Spark and checks that it is
complete. Everything is end to end: Parquet, the JVM, Python workers, HTTP, MariaDB with its fsyncs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from bench import measure
from bench.measure import Scale
from lastbit import Client
from lastbit.spark import ack, item_id

BILLION = 10**9
FOLDER = Path(os.environ.get("LASTBIT_BENCH_FOLDER") or tempfile.gettempdir())


@contextlib.contextmanager
def session(connect: bool = False) -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    folder = tempfile.mkdtemp(prefix="lastbit-bench-", dir=FOLDER)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": "8",
        "spark.local.dir": folder,
    }
    builder = SparkSession.builder.remote("local[2]") if connect else SparkSession.builder.master("local[2]")
    builder = builder.appName("lastbit bench")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Peaks:
    """The peak resident memory, in MB, of this process and of Spark's Python workers, while it is watched."""

    workers: float = 0.0
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def driver(self) -> float:
        return measure.memory(os.getpid(), "VmHWM")

    def __enter__(self) -> Peaks:
        self._done.clear()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._done.wait(0.1):
            for process in _python_workers():
                with contextlib.suppress(OSError, IndexError):  # it has ended
                    self.workers = max(self.workers, measure.memory(process, "VmHWM"))


def _python_workers() -> list[int]:
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if b"pyspark.daemon" in (entry / "cmdline").read_bytes():
                    processes.append(int(entry.name))
    return processes


@dataclass
class Spent:
    seconds: float = 0.0
    processor: float = 0.0


@contextlib.contextmanager
def _spending() -> Iterator[Spent]:
    """What the block needs, known when it ends."""
    spent = Spent()
    start, before = time.perf_counter(), _processor_time()
    yield spent
    spent.seconds, spent.processor = time.perf_counter() - start, _processor_time() - before


def _median(rounds: list[Spent]) -> Spent:
    return Spent(
        statistics.median(each.seconds for each in rounds), statistics.median(each.processor for each in rounds)
    )


def _processor_time() -> float:
    """User and system time of this process and its descendants, including those that have ended."""
    parents, times = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)], times[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15]))

    def ours(process: int) -> bool:
        while process not in (0, os.getpid()):
            process = parents.get(process, 0)
        return process != 0

    return sum(ticks for process, ticks in times.items() if ours(process)) / os.sysconf("SC_CLK_TCK")


def _write_ids(spark: SparkSession, batch: int, items: int, at_random: bool, folder: Path) -> None:
    # A multiplier that is coprime to the number of items visits each number once.
    number = (sf.col("id") * 7_919_104_729 % items) if at_random else sf.col("id")
    files = max(2, items // 5_000_000)
    spark.range(0, items, 1, files).select(item_id(batch, number).alias("item_id")).write.parquet(str(folder))


def _group_and_count(spark: SparkSession, folder: Path, by_text: bool) -> None:
    ids = spark.read.parquet(str(folder))
    if by_text:
        groups = ids.groupBy(sf.substring_index("item_id", ":", 2).alias("group"))
    else:
        parts = sf.split("item_id", ":")
        groups = ids.groupBy(parts[0].cast("bigint").alias("batch"), parts[1].cast("bigint").alias("group"))
    groups.count().write.format("noop").mode("overwrite").save()


def timings(spark: SparkSession, client: Client, items: int, *, rounds: int = 3, at_random: bool = False) -> list[str]:
    """One column of the table: medians of the rounds, each of which acks a new batch and checks that it is complete."""
    numbers, texts, acks = [], [], []
    peaks = Peaks()
    for number_of_round in range(rounds + 1):
        batch = client.open(items=items, sealed=True)
        folder = Path(tempfile.mkdtemp(prefix="lastbit-ids-", dir=FOLDER))
        try:
            _write_ids(spark, batch.id, items, at_random, folder / "ids")
            with _spending() as number:
                _group_and_count(spark, folder / "ids", by_text=False)
            with _spending() as text:
                _group_and_count(spark, folder / "ids", by_text=True)
            with peaks, _spending() as acked:
                report = ack(spark.read.parquet(str(folder / "ids")), url=client.url)
        finally:
            shutil.rmtree(folder)
        verification = batch.verify()
        if not (report.applied == items == verification.acked and verification.ok and report.completed == (batch.id,)):
            raise RuntimeError(f"{items} items were sent; the report is {report}, but the batch has {verification}")
        if number_of_round or not rounds:  # the first round warms up the JVM
            numbers.append(number)
            texts.append(text)
            acks.append(acked)
    number, text, acked = map(_median, (numbers, texts, acks))
    order = "at random" if at_random else "in order"
    return [
        *(f"{items:,} ids, {order}", f"{acked.seconds:.1f}", f"{number.seconds:.1f}", f"{text.seconds:.1f}"),
        *(f"{acked.seconds / number.seconds:.2f}", f"{acked.seconds / text.seconds:.2f}"),
        *(f"{acked.processor:.1f}", f"{number.processor:.1f}", f"{acked.processor / number.processor:.2f}"),
        *(f"{peaks.driver:.0f}", f"{peaks.workers:.0f}"),
    ]


TITLE = "spark: acks from Parquet, local[2], over HTTP into MariaDB (medians)"
FIGURES = [
    *("", "ack, s", "count by numbers, s", "count by text, s", "ack / by numbers", "ack / by text"),
    *("ack, processor s", "count by numbers, processor s", "ack / by numbers, processor"),
    *("driver's Python, MB", "a Python worker, MB"),
]


def _show(sizes: list[list[str]]) -> None:
    """A column for each size."""
    names, *rows = zip(FIGURES, *sizes, strict=True)
    measure.show(TITLE, list(names), rows)


def billion(spark: SparkSession, client: Client, items: int = BILLION) -> None:
    """Open, extend, ack everything through Spark, complete; measure each step."""
    peaks = Peaks()
    with peaks:
        with _spending() as opening:
            batch = client.open(key="a billion items")
        with _spending() as extending:
            batch.extend(items)
        with _spending() as sealing:
            batch.seal()
        ids = spark.range(0, items, 1, 64).select(item_id(batch.id, "id").alias("item_id"))
        with _spending() as acking:
            report = ack(ids, url=client.url)
    if report.completed != (batch.id,):
        raise RuntimeError(f"the batch did not complete: {report}")
    with _spending() as verifying:
        verification = batch.verify()
    if not (verification.ok and verification.acked == items and batch.refresh().succeeded):
        raise RuntimeError(f"the bits differ: {verification}")
    steps = {
        "open": opening,
        "extend": extending,
        "seal": sealing,
        "ack all, and with the last one complete": acking,
        "verify: count the bits again": verifying,
    }
    measure.show(
        f"{items:,} items through Spark, local[2], over HTTP into MariaDB",
        ["", "seconds"],
        [[name, f"{spent.seconds:.3f}"] for name, spent in steps.items()]
        + [["peak of the driver's Python, MB", f"{peaks.driver:.0f}"], ["of a worker, MB", f"{peaks.workers:.0f}"]],
    )


@contextlib.contextmanager
def everything(connect: bool = False) -> Iterator[tuple[SparkSession, Client]]:
    with (
        measure.mariadb() as server,
        measure.lastbit_on(server) as service,
        Client(service.url) as client,
        session(connect) as spark,
    ):
        yield spark, client


def run(scale: Scale) -> None:
    sizes = (20_000_000, 100_000_000) if scale.items > 1_000_000 else (200_000,)
    with everything() as (spark, client):
        _show([timings(spark, client, items, rounds=scale.rounds if items < 50_000_000 else 1) for items in sizes])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.spark", description=__doc__)
    parser.add_argument("--items", type=int, nargs="*", default=[], help="ids in Parquet; a column for each size")
    parser.add_argument("--random", action="store_true", help="in no order")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after one that warms up (3)")
    parser.add_argument("--billion", nargs="?", type=int, const=BILLION, metavar="ITEMS", help="a batch of this size")
    parser.add_argument("--connect", action="store_true", help="through Spark Connect")
    options = parser.parse_args()
    with everything(options.connect) as (spark, client):
        if options.items:
            _show([timings(spark, client, n, rounds=options.rounds, at_random=options.random) for n in options.items])
        if options.billion:
            billion(spark, client, options.billion)


if __name__ == "__main__":
    main()
