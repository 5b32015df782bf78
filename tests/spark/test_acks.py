"""Acking a DataFrame: what is counted, and what happens with input and services that are not as they should be."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lastbit import Client, InvalidArgument, Retry, ServiceUnreachable, Unauthorized, Unavailable
from lastbit.spark import MalformedRows, ack, ack_stream, item_id, malformed_rows

pytestmark = pytest.mark.xdist_group("spark")

FAST = Retry(attempts=3, base=0.01, deadline=5)


def ids(spark: Any, *texts: str | None) -> Any:
    return spark.createDataFrame([(text,) for text in texts], "item_id string")


def test_a_frame_acks_its_batch(spark: Any, client: Client) -> None:
    """Each item counts once however many rows bear it; the last one completes the batch; again is a repeat."""
    batch = client.open(items=20_000, sealed=True)
    numbers = spark.range(20_000).select(item_id(batch.id, "id").alias("item_id"))
    first = ack(numbers.where("item_id like '%7'"), url=client.url)
    assert (first.rows, first.items, first.applied, first.completed) == (1999, 1999, 1999, ())
    rest = ack(numbers.union(numbers), url=client.url)
    assert (rest.rows, rest.items, rest.applied, rest.repeated) == (40_000, 20_000, 18_001, 1999)
    assert rest.completed == (batch.id,)
    assert rest.clean
    again = ack(numbers, url=client.url)
    assert (again.applied, again.repeated, again.completed) == (0, 20_000, (batch.id,))
    assert batch.refresh().succeeded
    assert batch.verify().ok


def test_failed_rows_fail_their_items_and_a_good_row_wins(spark: Any, client: Client) -> None:
    """Of an item with a failed row and a good one something was produced: it is acked."""
    batch = client.open(items=4, sealed=True)
    rows = [(0, "good"), (1, "bad"), (1, "good"), (2, "bad"), (3, None)]
    frame = spark.createDataFrame([(f"{batch.id}:0:{n}", state) for n, state in rows], "item_id string, state string")
    report = ack(frame, url=client.url, failed="state = 'bad'", reason="no text in it")
    assert (report.rows, report.items, report.applied, report.completed) == (5, 4, 4, (batch.id,))
    assert [(failed.start, failed.end, dict(failed.reasons)) for failed in batch.failed()] == [
        (2, 3, {f"{batch.id}:0:2": "no text in it"})
    ]


def test_what_was_never_issued_is_named_and_does_not_block_the_rest(spark: Any, client: Client) -> None:
    """Mixed batches; gone ones; numbers beyond the batch, indexes beyond its group and beyond any group; no ids."""
    small = client.open(items=70, group_size=64, sealed=True)
    large = client.open(items=9000)
    cancelled = client.open(items=9000)
    cancelled.cancel()
    gone = 10**9
    frame = ids(
        *(spark, None, "", "x", f"{small.id}:0", f" {small.id}:0:0"),
        *(f"{small.id}:0:63", f"{small.id}:0:64", f"{small.id}:0:8191", f"{small.id}:0:40000", f"{small.id}:1:6"),
        *(f"{large.id}:0:8191", f"{large.id}:1:807", f"{large.id}:1:808", f"{large.id}:77:0", f"{large.id}:0:8192"),
        *(f"{cancelled.id}:0:0", f"{cancelled.id}:0:8000", f"{cancelled.id}:0:9000", f"{cancelled.id}:0:99999"),
        *(f"{gone}:0:0", f"{gone}:0:32767", f"{gone}:0:32768", f"{gone}:{2**53 - 1}:1"),
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


def test_a_strict_call_sends_nothing_where_a_row_holds_no_id(spark: Any, client: Client) -> None:
    """And says how many there are; without them it is a call as any other."""
    batch = client.open(items=2)
    with pytest.raises(MalformedRows, match="2 of 4 rows") as caught:
        ack(ids(spark, f"{batch.id}:0:0", f"{batch.id}:0:1", None, "x"), url=client.url, strict=True)
    assert (caught.value.malformed, caught.value.rows) == (2, 4)
    assert batch.refresh().acked == 0
    assert ack(ids(spark, f"{batch.id}:0:0"), url=client.url, strict=True).applied == 1


def test_an_empty_frame_acks_nothing(spark: Any, client: Client) -> None:
    """Without an error: a day without input is no failure."""
    assert ack(ids(spark), url=client.url).to_dict() == {
        "rows": 0,
        "items": 0,
        "applied": 0,
        "repeated": 0,
        "rejected": {},
        "malformed": 0,
        "completed": (),
    }


def test_a_column_that_is_not_there_is_refused_before_anything_is_sent(spark: Any, unused_port: int) -> None:
    """Wrong use is told from a service that is away."""
    with pytest.raises(InvalidArgument, match="the columns are item_id"):
        ack(ids(spark, "7:0:0"), "item", f"http://127.0.0.1:{unused_port}", retry=FAST)


def test_a_service_that_is_down_is_named_after_few_tries(spark: Any, unused_port: int) -> None:
    """The error bears the URL, it comes before Spark computes anything, and nothing is reported as acked."""
    url = f"http://127.0.0.1:{unused_port}"
    begun = time.monotonic()
    with pytest.raises(ServiceUnreachable, match=url) as caught:
        ack(ids(spark, "7:0:0"), url=url, retry=FAST)
    assert caught.value.attempts == 3
    assert time.monotonic() - begun < 10


def test_a_service_that_goes_down_in_the_middle_is_an_error_not_a_half_report(
    spark: Any, scripted: Any, client: Client
) -> None:
    """The executors' error comes out as itself, without Spark's own retries around it."""
    scripted.reply = lambda seen: (
        (200, {}, {"applied": 0, "repeated": 0, "completed": [], "rejected": []})
        if seen.body == {"items": []}
        else (503, {}, {"code": "unavailable", "detail": "the database is away"})
    )
    with pytest.raises(Unavailable, match="the database is away"):
        ack(ids(spark, "7:0:0"), url=scripted.url, retry=FAST)
    posts = [seen for seen in scripted.seen if seen.body != {"items": []}]
    assert len(posts) == 3
    assert len({seen.headers["idempotency-key"] for seen in posts}) == 1


def test_a_token_that_is_refused_is_an_error_at_once(spark: Any, scripted: Any) -> None:
    """401 is no outage: it is asked once, and the error is the SDK's own."""
    scripted.reply = lambda _: (401, {}, {"code": "unauthorized", "detail": "no such token"})
    with pytest.raises(Unauthorized, match="no such token"):
        ack(ids(spark, "7:0:0"), url=scripted.url, token="not-mine", retry=FAST)
    assert [seen.headers["authorization"] for seen in scripted.seen] == ["Bearer not-mine"]


def test_the_same_run_bears_the_same_idempotency_keys(spark: Any, scripted: Any) -> None:
    """So a task that is run again is recognised; another run is another request."""
    scripted.replies((200, {}, {"applied": 1, "repeated": 0, "completed": [], "rejected": []}))
    for run in ("monday", "monday", "tuesday"):
        ack(ids(spark, "7:0:0", "7:1:5"), url=scripted.url, idempotency_key=run)
    first, second, third = [seen.headers["idempotency-key"] for seen in scripted.seen if seen.body.get("groups")]
    assert first == second != third


def test_calls_are_bounded(spark: Any, scripted: Any) -> None:
    """In bitfields a request and in requests at a time."""
    scripted.replies((200, {}, {"applied": 1, "repeated": 0, "completed": [], "rejected": []}))
    frame = spark.range(100).selectExpr("concat('7:', id, ':1') AS item_id")
    ack(frame, url=scripted.url, groups=30, parallel=1)
    sizes = [len(seen.body["groups"]) for seen in scripted.seen if seen.body.get("groups")]
    assert sizes == [30, 30, 30, 10]
    sent = [mask["group"] for seen in scripted.seen for mask in seen.body.get("groups", ())]
    assert sorted(sent) == list(range(100))
    for wrong in ({"groups": 0}, {"groups": 5000}, {"parallel": 0}):
        with pytest.raises(InvalidArgument):
            ack(frame, url=scripted.url, **wrong)


def test_a_stream_that_lost_its_commit_acks_the_same_bits(spark: Any, client: Client, tmp_path: Any) -> None:
    """A query dies in the middle of a micro-batch and its last commit is gone too: it replays both, and nothing is
    counted twice."""
    batch = client.open(items=3000)
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    source.mkdir()
    reports: dict[int, list[Any]] = {}

    def feed(first: int, last: int) -> None:
        lines = "\n".join(f"{batch.id}:0:{n}" for n in range(first, last))
        (source / f"{first}.txt").write_text(lines)

    def run(die_in: int | None = None) -> None:
        acked = ack_stream("value", client.url, on_report=lambda r, epoch: reports.setdefault(epoch, []).append(r))

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
    assert (reports[1][-1].applied, reports[1][-1].repeated) == (0, 1000)
    assert [(pending.start, pending.end) for pending in batch.pending()] == [(2500, 3000)]
    assert batch.verify().ok
