"""The labels of a batch: their limits, and how a patch changes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from core import errors

MAX_LABELS: Final = 64
MAX_BYTES: Final = 16 * 2**10
"""Bytes of all labels of a batch as JSON, as they are stored: in its row, and in most of its events."""


def excess(labels: Mapping[str, str | None], times: int = 1) -> str | None:
    """What was expected, if the labels have more than `times` as many bytes as a batch may have; else None."""
    size, limit = len(json.dumps(dict(labels), ensure_ascii=False).encode()), times * MAX_BYTES
    return None if size <= limit else f"expected at most {limit:,} bytes of JSON, got {size:,}"


def merged(labels: Mapping[str, str], patch: Mapping[str, str | None] | None) -> dict[str, str]:
    """The labels after a patch, in which None removes one or all. Raises `errors.InvalidRequest` for too many."""
    if patch is None:
        return {}
    labels_after = {name: value for name, value in {**labels, **patch}.items() if value is not None}
    if len(labels_after) > MAX_LABELS:
        raise errors.InvalidRequest("body.labels", f"expected at most {MAX_LABELS} labels, got {len(labels_after)}")
    if fault := excess(labels_after):
        raise errors.InvalidRequest("body.labels", fault)
    return labels_after
