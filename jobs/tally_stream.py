"""`spark-submit jobs/tally_stream.py`: count a stream into a tally, each message once.

    make zip
    spark-submit --py-files dist/lastbit.zip jobs/tally_stream.py --tally screws --url http://lastbit:8000 \\
      --format kafka --option kafka.bootstrap.servers=kafka:9092 --option subscribe=fastened \\
      --option startingOffsets=earliest --key "get_json_object(cast(value AS string), '$.robot')" \\
      --checkpoint s3a://bucket/checkpoints/screws

Rows need a topic, a partition and an offset. Kafka's columns are used as they are; files need such columns. Files are
read in the order of their times, so an earlier offset of a partition must not be in a later file.

The job counts all available messages and ends; with --every it continues. Each message counts once, even if the job is
killed and started again, uses another checkpoint for the same tally, or runs twice at the same time. It needs
`lastbit`, PySpark and the standard library. A bare cluster needs only the zip in --py-files. The report is one line of
JSON on standard output. On Spark Connect, set SPARK_REMOTE, run it with Python, and name the zip in --artifact.

Exit status (in client mode, where spark-submit returns it): 0 all counted; 1 failed, and some messages may be counted;
2 wrong usage: no such input, column or SQL.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from lastbit.errors import InvalidArgument, LastbitError
from lastbit.spark import TallyReport, tally_stream
from lastbit.spark._partitions import is_connect
from lastbit.spark.arguments import add_connect, add_reader, add_service, send_artifact, token_of
from lastbit.spark.driver_output import keep_standard_output_clean
from lastbit.spark.failures import SPARK_ERRORS, is_wrong_use, message_of

GOOD, FAILED, WRONG_USE = 0, 1, 2
STORED = "lastbit-counted"
"""The name of the folder in which the counts are stored on Spark Connect."""


@dataclass
class _Counted:
    """The total of all micro-batches, and the failure of the last one.

    On Spark Connect, a process of the server runs the sink, in a session of its own, with a copy of this object. That
    copy is stored next to the checkpoint, where this process reads it.
    """

    batches: int = 0
    total: TallyReport = field(default_factory=TallyReport)
    failure: str | None = None
    wrong_use: bool = False
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    def store(self, spark: SparkSession, checkpoint: str) -> None:
        frame = spark.createDataFrame([(json.dumps(asdict(self)),)], "counted string")
        frame.coalesce(1).write.mode("overwrite").text(f"{checkpoint}/{STORED}")

    def load(self, spark: SparkSession, checkpoint: str) -> None:
        try:
            rows = spark.read.text(f"{checkpoint}/{STORED}").collect()
        except AnalysisException:  # there was no micro-batch yet
            return
        stored = json.loads(rows[0][0])
        if stored["run"] != self.run:
            return
        self.batches, self.total = stored["batches"], TallyReport(**stored["total"])
        self.failure, self.wrong_use = stored["failure"], stored["wrong_use"]

    def add(self, report: TallyReport, epoch: int) -> None:
        self.batches += 1
        self.total = TallyReport(
            self.total.entries + report.entries,
            self.total.applied + report.applied,
            self.total.repeated + report.repeated,
        )
        _say(f"micro-batch {epoch}: {report.applied:,} applied, {report.repeated:,} repeated")


def main(arguments: list[str] | None = None) -> int:
    keep_standard_output_clean()
    options = _parser().parse_args(arguments)
    start = time.monotonic()
    counted = _Counted()
    try:
        sink = _sink(options, token_of(options.token_file), counted)
        spark = SparkSession.builder.appName(f"lastbit tally_stream {options.tally}").getOrCreate()
        send_artifact(spark, options.artifact)
        writer = _read(spark, options).writeStream.foreachBatch(sink).option("checkpointLocation", options.checkpoint)
        trigger: dict[str, Any] = (
            {"processingTime": f"{options.every} seconds"} if options.every else {"availableNow": True}
        )
        try:
            writer.trigger(**trigger).start().awaitTermination()
        finally:
            if is_connect(spark):
                counted.load(spark, options.checkpoint)
    except InvalidArgument as error:
        _say(str(error))
        return WRONG_USE
    except SPARK_ERRORS as error:
        # An exception of the sink passes through the JVM and loses its type.
        _say(counted.failure or message_of(error))
        return WRONG_USE if counted.wrong_use or is_wrong_use(error) else FAILED
    print(json.dumps({"batches": counted.batches, **counted.total.to_dict()}), flush=True)  # noqa: T201  # the report
    _say(f"done in {time.monotonic() - start:.1f} s")
    return GOOD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tally_stream.py", description="Count a stream into a tally.")
    parser.add_argument("--tally", required=True, metavar="NAME")
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="where Spark stores how far it has read")
    parser.add_argument("--format", default="parquet", help="kafka, parquet, json, csv, orc, … (parquet)")
    parser.add_argument("--input", metavar="PATH", help="a folder, for formats that are files")
    parser.add_argument("--schema", metavar="DDL", help="for files: 'topic string, partition int, offset bigint, …'")
    add_reader(parser)
    parser.add_argument("--explode", metavar="SQL", help="an array; each element becomes a row, in the column item")
    parser.add_argument("--key", required=True, metavar="SQL", help="the tally's key for a row")
    parser.add_argument("--delta", default="1", metavar="SQL", help="the amount to add (1)")
    parser.add_argument("--topic", default="topic", metavar="SQL", help="the topic of the message (topic)")
    parser.add_argument("--partition", default="partition", metavar="SQL", help="its partition (partition)")
    parser.add_argument("--offset", default="offset", metavar="SQL", help="its offset (offset)")
    parser.add_argument(
        "--generation", default="0", metavar="SQL", help="the generation of a topic that was recreated (0)"
    )
    parser.add_argument("--header", metavar="SQL", help="the source chain of republished messages")
    parser.add_argument("--by", choices=("entry", "range"), default="entry", help="range: add messages up (entry)")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="continue, with a micro-batch at this interval")
    add_service(parser, "maximum number of tasks that send at a time")
    add_connect(parser)
    return parser


def _read(spark: SparkSession, options: argparse.Namespace) -> DataFrame:
    reader = spark.readStream.format(options.format).options(**dict(options.option))
    if options.schema:
        reader = reader.schema(options.schema)
    frame = reader.load(options.input) if options.input else reader.load()
    return frame.where(options.where) if options.where else frame


def _sink(options: argparse.Namespace, token: str | None, counted: _Counted) -> Any:
    apply = tally_stream(
        options.tally,
        options.url,
        token,
        on_report=counted.add,
        key=options.key,
        delta=options.delta,
        topic=options.topic,
        partition=options.partition,
        offset=options.offset,
        generation=options.generation,
        header=options.header,
        explode=options.explode,
        by=options.by,
        parallel=options.parallel,
    )

    def sink(frame: DataFrame, epoch: int) -> None:
        try:
            apply(frame, epoch)
        except LastbitError as error:
            counted.failure, counted.wrong_use = str(error), isinstance(error, InvalidArgument)
            raise
        finally:
            if is_connect(frame):
                counted.store(frame.sparkSession, options.checkpoint)

    return sink


def _say(text: str) -> None:
    print(f"tally_stream: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
