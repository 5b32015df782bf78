"""Item ids as Columns: builds ids from numbers, and splits ids into parts. Everything runs in the JVM.

The parts are null for null and for text that is not an item id (see `lastbit.ids`).
"""

from __future__ import annotations

from typing import TypeAlias

from pyspark.sql import Column
from pyspark.sql import functions as sf

from lastbit.errors import InvalidArgument
from lastbit.ids import DEFAULT_GROUP_SIZE, INTEGER_LIMIT, MAX_GROUP_SIZE, MIN_GROUP_SIZE, valid_group_size

# As in lastbit.ids, for Java: \z and not $, which also matches before a last line break; [0-9] and not \d.
INTEGER = "(0|[1-9][0-9]{0,15})"
ITEM_ID = rf"\A{INTEGER}:{INTEGER}:{INTEGER}\z"

ColumnOrName: TypeAlias = Column | str


def item_id(batch: ColumnOrName | int, number: ColumnOrName, group_size: int = DEFAULT_GROUP_SIZE) -> Column:
    """The id of the item at `number` (0-based) of `batch`, as a string; null if the number is null or negative.

    `batch` is a batch's id or a column of them. Raises `InvalidArgument` for a group size that no batch has.
    """
    size = _checked(group_size)
    n = _column(number).cast("bigint")
    batch_column = sf.lit(batch) if isinstance(batch, int) else _column(batch)
    text = sf.concat_ws(
        ":", batch_column.cast("string"), _quotient(n, size).cast("string"), (n % sf.lit(size)).cast("string")
    )
    return sf.when(batch_column.isNotNull() & (n >= 0), text)


def is_item_id(column: ColumnOrName) -> Column:
    """Whether the text is exactly an item id. False for null."""
    return sf.coalesce(item_index(column).isNotNull(), sf.lit(False))


def item_batch(column: ColumnOrName) -> Column:
    """The batch of an item id."""
    return _part(column, 1)


def item_group(column: ColumnOrName) -> Column:
    """The group of an item id."""
    return _part(column, 2)


def item_index(column: ColumnOrName) -> Column:
    """The index of an item id within its group."""
    return _part(column, 3)


def item_number(column: ColumnOrName, group_size: int = DEFAULT_GROUP_SIZE) -> Column:
    """An item's 0-based position in its batch. Null also if index ≥ group_size, or if the position would exceed 2^53:
    such an id belongs to no item, and is never an alias of another one. Raises `InvalidArgument` for a group size that
    no batch has."""
    size = _checked(group_size)
    group, index = item_group(column), item_index(column)
    # A bigint would overflow with the largest groups.
    return sf.when((index < size) & (group < INTEGER_LIMIT // size), group * sf.lit(size) + index)


def named(name: str) -> Column:
    """The column with this name, which may contain dots."""
    return sf.col("`" + name.replace("`", "``") + "`")


def _part(column: ColumnOrName, part: int) -> Column:
    text = _column(column)
    # regexp_extract returns '' if nothing matches. An id with a too large integer has no parts.
    parts = [sf.nullif(sf.regexp_extract(text, ITEM_ID, group), sf.lit("")).cast("bigint") for group in (1, 2, 3)]
    small = (parts[0] < INTEGER_LIMIT) & (parts[1] < INTEGER_LIMIT) & (parts[2] < INTEGER_LIMIT)
    return sf.when(small, parts[part - 1])


def _quotient(number: Column, size: int) -> Column:
    """Integer division; `/` would go through doubles."""
    return sf.call_function("div", number, sf.lit(size).cast("bigint"))


def _column(column: ColumnOrName) -> Column:
    return sf.col(column) if isinstance(column, str) else column


def _checked(group_size: int) -> int:
    if not valid_group_size(group_size):
        raise InvalidArgument(
            f"a group size is a multiple of 8 from {MIN_GROUP_SIZE} to {MAX_GROUP_SIZE}, not {group_size!r}"
        )
    return group_size
