"""Request and response bodies of the batch routes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from api import expectations, patterns
from api.routes.fields import Body, Key, Labels, LabelsPatch, Moment, of_events
from core import feed
from core.acks.call import MAX_REASON
from core.batches import batch as batches
from core.batches import history, tree
from core.batches.callbacks import DEFAULT_TYPES, Callback
from core.batches.labels import MAX_BYTES
from core.batches.tolerance import OnExceeded
from core.batches.update import KEEP, Patch
from core.batches.writing import Extend
from core.webhooks import addresses
from lastbit.ids import DEFAULT_GROUP_SIZE, MAX_GROUP_SIZE, MAX_ITEMS, MIN_GROUP_SIZE, ItemId, item_id

MAX_SECONDS: Final = 100 * 365 * 24 * 3600
BODY_WITH_LABELS: Final = 256 * 1024
"""Bytes. Every character of a label may be an escape of six or twelve bytes."""
OnExceededName = Literal["continue", "cancel"]
LABELS: Final = f"your names and values, to find the batch by; at most {MAX_BYTES // 2**10} KiB of JSON"
DEFAULT_TYPES_TEXT: Final = ", ".join(f"`{name}`" for name in DEFAULT_TYPES)
TOLERATED_FAILURES: Final = "maximum number of failed items with which the batch succeeds"
TOLERATED_PERCENTAGE: Final = (
    "maximum percentage of failed items with which the batch succeeds, judged once it is sealed"
)


def _of_a_batch(types: list[str]) -> list[str]:
    for name in types:
        if not name.startswith(f"{feed.BATCH}."):
            raise ValueError(f"expected types of a batch's events, like batch.completed, got {name!r}")
    return of_events(types)


CallbackType = Annotated[
    str, StringConstraints(min_length=1, max_length=255), WithJsonSchema({"type": "string", "pattern": "^batch\\..+$"})
]


class NewCallback(Body):
    """A signed webhook for one batch alone."""

    url: str = Field(
        max_length=addresses.LONGEST_URL,
        description="http or https, without a user name; every address of its host must be public",
        json_schema_extra={"pattern": patterns.URL},
    )
    types: Annotated[list[CallbackType], AfterValidator(_of_a_batch)] | None = Field(
        None, min_length=1, max_length=100, description=f"types of the batch's events; by default {DEFAULT_TYPES_TEXT}"
    )

    def callback(self) -> Callback:
        return Callback(self.url) if self.types is None else Callback(self.url, tuple(sorted(set(self.types))))


class OpenBody(Body):
    LIMIT = BODY_WITH_LABELS

    key: Key | None = Field(None, description="your name for the batch; need not be unique")
    labels: Labels = Field(default_factory=dict, description=LABELS)
    group_size: int = Field(
        DEFAULT_GROUP_SIZE, ge=MIN_GROUP_SIZE, le=MAX_GROUP_SIZE, multiple_of=8, description="items per bitfield"
    )
    items: int = Field(0, ge=0, le=MAX_ITEMS, description="also extend the batch by this number of items")
    sealed: bool = Field(False, description="also seal the batch")
    seal_at: int | None = Field(
        None, ge=0, le=MAX_ITEMS, description="the batch seals itself with this number of items, and can't have more"
    )
    parent: str | None = Field(
        None,
        description="the item of another batch that is acked when this batch succeeds",
        json_schema_extra={"pattern": patterns.ITEM_ID},
    )
    expires_in: int | None = Field(
        None, ge=1, le=MAX_SECONDS, description="seconds of idleness after which this batch expires"
    )
    tolerated_failures: int | None = Field(None, ge=0, le=MAX_ITEMS, description=TOLERATED_FAILURES)
    tolerated_failure_percentage: int | None = Field(None, ge=0, le=100, description=TOLERATED_PERCENTAGE)
    on_exceeded: OnExceededName | None = Field(
        None, description="what happens when the failures exceed the tolerance; by default `continue`"
    )

    callback: NewCallback | None = Field(None, description="a webhook that gets the events of this batch alone")
    deadline: Moment = Field(
        None, description="when the batch expires if it is unfinished, however busy it is; a time in the future"
    )

    @field_validator("group_size", mode="before")
    @classmethod
    def _is_a_group_size(cls, value: Any) -> Any:
        """Say everything that is expected: pydantic names only the first limit that the number breaks."""
        if type(value) is int and (value % 8 or not MIN_GROUP_SIZE <= value <= MAX_GROUP_SIZE):
            raise ValueError(f"expected a multiple of 8 from {MIN_GROUP_SIZE} to {MAX_GROUP_SIZE:,}")
        return value

    @field_validator("seal_at")
    @classmethod
    def _seals_later(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("sealed"):
            raise ValueError("expected either sealed or seal_at")
        if value is not None and value < info.data.get("items", 0):
            raise ValueError(f"expected at least the {info.data['items']} items that the batch is opened with")
        return value

    @field_validator("parent")
    @classmethod
    def _is_an_item(cls, value: str | None) -> str | None:
        if value is not None:
            ItemId.parse(value)
        return value

    @field_validator("on_exceeded")
    @classmethod
    def _has_tolerance(cls, value: str | None, info: ValidationInfo) -> str | None:
        limits = [info.data.get(name, 0) for name in ("tolerated_failures", "tolerated_failure_percentage")]
        if value is not None and limits == [None, None]:
            raise ValueError("it needs tolerated_failures or tolerated_failure_percentage")
        return value

    def opening(self) -> batches.Opening:
        facts = {name: getattr(self, name) for name in type(self).model_fields}
        facts |= {
            "parent": None if self.parent is None else ItemId.parse(self.parent),
            "on_exceeded": OnExceeded(self.on_exceeded or OnExceeded.CONTINUE),
            "callback": None if self.callback is None else self.callback.callback(),
        }
        return batches.Opening(**facts)


class PatchBody(Body):
    """A JSON Merge Patch (RFC 7396): fields that are left out stay as they are, and null removes. A batch has at most
    64 labels afterwards, of 16 KiB of JSON."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})
    LIMIT = BODY_WITH_LABELS

    labels: LabelsPatch | None = Field(
        None,
        description="names to add or change, with their values, or to remove, with null; null removes all labels",
    )
    tolerated_failures: int | None = Field(None, ge=0, le=MAX_ITEMS, description=TOLERATED_FAILURES)
    tolerated_failure_percentage: int | None = Field(None, ge=0, le=100, description=TOLERATED_PERCENTAGE)
    on_exceeded: OnExceededName | None = Field(
        None, description="what happens when the failures exceed the tolerance; null means `continue`"
    )
    deadline: Moment = Field(
        None, description="when the batch expires if it is unfinished, however busy it is; a time in the future"
    )

    @model_validator(mode="before")
    @classmethod
    def _names_a_field(cls, value: Any) -> Any:
        if value == {}:
            raise ValueError(f"expected at least one of {', '.join(cls.model_fields)}")
        return value

    def patch(self) -> Patch:
        named = {name: getattr(self, name) for name in self.model_fields_set}
        on_exceeded = named.pop("on_exceeded", KEEP)
        return Patch(**named, on_exceeded=OnExceeded(on_exceeded) if isinstance(on_exceeded, str) else on_exceeded)


class ExtendBody(Body):
    count: int = Field(ge=0, le=MAX_ITEMS, description="the number of items to issue")
    digest: str | None = Field(
        None,
        pattern=expectations.visible_ascii(64),
        description="stands for what the items are for: a repeat under the same Idempotency-Key has the same one",
    )
    by: str | None = Field(
        None,
        description="a pending item of the batch that adds the items, to a sealed batch too",
        json_schema_extra={"pattern": patterns.ITEM_ID},
    )

    @field_validator("by")
    @classmethod
    def _is_an_item(cls, value: str | None) -> str | None:
        if value is not None:
            ItemId.parse(value)
        return value

    def operation(self, batch: int, idempotency_key: str | None) -> Extend:
        return Extend(
            batch=batch,
            count=self.count,
            idempotency_key=idempotency_key,
            digest=self.digest,
            by=None if self.by is None else ItemId.parse(self.by),
        )


class CancelBody(Body):
    reason: str | None = Field(None, max_length=MAX_REASON, description="why; for people. A repeat keeps the first one")
    children: bool = Field(
        default=False, description="also cancel the live batches below it, which stand for its items, at any depth"
    )


class ReopenBody(Body):
    deadline: Moment = Field(
        None,
        description="the new deadline, a time in the future, or null for none; left out, it stays as it is. One that "
        "has passed must be replaced",
    )
    reason: str | None = Field(None, max_length=MAX_REASON, description="why, for readers of the event")


StateName = Literal["open", "sealed", "complete", "expired", "cancelled"]


class Batch(BaseModel):
    id: int
    key: str | None
    labels: dict[str, str]
    state: StateName
    group_size: int
    items: int
    acked: int
    failed: int
    skipped: int
    pending: int
    complete: bool = Field(description="sealed, and nothing is pending")
    succeeded: bool = Field(description="complete, and the failures are within the tolerance, by default none")
    parent: str | None
    seal_at: int | None
    expires_in: int | None
    deadline: datetime | None
    tolerated_failures: int | None
    tolerated_failure_percentage: int | None
    on_exceeded: OnExceededName
    exceeded: bool = Field(description="the failures have exceeded the tolerance; stays true")
    created_at: datetime
    updated_at: datetime
    sealed_at: datetime | None
    ended_at: datetime | None
    ended_by: int | None = Field(
        description="the batch above it whose end cancelled it; null if it ended by itself, or not at all"
    )
    reason: str | None = Field(description="the reason of its cancellation, if one was given")
    traceparent: str | None = Field(description="the W3C Trace Context of the open; null if it had none")
    tracestate: str | None


class OpenedCallback(BaseModel):
    id: int = Field(description="the id of the webhook: its deliveries are listed and sent again as those of others")
    url: str
    types: list[str]
    secret: str = Field(description="the receiver verifies signatures with it; only open returns it, and its replays")


class OpenedBatch(Batch):
    start: int = Field(description="the first number that was issued")
    count: int = Field(description="the number of items that were issued")
    newly: bool = Field(description="this call completed the batch")
    callback: OpenedCallback | None = Field(description="null if the batch has none, or none any more")


class SealedBatch(Batch):
    newly: bool = Field(description="this call completed the batch")
    newly_succeeded: bool = Field(description="this call made `succeeded` true")


class Extension(BaseModel):
    batch: int
    group_size: int
    start: int = Field(description="the numbers are start .. start+count-1; an item's id is batch:group:index with "
                       "group, index = divmod(number, group_size)")  # fmt: skip
    count: int
    items: int = Field(description="the batch's total now")


class Point(BaseModel):
    at: datetime
    resolved: int = Field(description="the items that were acked, failed or skipped at this time")
    failed: int


class History(BaseModel):
    batch: int
    points: list[Point] = Field(
        description="from the open until the batch ended, or until now, by time: at most 132. From each point to the "
        "next, the counts changed steadily, as far as is known"
    )


class ListedBatch(Batch):
    history: list[Point] | None = Field(None, description="only with `history=true`: the points of its history")


class BatchPage(BaseModel):
    batches: list[ListedBatch]
    next: str | None = Field(description="the cursor of the next page; a page may be empty while this is set")


class Range(BaseModel):
    start: int
    end: int = Field(description="exclusive")
    first: str = Field(description="the id of the item at start")
    last: str = Field(description="the id of the item at end-1")


class FailedRange(Range):
    reasons: dict[str, str] = Field(description="item id → reason, for the items with a reason")


class PendingPage(BaseModel):
    ranges: list[Range]
    next: str | None


class FailedPage(BaseModel):
    ranges: list[FailedRange]
    next: str | None


class SkippedRange(Range):
    reasons: dict[str, str] = Field(description="item id → reason, for the items with a reason")


class SkippedPage(BaseModel):
    ranges: list[SkippedRange]
    next: str | None


class Tile(BaseModel):
    group: int = Field(description="the first group of the tile")
    groups: int = Field(description="the number of groups in the tile")
    issued: int = Field(description="the number of issued items in these groups")
    resolved: int = Field(description="the number of these that are acked, failed or skipped")
    failed: int
    skipped: int


class Picture(BaseModel):
    batch: int
    group_size: int
    items: int
    groups: int = Field(description="the batch's number of groups")
    tiles: list[Tile]
    next: int | None = Field(description="pass it as `start` to the next call; null at the end")


class Bitfields(BaseModel):
    resolved: str = Field(
        description="base64, little-endian bit order: bit i of the group is bytes[i//8] >> (i%8) & 1",
        json_schema_extra={"contentEncoding": "base64"},
    )
    failed: str = Field(
        description="likewise; a failed item is resolved too", json_schema_extra={"contentEncoding": "base64"}
    )
    skipped: str = Field(
        description="likewise; a skipped item is resolved too", json_schema_extra={"contentEncoding": "base64"}
    )


class GroupBits(Tile):
    batch: int
    bits: Bitfields = Field(description="the bits of the group's issued items, in whole bytes")


class Counted(BaseModel):
    acked: int
    failed: int
    skipped: int


class Verification(BaseModel):
    ok: bool
    items: int
    acked: int
    failed: int
    skipped: int
    pending: int
    counted: Counted = Field(description="the counts of the bits")
    faults: list[str] = Field(description="the discrepancies, in words")


class RepairBody(Body):
    dry_run: bool = Field(default=False, description="report what would be repaired, and change nothing")


class BatchCounts(BaseModel):
    state: StateName
    acked: int
    failed: int
    skipped: int
    pending: int


class Repair(BaseModel):
    dry_run: bool
    needed: bool = Field(description="counts or state disagreed with the bits")
    faults: list[str] = Field(description="the discrepancies, in words")
    groups: int = Field(description="groups whose stored row was wrong")
    before: BatchCounts
    after: BatchCounts = Field(description="the batch after the repair; with `dry_run`, as it would be")
    newly: bool = Field(description="this call completed the batch")
    newly_succeeded: bool = Field(description="this call made `succeeded` true")


class Progress(BaseModel):
    batch: int
    items: int = Field(description="in the batch and all of its descendants, without the items that a child stands for")
    acked: int
    failed: int
    skipped: int
    pending: int
    batches: dict[StateName, int] = Field(description="the number of these batches by state; the batch itself is one")
    truncated: bool = Field(
        description=f"there are more than {tree.MOST:,} batches: the sums have this number of them, those of the upper "
        "levels"
    )


class Watermark(BaseModel):
    watermark: int = Field(description="the smallest pending number: every item below it is resolved")
    item: str | None = Field(description="the id of that item; null if none is pending")


class ExplanationReason(BaseModel):
    model_config = ConfigDict(extra="allow")

    code: str = Field(
        description="stable: `complete`, `ended`, `failed`, `failures_exceeded`, `not_sealed`, `pending`, "
        "`oldest_untouched_group`, `waiting_for_children`, `parent_not_told`, "
        "`children_not_told`, `webhook_not_delivered`, `ending_without_worker`; later "
        "releases may add codes. Other fields depend on the code"
    )
    text: str = Field(description="a sentence for people")


class Explanation(BaseModel):
    batch: int
    state: StateName
    done: bool = Field(description="complete: sealed, and nothing is pending")
    reasons: list[ExplanationReason]


_SHOWN: Final = tuple(Batch.model_fields)


def shown(batch: batches.Batch) -> dict[str, Any]:
    """The fields of `Batch`."""
    return {name: getattr(batch, name) for name in _SHOWN}


def points(line: Iterable[history.Point]) -> list[dict[str, Any]]:
    return [point._asdict() for point in line]


def named_range(batch: batches.Batch, start: int, end: int) -> dict[str, Any]:
    """The items start .. end-1 as a `Range`."""
    first, last = (item_id(batch.id, number, batch.group_size) for number in (start, end - 1))
    return {"start": start, "end": end, "first": first, "last": last}
