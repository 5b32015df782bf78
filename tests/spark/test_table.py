"""The table of docs/spark.md: what it promises for this session works, and everything else is refused by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from deltalake import write_deltalake
from pyiceberg.catalog.memory import InMemoryCatalog

from jobs import bulk_ack
from jobs import tally_stream as tally_job
from lastbit import Client
from lastbit import spark as functions
from tests.spark.conftest import CONNECT
from tests.support.servers import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("spark")]

SESSION = f"{'Connect' if CONNECT else 'classic'} {'3.5' if pyspark.__version__.startswith('3.5.') else '4'}"
MESSAGES = """SELECT 'k' AS key, 2 AS delta, 't' AS topic, 0 AS partition, id AS offset FROM range(3)"""
ITEMS = 3


class Case:
    """A batch of three items, and a frame and a file of their ids."""

    def __init__(self, spark: Any, client: Client, folder: Path) -> None:
        self.spark, self.client, self.url, self.folder = spark, client, client.url, folder
        self.batch = client.open(items=ITEMS)
        (folder / "ids").mkdir()
        (folder / "ids" / "a.txt").write_text("".join(f"{self.batch.id}:0:{n}\n" for n in range(ITEMS)))
        self.ids = spark.range(ITEMS).select(functions.item_id(self.batch.id, "id").alias("item_id"))
        self.tally = folder.name

    @property
    def table(self) -> pa.Table:
        """The ids, for tables that Spark doesn't write."""
        return pa.table({"item_id": [f"{self.batch.id}:0:{n}" for n in range(ITEMS)]})

    @property
    def acked(self) -> bool:
        return self.batch.refresh().acked == ITEMS

    def stream(self, frame: Any, sink: Any) -> None:
        writer = frame.writeStream.option("checkpointLocation", str(self.folder / "checkpoint"))
        writer = writer.format(sink).option("url", self.url) if isinstance(sink, str) else writer.foreachBatch(sink)
        writer.trigger(availableNow=True).start().awaitTermination()

    def messages(self) -> Any:
        path = str(self.folder / "messages")
        self.spark.sql(MESSAGES).write.json(path)
        return path, "key string, delta int, topic string, partition int, offset long"


def source(case: Case) -> bool:
    functions.register(case.spark)
    reader = case.spark.read.format("lastbit").option("url", case.url).option("batch", case.batch.id)
    pending = reader.load()
    assert pending.count() == ITEMS
    case.stream(case.spark.readStream.schema("item_id string").text(str(case.folder / "ids")), "lastbit")
    case.ids.write.format("lastbit").option("url", case.url).mode("append").save()
    return case.acked


def ack_stream(case: Case) -> bool:
    lines = case.spark.readStream.text(str(case.folder / "ids"))
    case.stream(lines, functions.ack_stream("value", case.url))
    return case.acked


def tally_stream(case: Case) -> bool:
    path, schema = case.messages()
    case.stream(case.spark.readStream.schema(schema).json(path), functions.tally_stream(case.tally, case.url))
    return case.client.tally(case.tally).value("k") == 6


def columns(case: Case) -> bool:
    names = ("item_batch", "item_group", "item_index", "item_number", "is_item_id")
    last = case.ids.select(*(getattr(functions, name)("item_id") for name in names)).collect()[-1]
    return tuple(last) == (case.batch.id, 0, 2, 2, True)


def explain(case: Case) -> bool:
    functions.ack(case.ids.where("item_id LIKE '%:1'"), url=case.url)
    rows = functions.explain(case.batch, case.url).orderBy("start").collect()
    assert [(row.start, row.end, row["items"]) for row in rows] == [(0, 1, 1), (2, 3, 1)]
    return {row.first for row in rows} == {row.last for row in rows} == {f"{case.batch.id}:0:{n}" for n in (0, 2)}


def with_item_ids(case: Case) -> bool:
    numbered = functions.with_item_ids(case.spark.range(2), case.batch)
    return {row.item_id for row in numbered.collect()} == {f"{case.batch.id}:0:{n}" for n in (3, 4)}


def tally_job_counts(case: Case) -> bool:
    path, schema = case.messages()
    arguments = ["--tally", case.tally, "--url", case.url, "--input", path, "--format", "json", "--schema", schema]
    checkpoint = ["--checkpoint", str(case.folder / "checkpoint"), "--key", "key", "--delta", "delta"]
    return tally_job.main([*arguments, *checkpoint]) == 0 and case.client.tally(case.tally).value("k") == 6


def delta_rows(case: Case) -> bool:
    path = str(case.folder / "delta")
    write_deltalake(path, case.table)
    return functions.ack(functions.delta_rows(path, 0), url=case.url).applied == ITEMS and case.acked


def iceberg_rows(case: Case) -> bool:
    catalog = InMemoryCatalog(case.tally, warehouse=f"file://{case.folder}/iceberg")
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.rendered", case.table.schema)
    table.append(case.table)
    rows = functions.iceberg_rows(table, table.current_snapshot().snapshot_id)
    return functions.ack(rows, url=case.url).applied == ITEMS and case.acked


def bulk_ack_acks(case: Case) -> bool:
    arguments = ["--input", str(case.folder / "ids"), "--format", "text", "--url", case.url]
    return bulk_ack.main(arguments) == 0 and case.acked


USES: dict[str, Callable[[Case], bool]] = {
    "`ack`": lambda case: functions.ack(case.ids, url=case.url).applied == ITEMS and case.acked,
    "`ack_stream`": ack_stream,
    "`malformed_rows`": lambda case: functions.malformed_rows(case.spark.sql("SELECT 'x' AS item_id")).count() == 1,
    "`item_masks`": lambda case: functions.item_masks(case.ids).collect()[0].bits.rstrip(b"\0") == b"\x07",
    "`item_id`, `item_batch`, `item_group`, `item_index`, `item_number`, `is_item_id`": columns,
    "`with_item_ids`": with_item_ids,
    "`job`, `Job`": lambda case: functions.job(case.spark.range(2), case.url, key=case.tally).todo.count() == 2,
    "`explain`": explain,
    "`delta_rows`": delta_rows,
    "`iceberg_rows`": iceberg_rows,
    "`ack_udf`": lambda case: (
        [row[0] for row in case.ids.select(functions.ack_udf(case.url)("item_id")).collect()] == ["accepted"] * ITEMS
    ),
    "`apply_tally`": lambda case: functions.apply_tally(case.spark.sql(MESSAGES), case.tally, case.url).applied == 3,
    "`tally_stream`": tally_stream,
    '`register`, `format("lastbit")`': source,
    "`jobs/bulk_ack.py`": bulk_ack_acks,
    "`jobs/tally_stream.py`": tally_job_counts,
}


def table() -> dict[str, dict[str, str]]:
    """What the page says of each function: the kinds of session, and whether it works there."""
    lines = (ROOT / "docs" / "spark.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| function |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    header, _, *body = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    named = {name: dict(zip(header[1:], cells, strict=True)) for name, *cells in body}
    everything_else = named.pop("everything else")
    assert named.keys() <= USES.keys()
    return {name: named.get(name, everything_else) for name in USES}


def test_each_function_and_each_kind_of_session_is_tried() -> None:
    """So that no function of the package is missing here."""
    named = " ".join(USES)
    errors_and_reports = {"AckProgress", "AckReport", "MalformedRows", "PySparkTooOld", "TallyReport"}
    assert all(f"`{name}`" in named for name in set(functions.__all__) - errors_and_reports)
    assert all(SESSION in cells for cells in table().values())


@pytest.mark.parametrize("name", USES)
def test_each_function_works_where_the_table_says_so(
    spark: Any, client: Client, tmp_path: Path, capsys: Any, name: str
) -> None:
    """In this kind of session; where it doesn't work, the error names the function and the version it needs."""
    case = Case(spark, client, tmp_path)
    promise = table()[name][SESSION]
    if promise == "yes":
        assert USES[name](case), json.dumps(capsys.readouterr().err)
        return
    assert promise == "no"
    with pytest.raises(functions.PySparkTooOld, match=r"needs PySpark 4\.1 or later, and this is 3\.5") as error_info:
        USES[name](case)
    assert 'the data source "lastbit"' in str(error_info.value)
