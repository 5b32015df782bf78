"""Converts item ids to one bitfield per group. All rows stay in the JVM.

There are two aggregations. The first one collects *words*, the bits of 512 neighbouring items, grouped by the text
before an id's last colon: eight `bit_or`s of longs, which Spark compiles and keeps in its hash map. The second one
joins a group's words into its bitfield. `bitmap_construct_agg` would do it in one step, but its state is a binary
value, for which Spark has no hash aggregation: it would sort all rows first and need 4 KiB for each group in a task,
even for a few items. The cost of words grows with the rows, even if ids come in random order from a large batch.

Ids are checked as strictly as in `lastbit.ids`, without a regular expression for each row. The text after the last
colon is cast to an integer, and is valid if that integer has exactly these digits. The text before the last colon is
checked once for each word.

A word's long keeps bit i at 8 * (7 - i // 8) + i % 8, so that its hexadecimal digits, most significant first, are
those of the bitfield in our order: bit i of a group is `bytes[i // 8] >> (i % 8) & 1`.
"""

from __future__ import annotations

from typing import TypeAlias

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType, StringType

from lastbit.errors import InvalidArgument
from lastbit.ids import INTEGER_LIMIT, MAX_GROUP_SIZE
from lastbit.spark.columns import INTEGER, named

LONGS = 8
"""Longs of a word."""
WORD = 64 * LONGS
WORDS = MAX_GROUP_SIZE // WORD
"""Words of the largest possible group."""

Condition: TypeAlias = Column | str
"""Selects rows: a Column or SQL. Null means not selected, as in WHERE."""


def item_masks(
    df: DataFrame,
    column: str | Column = "item_id",
    *,
    failed: Condition | None = None,
    skipped: Condition | None = None,
) -> DataFrame:
    """One row for each group that has an item id in `df`:

    | column | is |
    |---|---|
    | batch, group | the group; both null in the only row for texts that are not item ids, including null |
    | bits | the items that are done, little-endian, up to index 32,767; bytes after that of the last may be missing |
    | failed_bits | the failed items; null if none failed. An item with a failed row and another one is not failed |
    | skipped_bits | the skipped items; null if none is. An item that is also done is not skipped |
    | items | the number of distinct items, including those counted in `beyond` |
    | beyond | the number of items with an index of 32,768 or more, which no group has |
    | rows | the number of rows with these items |

    The result is lazy. Raises `InvalidArgument` if there is no such column, or it isn't text.
    """
    rows = ids_of(df, column, failed, skipped)
    words = _words(rows)
    inside = sf.when(sf.col("word") < WORDS, sf.struct("word", *_outcomes(rows)))
    outside = sf.col("word") >= WORDS
    count = sf.col("count")
    groups = words.groupBy("batch", "group").agg(
        sf.sort_array(sf.collect_list(inside)).alias("words"),
        sf.sum(count).alias("items"),
        sf.sum(sf.when(outside, count).otherwise(0)).alias("beyond"),
        sf.sum("rows").alias("rows"),
    )
    is_group = sf.col("batch").isNotNull()

    def bits_of(outcome: str) -> Column:
        """Null if there are none."""
        if outcome not in rows.columns:
            return sf.lit(None).cast("binary")
        return sf.when(is_group & sf.exists("words", lambda word: _any(word[outcome])), _bitfield(outcome))

    return groups.select(
        "batch",
        "group",
        sf.when(is_group, _bitfield("acked")).alias("bits"),
        bits_of("failed").alias("failed_bits"),
        bits_of("skipped").alias("skipped_bits"),
        sf.when(is_group, sf.col("items")).otherwise(0).alias("items"),
        sf.when(is_group, sf.col("beyond")).otherwise(0).alias("beyond"),
        "rows",
    )


def ids_of(
    df: DataFrame, column: str | Column, failed: Condition | None = None, skipped: Condition | None = None
) -> DataFrame:
    """The column of ids as `id`, and the given conditions as `failed` and `skipped`. Raises `InvalidArgument`."""
    columns = [column_of(df, column).alias("id")]
    conditions = {
        name: sf.expr(condition) if isinstance(condition, str) else condition
        for name, condition in (("failed", failed), ("skipped", skipped))
        if condition is not None
    }
    try:
        columns += [condition.alias(name) for name, condition in conditions.items()]
        selection = df.select(*columns)
        schema = selection.schema
    except (AnalysisException, ParseException) as error:
        column_names = ", ".join(df.columns) or "none"
        raise InvalidArgument(f"there is no such column (the columns are {column_names}): {error}") from error
    if not isinstance(schema["id"].dataType, StringType):
        kind = schema["id"].dataType.simpleString()
        raise InvalidArgument(f"the column of item ids has the type {kind}, not string; ids are text, like 7:0:42")
    for name in conditions:
        if not isinstance(schema[name].dataType, BooleanType):
            kind = schema[name].dataType.simpleString()
            raise InvalidArgument(f"the condition for {name} rows has the type {kind}, not boolean")
    return selection


def _outcomes(rows: DataFrame) -> list[str]:
    """The outcomes that `rows`, of `ids_of`, tell apart. An item has the first one that any of its rows has."""
    return ["acked", *[name for name in ("skipped", "failed") if name in rows.columns]]


def column_of(df: DataFrame, column: str | Column) -> Column:
    """A column of `df` by its name, which may contain dots; or a field of one, as in `event.item`."""
    if isinstance(column, str):
        return named(column) if column in df.columns else sf.col(column)
    return column


def _words(rows: DataFrame) -> DataFrame:
    """(batch, group, word) → the bits of its items, the number of items, and the number of their rows."""
    outcomes = _outcomes(rows)
    kept = outcomes[1:]
    flag = [sf.coalesce(name, sf.lit(False)).alias(name) for name in kept]
    text = sf.col("id")
    head = sf.substring_index(text, ":", 2)
    cut = rows.select(*flag, text.alias("id"), head.alias("head"))
    cut = cut.select(
        *kept,
        "head",
        sf.octet_length("id").alias("length"),
        sf.octet_length("head").alias("before"),
        # If there are not exactly two colons, head and tail don't add up to the id. The lengths show this.
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
        here = f"{condition}shiftright(index, 6) & {LONGS - 1}L"
        return [
            sf.expr(f"bit_or(IF({here} = {number}, {bit}, 0L))").alias(f"{name}{number}") for number in range(LONGS)
        ]

    sums = gathered("acked", "".join(f"NOT {name} AND " for name in kept))
    for place, name in enumerate(kept):
        sums += gathered(name, "".join(f"NOT {better} AND " for better in kept[:place]) + f"{name} AND ")
    shift = WORD.bit_length() - 1
    gathered_words = parsed.groupBy(
        sf.when(index.isNotNull(), sf.col("head")).alias("head"), sf.shiftright(index, shift).alias("word")
    ).agg(sf.count(sf.lit(1)).alias("rows"), *sums)
    # Check the heads, once for each word: two integers below 2^53, or the whole word is malformed.
    texts = [sf.regexp_extract("head", rf"\A{INTEGER}:{INTEGER}\z", part) for part in (1, 2)]
    parts = [sf.nullif(text, sf.lit("")).cast("bigint") for text in texts]
    judged = gathered_words.select(
        "word",
        "rows",
        parts[0].alias("batch"),
        parts[1].alias("group"),
        *[_longs_of(name, outcomes[:place]).alias(name) for place, name in enumerate(outcomes)],
    )
    good = (sf.col("batch") < INTEGER_LIMIT) & (sf.col("group") < INTEGER_LIMIT)
    count = sum((_count(name) for name in outcomes), sf.lit(0))
    return judged.select(
        sf.when(good, sf.col("batch")).alias("batch"),
        sf.when(good, sf.col("group")).alias("group"),
        sf.when(good, sf.col("word")).alias("word"),
        *outcomes,
        sf.when(good, count).otherwise(0).cast("bigint").alias("count"),
        "rows",
    )


def _longs_of(outcome: str, better: list[str]) -> Column:
    """The longs of an outcome, without items that also have a better one."""

    def longs(name: str) -> Column:
        return sf.array(*[f"{name}{number}" for number in range(LONGS)])

    result = longs(outcome)
    for name in better:
        result = sf.zip_with(result, longs(name), lambda ours, theirs: ours.bitwiseAND(sf.bitwise_not(theirs)))
    return result


def _count(name: str) -> Column:
    return sum((sf.bit_count(sf.get(sf.col(name), sf.lit(number))) for number in range(LONGS)), sf.lit(0))


def _any(longs: Column) -> Column:
    return sf.exists(longs, lambda long: long != 0)


def _bitfield(name: str) -> Column:
    """The words' longs of that name, joined. Gaps between words are filled with zeros."""
    words = sf.col("words")

    def text(word: Column, position: Column) -> Column:
        before = sf.coalesce(sf.get(words, position - 1)["word"], sf.lit(-1))
        gap = sf.call_function("repeat", sf.lit("0"), ((word["word"] - before - 1) * (WORD // 4)).cast("int"))
        longs = sf.array_join(sf.transform(word[name], lambda long: sf.lpad(sf.hex(long), 16, "0")), "")
        return sf.concat(gap, longs)

    return sf.unhex(sf.array_join(sf.transform(words, text), ""))
