"""The service's responses as frozen dataclasses, and the options of calls.

`from_json` decodes each; it ignores unknown fields, so that an older client works with a newer service. Times are
timezone-aware, in UTC. Counts are items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import EllipsisType
from typing import Any, Final, Literal, Self, TypedDict

from lastbit._shapes import timestamp, timestamp_or_none
from lastbit.ids import DEFAULT_GROUP_SIZE, INTEGER_LIMIT, MAX_GROUP_SIZE, ItemId, ItemIds

Json = Mapping[str, Any]

TERMINAL_STATES = frozenset({"complete", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch's state at the time of the response. `state` is `open`, `sealed`, `complete`, `expired` or `cancelled`.
    `seal_at`: the number of items with which it seals itself. `expires_in` is in seconds of idleness. An unfinished
    batch also expires at its `deadline`. `exceeded`: the failures have passed the tolerance at some time. `reason`: why
    it was cancelled, if anybody said. `ended_by`: the batch above it whose end cancelled it. `traceparent` and
    `tracestate`: the W3C Trace Context in which it was opened."""

    id: int
    key: str | None
    labels: Mapping[str, str]
    state: str
    group_size: int
    items: int
    acked: int
    failed: int
    skipped: int
    pending: int
    complete: bool
    succeeded: bool
    parent: str | None
    seal_at: int | None
    expires_in: int | None
    deadline: datetime | None
    tolerated_failures: int | None
    tolerated_failure_percentage: int | None
    on_exceeded: str
    exceeded: bool
    created_at: datetime
    updated_at: datetime
    sealed_at: datetime | None
    ended_at: datetime | None
    ended_by: int | None
    reason: str | None
    traceparent: str | None
    tracestate: str | None

    @property
    def ended(self) -> bool:
        """Whether the batch is complete, expired or cancelled."""
        return self.state in TERMINAL_STATES

    @property
    def resolved(self) -> int:
        """Items that are acked, failed or skipped."""
        return self.acked + self.failed + self.skipped

    @classmethod
    def _fields(cls, data: Json) -> dict[str, Any]:
        return {
            "id": data["id"],
            "key": data["key"],
            "labels": dict(data["labels"] or {}),
            "state": data["state"],
            "group_size": data["group_size"],
            "items": data["items"],
            "acked": data["acked"],
            "failed": data["failed"],
            "skipped": data.get("skipped", 0),
            "pending": data["pending"],
            "complete": data["complete"],
            "succeeded": data["succeeded"],
            "parent": data.get("parent"),
            "seal_at": data.get("seal_at"),
            "expires_in": data.get("expires_in"),
            "deadline": timestamp_or_none(data.get("deadline")),
            "tolerated_failures": data.get("tolerated_failures"),
            "tolerated_failure_percentage": data.get("tolerated_failure_percentage"),
            "on_exceeded": data.get("on_exceeded", "continue"),
            "exceeded": data.get("exceeded", False),
            "created_at": timestamp(data["created_at"]),
            "updated_at": timestamp(data["updated_at"]),
            "sealed_at": timestamp_or_none(data["sealed_at"]),
            "ended_at": timestamp_or_none(data["ended_at"]),
            "ended_by": data.get("ended_by"),
            "reason": data.get("reason"),
            "traceparent": data.get("traceparent"),
            "tracestate": data.get("tracestate"),
        }

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data))


@dataclass(frozen=True, slots=True)
class Callback:
    """A URL to call when something happens to a batch: an argument of `open`. `types`: one or several types of a
    batch's events, by default those that tell how it ended."""

    url: str
    types: str | Iterable[str] | None = None


class BatchOptions(TypedDict, total=False):
    """What a new batch is like. Without a value, or with None, the service's default applies. The docstring of
    `Client.open` explains them."""

    key: str | None
    labels: Mapping[str, str] | None
    group_size: int | None
    seal_at: int | None
    parent: str | ItemId | None
    expires_in: int | timedelta | None
    tolerated_failures: int | None
    tolerated_failure_percentage: int | None
    on_exceeded: Literal["continue", "cancel"] | None
    callback: str | Callback | None
    deadline: datetime | timedelta | None


class OpenOptions(BatchOptions, total=False):
    """What `open` can be told about a new batch."""

    items: int | None
    sealed: bool


class Changes(TypedDict, total=False):
    """What `update` can change of a batch. What is left out stays as it is, and None removes it."""

    labels: Mapping[str, str | None] | EllipsisType | None
    tolerated_failures: int | EllipsisType | None
    tolerated_failure_percentage: int | EllipsisType | None
    on_exceeded: Literal["continue", "cancel"] | EllipsisType | None
    deadline: datetime | timedelta | EllipsisType | None


@dataclass(frozen=True, slots=True)
class OpenedCallback:
    """The callback of a batch: a webhook with this `id`, and the secret with which its receiver verifies signatures."""

    id: int
    url: str
    types: tuple[str, ...]
    secret: str = field(repr=False)

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["id"], data["url"], tuple(data["types"]), data["secret"])


@dataclass(frozen=True, slots=True)
class Opened(Batch):
    """The result of open: the batch, the range of numbers issued, whether the open completed it (an empty batch opened
    sealed is complete at once), and its callback."""

    start: int
    count: int
    newly: bool
    callback: OpenedCallback | None = None

    @property
    def ids(self) -> ItemIds:
        """The ids issued by the open."""
        return ItemIds(self.id, self.group_size, range(self.start, self.start + self.count))

    @classmethod
    def from_json(cls, data: Json) -> Self:
        callback = data.get("callback")
        batch = cls(
            **cls._fields(data),
            start=data["start"],
            count=data["count"],
            newly=data["newly"],
            callback=None if callback is None else OpenedCallback.from_json(callback),
        )
        _check_issued(batch)
        return batch


@dataclass(frozen=True, slots=True)
class Sealed(Batch):
    """The result of seal: the batch, and whether this seal completed it and made it succeed."""

    newly: bool
    newly_succeeded: bool

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data), newly=data["newly"], newly_succeeded=data["newly_succeeded"])


@dataclass(frozen=True, slots=True)
class Extended:
    """The result of extend: the numbers start .. start+count-1 were issued; `items` is the batch's new total.
    `replayed`: an earlier call with the same idempotency key issued them."""

    batch: int
    group_size: int
    start: int
    count: int
    items: int
    replayed: bool = False

    @property
    def ids(self) -> ItemIds:
        return ItemIds(self.batch, self.group_size, range(self.start, self.start + self.count))

    @classmethod
    def from_json(cls, data: Json) -> Self:
        issued = cls(data["batch"], data["group_size"], data["start"], data["count"], data["items"])
        _check_issued(issued)
        return issued


def _check_issued(answer: Opened | Extended) -> None:
    """Raises `ValueError` if the response's fields cannot be converted to ids."""
    if answer.group_size < 1 or answer.start < 0 or answer.count < 0 or answer.start + answer.count > INTEGER_LIMIT:
        raise ValueError(f"{answer.count!r} items from {answer.start!r}, in groups of {answer.group_size!r}")


@dataclass(frozen=True, slots=True)
class Completed:
    """A complete batch that contains an item of the call. `newly`: this call completed it. `newly_succeeded`: this call
    made `succeeded` true."""

    batch: int
    key: str | None
    newly: bool
    succeeded: bool
    newly_succeeded: bool

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["batch"], data["key"], data["newly"], data["succeeded"], data["newly_succeeded"])

    def merged(self, later: Completed) -> Completed:
        """Merge two results of one call for this batch. A batch that has succeeded stays so."""
        return Completed(
            self.batch,
            self.key,
            self.newly or later.newly,
            self.succeeded or later.succeeded,
            self.newly_succeeded or later.newly_succeeded,
        )


HELD: Final = "held"
"""The reason of a rejection by which nothing is lost: a nested batch stands for the item, and resolves it."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejection with its reason: of one `item`, or of `count` bits in the mask of one `group` (`"7:2"`). The reasons
    are those of `ItemRejected`."""

    reason: str
    item: str | None = None
    group: str | None = None
    count: int = 1

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["reason"], data.get("item"), data.get("group"), data.get("count", 1))


@dataclass(frozen=True, slots=True)
class AckResult:
    """The result of acks, failures and skips. `applied`: items that changed; `repeated`: items that did not."""

    applied: int = 0
    repeated: int = 0
    completed: tuple[Completed, ...] = ()
    rejected: tuple[Rejected, ...] = ()

    @property
    def rejected_count(self) -> int:
        """The number of rejected items; a rejected mask counts all its bits."""
        return sum(rejection.count for rejection in self.rejected)

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(
            data["applied"],
            data["repeated"],
            tuple(map(Completed.from_json, data["completed"])),
            tuple(map(Rejected.from_json, data["rejected"])),
        )

    def merged(self, later: AckResult) -> AckResult:
        """Merge two results of one call; each complete batch is listed once."""
        completed = {batch_result.batch: batch_result for batch_result in self.completed}
        for batch_result in later.completed:
            earlier = completed.get(batch_result.batch)
            completed[batch_result.batch] = batch_result if earlier is None else earlier.merged(batch_result)
        return AckResult(
            self.applied + later.applied,
            self.repeated + later.repeated,
            tuple(completed.values()),
            self.rejected + later.rejected,
        )


@dataclass(frozen=True, slots=True)
class PendingRange:
    """The numbers start .. end-1 are pending; `first` and `last` are the ids of their ends."""

    start: int
    end: int
    first: str
    last: str

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def ids(self) -> ItemIds:
        """All ids of the range, as a lazy sequence, for example to publish them again."""
        last = ItemId.parse(self.last)
        if last.group:
            group_size = (self.end - 1 - last.index) // last.group
        else:
            # All items are in group 0, where every group size that is large enough gives the same ids.
            group_size = DEFAULT_GROUP_SIZE if last.index < DEFAULT_GROUP_SIZE else MAX_GROUP_SIZE
        return ItemIds(last.batch, group_size, range(self.start, self.end))

    @classmethod
    def from_json(cls, data: Json) -> Self:
        pending = cls(data["start"], data["end"], data["first"], data["last"])
        pending._check()
        return pending

    def _check(self) -> None:
        """Raises `ValueError` if the numbers and the ids do not belong to one range."""
        if not 0 <= self.start < self.end or ItemId.parse(self.first).batch != ItemId.parse(self.last).batch:
            raise ValueError(f"{self.first} to {self.last} are not the numbers {self.start} to {self.end}")
        ids = self.ids
        if ids.group_size < 1 or (ids[0], ids[-1]) != (self.first, self.last):
            raise ValueError(f"{self.first} to {self.last} are not the numbers {self.start} to {self.end}")


@dataclass(frozen=True, slots=True)
class FailedRange(PendingRange):
    """The numbers start .. end-1 have failed. `reasons` maps ids to their reasons; ids without a reason are missing."""

    reasons: Mapping[str, str]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        reasons = dict(data.get("reasons") or {})
        failed_range = cls(data["start"], data["end"], data["first"], data["last"], reasons)
        failed_range._check()
        return failed_range


@dataclass(frozen=True, slots=True)
class SkippedRange(FailedRange):
    """The numbers start .. end-1 are skipped. `reasons` maps ids to their reasons; ids without a reason are missing."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The result of recounting the bits."""

    acked: int
    failed: int
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Verification:
    """The batch's counts and a recount of its bits. `ok` if they agree; otherwise `faults` describes the
    differences."""

    ok: bool
    items: int
    acked: int
    failed: int
    pending: int
    counted: Counted
    faults: tuple[str, ...] = ()
    skipped: int = 0

    @classmethod
    def from_json(cls, data: Json) -> Self:
        counts = data["counted"]
        counted = Counted(counts["acked"], counts["failed"], counts.get("skipped", 0))
        return cls(
            data["ok"],
            data["items"],
            data["acked"],
            data["failed"],
            data["pending"],
            counted,
            tuple(data.get("faults", ())),
            data.get("skipped", 0),
        )


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """State and counts of a batch at one time."""

    state: str
    acked: int
    failed: int
    pending: int
    skipped: int = 0

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["state"], data["acked"], data["failed"], data["pending"], data.get("skipped", 0))


@dataclass(frozen=True, slots=True)
class Repair:
    """The result of a repair. `needed`: the counts or the state disagreed with the bits; `faults` describes how.
    `groups`: number of groups whose stored row was wrong. `after`: the batch after the repair, or with `dry_run` as it
    would be. `newly` and `newly_succeeded` as for a seal."""

    dry_run: bool
    needed: bool
    faults: tuple[str, ...]
    groups: int
    before: BatchCounts
    after: BatchCounts
    newly: bool
    newly_succeeded: bool

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(
            data["dry_run"],
            data["needed"],
            tuple(data["faults"]),
            data["groups"],
            BatchCounts.from_json(data["before"]),
            BatchCounts.from_json(data["after"]),
            data["newly"],
            data["newly_succeeded"],
        )


@dataclass(frozen=True, slots=True)
class Watermark:
    """The smallest pending number: every item below it is resolved. `item` is its id; None if nothing is pending."""

    watermark: int
    item: str | None

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["watermark"], data["item"])


@dataclass(frozen=True, slots=True)
class TreeProgress:
    """The sums of a batch and all of its descendants, without the items that a child stands for, and the number of
    these batches by state. `truncated`: there are more batches than the service sums up."""

    batch: int
    items: int
    acked: int
    failed: int
    pending: int
    batches: Mapping[str, int]
    truncated: bool
    skipped: int = 0

    @classmethod
    def from_json(cls, data: Json) -> Self:
        counts = {name: data[name] for name in ("batch", "items", "acked", "failed", "pending", "truncated")}
        return cls(**counts, batches=dict(data["batches"]), skipped=data.get("skipped", 0))


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The counts of a batch at a time. `resolved` includes `failed`, and skipped items."""

    at: datetime
    resolved: int
    failed: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(timestamp(data["at"]), data["resolved"], data["failed"])


def history(data: Json) -> list[HistoryPoint]:
    return list(map(HistoryPoint.from_json, data["points"]))


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why a batch is not done: a stable `code`, a sentence for people, and data for the code."""

    code: str
    text: str
    facts: Mapping[str, Any]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        facts = {name: value for name, value in data.items() if name not in ("code", "text")}
        return cls(data["code"], data["text"], facts)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whether a batch is done (complete), and if not, the reasons."""

    batch: int
    state: str
    done: bool
    reasons: tuple[Reason, ...]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["batch"], data["state"], data["done"], tuple(map(Reason.from_json, data["reasons"])))


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the feed. `batch` is None for your own events. `data`: any JSON for your own events; labels and
    counts for a batch's transition."""

    position: int
    id: str
    type: str
    batch: int | None
    key: str | None
    data: Any
    at: datetime

    @classmethod
    def from_json(cls, data: Json) -> Self:
        at = timestamp(data["at"])
        return cls(data["position"], data["id"], data["type"], data["batch"], data["key"], data["data"], at)


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events in commit order. `next`: the position to continue after; `last`: the feed's last position. With a filter,
    a page may be empty while `next` is below `last`."""

    events: tuple[Event, ...]
    next: int
    last: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(tuple(map(Event.from_json, data["events"])), data["next"], data["last"])


@dataclass(frozen=True, slots=True)
class Appended:
    """The position of an event of your own. `repeated`: it had been appended before, at this position."""

    id: str
    position: int
    repeated: bool

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["id"], data["position"], data["repeated"])


@dataclass(frozen=True, slots=True)
class Fence:
    """Sent with a write for a consumer group's partition: the service refuses it unless `worker` owns the partition at
    this `epoch`."""

    group: str
    partition: int
    worker: str
    epoch: int

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("group", "partition", "worker", "epoch")}
