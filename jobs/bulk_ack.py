"""`spark-submit jobs/bulk_ack.py`: ack what a pipeline wrote. The report is one line of JSON on standard output.

    make zip
    spark-submit --py-files dist/lastbit.zip jobs/bulk_ack.py --input s3a://bucket/out --url http://lastbit:8000

It needs `lastbit`, PySpark and the standard library, so the zip in --py-files is all that a bare cluster is missing.
Running it again, whole or after a failure, is safe: acks are idempotent.

Exit status (in client mode, where spark-submit passes it on): 0 all good; 1 failed, also at a file that can't
be read, and some of the items may be acked; 2 wrong use: no such input, column, option or SQL; 3 something was rejected
or malformed, or --strict refused it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from lastbit.errors import InvalidArgument, LastbitError
from lastbit.spark import MalformedRows, ack, item_masks, malformed_rows
from lastbit.spark.arguments import add_reader, add_service, token_of
from lastbit.spark.driver_output import keep_standard_output_clean
from lastbit.spark.failures import SPARK_ERRORS, is_wrong_use, told

FORMATS: Final = ("parquet", "csv", "json", "orc", "text")
GOOD, FAILED, WRONG_USE, NOT_ALL = 0, 1, 2, 3


def main(arguments: list[str] | None = None) -> int:
    keep_standard_output_clean()
    given = _parser().parse_args(arguments)
    try:
        token = token_of(given.token_file)
        spark = SparkSession.builder.appName("lastbit bulk_ack").getOrCreate()
        return _run(spark, given, token)
    except (AnalysisException, InvalidArgument) as error:
        _say(str(error))
        return WRONG_USE
    except LastbitError as error:
        _say(str(error))
        return FAILED
    except SPARK_ERRORS as error:
        _say(told(error))
        if is_wrong_use(error):
            return WRONG_USE
        _say("some of the items may be acked; mend the input and run it again, which counts nothing twice")
        return FAILED


def _run(spark: SparkSession, given: argparse.Namespace, token: str | None) -> int:
    begun = time.monotonic()
    frame = _read(spark, given)
    try:
        report = _dry_run(frame, given) if given.dry_run else _ack(frame, given, token)
    except MalformedRows as error:
        _say(str(error))
        return NOT_ALL if _write_rejects(frame, given) else FAILED
    print(json.dumps(report), flush=True)  # noqa: T201  # the report is what standard output is for
    _say(f"done in {time.monotonic() - begun:.1f} s")
    if report["malformed"] and not _write_rejects(frame, given):
        return FAILED
    return NOT_ALL if report["malformed"] or report.get("rejected") else GOOD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bulk_ack.py", description="Ack the item ids that a pipeline wrote.")
    parser.add_argument("--input", action="append", required=True, metavar="PATH", help="repeatable")
    parser.add_argument("--format", choices=FORMATS, default="parquet")
    add_reader(parser)
    parser.add_argument("--item-column", metavar="NAME", help="item_id; with --format text the line, value")
    parser.add_argument("--failed-when", metavar="SQL", help="fail the items of these rows instead of acking them")
    parser.add_argument(
        "--rejects", metavar="PATH", help="add the rows that hold no item id to this folder, as JSON lines"
    )
    parser.add_argument("--strict", action="store_true", help="send nothing where a row holds no item id")
    parser.add_argument("--dry-run", action="store_true", help="count, and send nothing")
    add_service(parser, "requests at a time, at most")
    return parser


def _read(spark: SparkSession, given: argparse.Namespace) -> DataFrame:
    # Names in the first line: a CSV without them has no column to name.
    options = {"header": "true"} if given.format == "csv" else {}
    options |= dict(given.option)
    _say(f"reading {given.format} from {', '.join(given.input)}")
    frame = spark.read.format(given.format).options(**options).load(given.input)
    return frame.where(given.where) if given.where else frame


def _column(given: argparse.Namespace) -> str:
    name: str = given.item_column or ("value" if given.format == "text" else "item_id")
    return name


def _ack(frame: DataFrame, given: argparse.Namespace, token: str | None) -> dict[str, Any]:
    report = ack(
        frame,
        _column(given),
        given.url,
        token,
        failed=given.failed_when,
        strict=given.strict,
        parallel=given.parallel,
    )
    return report.to_dict()


def _dry_run(frame: DataFrame, given: argparse.Namespace) -> dict[str, Any]:
    masks = item_masks(frame, _column(given), failed=given.failed_when)
    known = sf.col("batch").isNotNull()
    counted = masks.agg(
        sf.coalesce(sf.sum("rows"), sf.lit(0)).alias("rows"),
        sf.coalesce(sf.sum("items"), sf.lit(0)).alias("items"),
        sf.coalesce(sf.sum(sf.when(~known, sf.col("rows"))), sf.lit(0)).alias("malformed"),
        sf.count_if(known).alias("groups"),
        sf.sort_array(sf.collect_set("batch")).alias("batches"),
    ).first()
    assert counted is not None
    return {"dry_run": True, **counted.asDict()}


def _write_rejects(frame: DataFrame, given: argparse.Namespace) -> bool:
    """Whether they are written, where that was asked for."""
    if given.rejects:
        try:
            malformed_rows(frame, _column(given)).write.mode("append").json(given.rejects)
        except SPARK_ERRORS as error:
            _say(f"the malformed rows can't be written to {given.rejects}: {told(error)}")
            return False
        _say(f"wrote the malformed rows to {given.rejects}")
    return True


def _say(text: str) -> None:
    print(f"bulk_ack: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
