"""The routes of failures by reason, and of their redrive."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Self

from fastapi import Request, Response
from pydantic import BaseModel, Field, model_validator

from api import patterns
from api.access.rules import needs
from api.problems import BODY, documented
from api.routes import cursors, fields, models
from api.routes.batches import REPLAYED, IdempotencyKey, Limit, service_of
from api.routes.fields import BatchId
from api.routes.reply import EMPTY, Reply
from api.routes.route import JsonRoute, PrefixedRouter
from core import errors
from core.acks.call import MAX_REASON
from core.batches import redrive
from lastbit.ids import ItemId, item_id
from lastbit.tokens import Role

router = PrefixedRouter(prefix="/v1/batches", route_class=JsonRoute, tags=["batches"])


class FailureReason(BaseModel):
    reason: str | None = Field(description="null: no reason was given")
    count: int = Field(description="the number of examined items that failed for it")
    first_at: datetime | None
    last_at: datetime | None
    items: list[str] = Field(description="the first ones of these items, at most five")


class Reasons(BaseModel):
    reasons: list[FailureReason] = Field(description="the most frequent ones first")
    failed: int = Field(description="the batch's number of failed items")
    examined: int = Field(description="the number of failed items that were examined")
    exact: bool = Field(description="false: only some of the failed items were examined")
    next: str | None


class RedriveBody(fields.Body):
    LIMIT = 256 * 1024

    reason: str | None = Field(None, max_length=MAX_REASON, description="only items that failed for this reason")
    items: list[Annotated[str, Field(json_schema_extra={"pattern": patterns.ITEM_ID})]] | None = Field(
        None, min_length=1, max_length=redrive.RANGES, description="only these, as far as they have failed"
    )
    note: str | None = Field(None, max_length=MAX_REASON, description="a text for the reader of the event")
    pending: bool = Field(
        default=False,
        description="pending items instead, except those of nested batches; not with a reason or items",
    )
    unchanged_for: int | None = Field(
        None, ge=0, le=models.MAX_SECONDS, description="with `pending`: only if nothing changed for these seconds"
    )

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if self.pending and (self.reason is not None or self.items is not None):
            raise ValueError("pending items have no reason, and are not chosen one by one")
        if self.unchanged_for is not None and not self.pending:
            raise ValueError("unchanged_for is for pending items")
        return self

    def wish(self) -> redrive.Wish:
        """Raises `errors.InvalidRequest`."""
        items = None if self.items is None else [_item(place, text) for place, text in enumerate(self.items)]
        return redrive.Wish(self.reason, items, self.note, self.pending, self.unchanged_for or 0)


def _item(place: int, text: str) -> ItemId:
    try:
        return ItemId.parse(text)
    except ValueError as error:
        raise errors.InvalidRequest(f"body.items[{place}]", str(error)) from None


class Redrive(BaseModel):
    count: int = Field(description="the number of items that were asked for")
    ranges: list[models.Range] = Field(description=f"the first {redrive.RANGES:,} of them")
    more: bool = Field(
        description="whether there are more ranges; list the failed or pending items from the last end on"
    )
    position: int = Field(description="the event's position in the feed")


@router.get("/{id}/failed/reasons", response_model=Reasons, responses=documented("batch_not_found", "invalid_request"))
@needs(Role.READ, is_limited=True)
def list_failure_reasons(
    batch: BatchId, request: Request, limit: Limit = 100, cursor: cursors.Cursor = None
) -> dict[str, Any]:
    """The reasons of the failed items, with their number, times and some of the items. Of very many failed items, a
    sample is examined."""
    subject = f"reasons:{batch}"
    start = cursors.decode(subject, cursor) or 0
    state, page = service_of(request).batches.failures(batch, start, limit)
    reasons = [
        {
            "reason": reason.reason,
            "count": reason.count,
            "first_at": reason.first_at,
            "last_at": reason.last_at,
            "items": [item_id(batch, number, state.group_size) for number in reason.numbers],
        }
        for reason in page.reasons
    ]
    following = None if page.next is None else cursors.encode(subject, page.next)
    return {
        "reasons": reasons,
        "failed": state.failed,
        "examined": page.examined,
        "exact": page.exact,
        "next": following,
    }


@router.post(
    "/{id}/redrive",
    response_model=Redrive,
    responses={
        200: REPLAYED,
        **documented(
            "batch_not_found",
            "batch_expired",
            "batch_cancelled",
            "nothing_failed",
            "nothing_pending",
            "idempotency_key_reused",
            *BODY,
        ),
    },
)
@needs(Role.PRODUCE, is_limited=True)
def redrive_batch(
    batch: BatchId, body: RedriveBody, request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    """Ask the producer to send failed items again, or pending ones: append an event that names them. Their acks
    override the failures."""
    redrive = service_of(request).batches.redrive(batch, body.wish(), idempotency_key)

    spans = [models.named_range(redrive.batch, span.start, span.end) for span in redrive.ranges]
    answer = {"count": redrive.count, "ranges": spans, "more": redrive.more, "position": redrive.position}
    headers = {"Idempotency-Replayed": "true"} if redrive.replayed else EMPTY
    return Reply.of(answer, headers=headers).response()
