"""The route that finds failures of all batches by a text. `failures` has those of one batch."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any

from fastapi import Query, Request
from pydantic import BaseModel, Field

from api.access.rules import needs
from api.problems import documented
from api.routes import cursors, models
from api.routes.batches import Limit, service_of
from api.routes.route import JsonRoute, PrefixedRouter
from api.routes.search import Chosen
from core.acks.call import MAX_REASON
from core.batches.failure_search import Place
from core.batches.lifecycle import State
from lastbit.ids import item_id
from lastbit.tokens import Role

router = PrefixedRouter(prefix="/v1/failures", route_class=JsonRoute, tags=["batches"])

_SUBJECT = "failures"
"""The list of the cursors."""


class Failure(BaseModel):
    item: str
    batch: int
    key: str | None = Field(description="the key of its batch")
    reason: str
    failed_at: datetime


class FailurePage(BaseModel):
    failures: list[Failure]
    next: str | None


@router.get("", response_model=FailurePage, responses=documented("invalid_request"))
@needs(Role.READ, is_limited=True)
def find_failures(
    request: Request,
    conditions: Chosen,
    text: Annotated[
        str | None,
        Query(min_length=1, max_length=MAX_REASON, description="a part of the reason, in upper or lower case"),
    ] = None,
    state: models.StateName | None = None,
    limit: Limit = 100,
    cursor: cursors.Cursor = None,
) -> dict[str, Any]:
    """The failed items whose reason has this text, in all batches or in those that the filter selects: the newest batch
    first, and within a batch the lowest item. Items that failed without a reason are left out. There is no index of
    reasons, so a page examines at most about 10,000 failures and may be empty while `next` is set."""
    conditions = replace(conditions, state=None if state is None else State(state))
    start = cursors.decode_pair(_SUBJECT, cursor)
    page = service_of(request).batches.find_failures(
        conditions, text, place=None if start is None else Place(*start), limit=limit
    )
    documents = []
    for row in page.failures:
        batch = page.batches[row.batch_id]
        documents.append(
            {
                "item": item_id(batch.id, row.number, batch.group_size),
                "batch": batch.id,
                "key": batch.key,
                "reason": row.reason,
                "failed_at": row.failed_at,
            }
        )
    following = None if page.next is None else cursors.encode(_SUBJECT, f"{page.next.batch}:{page.next.number}")
    return {"failures": documents, "next": following}
