"""A real pipeline on real input, acked by `spark-submit jobs/bulk_ack.py` where there is PySpark and nothing else."""

from __future__ import annotations

import json
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from lastbit import Client
from lastbit.spark import ack, register, with_item_ids
from tests.spark.conftest import BULK_ACK, submit

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark")]

DPKG = Path("/var/lib/dpkg/status")


def records() -> list[tuple[str, str]]:
    """(name, text) of each Debian package that this machine knows of; else of the standard library's modules."""
    if DPKG.exists():
        texts = DPKG.read_text(errors="replace").strip().split("\n\n")
        return [(re.findall(r"(?m)^Package: (.*)$", text)[0], text) for text in texts]
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [(path.stem, path.read_text(errors="replace")) for path in files]


def test_a_pipeline_on_the_machines_own_records_ends_succeeded(
    spark: Any, client: Client, sdk_zip: Path, bare_python: Path, tmp_path: Path
) -> None:
    """Fanned out, transformed, some rows failing and some lost; acked from Parquet; what is missing is read back, run
    again, and the batch succeeds."""
    register(spark)
    input_rows = records()
    assert len(input_rows) > 50
    batch = client.open(key="debian-records")
    frame = spark.createDataFrame(input_rows, "name string, record string")
    work = with_item_ids(frame, batch, idempotency_key="fan-out")
    batch.seal()
    assert batch.refresh().items == len(input_rows)

    # The transform: words of the record. Of each ten names one is lost on the way, one comes out failed.
    transformed = work.selectExpr(
        *("item_id", "name", "size(split(record, '[^A-Za-z]+')) AS words"),
        *("pmod(hash(name), 10) = 1 AS failed", "pmod(hash(name), 10) = 0 AS lost"),
    )
    first = tmp_path / "first"
    transformed.where("NOT lost").write.parquet(str(first))
    done = submit(
        *(sdk_zip, BULK_ACK, "--input", str(first), "--url", client.url, "--failed-when", "failed"), bare=bare_python
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
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

    # Read back what is missing and what failed, and run exactly that again.
    def read(state: str) -> Any:
        reader = spark.read.format("lastbit").option("url", client.url).option("batch", batch.id)
        return reader.option("state", state).load()

    missing = work.join(read("pending").unionAll(read("failed")), "item_id").selectExpr("item_id", "name")
    again = missing.localCheckpoint()
    assert again.count() == lost + failed
    assert ack(again, url=client.url).completed == (batch.id,)
    assert batch.refresh().succeeded
    assert batch.verify().ok


def test_the_job_tells_bad_input_from_failure(client: Client, sdk_zip: Path, tmp_path: Path) -> None:
    """Exit 3 passes through spark-submit, beside the report; the rows without ids are written out."""
    batch = client.open(items=10)
    csv = tmp_path / "in.csv"
    csv.write_text(
        f"id,state\n{batch.id}:0:0,ok\n{batch.id}:0:1,bad\n{batch.id}:0:99,ok\nnonsense,ok\n{batch.id}:0:2,skip\n"
    )
    rejects = tmp_path / "rejects"
    arguments = ["--input", str(csv), "--format", "csv", "--item-column", "id", "--where", "state <> 'skip'"]
    arguments += ["--failed-when", "state = 'bad'", "--rejects", str(rejects)]

    done = submit(sdk_zip, BULK_ACK, *arguments, "--url", client.url)
    assert done.returncode == 3, done.stderr
    report = json.loads(done.stdout)
    assert (report["rows"], report["malformed"], report["rejected"]) == (4, 1, {"unknown_item": 1})
    assert (batch.refresh().acked, batch.refresh().failed) == (1, 1)
    written = [json.loads(line) for path in rejects.glob("*.json") for line in path.read_text().splitlines()]
    assert written == [{"id": "nonsense", "state": "ok"}]
    assert "bulk_ack: " in done.stderr
