"""From item ids to one bitfield a group, without a row leaving the JVM.

Two aggregations. The first one gathers *words*, the bits of 512 neighbouring items, under the text before an id's
last colon: eight `bit_or`s of longs, which Spark compiles and keeps in its hash map. The second one joins a group's
words into its bitfield. `bitmap_construct_agg` would do it in one step, but its state is a binary value, for which
Spark has no hash aggregation: it sorts all rows first and keeps 4 KiB for each group that a task meets, however few
of its items it sees. Words cost what the rows cost, also where ids come at random from a large batch.

An id is judged as strictly as `lastbit.ids` does, without a regular expression for each row: the index is cast, and is
one if its digits make up exactly what stands after the last colon; the text before it is judged once for each word.

A word's long keeps bit i at 8 * (7 - i // 8) + i % 8, so that its hexadecimal digits, most significant first, are
those of the bitfield in our order: bit i of a group is `bytes[i // 8] >> (i % 8) & 1`.
"""

from __future__ import annotations

from typing import TypeAlias

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType, StringType

from lastbit.errors import InvalidArgument
from lastbit.ids import INTEGER_LIMIT, MAX_GROUP_SIZE
from lastbit.spark.columns import INTEGER

LONGS = 8
"""Longs of a word."""
WORD = 64 * LONGS
WORDS = MAX_GROUP_SIZE // WORD
"""Words of the largest possible group."""

Failed: TypeAlias = Column | str
"""Selects failed rows: a Column or SQL. Null counts as not failed, as in WHERE."""


def item_masks(df: DataFrame, column: str | Column = "item_id", *, failed: Failed | None = None) -> DataFrame:
    """One row for each group of which `df` has an item id:

    | column | is |
    |---|---|
    | batch, group | the group; both null in the one row that counts texts that are not item ids, null included |
    | bits | its items, little-endian bit order, up to index 32,767; the bytes after the last item's may be missing |
    | failed_bits | those that failed; null where none did. An item with a failed row and a good one is not failed |
    | items | the distinct items among the ids, those beyond included |
    | beyond | how many of them have an index of 32,768 or more, which is beyond any group |
    | rows | the rows that they came from |

    Nothing is computed yet. Raises `InvalidArgument` where the column is not there or is no text.
    """
    rows = ids_of(df, column, failed)
    words = _words(rows)
    fields = ["word", "acked", "failed"] if failed is not None else ["word", "acked"]
    inside = sf.when(sf.col("word") < WORDS, sf.struct(*fields))
    outside = sf.col("word") >= WORDS
    count = sf.col("count")
    groups = words.groupBy("batch", "group").agg(
        sf.sort_array(sf.collect_list(inside)).alias("words"),
        sf.sum(count).alias("items"),
        sf.sum(sf.when(outside, count).otherwise(0)).alias("beyond"),
        sf.sum("rows").alias("rows"),
    )
    bits = _bitfield("acked")
    failed_bits = _bitfield("failed") if failed is not None else sf.lit(None).cast("binary")
    has_failed = sf.exists("words", lambda word: _any(word["failed"])) if failed is not None else sf.lit(False)
    known = sf.col("batch").isNotNull()
    return groups.select(
        "batch",
        "group",
        sf.when(known, bits).alias("bits"),
        sf.when(known & has_failed, failed_bits).alias("failed_bits"),
        sf.when(known, sf.col("items")).otherwise(0).alias("items"),
        sf.when(known, sf.col("beyond")).otherwise(0).alias("beyond"),
        "rows",
    )


def ids_of(df: DataFrame, column: str | Column, failed: Failed | None = None) -> DataFrame:
    """The column of ids as `id` and, where `failed` is given, whether the row failed as `failed`. Raises
    `InvalidArgument`."""
    ids = df[column] if isinstance(column, str) and column in df.columns else column
    columns = [(sf.col(ids) if isinstance(ids, str) else ids).alias("id")]
    if failed is not None:
        flag = sf.expr(failed) if isinstance(failed, str) else failed
        columns.append(flag.alias("failed"))
    try:
        selection = df.select(*columns)
        schema = selection.schema
    except AnalysisException as error:
        shown = ", ".join(df.columns) or "none"
        raise InvalidArgument(f"there is no such column as asked for (the columns are {shown}): {error}") from error
    if not isinstance(schema["id"].dataType, StringType):
        found = schema["id"].dataType.simpleString()
        raise InvalidArgument(f"the column of item ids is of type {found}, not string; ids are text, like 7:0:42")
    if failed is not None and not isinstance(schema["failed"].dataType, BooleanType):
        found = schema["failed"].dataType.simpleString()
        raise InvalidArgument(f"what says which rows failed is of type {found}, not boolean")
    return selection


def _words(rows: DataFrame) -> DataFrame:
    """(batch, group, word) → the bits of its items, how many they are, and the rows that they came from."""
    with_failed = "failed" in rows.columns
    flag = [sf.coalesce("failed", sf.lit(False)).alias("failed")] if with_failed else []
    kept = ["failed"] if with_failed else []
    text = sf.col("id")
    head = sf.substring_index(text, ":", 2)
    cut = rows.select(*flag, text.alias("id"), head.alias("head"))
    cut = cut.select(
        *kept,
        "head",
        sf.octet_length("id").alias("length"),
        sf.octet_length("head").alias("before"),
        # With more colons than two, or fewer, head and tail don't make up the id, which the lengths show.
        sf.substring_index("id", ":", -1).alias("tail"),
    )
    cut = cut.select(
        *kept,
        "head",
        "length",
        "before",
        sf.octet_length("tail").alias("digits"),
        sf.expr("try_cast(tail AS BIGINT)").alias("index"),
    )
    index = sf.col("index")
    digits = sf.when(index < 10, 1).when(index < 100, 2).when(index < 1000, 3).when(index < 10_000, 4)
    digits = digits.when(index < 100_000, 5).otherwise(sf.length(index.cast("string")))
    exact = (
        (index >= 0)
        & (index < INTEGER_LIMIT)
        & (sf.col("digits") == digits)
        & (sf.col("length") == sf.col("before") + 1 + sf.col("digits"))
    )
    parsed = cut.select(*kept, "head", sf.when(exact, index).alias("index"))
    bit = "shiftleft(1L, CAST((index ^ 56L) & 63L AS INT))"

    def gathered(name: str, condition: str) -> list[Column]:
        return [
            sf.expr(f"bit_or(IF({condition}(index >> 6) & {LONGS - 1}L = {each}, {bit}, 0L))").alias(f"{name}{each}")
            for each in range(LONGS)
        ]

    sums = gathered("acked", "NOT failed AND " if with_failed else "")
    if with_failed:
        sums += gathered("failed", "failed AND ")
    shift = WORD.bit_length() - 1
    gathered_words = parsed.groupBy(
        sf.when(index.isNotNull(), sf.col("head")).alias("head"), sf.shiftright(index, shift).alias("word")
    ).agg(sf.count(sf.lit(1)).alias("rows"), *sums)
    # The heads, once for each word: two integers below 2^53, or the whole word is malformed.
    parts = [sf.regexp_extract("head", rf"\A{INTEGER}:{INTEGER}\z", part).try_cast("bigint") for part in (1, 2)]
    acked = sf.array(*[f"acked{each}" for each in range(LONGS)])
    judged = gathered_words.select(
        "word",
        "rows",
        parts[0].alias("batch"),
        parts[1].alias("group"),
        acked.alias("acked"),
        *([_without(acked).alias("failed")] if with_failed else []),
    )
    good = (sf.col("batch") < INTEGER_LIMIT) & (sf.col("group") < INTEGER_LIMIT)
    names = ["acked", "failed"] if with_failed else ["acked"]
    count = sum((_count(name) for name in names), sf.lit(0))
    return judged.select(
        sf.when(good, sf.col("batch")).alias("batch"),
        sf.when(good, sf.col("group")).alias("group"),
        sf.when(good, sf.col("word")).alias("word"),
        *names,
        sf.when(good, count).otherwise(0).cast("bigint").alias("count"),
        "rows",
    )


def _without(acked: Column) -> Column:
    """The failed longs without items that are also acked: ack wins."""
    failed = sf.array(*[f"failed{each}" for each in range(LONGS)])
    return sf.zip_with(failed, acked, lambda ours, theirs: ours.bitwiseAND(sf.bitwise_not(theirs)))


def _count(name: str) -> Column:
    return sum((sf.bit_count(sf.get(sf.col(name), sf.lit(each))) for each in range(LONGS)), sf.lit(0))


def _any(longs: Column) -> Column:
    return sf.exists(longs, lambda each: each != 0)


def _bitfield(name: str) -> Column:
    """The words' longs of that name, joined: gaps between words are zeros."""
    words = sf.col("words")

    def text(word: Column, position: Column) -> Column:
        before = sf.coalesce(sf.get(words, position - 1)["word"], sf.lit(-1))
        gap = sf.repeat(sf.lit("0"), ((word["word"] - before - 1) * (WORD // 4)).cast("int"))
        longs = sf.array_join(sf.transform(word[name], lambda each: sf.lpad(sf.hex(each), 16, "0")), "")
        return sf.concat(gap, longs)

    return sf.unhex(sf.array_join(sf.transform(words, text), ""))
