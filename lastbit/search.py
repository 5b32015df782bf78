"""Finding batches: the filters of `Client.batches` and `Client.counts`, and the counts by state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self, TypedDict

from lastbit import _arguments
from lastbit.errors import InvalidArgument
from lastbit.ids import ItemId

Outcome = Literal["succeeded", "failed", "exceeded"]


class Filters(TypedDict, total=False):
    """The conditions for a batch; all that are given must hold. Without a value, or with None, a condition does not
    apply.

    `labels`: a batch must have all of them. `key_prefix`: the beginning of the key. `opened_after` is inclusive,
    `opened_before` exclusive; both need a time zone. `outcome`: `succeeded` or `failed` is that of a complete batch;
    `exceeded` are batches in any state whose failures have exceeded their tolerance. `parent`: a batch's id or one of
    its items, for the batches that resolve items of it. `unchanged_for`: open and sealed batches that have not changed
    for this time; a number is in seconds. `failed`: if true, batches with failed items, in any state.
    """

    key: str | None
    key_prefix: str | None
    labels: Mapping[str, str] | None
    opened_after: datetime | None
    opened_before: datetime | None
    outcome: Outcome | None
    parent: int | str | ItemId | None
    unchanged_for: int | timedelta | None
    failed: bool | None


def query(filters: Filters, state: str | None = None) -> list[tuple[str, str]]:
    """The filters as parameters of a request. Raises `InvalidArgument`."""
    _arguments.check_names("filter", filters, Filters)
    texts = {
        "state": state,
        "key": filters.get("key"),
        "key_prefix": filters.get("key_prefix"),
        "opened_after": _moment("opened_after", filters.get("opened_after")),
        "opened_before": _moment("opened_before", filters.get("opened_before")),
        "outcome": filters.get("outcome"),
        "parent": None if filters.get("parent") is None else str(filters["parent"]),
        "unchanged_for": _seconds(filters.get("unchanged_for")),
        "failed": "true" if filters.get("failed") else None,
    }
    labels = _arguments.labels(filters.get("labels") or {})
    params = [(name, text) for name, text in texts.items() if text is not None]
    return params + [("label", f"{name}:{value}") for name, value in labels.items()]


def _seconds(duration: int | timedelta | None) -> str | None:
    if duration is None:
        return None
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    return str(int(_arguments.seconds("unchanged_for", seconds)))


def _moment(name: str, time: datetime | None) -> str | None:
    if time is None:
        return None
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise InvalidArgument(f"{name} must be a datetime with a time zone, not {time!r}")
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class StateCounts:
    """The number of batches by state. `states` has all five states. `exact`: False if there are more batches than the
    service counts in one call; `total` is then the number that it counted."""

    states: Mapping[str, int]
    total: int
    exact: bool

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(dict(data["states"]), data["total"], data["exact"])
