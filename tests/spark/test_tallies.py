"""Counting streams into a tally: whatever Spark repeats, splits differently or runs twice, each message counts once."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as sf

from jobs import tally_stream as job
from lastbit import Client, InvalidArgument, OutOfOrder, SourceChain
from lastbit.spark import TallyReport, apply_tally, tally_stream
from lastbit.spark.tallies import _roots
from tests.spark.conftest import CONNECT

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("spark")]

SCHEMA = "topic string, partition int, offset bigint, robot string, screws array<string>"
ENTRY = "key string, delta int, topic string, partition int, offset int"
OPTIONS: dict[str, Any] = {
    "explode": "screws",
    "key": "concat(robot, '/', item)",
    "delta": "length(item)",
    "parallel": 2,
}
"""The entries of a message: several screws, some of the same kind."""


class Screws:
    """Messages in files: two partitions, and files that overlap, as a crashing sink leaves them."""

    def __init__(self, folder: Path, messages: int = 300) -> None:
        self.folder = folder
        self.truth: dict[str, int] = {}
        self.entries = 0
        folder.mkdir()
        rows = [self._row(number) for number in range(messages)]
        for row in rows:
            self.entries += len(set(row["screws"]))
            for screw in row["screws"]:
                key = f"{row['robot']}/{screw}"
                self.truth[key] = self.truth.get(key, 0) + len(screw)
        size = messages // 6
        for file, start in enumerate(range(0, messages, size)):
            path = folder / f"{file}.json"
            overlapping = rows[max(0, start - 10) : start + size]
            path.write_text("\n".join(map(json.dumps, [*overlapping, *overlapping[:5]])))
            os.utime(path, (1_000_000 + file, 1_000_000 + file))  # files are read in the order of their times

    @staticmethod
    def _row(number: int) -> dict[str, Any]:
        screws = [("M4", "M6", "M10")[(number * place) % 3] for place in range(number % 4)]
        return {
            "topic": "fastened",
            "partition": number % 2,
            "offset": number // 2 * 3,
            "robot": f"robot-{number % 5}",
            "screws": screws,
        }


@pytest.fixture(scope="module")
def screws(tmp_path_factory: pytest.TempPathFactory) -> Screws:
    return Screws(tmp_path_factory.mktemp("screws") / "in")


@pytest.fixture(params=["entry", "range"])
def by(request: pytest.FixtureRequest) -> str:
    """How messages are counted."""
    return str(request.param)


def totals(client: Client, tally: str) -> dict[str, int]:
    return {total.key: total.value for total in client.tally(tally).totals()}


def start(spark: Any, screws: Screws, tally: str, url: str, checkpoint: Path, files: int, **options: Any) -> Any:
    sink = tally_stream(tally, url, **OPTIONS, **options)
    frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", files).json(str(screws.folder))
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    return query.trigger(availableNow=True).start()


def forget_last_commit(checkpoint: Path) -> None:
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)


def test_a_stream_is_counted_once_whatever_is_replayed(
    spark: Any, client: Client, screws: Screws, tmp_path: Path, by: str
) -> None:
    """The last commit is lost and its micro-batch replayed; then a new checkpoint on the same tally, with other
    micro-batch boundaries, whose batch ids start again."""
    reports = tmp_path / "reports"

    def report_to_file(report: TallyReport, epoch: int) -> None:
        with reports.open("a") as file:  # on Connect, another process calls this
            file.write(json.dumps([epoch, report.to_dict()]) + "\n")

    def run(checkpoint: str, files: int) -> list[tuple[int, TallyReport]]:
        reports.write_text("")
        place = tmp_path / checkpoint
        query = start(spark, screws, f"replayed-{by}", client.url, place, files, on_report=report_to_file, by=by)
        query.awaitTermination()
        lines = map(json.loads, reports.read_text().splitlines())
        return [(epoch, TallyReport(**report)) for epoch, report in lines]

    first = run("one", 3)
    assert [epoch for epoch, _ in first] == [0, 1]
    assert totals(client, f"replayed-{by}") == screws.truth
    forget_last_commit(tmp_path / "one")
    ((epoch, replayed),) = run("one", 3)
    assert (epoch, replayed.applied) == (1, 0)
    assert replayed.repeated == first[-1][1].entries > 0
    assert [(epoch, report.applied) for epoch, report in run("two", 5)] == [(0, 0), (1, 0)]
    assert totals(client, f"replayed-{by}") == screws.truth


def test_a_driver_that_dies_in_a_micro_batch_continues_exactly(
    spark: Any, client: Client, screws: Screws, tmp_path: Path, by: str
) -> None:
    """Some of the micro-batch was applied, in the order of its source; the rest is applied in the replay."""
    sink = tally_stream(f"died-{by}", client.url, **OPTIONS, by=by)

    def dying(frame: Any, epoch: int) -> None:
        sink(frame.where(f"offset < {220 if epoch else 10_000}"), epoch)
        if epoch:
            raise RuntimeError("the driver dies")

    frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 2).json(str(screws.folder))
    query = frame.writeStream.foreachBatch(dying).option("checkpointLocation", str(tmp_path / "one"))
    with pytest.raises(Exception, match="the driver dies"):
        query.trigger(availableNow=True).start().awaitTermination()
    assert 0 < sum(totals(client, f"died-{by}").values()) < sum(screws.truth.values())
    start(spark, screws, f"died-{by}", client.url, tmp_path / "one", 4, by=by).awaitTermination()
    assert totals(client, f"died-{by}") == screws.truth


def test_two_concurrent_drivers_count_each_message_once(
    spark: Any, client: Client, screws: Screws, tmp_path: Path, by: str
) -> None:
    """Each with its own checkpoint and boundaries, interleaved with the other. On Connect each reports from a process
    of its own, and they are not made to alternate."""
    barrier = None if CONNECT else threading.Barrier(2, timeout=120)
    reports = tmp_path / "reports"

    def meet(report: TallyReport, _: int) -> None:
        with reports.open("a") as file:
            file.write(f"{report.applied}\n")
        if barrier is not None and len(reports.read_text().splitlines()) < 5:
            barrier.wait()

    queries = [
        start(spark, screws, f"both-{by}", client.url, tmp_path / name, files, on_report=meet, by=by)
        for name, files in (("one", 2), ("two", 2))
    ]
    for query in queries:
        query.awaitTermination()
    assert totals(client, f"both-{by}") == screws.truth
    assert sum(map(int, reports.read_text().split())) == screws.entries


def test_republished_messages_count_by_their_root(spark: Any, client: Client) -> None:
    """Even messages that were published twice, and are in one frame; a message without a header is at its root."""

    def chain(offset: int, child: int) -> str:
        return SourceChain().hop("root", 1, offset, child, generation=3).hop("between", 0, 9).encode()

    # offset, header, key: siblings of one message, published again after a crash, and one message without a header.
    rows = [(0, chain(5, 0), "k"), (1, chain(5, 1), "k"), (2, chain(5, 0), "k"), (3, chain(5, 1), "k")]
    rows += [(4, chain(6, 0), "j"), (5, None, "k"), (6, "[]", "j")]
    frame = spark.createDataFrame(rows, "offset bigint, header string, key string")
    options: dict[str, Any] = {"delta": "1", "topic": "'by-robot'", "partition": "0", "header": "header", "parallel": 2}
    assert apply_tally(frame, "root", client.url, **options) == TallyReport(5, 5, 0)
    assert apply_tally(frame.where("offset > 1"), "root", client.url, **options) == TallyReport(5, 0, 5)
    assert totals(client, "root") == {"j": 2, "k": 3}
    sources = {
        (counter.topic, counter.partition, counter.generation): counter
        for counter in client.tally("root").get("k").sources
    }
    assert set(sources) == {("root", 1, 3), ("by-robot", 0, 0)}
    assert sources["root", 1, 3].child == SourceChain().hop("root", 1, 5, 1).source.child
    # A client that consumes next to Spark computes the same source.
    chain_ = SourceChain.decode(chain(5, 1)).hop("by-robot", 0, 1)
    assert client.tally("root").apply([("k", 1, chain_)]).repeated == 1


HOP = {"topic": "root", "partition": 1, "offset": 5}
CHAINS = [
    [],
    [HOP],
    [{**HOP, "child": 0}],
    [{**HOP, "child": 131_071, "generation": 3}, HOP, {**HOP, "topic": "b", "child": 1}, {**HOP, "child": 2}, HOP],
    [{**HOP, "partition": 2**53 - 1, "offset": 2**53 - 1, "generation": 2**53 - 1}],
    [{**HOP, "more": [1, {"child": 2}]}],
]
NO_CHAINS = [
    *([{**HOP, "child": child}] for child in (131_072, -1, 1.5, 1e3, True, "x", [1], {})),
    [{**HOP, "child": child} for child in range(4)],
    [HOP, {"topic": "b", "partition": 0}],
    [HOP, {**HOP, "topic": ""}],
    [HOP, {**HOP, "offset": 2**53}],
    *([{**HOP, name: value}] for name in ("partition", "offset", "generation") for value in (-1, 0.5, 2**53, 10**30)),
    *([{**HOP, name: None}] for name in HOP),
    *(bad for bad in (HOP, {}, [None], [HOP, None], [7], ["x"], 7, "x", None)),
]


def test_a_header_is_read_as_by_the_sdk(spark: Any) -> None:
    """A chain that `SourceChain` refuses has no source: siblings of one message could get the same one otherwise."""
    headers = [*(json.dumps(hops) for hops in CHAINS + NO_CHAINS), "", "no chain", "[", '[{"topic": "root"', " \n[ ]"]
    columns = ("topic", "partition", "offset", "child", "generation")
    frame = spark.createDataFrame(list(enumerate(headers)), "number int, header string")
    at_row = dict(zip(columns, map(sf.lit, ("row", 0, 9, 0, 0)), strict=True))
    sources = _roots(sf.col("header"), at_row)
    rows = frame.select("number", *(column.alias(name) for name, column in sources.items())).collect()
    found = {headers[row.number]: tuple(row[name] for name in columns) for row in rows}

    def wanted(header: str) -> tuple[Any, ...]:
        try:
            chain = SourceChain.decode(header)
        except InvalidArgument:
            return (None,) * 5
        if any(hop.offset >= 2**53 for hop in chain.hops):
            return (None,) * 5  # entries take no such offset
        return tuple(chain.source) if chain.hops else ("row", 0, 9, 0, 0)

    assert found == {header: wanted(header) for header in headers}
    assert sum(wanted(header)[0] is None for header in headers) == len(NO_CHAINS) + 4


def test_input_that_cannot_be_counted_is_refused(spark: Any, client: Client) -> None:
    """Before anything is sent if it can be detected, otherwise by the task or the service."""
    frame = spark.createDataFrame(
        [("k", 1, "t", 0, 5)], "key string, delta int, topic string, partition int, offset int"
    )
    for options, message in (
        ({"key": "nowhere"}, "no such column"),
        ({"delta": "1.5"}, "delta has the type"),
        ({"offset": "'5'"}, "offset has the type"),
        ({"topic": "7"}, "topic has the type"),
        ({"parallel": 0}, "parallel must be at least 1"),
        ({"entries": 0}, "1 to 10,000"),
        ({"topic": "cast(null AS string)"}, "has no valid source"),
        ({"header": "'no chain'"}, "has no valid source"),
        ({"header": "'[]'", "by": "range"}, "need the order of their source"),
        ({"by": "offset"}, "by is 'entry' or 'range'"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            apply_tally(frame, "refused", client.url, **options)
    with pytest.raises(InvalidArgument, match="occurs twice"):
        apply_tally(frame.unionAll(frame.selectExpr("key", "2", "topic", "partition", "offset")), "refused", client.url)
    assert totals(client, "refused") == {}
    null_keys = frame.selectExpr("nullif(key, 'k') AS key", "delta", "topic", "partition", "offset")
    assert apply_tally(null_keys, "refused", client.url) == TallyReport(0, 0, 0)
    assert apply_tally(frame, "refused", client.url) == TallyReport(1, 1, 0)


def test_an_out_of_order_error_reaches_the_driver(spark: Any, scripted_service: Any) -> None:
    """With its own class, not as one of Spark's errors."""
    problem = {"code": "out_of_order", "detail": "offset 5 comes after 6"}
    scripted_service.reply = lambda seen: (
        (409, {}, problem) if seen.body["entries"] else (200, {}, {"applied": 0, "repeated": 0})
    )
    frame = spark.createDataFrame(
        [("k", 1, "t", 0, 5)], "key string, delta int, topic string, partition int, offset int"
    )
    with pytest.raises(OutOfOrder, match="offset 5 comes after 6"):
        apply_tally(frame, "t", scripted_service.url, parallel=1)


@pytest.fixture
def arguments(client: Client, screws: Screws, tmp_path: Path) -> list[str]:
    return [
        *("--input", str(screws.folder), "--format", "json", "--schema", SCHEMA, "--option", "maxFilesPerTrigger=2"),
        *("--explode", "screws", "--key", "concat(robot, '/', item)", "--delta", "length(item)", "--parallel", "2"),
        *("--url", client.url, "--checkpoint", str(tmp_path / "checkpoint")),
    ]


def test_the_job_counts_its_input_once(
    spark: Any, client: Client, screws: Screws, arguments: list[str], tmp_path: Path, capsys: Any, by: str
) -> None:
    """A second run adds nothing, with its checkpoint or with another one."""
    assert job.main([*arguments, "--tally", f"job-{by}", "--by", by]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["batches"] == 3
    assert report["entries"] == report["applied"] + report["repeated"]
    assert totals(client, f"job-{by}") == screws.truth
    assert job.main([*arguments, "--tally", f"job-{by}", "--by", by]) == 0
    assert json.loads(capsys.readouterr().out) == {"batches": 0, "entries": 0, "applied": 0, "repeated": 0}
    assert job.main([*arguments, "--tally", f"job-{by}", "--by", by, "--checkpoint", str(tmp_path / "other")]) == 0
    assert json.loads(capsys.readouterr().out)["applied"] == 0
    assert totals(client, f"job-{by}") == screws.truth


def test_the_job_distinguishes_wrong_use_from_failure(
    spark: Any, scripted_service: Any, arguments: list[str], unused_port: int, tmp_path: Path, capsys: Any
) -> None:
    """2: no such input, column or SQL, bad names; 1: a service that refuses or is unreachable. Nothing on standard
    output."""
    for more_arguments in (
        ["--input", str(tmp_path / "nowhere")],
        ["--key", "no such column"],
        ["--key", "nowhere"],
        ["--where", "nowhere = 1"],
        ["--url", "nowhere"],
        ["--token-file", str(tmp_path / "none")],
    ):
        checkpoint = ["--checkpoint", str(tmp_path / f"wrong-{hash(tuple(more_arguments))}")]
        assert job.main([*arguments, "--tally", "wrong", *checkpoint, *more_arguments]) == 2, more_arguments
    with pytest.raises(SystemExit) as error_info:
        job.main(arguments)
    assert error_info.value.code == 2
    scripted_service.reply = lambda _: (401, {}, {"code": "unauthorized", "detail": "no such token"})
    command = ["--url", scripted_service.url, "--checkpoint", str(tmp_path / "refused")]
    assert job.main([*arguments, "--tally", "wrong", *command]) == 1
    if not CONNECT:  # there another process sends, with the usual retries
        unreachable = ["--url", f"http://127.0.0.1:{unused_port}", "--checkpoint", str(tmp_path / "gone")]
        assert _impatient([*arguments, "--tally", "wrong", *unreachable]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "no such token" in output.err


def _impatient(arguments: list[str]) -> int:
    """Run the job with a library that gives up soon."""
    from lastbit import retry

    patched = pytest.MonkeyPatch()
    patched.setattr(retry.Retry.__init__, "__defaults__", (2, 1.0, 0.01, 0.01))
    try:
        return job.main(arguments)
    finally:
        patched.undo()
