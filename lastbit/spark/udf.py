"""A UDF that acks by id and returns each row's result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql import Column

from lastbit import _calls
from lastbit._drivers import Driver
from lastbit._masks import MOST_ITEMS
from lastbit._urllib import Connection
from lastbit.errors import InvalidArgument
from lastbit.ids import InvalidItemId, ItemId
from lastbit.retry import Retry
from lastbit.spark import _arrow


def ack_udf(
    url: str | None = None,
    token: str | None = None,
    *,
    fail: bool = False,
    reason: str | None = None,
    timeout: float = 30.0,
    retry: Retry | None = None,
) -> Callable[..., Column]:
    """A pandas UDF: item id → `accepted`, `rejected: unknown_batch` (or another reason) or `malformed`, for each row.

        df.withColumn("ack", ack_udf(url=url)("item_id"))

    It acks when the column is computed, in calls of at most 10,000 ids; with `fail=True` it marks them as failed. Spark
    may compute a column twice; then the same ids are acked again, which changes nothing, and the results are the same
    unless the batch ended in between. It sends ids, not bits: for whole frames `ack` is many times faster.

    `url`, `token`: by default LASTBIT_URL and LASTBIT_TOKEN of the driver. Raises `MissingExtra` if pyarrow or pandas
    is missing; a task raises `ServiceUnreachable` or `ServiceError`, after the retries.
    """
    _arrow.require("ack_udf")
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    if reason is not None and not fail:
        raise InvalidArgument("a reason is possible only with fail=True")
    connection = Connection.named(url, token, timeout, retry)
    verb = "failures" if fail else "acks"

    def answers(columns: Iterator[Any]) -> Iterator[Any]:
        import pandas as pd

        driver = connection.driver()
        for column in columns:
            texts = [text if isinstance(text, str) else None for text in column]
            results: list[str] = []
            for first in range(0, len(texts), MOST_ITEMS):
                results += _answers(driver, verb, texts[first : first + MOST_ITEMS], reason)
            yield pd.Series(results, dtype=object)

    # Set here, as the annotations of this module are text, and the names of pandas are not among its globals.
    answers.__annotations__ = {"columns": Iterator[pd.Series], "return": Iterator[pd.Series]}
    udf: Callable[..., Column] = pandas_udf(answers, "string").asNondeterministic()
    return udf


def _answers(driver: Driver, verb: str, texts: list[str | None], reason: str | None) -> list[str]:
    good = [text for text in dict.fromkeys(texts) if text is not None and _is_id(text)]
    answers: dict[str | None, str] = dict.fromkeys(good, "accepted")
    if good:
        result = driver.run(_calls.resolve, verb, iter([{"items": good}]), reason)
        answers |= {rejection.item: f"rejected: {rejection.reason}" for rejection in result.rejected}
    return [answers.get(text, "malformed") for text in texts]


def _is_id(text: str) -> bool:
    try:
        ItemId.parse(text)
    except InvalidItemId:
        return False
    return True
