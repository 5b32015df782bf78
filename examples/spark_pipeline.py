"""A Spark pipeline from its fan-out to its last item: `python -m examples.spark_pipeline --url http://127.0.0.1:8000`.

It numbers the standard library's modules and counts the words of each. It loses a tenth on purpose, fails some, and
acks its output. Then it reads the missing and failed items and runs only those again, and the batch succeeds. Start a
service first: `make serve`. With SPARK_REMOTE=local[2], or an address, it runs on Spark Connect."""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import tempfile
import uuid
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from lastbit import Client
from lastbit.spark import ack, explain, item_id, with_item_ids


def session() -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "4", "spark.log.level": "ERROR"}
    settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    builder = SparkSession.builder.appName("lastbit example")
    if "SPARK_REMOTE" not in os.environ:  # otherwise a session of Spark Connect
        builder = builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def modules(spark: SparkSession) -> DataFrame:
    """The input: name and text of each module of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return spark.createDataFrame(
        [(path.stem, path.read_text(errors="replace")) for path in files], "name string, text string"
    )


def count_words(work: DataFrame) -> DataFrame:
    """The work. Very short modules fail."""
    words = sf.size(sf.split("text", r"\W+"))
    return work.select("item_id", "name", words.alias("words"), (sf.length("text") < 1500).alias("failed"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the service")
    url: str = parser.parse_args().url
    spark = session()
    with Client(url) as client, tempfile.TemporaryDirectory() as folder:
        # A key for this run: a driver restarted with it would get the same batch and the same ids.
        run = uuid.uuid4().hex
        batch = client.open(key="words", idempotency_key=run)
        work = with_item_ids(modules(spark), batch, idempotency_key=run)
        batch.seal()
        print(f"fanned out {batch.refresh().items} modules as batch {batch.id}")

        # Lose some rows, as a wrong filter or a skipped partition would.
        count_words(work).where(sf.pmod(sf.hash("name"), sf.lit(10)) != 0).write.parquet(f"{folder}/out")
        report = ack(spark.read.parquet(f"{folder}/out"), url=url, failed="failed")
        print(f"acked the output: {report}")

        # The ranges are read once, so that acks don't change them. format("lastbit") reads the ids on the executors.
        ranges = explain(batch, url, spark=spark).unionAll(explain(batch, url, state="failed", spark=spark))
        numbers = ranges.select(sf.explode(sf.expr("sequence(start, end - 1)")).alias("number"))
        todo = numbers.select(item_id(batch.id, "number", batch.refresh().group_size).alias("item_id"))
        print(f"run again: {todo.count()} items")
        report = ack(count_words(work.join(todo, "item_id")), url=url)
        print(f"acked the rest: {report}")
        print(f"succeeded: {batch.refresh().succeeded}")
    spark.stop()


if __name__ == "__main__":
    main()
