"""Acks of what a table has committed: a version of a Delta or Iceberg table, or what a stream has stored."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.manifest import ManifestContent, ManifestFile
from pyroaring import BitMap64

from lastbit import Client, InvalidArgument
from lastbit.spark import ack, ack_stream, delta_rows, iceberg_rows, item_id

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("spark")]


def rows(batch: Any, numbers: range, **columns: str) -> pa.Table:
    ids = [f"{batch.id}:0:{number}" for number in numbers]
    return pa.table({"item_id": ids, **{name: [value] * len(ids) for name, value in columns.items()}})


def pending(batch: Any) -> list[tuple[int, int]]:
    return [(span.start, span.end) for span in batch.pending()]


class Delta:
    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "a table")
        self.log = Path(self.path) / "_delta_log"

    def append(self, table: pa.Table, **options: Any) -> int:
        write_deltalake(self.path, table, mode="append", **options)
        return DeltaTable(self.path).version()

    def commit(self, version: int, *actions: dict[str, Any]) -> None:
        (self.log / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))

    def added(self, version: int) -> Any:
        actions = map(json.loads, (self.log / f"{version:020}.json").read_text().splitlines())
        return next(action["add"] for action in actions if "add" in action)


@pytest.fixture
def delta(tmp_path: Path) -> Delta:
    return Delta(tmp_path)


def test_a_version_of_a_delta_table_is_acked_and_nothing_else(spark: Any, client: Client, delta: Delta) -> None:
    """Neither other versions nor files that no version has; also once the table has replaced the version's files."""
    batch = client.open(items=40)
    kinds = ("a plain one", "100 % ü/{x}")
    first, second, third = (
        delta.append(rows(batch, range(start, start + 10), kind=kind), partition_by=["kind"])
        for start, kind in ((0, kinds[0]), (10, kinds[1]), (20, kinds[0]))
    )
    assert (first, second, third) == (0, 1, 2)
    written = Path(delta.path) / next(Path(delta.path).glob("kind=a*/*.parquet"))
    pq.write_table(rows(batch, range(30, 40)), written.with_name("of-a-task-that-was-copied.parquet"))
    DeltaTable(delta.path).optimize.compact()
    assert DeltaTable(delta.path).version() == 3
    frame = delta_rows(delta.path, second, spark=spark)
    assert frame.columns == ["item_id"]
    report = ack(frame, url=client.url)
    assert (report.rows, report.applied) == (10, 10)
    assert pending(batch) == [(0, 10), (20, 40)]
    assert ack(delta_rows(delta.path, first, spark=spark), url=client.url).applied == 10
    assert ack(delta_rows(delta.path, 3, spark=spark), url=client.url).applied == 10
    assert pending(batch) == [(30, 40)]


def test_a_version_that_added_no_files_acks_nothing(spark: Any, client: Client, delta: Delta) -> None:
    """As an empty frame does; its columns are there, for a condition of failed rows."""
    batch = client.open(items=1)
    delta.append(rows(batch, range(1), error="none"))
    DeltaTable(delta.path).delete()
    frame = delta_rows(delta.path, 1, spark=spark)
    assert ack(frame, url=client.url, failed="error IS NOT NULL").rows == 0


def test_a_delta_table_whose_files_are_not_its_rows_is_refused(spark: Any, client: Client, delta: Delta) -> None:
    """A deletion vector in the version's own files, column mapping, a version that can't exist."""
    batch = client.open(items=4)
    delta.append(rows(batch, range(2)))
    shutil.copy(Path(delta.path) / delta.added(0)["path"], Path(delta.path) / "copy.parquet")
    deleted = struct.pack("<i", 1681511377) + BitMap64([1]).serialize()
    vector = {"storageType": "i", "pathOrInlineDv": z85(deleted), "sizeInBytes": len(deleted), "cardinality": 1}
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    delta.commit(
        1,
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"add": {**delta.added(0), "path": "copy.parquet", "deletionVector": vector}},
    )
    with pytest.raises(InvalidArgument, match="deletion vectors"):
        delta_rows(delta.path, 1, spark=spark)
    shutil.copy(Path(delta.path) / "copy.parquet", Path(delta.path) / "whole.parquet")
    delta.commit(2, {"add": {**delta.added(0), "path": "whole.parquet"}})
    assert delta_rows(delta.path, 2, spark=spark).count() == 2
    with pytest.raises(InvalidArgument, match="0 or more"):
        delta_rows(delta.path, -1, spark=spark)


def test_a_delta_table_with_column_mapping_is_refused(spark: Any, client: Client, delta: Delta) -> None:
    """A column of its files may have another column's name."""
    delta.append(rows(client.open(items=1), range(1)))
    actions = map(json.loads, (delta.log / f"{0:020}.json").read_text().splitlines())
    metadata = next(action["metaData"] for action in actions if "metaData" in action)
    schema = json.loads(metadata["schemaString"])
    schema["fields"][0]["metadata"] = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "item_id"}
    configuration = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"}
    mapped = {**metadata, "schemaString": json.dumps(schema), "configuration": configuration}
    delta.commit(1, {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": mapped})
    with pytest.raises(InvalidArgument, match="column mapping"):
        delta_rows(delta.path, 1, spark=spark)


def z85(content: bytes) -> str:
    """ZeroMQ's Base85, in which a Delta log has short deletion vectors."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    padded = content + b"\0" * (-len(content) % 4)
    numbers = struct.unpack(f">{len(padded) // 4}I", padded)
    return "".join(digits[number // 85**place % 85] for number in numbers for place in (4, 3, 2, 1, 0))


@pytest.fixture
def iceberg(tmp_path: Path) -> Any:
    catalog = InMemoryCatalog("tests", warehouse=f"file://{tmp_path}/a warehouse")
    catalog.create_namespace("shop")
    return catalog.create_table("shop.rendered", pa.schema([("item_id", pa.string()), ("error", pa.string())]))


def test_a_snapshot_of_an_iceberg_table_is_acked_and_nothing_else(spark: Any, client: Client, iceberg: Any) -> None:
    """Neither other snapshots nor rows that are kept; also once the table has replaced the snapshot's files."""
    batch = client.open(items=40)

    def commit(write: Any, table: pa.Table) -> int:
        write(table)
        return int(iceberg.current_snapshot().snapshot_id)

    first = commit(iceberg.append, rows(batch, range(10)))
    second = commit(iceberg.append, rows(batch, range(10, 20)))
    last = commit(iceberg.overwrite, rows(batch, range(20, 30)))
    report = ack(iceberg_rows(iceberg, second, spark=spark), url=client.url)
    assert (report.rows, report.applied) == (10, 10)
    assert pending(batch) == [(0, 10), (20, 40)]
    assert ack(iceberg_rows(iceberg, first, spark=spark), url=client.url).applied == 10
    assert ack(iceberg_rows(iceberg, last, spark=spark), url=client.url).applied == 10
    iceberg.delete()
    emptied = iceberg_rows(iceberg, iceberg.current_snapshot().snapshot_id, spark=spark)
    assert ack(emptied, url=client.url, failed="error IS NOT NULL").rows == 0
    assert pending(batch) == [(30, 40)]


def test_an_iceberg_snapshot_whose_files_are_not_its_rows_is_refused(
    spark: Any, client: Client, iceberg: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has delete files; PyIceberg writes none, so a list of data files stands for one of theirs. And a snapshot that
    doesn't exist."""
    iceberg.append(rows(client.open(items=1), range(1)))
    with pytest.raises(InvalidArgument, match="no snapshot 7"):
        iceberg_rows(iceberg, 7, spark=spark)
    monkeypatch.setattr(ManifestFile, "content", ManifestContent.DELETES)
    with pytest.raises(InvalidArgument, match="delete files"):
        iceberg_rows(iceberg, iceberg.current_snapshot().snapshot_id, spark=spark)


def test_a_stream_acks_only_what_it_has_stored(spark: Any, client: Client, tmp_path: Path) -> None:
    """A query stores each micro-batch in a folder of its own and acks the folder. It dies between the two, and loses a
    commit; when it starts again, it stores the same rows in the same folder, and each item counts once."""
    batch, url = client.open(items=300), client.url
    source, stored = tmp_path / "in", tmp_path / "stored"
    source.mkdir()
    for part in range(3):
        lines = "\n".join(f"{batch.id}:0:{number}" for number in range(part * 100, part * 100 + 100))
        (source / f"{part}.txt").write_text(lines)

    def run(dies_in: int | None) -> None:
        def sink(frame: Any, epoch: int) -> None:
            folder = f"{stored}/epoch={epoch}"
            frame.selectExpr("value AS item_id").write.mode("overwrite").parquet(folder)
            if epoch == dies_in:
                raise RuntimeError("the driver dies before it acks")
            ack(frame.sparkSession.read.parquet(folder), url=url)

        stream = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(source))
        query = stream.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(Exception, match="dies before it acks"):
        run(dies_in=1)
    assert batch.refresh().acked == 100
    run(dies_in=None)
    assert batch.refresh().acked == 300
    (tmp_path / "checkpoint" / "commits" / "2").unlink()
    (tmp_path / "checkpoint" / "commits" / ".2.crc").unlink(missing_ok=True)
    run(dies_in=None)
    assert spark.read.parquet(str(stored)).count() == 300
    assert (batch.refresh().acked, batch.verify().ok) == (300, True)


def test_a_second_stream_acks_what_the_first_has_committed(spark: Any, client: Client, tmp_path: Path) -> None:
    """Files in the first one's folder that it never committed are not read."""
    batch = client.open(items=30)
    ids = spark.range(10).select(item_id(batch.id, "id").alias("item_id"))
    ids.write.json(str(tmp_path / "in"))
    output = tmp_path / "out"

    def run(frame: Any, sink: Any, checkpoint: str) -> None:
        writer = frame.writeStream.option("checkpointLocation", str(tmp_path / checkpoint))
        writer = writer.format("parquet").option("path", str(output)) if sink is None else writer.foreachBatch(sink)
        writer.trigger(availableNow=True).start().awaitTermination()

    run(spark.readStream.schema("item_id string").json(str(tmp_path / "in")), None, "first")
    pq.write_table(rows(batch, range(10, 30)), output / "uncommitted.parquet")
    run(spark.readStream.schema("item_id string").parquet(str(output)), ack_stream(url=client.url), "second")
    assert pending(batch) == [(10, 30)]
