"""A real pipeline on real input, acked by `spark-submit jobs/bulk_ack.py` with PySpark as the only package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from lastbit import Client
from lastbit.spark import ack, register, with_item_ids
from tests.spark.conftest import BULK_ACK, CONNECT, PYSPARK_35, outside_this_session, submit
from tests.support.servers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark")]

DPKG = Path("/var/lib/dpkg/status")


def records() -> list[tuple[str, str]]:
    """(name, text) of each Debian package that this machine lists, or of the standard library's modules."""
    if DPKG.exists():
        texts = DPKG.read_text(errors="replace").strip().split("\n\n")
        return [(re.findall(r"(?m)^Package: (.*)$", text)[0], text) for text in texts]
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [(path.stem, path.read_text(errors="replace")) for path in files]


@pytest.mark.skipif(PYSPARK_35, reason="it reads the missing items with the data source")
def test_a_pipeline_on_the_machines_own_records_ends_succeeded(
    spark: Any, client: Client, sdk_zip: Path, bare_python: Path, tmp_path: Path
) -> None:
    """Fanned out, transformed, with some rows failing and some lost; acked from Parquet; missing items are read back
    and run again, and the batch succeeds."""
    register(spark)
    input_rows = records()
    assert len(input_rows) > 50
    batch = client.open(key="debian-records")
    frame = spark.createDataFrame(input_rows, "name string, record string")
    work = with_item_ids(frame, batch, idempotency_key="fan-out")
    batch.seal()
    assert batch.refresh().items == len(input_rows)

    # The transformation counts the words of a record. Of every ten names, one is lost and one fails.
    transformed = work.selectExpr(
        *("item_id", "name", "size(split(record, '[^A-Za-z]+')) AS words"),
        *("pmod(hash(name), 10) = 1 AS failed", "pmod(hash(name), 10) = 0 AS lost"),
    )
    first = tmp_path / "first"
    transformed.where("NOT lost").write.parquet(str(first))
    process = submit(
        *(sdk_zip, BULK_ACK, "--input", str(first), "--url", client.url, "--failed-when", "failed"), bare=bare_python
    )
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(process.stdout)
    lost = transformed.where("lost").count()
    failed = transformed.where("failed").count()
    assert lost > 0
    assert failed > 0
    assert report == {
        "rows": len(input_rows) - lost,
        "items": len(input_rows) - lost,
        "applied": len(input_rows) - lost,
        "repeated": 0,
        "rejected": {},
        "malformed": 0,
        "completed": [],
    }
    assert (batch.refresh().failed, batch.refresh().pending) == (failed, lost)

    # Read the missing and failed items back, and run exactly those again.
    def read(state: str) -> Any:
        reader = spark.read.format("lastbit").option("url", client.url).option("batch", batch.id)
        return reader.option("state", state).load()

    missing = work.join(read("pending").unionAll(read("failed")), "item_id").selectExpr("item_id", "name")
    remaining = missing.localCheckpoint()
    assert remaining.count() == lost + failed
    assert ack(remaining, url=client.url).completed == (batch.id,)
    assert batch.refresh().succeeded
    assert batch.verify().ok


def test_the_example_ends_succeeded_in_each_kind_of_session(java: None, client: Client) -> None:
    """As its docstring says: fanned out, acked, and what was lost or failed is run again."""
    environment = {**outside_this_session(), "SPARK_LOCAL_IP": "127.0.0.1"}
    process = subprocess.run(
        [sys.executable, "-m", "examples.spark_pipeline", "--url", client.url],
        cwd=ROOT,
        env={**environment, "SPARK_REMOTE": "local[2]"} if CONNECT else environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.splitlines()[-1] == "succeeded: True"
    again = re.search(r"run again: (\d+) items", process.stdout)
    assert again is not None
    assert int(again[1]) > 0
    (batch,) = client.batches(key="words")
    assert batch.succeeded


def test_the_job_distinguishes_bad_input_from_failure(client: Client, sdk_zip: Path, tmp_path: Path) -> None:
    """Exit 3 passes through spark-submit, with the report; rows without ids are written to a file."""
    batch = client.open(items=10)
    csv = tmp_path / "in.csv"
    csv.write_text(
        f"id,state\n{batch.id}:0:0,ok\n{batch.id}:0:1,bad\n{batch.id}:0:99,ok\nnonsense,ok\n{batch.id}:0:2,skip\n"
    )
    rejects = tmp_path / "rejects"
    arguments = ["--input", str(csv), "--format", "csv", "--item-column", "id", "--where", "state <> 'skip'"]
    arguments += ["--failed-when", "state = 'bad'", "--rejects", str(rejects)]

    process = submit(sdk_zip, BULK_ACK, *arguments, "--url", client.url)
    assert process.returncode == 3, process.stderr
    report = json.loads(process.stdout)
    assert (report["rows"], report["malformed"], report["rejected"]) == (4, 1, {"unknown_item": 1})
    assert (batch.refresh().acked, batch.refresh().failed) == (1, 1)
    written = [json.loads(line) for path in rejects.glob("*.json") for line in path.read_text().splitlines()]
    assert written == [{"id": "nonsense", "state": "ok"}]
    assert "bulk_ack: " in process.stderr
