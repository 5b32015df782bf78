"""A standalone cluster, a master and two workers, on the loopback: tasks that die, fail, or run twice at the same time,
in each kind of session."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from lastbit import Client
from lastbit.spark import item_id
from tests.spark.conftest import BULK_ACK, PYSPARK_35, submit
from tests.support.servers import ROOT, free_port, wait_until_it_prints

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("spark")]

# Even small stages keep their tasks: a task is copied once another task of its stage has ended.
SPECULATION = {
    "spark_sql_adaptive_coalescePartitions_enabled": "false",
    "spark_sql_shuffle_partitions": "6",
    "spark_locality_wait": "0s",
    "spark_speculation": "true",
    "spark_speculation_interval": "20ms",
    "spark_speculation_multiplier": "1.0",
    "spark_speculation_quantile": "0.1",
    "spark_speculation_minTaskRuntime": "50ms",
}


@dataclass
class Cluster:
    url: str
    workers: list[subprocess.Popen[str]]

    def executors(self) -> list[int]:
        """The workers' executors. A worker has other children too, including launchers that have ended."""
        parents = {worker.pid for worker in self.workers}
        pids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text()
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if b"CoarseGrainedExecutorBackend" in command and int(stat.rpartition(")")[2].split()[1]) in parents:
                    pids.append(int(entry.name))
        return pids


@pytest.fixture(scope="module")
def cluster(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    import pyspark

    assert pyspark.__file__ is not None
    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    folder = tmp_path_factory.mktemp("cluster")
    environment = {
        **os.environ,
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
    }
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *arguments: str, host: str = "127.0.0.1", expected_output: str) -> subprocess.Popen[str]:
        command = [spark_class, f"org.apache.spark.deploy.{name}", "--host", host, "--webui-port", "0"]
        process = subprocess.Popen(
            [*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True, cwd=folder
        )
        started.append(process)
        wait_until_it_prints(process, expected_output)
        return process

    try:
        port = free_port()
        start("master.Master", "--port", str(port), expected_output="New state: ALIVE")
        url = f"spark://127.0.0.1:{port}"
        workers = [
            start(
                "worker.Worker",
                *("--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"work-{n}"), url),
                # Separate hosts, since speculation never runs a copy on the host of the first task.
                host=f"127.0.0.{n}",
                expected_output="Successfully registered with master",
            )
            for n in (1, 2)
        ]
        yield Cluster(url, workers)
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@dataclass
class Meddler:
    """A proxy in front of the service. The first masks are applied, but all executors are killed before they get the
    answer; then the first request of the next ones is delayed until another task has sent a copy of it."""

    cluster: Cluster
    real: httpx.Client
    killed: list[int] = field(default_factory=list)
    dead: bool = False
    held: frozenset[tuple[str, int]] | None = None
    copies: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, seen: Any) -> Any:
        masks = bool(seen.body and seen.body.get("groups"))
        # A copy may have read its rows in another order, which gives its requests other keys.
        content = masks and frozenset((seen.path, mask["group"]) for mask in seen.body["groups"])
        with self.lock:
            kill = masks and not self.killed
            # Ignore requests of an executor that is being killed: its task is repeated anyway.
            wait = self.dead and masks and self.held is None
            if kill:
                self.killed = self.cluster.executors()
            if wait:
                self.held = content
            elif masks and content == self.held:
                self.copies.set()
        headers = {name: value for name, value in seen.headers.items() if name in {"idempotency-key", "content-type"}}
        # Shorter than the SDK's own timeout, so that a request until then is another task's. If none came, an executor
        # may not have been back yet, and the retry is delayed instead.
        if wait and not self.copies.wait(25):
            with self.lock:
                self.held = None
            return None
        answer = self.real.request(seen.method, seen.path, headers=headers, json=seen.body)
        if kill:
            for process in self.killed:
                os.kill(process, signal.SIGKILL)
            self.dead = True
            return None
        return answer.status_code, {}, answer.json()


def test_the_job_is_exact_though_executors_die_and_tasks_run_twice(
    spark: Any, cluster: Cluster, client: Client, service_url: str, scripted_service: Any, sdk_zip: Path, tmp_path: Path
) -> None:
    """An executor is killed after its acks were committed, and a task is copied by speculation: the final bits match
    the model."""
    count = 100_000
    batch = client.open(items=count, sealed=True)
    rows = spark.range(count).selectExpr("id", "pmod(hash(id), 10) AS fate")
    output = rows.where("fate < 8").select(item_id(batch.id, "id").alias("item_id"), "id", "fate")
    output.repartition(4).write.parquet(str(tmp_path / "out"))
    with httpx.Client(base_url=service_url, timeout=60) as real:
        scripted_service.reply = meddler = Meddler(cluster, real)
        process = submit(
            *(sdk_zip, BULK_ACK, "--input", str(tmp_path / "out"), "--url", scripted_service.url),
            *("--failed-when", "fate = 7", "--parallel", "6"),
            spark_master=cluster.url,
            spark_executor_memory="512m",
            spark_default_parallelism="2",
            **SPECULATION,
        )
    assert process.returncode == 0, process.stdout + process.stderr
    assert len(meddler.killed) == 2
    assert meddler.copies.is_set(), "speculation ran no copy"
    report = json.loads(process.stdout)
    assert report["items"] == report["applied"] + report["repeated"] == output.count()

    model: dict[str, set[int]] = {"failed": set(), "pending": set()}
    for number, fate in rows.where("fate >= 7").collect():
        model["failed" if fate == 7 else "pending"].add(number)
    assert {n for span in batch.failed() for n in range(span.start, span.end)} == model["failed"]
    assert {n for span in batch.pending() for n in range(span.start, span.end)} == model["pending"]
    assert batch.verify().ok


@pytest.mark.skipif(PYSPARK_35, reason="PySpark 3.5 has no data sources in Python")
def test_a_writer_that_fails_on_its_first_attempt_acks_everything_once(
    java: None, client: Client, sdk_zip: Path
) -> None:
    """Items sent by its first attempt stay acked, the second sends them again, and the batch completes exactly once.
    Retries of a task are the same with and without a cluster."""
    count = 60_000
    batch = client.open(items=count, sealed=True)
    script = ROOT / "tests" / "spark" / "failing_writer.py"
    process = submit(
        *(sdk_zip, script, client.url, str(batch.id), str(count)),
        spark_master="local[2,2]",
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert (batch.refresh().acked, batch.state, batch.succeeded) == (count, "complete", True)
    assert batch.verify().ok
