"""`spark-submit jobs/bulk_ack.py`: ack the output of a pipeline. The report is one line of JSON on standard output.

    make zip
    spark-submit --py-files dist/lastbit.zip jobs/bulk_ack.py --input s3a://bucket/out --url http://lastbit:8000

It needs `lastbit`, PySpark and the standard library. A bare cluster needs only the zip in --py-files. It is safe to run
it again, also after a failure, because acks are idempotent. On Spark Connect, without spark-submit:

    SPARK_REMOTE=sc://host PYTHONPATH=dist/lastbit.zip python jobs/bulk_ack.py --artifact dist/lastbit.zip --input …

Exit status (in client mode, where spark-submit returns it): 0 all good; 1 failed, for example because a file can't be
read, and some items may be acked; 2 wrong usage: no such input, column, option or SQL; 3 an item was rejected, but not
because a nested batch holds it, or a row was malformed, or --strict refused it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from lastbit.errors import InvalidArgument, LastbitError
from lastbit.models import HELD
from lastbit.spark import MalformedRows, ack, item_masks, malformed_rows
from lastbit.spark.arguments import add_connect, add_reader, add_service, send_artifact, token_of
from lastbit.spark.driver_output import keep_standard_output_clean
from lastbit.spark.failures import SPARK_ERRORS, is_wrong_use, message_of

FORMATS: Final = ("parquet", "csv", "json", "orc", "text")
GOOD, FAILED, WRONG_USE, NOT_ALL = 0, 1, 2, 3


def main(arguments: list[str] | None = None) -> int:
    keep_standard_output_clean()
    options = _parser().parse_args(arguments)
    try:
        token = token_of(options.token_file)
        spark = SparkSession.builder.appName("lastbit bulk_ack").getOrCreate()
        send_artifact(spark, options.artifact)
        return _run(spark, options, token)
    except InvalidArgument as error:
        _say(str(error))
        return WRONG_USE
    except LastbitError as error:
        _say(str(error))
        return FAILED
    except SPARK_ERRORS as error:
        _say(message_of(error))
        if is_wrong_use(error):
            return WRONG_USE
        _say("some items may be acked; fix the input and run the job again, which is safe")
        return FAILED


def _run(spark: SparkSession, options: argparse.Namespace, token: str | None) -> int:
    start = time.monotonic()
    frame = _read(spark, options)
    try:
        report = _dry_run(frame, options) if options.dry_run else _ack(frame, options, token)
    except MalformedRows as error:
        _say(str(error))
        return NOT_ALL if _write_rejects(frame, options) else FAILED
    print(json.dumps(report), flush=True)  # noqa: T201
    _say(f"done in {time.monotonic() - start:.1f} s")
    if report["malformed"] and not _write_rejects(frame, options):
        return FAILED
    return NOT_ALL if report["malformed"] or report.get("rejected", {}).keys() - {HELD} else GOOD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bulk_ack.py", description="Ack the item ids that a pipeline wrote.")
    parser.add_argument(
        "--input", action="append", required=True, metavar="PATH", help="the input; repeat for several paths"
    )
    parser.add_argument("--format", choices=FORMATS, default="parquet")
    add_reader(parser)
    parser.add_argument("--item-column", metavar="NAME", help="the column with the ids (item_id; value for text)")
    parser.add_argument("--failed-when", metavar="SQL", help="fail the items of these rows instead of acking them")
    parser.add_argument("--skipped-when", metavar="SQL", help="skip the items of these rows, which are not needed")
    parser.add_argument(
        "--rejects", metavar="PATH", help="append the rows without an item id to this folder, as JSON lines"
    )
    parser.add_argument("--strict", action="store_true", help="send nothing if a row has no item id")
    parser.add_argument("--dry-run", action="store_true", help="count, and send nothing")
    parser.add_argument("--progress", action="store_true", help="show the tasks, rows and rate (needs lastbit[cli])")
    add_service(parser, "maximum number of requests at a time")
    add_connect(parser)
    return parser


def _read(spark: SparkSession, options: argparse.Namespace) -> DataFrame:
    # A CSV without a header has no column names.
    reader_options = {"header": "true"} if options.format == "csv" else {}
    reader_options |= dict(options.option)
    _say(f"reading {options.format} from {', '.join(options.input)}")
    frame = spark.read.format(options.format).options(**reader_options).load(options.input)
    return frame.where(options.where) if options.where else frame


def _column(options: argparse.Namespace) -> str:
    name: str = options.item_column or ("value" if options.format == "text" else "item_id")
    return name


def _ack(frame: DataFrame, options: argparse.Namespace, token: str | None) -> dict[str, Any]:
    report = ack(
        frame,
        _column(options),
        options.url,
        token,
        failed=options.failed_when,
        skipped=options.skipped_when,
        strict=options.strict,
        parallel=options.parallel,
        progress=options.progress,
    )
    return report.to_dict()


def _dry_run(frame: DataFrame, options: argparse.Namespace) -> dict[str, Any]:
    masks = item_masks(frame, _column(options), failed=options.failed_when, skipped=options.skipped_when)
    valid = sf.col("batch").isNotNull()
    counted = masks.agg(
        sf.coalesce(sf.sum("rows"), sf.lit(0)).alias("rows"),
        sf.coalesce(sf.sum("items"), sf.lit(0)).alias("items"),
        sf.coalesce(sf.sum(sf.when(~valid, sf.col("rows"))), sf.lit(0)).alias("malformed"),
        sf.count_if(valid).alias("groups"),
        sf.sort_array(sf.collect_set("batch")).alias("batches"),
    ).first()
    assert counted is not None
    return {"dry_run": True, **counted.asDict()}


def _write_rejects(frame: DataFrame, options: argparse.Namespace) -> bool:
    """Write the malformed rows if --rejects is set. Returns False if that failed."""
    if options.rejects:
        try:
            malformed_rows(frame, _column(options)).write.mode("append").json(options.rejects)
        except SPARK_ERRORS as error:
            _say(f"the malformed rows can't be written to {options.rejects}: {message_of(error)}")
            return False
        _say(f"wrote the malformed rows to {options.rejects}")
    return True


def _say(text: str) -> None:
    print(f"bulk_ack: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
