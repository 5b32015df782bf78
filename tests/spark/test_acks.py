"""Acks of a DataFrame: the counts, and the handling of bad input and failing services."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from lastbit import Client, InvalidArgument, InvalidRequest, Retry, ServiceUnreachable, Unauthorized, Unavailable
from lastbit.spark import MalformedRows, ack, ack_stream, explain, item_id, malformed_rows

pytestmark = pytest.mark.xdist_group("spark")

FAST = Retry(attempts=3, base=0.01, deadline=5)


def ids(spark: Any, *texts: str | None) -> Any:
    return spark.createDataFrame([(text,) for text in texts], "item_id string")


def test_a_frame_acks_its_batch(spark: Any, client: Client) -> None:
    """Each item counts once however many rows have it; the last one completes the batch; a second run is a repeat."""
    batch = client.open(items=20_000, sealed=True)
    numbers = spark.range(20_000).select(item_id(batch.id, "id").alias("item_id"))
    first = ack(numbers.where("item_id like '%7'"), url=client.url)
    assert (first.rows, first.items, first.applied, first.completed) == (1999, 1999, 1999, ())
    rest = ack(numbers.union(numbers), url=client.url)
    assert (rest.rows, rest.items, rest.applied, rest.repeated) == (40_000, 20_000, 18_001, 1999)
    assert rest.completed == (batch.id,)
    assert rest.clean
    repeat = ack(numbers, url=client.url)
    assert (repeat.applied, repeat.repeated, repeat.completed) == (0, 20_000, (batch.id,))
    assert batch.refresh().succeeded
    assert batch.verify().ok


def test_skipped_rows_skip_their_items(spark: Any, client: Client) -> None:
    """An item with several rows has the best of their outcomes. The reason is that of the failures too."""
    batch = client.open(items=5, sealed=True)
    states = ["good", "bad", "skip", "bad skip", "skip good"]
    rows = [(item, state) for item, states_of in zip(batch.ids, states, strict=True) for state in states_of.split()]
    frame = spark.createDataFrame(rows, "item_id string, state string").repartition(2)
    report = ack(frame, url=client.url, failed="state = 'bad'", skipped="state = 'skip'", reason="no text in it")
    assert (report.items, report.applied, report.completed) == (5, 5, (batch.id,))
    assert (batch.refresh().acked, batch.info.failed, batch.info.skipped) == (2, 1, 2)
    assert [(ended.start, ended.end, dict(ended.reasons)) for ended in batch.skipped()] == [
        (2, 4, {batch.ids[2]: "no text in it", batch.ids[3]: "no text in it"})
    ]
    skipped_items = explain(batch, client.url, state="skipped", spark=spark).collect()
    assert [(row.start, row.end) for row in skipped_items] == [(2, 4)]


def test_failed_rows_fail_their_items_and_a_good_row_wins(spark: Any, client: Client) -> None:
    """An item with a failed row and a good one has a result, so it is acked."""
    batch = client.open(items=4, sealed=True)
    rows = [(0, "good"), (1, "bad"), (1, "good"), (2, "bad"), (3, None)]
    frame = spark.createDataFrame([(f"{batch.id}:0:{n}", state) for n, state in rows], "item_id string, state string")
    report = ack(frame, url=client.url, failed="state = 'bad'", reason="no text in it")
    assert (report.rows, report.items, report.applied, report.completed) == (5, 4, 4, (batch.id,))
    assert [(failed.start, failed.end, dict(failed.reasons)) for failed in batch.failed()] == [
        (2, 3, {f"{batch.id}:0:2": "no text in it"})
    ]


def test_items_that_were_not_issued_are_rejected_and_block_nothing(spark: Any, client: Client) -> None:
    """Items of several batches; deleted batches; numbers beyond the batch, indexes beyond its group and beyond any
    group; values that are not ids."""
    small = client.open(items=70, group_size=64, sealed=True)
    large = client.open(items=9000)
    cancelled = client.open(items=9000)
    cancelled.cancel()
    missing_batch = 10**9
    frame = ids(
        *(spark, None, "", "x", f"{small.id}:0", f" {small.id}:0:0"),
        *(f"{small.id}:0:63", f"{small.id}:0:64", f"{small.id}:0:8191", f"{small.id}:0:40000", f"{small.id}:1:6"),
        *(f"{large.id}:0:8191", f"{large.id}:1:807", f"{large.id}:1:808", f"{large.id}:77:0", f"{large.id}:0:8192"),
        *(f"{cancelled.id}:0:0", f"{cancelled.id}:0:8000", f"{cancelled.id}:0:9000", f"{cancelled.id}:0:99999"),
        *(
            f"{missing_batch}:0:0",
            f"{missing_batch}:0:32767",
            f"{missing_batch}:0:32768",
            f"{missing_batch}:{2**53 - 1}:1",
        ),
    )
    report = ack(frame, url=client.url)
    assert (report.rows, report.malformed, report.items) == (23, 5, 18)
    assert report.applied == 3
    assert report.rejected == {"cancelled": 4, "unknown_batch": 4, "unknown_item": 7}
    assert report.applied + report.repeated + sum(report.rejected.values()) == report.items
    assert not report.clean
    assert (small.refresh().acked, large.refresh().acked) == (1, 2)
    assert sorted(row[0] or "" for row in malformed_rows(frame).collect()) == [
        "",
        "",
        f" {small.id}:0:0",
        f"{small.id}:0",
        "x",
    ]


def test_items_of_nested_batches_are_held_and_the_report_is_clean(spark: Any, client: Client) -> None:
    """Their batches resolve them."""
    batch = client.open(items=3, sealed=True)
    child = client.open(items=1, sealed=True, parent=batch.ids[1])
    report = ack(ids(spark, *batch.ids), url=client.url)
    assert (report.items, report.applied, report.rejected) == (3, 2, {"held": 1})
    assert report.clean
    client.ack(child.ids)
    assert batch.refresh().succeeded


def test_a_strict_call_sends_nothing_if_a_row_has_no_id(spark: Any, client: Client) -> None:
    """And the error gives their number; without such rows it is an ordinary call."""
    batch = client.open(items=2)
    with pytest.raises(MalformedRows, match="2 of 4 rows") as error_info:
        ack(ids(spark, f"{batch.id}:0:0", f"{batch.id}:0:1", None, "x"), url=client.url, strict=True)
    assert (error_info.value.malformed, error_info.value.rows) == (2, 4)
    assert batch.refresh().acked == 0
    assert ack(ids(spark, f"{batch.id}:0:0"), url=client.url, strict=True).applied == 1


def test_an_empty_frame_acks_nothing(spark: Any, client: Client) -> None:
    """Without an error: a day without input is not a failure."""
    assert ack(ids(spark), url=client.url).to_dict() == {
        "rows": 0,
        "items": 0,
        "applied": 0,
        "repeated": 0,
        "rejected": {},
        "malformed": 0,
        "completed": (),
    }


def test_a_missing_column_is_refused_before_anything_is_sent(spark: Any, unused_port: int) -> None:
    """A wrong argument is distinguished from an unreachable service."""
    with pytest.raises(InvalidArgument, match="the columns are item_id"):
        ack(ids(spark, "7:0:0"), "item", f"http://127.0.0.1:{unused_port}", retry=FAST)


def test_a_reason_is_refused_before_anything_is_sent(spark: Any, client: Client) -> None:
    """Without failed items it would be ignored; one that is too long would be found when all was computed."""
    batch = client.open(items=1)
    with pytest.raises(InvalidArgument, match="a reason is for failed or skipped items"):
        ack(ids(spark, batch.ids[0]), url=client.url, reason="empty")
    with pytest.raises(InvalidRequest, match="reason"):
        ack(ids(spark, batch.ids[0]), url=client.url, failed="false", reason="x" * 4001)
    assert batch.refresh().acked == 0


def test_an_unreachable_service_is_named_after_a_few_tries(spark: Any, unused_port: int) -> None:
    """The error has the URL, it comes before Spark computes anything, and nothing is reported as acked."""
    url = f"http://127.0.0.1:{unused_port}"
    start = time.monotonic()
    with pytest.raises(ServiceUnreachable, match=url) as error_info:
        ack(ids(spark, "7:0:0"), url=url, retry=FAST)
    assert error_info.value.attempts == 3
    assert time.monotonic() - start < 10


def test_a_service_that_stops_in_the_middle_raises_an_error(spark: Any, scripted_service: Any, client: Client) -> None:
    """The executors' error is raised itself, without Spark's own retries around it."""
    scripted_service.reply = lambda seen: (
        (200, {}, {"applied": 0, "repeated": 0, "completed": [], "rejected": []})
        if seen.body == {"items": []}
        else (503, {}, {"code": "unavailable", "detail": "the database is away"})
    )
    with pytest.raises(Unavailable, match="the database is away"):
        ack(ids(spark, "7:0:0"), url=scripted_service.url, retry=FAST)
    posts = [seen for seen in scripted_service.seen if seen.body != {"items": []}]
    assert len(posts) == 3
    assert len({seen.headers["idempotency-key"] for seen in posts}) == 1


def test_a_token_that_is_refused_is_an_error_at_once(spark: Any, scripted_service: Any) -> None:
    """401 is not an outage: one request is sent, and the error is the SDK's own."""
    scripted_service.reply = lambda _: (401, {}, {"code": "unauthorized", "detail": "no such token"})
    with pytest.raises(Unauthorized, match="no such token"):
        ack(ids(spark, "7:0:0"), url=scripted_service.url, token="not-mine", retry=FAST)
    assert [seen.headers["authorization"] for seen in scripted_service.seen] == ["Bearer not-mine"]


def test_the_same_run_has_the_same_idempotency_keys(spark: Any, scripted_service: Any) -> None:
    """So a repeated task is recognized; another run is another request."""
    scripted_service.replies((200, {}, {"applied": 1, "repeated": 0, "completed": [], "rejected": []}))
    for run in ("monday", "monday", "tuesday"):
        ack(ids(spark, "7:0:0", "7:1:5"), url=scripted_service.url, idempotency_key=run)
    first, second, third = [
        seen.headers["idempotency-key"] for seen in scripted_service.seen if seen.body.get("groups")
    ]
    assert first == second != third


def test_calls_are_bounded(spark: Any, scripted_service: Any) -> None:
    """In bitfields a request and in concurrent requests."""
    scripted_service.replies((200, {}, {"applied": 1, "repeated": 0, "completed": [], "rejected": []}))
    frame = spark.range(100).selectExpr("concat('7:', id, ':1') AS item_id")
    ack(frame, url=scripted_service.url, groups=30, parallel=1)
    sizes = [len(seen.body["groups"]) for seen in scripted_service.seen if seen.body.get("groups")]
    assert sizes == [30, 30, 30, 10]
    sent = [mask["group"] for seen in scripted_service.seen for mask in seen.body.get("groups", ())]
    assert sorted(sent) == list(range(100))
    for options in ({"groups": 0}, {"groups": 5000}, {"parallel": 0}):
        with pytest.raises(InvalidArgument):
            ack(frame, url=scripted_service.url, **options)


def test_a_stream_that_lost_its_commit_acks_the_same_bits(spark: Any, client: Client, tmp_path: Any) -> None:
    """A query dies in the middle of a micro-batch and has also lost its last commit: it replays both, and nothing
    counts twice."""
    batch, url = client.open(items=3000), client.url
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    source.mkdir()
    reports = tmp_path / "reports"

    def report_to_file(report: Any, epoch: int) -> None:
        with reports.open("a") as file:  # on Connect, another process calls this
            file.write(json.dumps([epoch, report.applied, report.repeated]) + "\n")

    def feed(first: int, last: int) -> None:
        lines = "\n".join(f"{batch.id}:0:{n}" for n in range(first, last))
        (source / f"{first}.txt").write_text(lines)

    def run(die_in: int | None = None) -> None:
        acked = ack_stream("value", url, on_report=report_to_file)

        def sink(frame: Any, epoch: int) -> None:
            if epoch == die_in:
                acked(frame.where("hash(value) % 2 = 0"), epoch)
                raise RuntimeError("the driver dies in the middle of the micro-batch")
            acked(frame, epoch)

        stream = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(source))
        query = stream.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()

    feed(0, 1000)
    feed(1000, 2000)
    with pytest.raises(Exception, match="dies in the middle"):
        run(die_in=1)
    assert 1000 < batch.refresh().acked < 2000
    run()
    assert batch.refresh().acked == 2000
    commits = sorted((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    assert [path.name for path in commits] == ["0", "1"]
    commits[-1].unlink()
    (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    feed(2000, 2500)
    run()
    assert [1, 0, 1000] in map(json.loads, reports.read_text().splitlines())
    assert [(pending.start, pending.end) for pending in batch.pending()] == [(2500, 3000)]
    assert batch.verify().ok
