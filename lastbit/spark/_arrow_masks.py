"""Masks from Arrow columns, for the data source: Spark passes a Python writer rows, not a query plan.

The code is vectorised: Python loops only over groups. It combines the rows of one chunk into masks, and the service
combines the masks of all chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lastbit.ids import INTEGER_LIMIT, MAX_GROUP_SIZE
from lastbit.spark.posting import Mask

_INTEGER = "(?P<{}>0|[1-9][0-9]{{0,15}})"
_ACKED, _SKIPPED, _FAILED = range(3)
"""The outcome of a row. That of an item is the lowest one of its rows."""
_ITEM_ID = r"\A" + ":".join(_INTEGER.format(name) for name in ("batch", "group", "index")) + r"\z"


def masks(ids: Any, failed: Any | None = None, skipped: Any | None = None) -> Iterator[Mask]:
    """The rows of `item_masks` for an Arrow array of ids and, optionally, arrays of booleans that mark failed and
    skipped rows."""
    parts = pc.extract_regex(ids, _ITEM_ID)
    numbers = [pc.struct_field(parts, name).cast(pa.int64()) for name in ("batch", "group", "index")]
    good = pc.is_valid(parts)
    for number in numbers:
        good = pc.and_(good, pc.fill_null(pc.less(number, INTEGER_LIMIT), False))
    malformed_count = len(ids) - (pc.sum(good).as_py() or 0)
    if malformed_count:
        yield None, None, None, None, None, 0, 0, malformed_count
    batch, group, index = (number.filter(good).to_numpy(zero_copy_only=False) for number in numbers)
    outcomes = np.full(len(index), _ACKED)
    for outcome, flags in ((_FAILED, failed), (_SKIPPED, skipped)):
        if flags is not None:
            outcomes[pc.fill_null(flags, False).filter(good).to_numpy(zero_copy_only=False)] = outcome
    # By group, then index, acked rows first: the first row of an item decides its outcome.
    order = np.lexsort((outcomes, index, group, batch))
    batch, group, index, outcomes = batch[order], group[order], index[order], outcomes[order]
    new_group = _differs(batch) | _differs(group)
    new_item = new_group | _differs(index)
    edges = [*np.flatnonzero(new_group), len(index)]
    for start, end in pairwise(edges):
        first = new_item[start:end]
        indexes, item_outcomes = index[start:end][first], outcomes[start:end][first]
        in_range = indexes < MAX_GROUP_SIZE
        yield (
            int(batch[start]),
            int(group[start]),
            _bits(indexes[in_range & (item_outcomes == _ACKED)]),
            _bits(indexes[in_range & (item_outcomes == _FAILED)]),
            _bits(indexes[in_range & (item_outcomes == _SKIPPED)]),
            len(indexes),
            int(np.count_nonzero(~in_range)),
            int(end - start),
        )


def _differs(values: Any) -> Any:
    """Marks elements that differ from the previous one; the first is always marked."""
    return np.concatenate((np.ones(min(1, len(values)), dtype=bool), values[1:] != values[:-1]))


def _bits(indexes: Any) -> bytes | None:
    if not len(indexes):
        return None
    flags = np.zeros(int(indexes[-1]) + 1, dtype=bool)
    flags[indexes] = True
    return np.packbits(flags, bitorder="little").tobytes()
