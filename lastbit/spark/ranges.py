"""What a batch still waits for, as a DataFrame of ranges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

from pyspark.sql import DataFrame, SparkSession

from lastbit import _calls
from lastbit._urllib import Connection
from lastbit.errors import InvalidArgument
from lastbit.ids import item_id
from lastbit.retry import Retry

_PAGE = 1000
_SCHEMA = "batch bigint, start bigint, end bigint, items bigint, first string, last string, group_size int"


class Named(Protocol):
    """A `BatchHandle`."""

    @property
    def id(self) -> int: ...


def explain(
    batch: int | Named,
    url: str | None = None,
    token: str | None = None,
    *,
    state: Literal["pending", "failed", "skipped"] = "pending",
    spark: SparkSession | None = None,
    timeout: float = 30.0,
    retry: Retry | None = None,
) -> DataFrame:
    """The ranges of `batch` that are pending, failed or skipped at this moment:

    | column | is |
    |---|---|
    | batch | the batch's id |
    | start, end | the range's numbers, half-open |
    | items | end - start |
    | first, last | the ids of its first and last item |
    | group_size | the batch's |

    Unlike `format("lastbit")`, it needs no data source, so it works in every session. The driver holds one row for each
    range; if pending items are scattered over a very large batch, use `format("lastbit")`.

    `batch`: a batch's id, or a handle of a `Client` (with the same `url` and `token`). `spark`: by default the active
    session. Raises `InvalidArgument`, `BatchNotFound`, `ServiceUnreachable`.
    """
    if state not in ("pending", "failed", "skipped"):
        raise InvalidArgument(f"the state is pending, failed or skipped, not {state!r}")
    batch_id = batch if isinstance(batch, int) else batch.id
    driver = Connection.named(url, token, timeout, retry).driver()
    size = driver.run(_calls.get, batch_id).group_size
    ranges: Iterator[tuple[int, int]] = driver.iterate(_calls.ranges_from, batch_id, state, 0, _PAGE)
    rows = [
        (batch_id, start, end, end - start, item_id(batch_id, start, size), item_id(batch_id, end - 1, size), size)
        for start, end in ranges
    ]
    return (spark or SparkSession.builder.getOrCreate()).createDataFrame(rows, _SCHEMA)
