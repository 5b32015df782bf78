"""`format("lastbit")`: writing a frame acks its items, reading a batch returns its missing items."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import functions as sf

from lastbit import Client, MissingExtra
from lastbit.ids import item_id as id_of
from lastbit.spark import item_id, item_number, register
from lastbit.spark.source import _chunks, _chunks_of_ranges, _ids

pytestmark = pytest.mark.xdist_group("spark")


@pytest.fixture
def session(spark: Any) -> Any:
    register(spark)
    return spark


def partitions(frame: Any) -> int:
    """The number of partitions that have rows."""
    return frame.select(sf.spark_partition_id()).distinct().count()


@pytest.mark.nightly
def test_a_written_frame_acks_and_the_rest_is_read_back(session: Any, client: Client) -> None:
    """Pending items come back as ids, split by groups, and a join runs exactly the missing ones."""
    batch = client.open(items=30_000)
    work = session.range(30_000).select(item_id(batch.id, "id").alias("item_id"), "id")
    work.where("id % 3 = 0").write.mode("append").format("lastbit").option("url", client.url).save()
    assert batch.refresh().acked == 10_000
    pending = session.read.format("lastbit").option("url", client.url).option("batch", batch.id).load()
    assert pending.columns == ["item_id"]
    assert partitions(pending) == 4
    assert pending.count() == pending.distinct().count() == 20_000
    remaining = work.join(pending, "item_id")
    assert remaining.where("id % 3 = 0").count() == 0
    remaining.write.mode("append").format("lastbit").option("url", client.url).save()
    batch.seal()
    assert batch.refresh().succeeded
    assert pending.count() == 0


@pytest.mark.nightly
def test_failed_and_skipped_rows_are_read_back(session: Any, client: Client) -> None:
    """With boolean columns next to the ids; null counts as not failed."""
    batch = client.open(items=20_000, group_size=64)
    work = session.range(20_000).select(item_id(batch.id, "id", 64).alias("work"), "id")
    bad, idle = "CASE WHEN id % 2 = 1 THEN true WHEN id % 4 = 0 THEN false END AS bad", "id % 8 = 2 AS idle"
    states = work.selectExpr("work", bad, idle)
    options = {"url": client.url, "column": "work", "failed_column": "bad", "skipped_column": "idle", "reason": "odd"}
    states.write.mode("append").format("lastbit").options(**options).save()
    assert (batch.refresh().acked, batch.info.failed, batch.info.skipped) == (7_500, 10_000, 2_500)
    skipped_items = session.read.format("lastbit").options(url=client.url, batch=batch.id, state="skipped").load()
    assert skipped_items.distinct().count() == 2_500
    reader = session.read.format("lastbit").options(url=client.url, batch=batch.id, state="failed", partitions=3)
    failed = reader.load()
    assert partitions(failed) == 3
    numbers = failed.select(item_number("item_id", 64).alias("n")).agg({"n": "count"}).first()[0]
    assert numbers == failed.distinct().count() == 10_000


def test_an_untouched_batch_is_read_completely(session: Any, client: Client) -> None:
    """Its single range is split between the partitions; an empty batch has no rows."""
    batch = client.open(items=100_001)
    reader = session.read.format("lastbit").option("url", client.url)
    pending = reader.option("batch", batch.id).load()
    assert pending.select(item_number("item_id").alias("n")).agg({"n": "sum"}).first()[0] == 100_001 * 50_000
    assert pending.distinct().count() == 100_001
    assert reader.option("batch", client.open().id).load().count() == 0


def test_a_strict_write_reports_bad_rows(session: Any, client: Client) -> None:
    """The valid rows are acked; without strict the job succeeds."""
    batch = client.open(items=1)
    frame = session.createDataFrame([(f"{batch.id}:0:0",), (f"{batch.id}:0:1",), (None,)], "item_id string")
    writer = frame.write.mode("append").format("lastbit").option("url", client.url)
    writer.save()
    with pytest.raises(Exception, match=r"unknown_item.*malformed") as error_info:
        writer.option("strict", "true").save()
    assert '"malformed": 1' in str(error_info.value)
    assert batch.refresh().acked == 1


def test_a_strict_write_leaves_held_items_to_their_batches(session: Any, client: Client) -> None:
    batch = client.open(items=2)
    client.open(items=1, parent=batch.ids[1])
    frame = session.createDataFrame([(item,) for item in batch.ids], "item_id string")
    frame.write.mode("append").format("lastbit").option("url", client.url).option("strict", "true").save()
    assert (batch.refresh().acked, batch.refresh().pending) == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "nothing"}, "there is no column 'nothing'"),
        ({"failed_column": "item_id"}, "type string, not boolean"),
        ({"url": "nowhere"}, "not the address of a service"),
        ({"strict": "yes"}, "strict is true or false"),
        ({"timeout": "1 min"}, "the option timeout is a number of seconds, not '1 min'"),
        ({"reason": "empty"}, "it needs the option failed_column"),
    ],
)
def test_wrong_options_are_refused_before_a_row_is_read(session: Any, options: dict[str, str], message: str) -> None:
    """With the name of the wrong option."""
    frame = session.createDataFrame([("7:0:0",)], "item_id string")
    with pytest.raises(Exception, match=message):
        frame.write.mode("append").format("lastbit").options(**{"url": "http://127.0.0.1:9", **options}).save()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the option batch is a whole number"),
        ({"batch": "seven"}, "the option batch is a whole number"),
        ({"batch": "7", "state": "acked"}, "pending, failed or skipped"),
        ({"batch": "999999999"}, "no such batch|batch_not_found"),
    ],
)
def test_a_batch_that_cannot_be_read_is_an_error(
    session: Any, client: Client, options: dict[str, str], message: str
) -> None:
    """Not an empty frame."""
    with pytest.raises(Exception, match=message):
        session.read.format("lastbit").option("url", client.url).options(**options).load().count()


def test_a_writer_keeps_only_the_columns_that_it_reads() -> None:
    """Rows may have large bodies, and a quarter of a million of them wait for their masks."""
    rows, body = 20, b"x" * 100_000
    schema = pa.schema({"body": pa.binary(), "item_id": pa.string(), "lost": pa.bool_()})

    def received() -> Iterator[pa.RecordBatch]:
        for number in range(10):
            ids = [f"7:0:{number * rows + row}" for row in range(rows)]
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, schema) as stream:
                stream.write_batch(pa.record_batch([[body] * rows, ids, [True] * rows], schema=schema))
            yield from pa.ipc.open_stream(sink.getvalue())

    before = pa.total_allocated_bytes()
    chunks = _chunks(received(), ["item_id", "lost"], 150)
    first = next(chunks)
    assert pa.total_allocated_bytes() - before < 2 * rows * len(body)  # of one batch and its stream, and not of eight
    assert [len(column) for column in first] == [160, 160]
    assert first[0].to_pylist() == [f"7:0:{number}" for number in range(160)]
    assert [len(column) for column in next(chunks)] == [40, 40]
    assert next(chunks, None) is None


@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), max_size=20),
    limit=st.integers(0, 300),
    most=st.integers(1, 30),
)
def test_ranges_are_read_many_at_a_time(lengths: list[tuple[int, int]], limit: int, most: int) -> None:
    """All their numbers below the limit, in order, in as few chunks as possible."""
    ranges = []
    place = 0
    for gap, length in lengths:
        ranges.append((place + gap, place + gap + length))
        place += gap + length
    chunks = list(_chunks_of_ranges(ranges, limit, most))
    wanted = [number for start, end in ranges for number in range(start, end) if number < limit]
    ids = [each for runs in chunks for each in _ids(7, runs, 64).to_pylist()]
    assert ids == [id_of(7, number, 64) for number in wanted]
    assert len(chunks) == -(-len(wanted) // most)


def test_a_stream_can_be_written(session: Any, client: Client, tmp_path: Any) -> None:
    """`writeStream` acks as well, and a replayed micro-batch changes nothing."""
    batch = client.open(items=300, sealed=True)
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    source.mkdir()

    def run() -> None:
        stream = session.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(source))
        query = stream.writeStream.format("lastbit").option("url", client.url).option("column", "value")
        query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()

    for part in range(2):
        lines = "\n".join(f"{batch.id}:0:{n}" for n in range(part * 150, part * 150 + 150))
        (source / f"{part}.txt").write_text(lines)
    run()
    assert batch.refresh().succeeded
    (checkpoint / "commits" / "1").unlink()
    (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    run()
    assert (batch.refresh().acked, batch.verify().ok) == (300, True)


def test_a_missing_package_is_named(spark: Any) -> None:
    """Without pyarrow or pandas, the first error names the missing package and the extra to install."""
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "from lastbit.spark import register, ack_udf\n"
        "for wanted in (lambda: register(None), ack_udf):\n"
        "    try: wanted()\n"
        "    except ImportError as error: print(error)"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.count("missing here: pandas") == output.count("pip install 'lastbit[spark]'") == 2
    assert issubclass(MissingExtra, ImportError)
