"""Failures, their reasons, and redrives, as the service answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from lastbit._shapes import timestamp, timestamp_or_none
from lastbit.models import Json, PendingRange


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed item and why it failed; `key`: that of its batch."""

    item: str
    batch: int
    key: str | None
    reason: str
    failed_at: datetime

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["item"], data["batch"], data["key"], data["reason"], timestamp(data["failed_at"]))


@dataclass(frozen=True, slots=True)
class FailureReason:
    """Items that failed for one reason: their number, the times of the first and the last failure, and up to five ids.
    `reason` and the times are None for failures without a reason."""

    reason: str | None
    count: int
    first_at: datetime | None
    last_at: datetime | None
    items: tuple[str, ...]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        first_at, last_at = timestamp_or_none(data["first_at"]), timestamp_or_none(data["last_at"])
        return cls(data["reason"], data["count"], first_at, last_at, tuple(data["items"]))


@dataclass(frozen=True, slots=True)
class FailureReasons:
    """The most frequent reasons first. `failed`: the batch's number of failed items; `examined`: of how many the
    reasons were counted. `exact` is false for a sample."""

    reasons: tuple[FailureReason, ...]
    failed: int
    examined: int
    exact: bool

    @classmethod
    def from_json(cls, data: Json) -> Self:
        reasons = tuple(map(FailureReason.from_json, data["reasons"]))
        return cls(reasons, data["failed"], data["examined"], data["exact"])


@dataclass(frozen=True, slots=True)
class Redriven:
    """The answer to a redrive: `count` failed items, the first 1,000 ranges of them, whether there are `more`, and the
    position of its event."""

    count: int
    ranges: tuple[PendingRange, ...]
    more: bool
    position: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        ranges = tuple(map(PendingRange.from_json, data["ranges"]))
        return cls(data["count"], ranges, data["more"], data["position"])


@dataclass(frozen=True, slots=True)
class Redrive:
    """A request to send items again that have failed, or are `pending`, as its followers get it. `spans`: (start, end)
    of the items' numbers, of which there may be `more`; `BatchHandle.redriven` gives all ids. `position`: that of its
    event."""

    position: int
    batch: int
    key: str | None
    labels: Mapping[str, str]
    group_size: int
    count: int
    spans: tuple[tuple[int, int], ...]
    more: bool
    reason: str | None
    note: str | None
    at: datetime
    pending: bool = False

    @classmethod
    def from_json(cls, data: Json) -> Self:
        """From the event in the feed."""
        facts = data["data"]
        return cls(
            data["position"],
            data["batch"],
            data["key"],
            dict(facts["labels"]),
            facts["group_size"],
            facts["count"],
            tuple((span["start"], span["end"]) for span in facts["ranges"]),
            facts["more"],
            facts["reason"],
            facts["note"],
            timestamp(data["at"]),
            facts.get("pending", False),
        )
