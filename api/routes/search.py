"""The routes that find batches: pages of them, and counts by state, under the same filter."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request
from pydantic import BaseModel, Field

from api import patterns
from api.access.rules import caller_of, needs
from api.problems import documented
from api.routes import cursors, fields, models
from api.routes.batches import Limit, service_of
from api.routes.fields import Moment
from api.routes.route import JsonRoute, PrefixedRouter
from core import errors
from core.batches import search
from core.batches.labels import MAX_LABELS
from core.batches.lifecycle import State
from core.batches.search import Filter, Outcome
from lastbit.ids import INTEGER_LIMIT, ItemId
from lastbit.tokens import Role

router = PrefixedRouter(prefix="/v1/batches", route_class=JsonRoute, tags=["batches"])

Text = Annotated[str | None, Query(max_length=255)]
WantedLabel = Annotated[str, Field(json_schema_extra={"pattern": patterns.LABEL})]


def _parent(text: str | None) -> int | ItemId | None:
    """Raises `errors.InvalidRequest`."""
    if text is None:
        return None
    if re.fullmatch("0|[1-9][0-9]{0,15}", text) and int(text) < INTEGER_LIMIT:
        return int(text)
    try:
        return ItemId.parse(text)
    except ValueError:
        raise errors.InvalidRequest("query.parent", f"expected a batch's id or an item's id, got {text!r}") from None


def _labels(texts: list[str]) -> dict[str, str]:
    """The labels in `name:value`, all of which are required. Raises `errors.InvalidRequest`."""
    labels: dict[str, str] = {}
    if len(texts) > MAX_LABELS:
        raise errors.InvalidRequest("query.label", f"expected at most {MAX_LABELS} labels, got {len(texts):,}")
    for label in texts:
        name, colon, value = label.partition(":")
        if not colon or not name:
            raise errors.InvalidRequest("query.label", f"expected name:value, got {label!r}")
        if labels.setdefault(name, value) != value:
            raise errors.InvalidRequest("query.label", f"{name!r} can't have two values at once")
    return labels


def _chosen(
    request: Request,
    key: Text = None,
    key_prefix: Annotated[str | None, Query(max_length=255, description="the beginning of the key")] = None,
    label: Annotated[list[WantedLabel], Query(description="name:value; repeat to require several labels")] = [],  # noqa: B006
    opened_after: Annotated[Moment, Query(description="opened at this time or later")] = None,
    opened_before: Annotated[Moment, Query(description="opened earlier than this")] = None,
    outcome: Annotated[
        Literal["succeeded", "failed", "exceeded"] | None,
        Query(
            description="`succeeded` or `failed`: complete batches with this result. `exceeded`: batches in any state "
            "whose failures exceeded their tolerance"
        ),
    ] = None,
    parent: Annotated[
        str | None,
        Query(
            description="children of this batch, or the child of this item",
            json_schema_extra={"pattern": patterns.BATCH_OR_ITEM},
        ),
    ] = None,
    unchanged_for: Annotated[
        int | None,
        Query(ge=0, le=models.MAX_SECONDS, description="live batches that have not changed for this number of seconds"),
        fields.Decimal,
    ] = None,
    failed: Annotated[bool, Query(description="batches with failed items, in any state")] = False,
) -> Filter:
    """The filter in the query, without a state."""
    return Filter(
        key=key,
        key_prefix=key_prefix,
        labels=_labels(label),
        opened_after=opened_after,
        opened_before=opened_before,
        outcome=None if outcome is None else Outcome(outcome),
        parent=_parent(parent),
        unchanged_for=unchanged_for,
        failed=failed,
        prefix=caller_of(request).prefix,
    )


Chosen = Annotated[Filter, Depends(_chosen)]


class StateCounts(BaseModel):
    open: int
    sealed: int
    complete: int
    expired: int
    cancelled: int


class Counts(BaseModel):
    states: StateCounts
    total: int
    exact: bool = Field(description=f"false: there are more than {search.MOST:,} batches to count; these were counted")


@router.get(
    "",
    response_model=models.BatchPage,
    response_model_exclude_unset=True,
    responses=documented("invalid_request"),
)
@needs(Role.READ, is_limited=True)
def list_batches(
    request: Request,
    chosen: Chosen,
    state: models.StateName | None = None,
    limit: Limit = 100,
    cursor: cursors.Cursor = None,
    history: Annotated[bool, Query(description="with the history of each batch")] = False,
) -> dict[str, Any]:
    """The batches, newest first."""
    chosen = replace(chosen, state=None if state is None else State(state))
    before = cursors.decode("batches", cursor)
    page = service_of(request).batches.page(chosen, before=before, limit=limit, with_history=history)
    documents = [models.shown(batch) for batch in page.batches]
    for document in documents if history else ():
        document["history"] = models.points(page.histories[document["id"]])
    following = None if page.before is None else cursors.encode("batches", page.before)
    return {"batches": documents, "next": following}


@router.get("/counts", response_model=Counts, responses=documented("invalid_request"))
@needs(Role.READ, is_limited=True)
def count_batches(request: Request, chosen: Chosen) -> dict[str, Any]:
    """The number of batches in each state, under the same filters as the list."""
    counts = service_of(request).batches.counts(chosen)
    return {"states": counts.by_state, "total": sum(counts.by_state.values()), "exact": counts.exact}
