"""The routes of tallies. The body of `apply` has a thousand entries, so it is decoded by msgspec, as acks are."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from api.access.rules import Access, caller_of, needs
from api.problems import BODY, Problem, documented
from api.routes import cursors, models
from api.routes.route import GuardedRoute
from api.server import bodies
from core import tallies
from core.consumer_groups import groups
from core.service import Service
from lastbit.ids import INTEGER_LIMIT
from lastbit.tokens import Role

router = APIRouter(prefix="/v1/tallies", route_class=GuardedRoute, tags=["tallies"])

MAX_ENTRIES: Final = 10_000

TallyName = Annotated[
    str,
    Path(
        alias="tally",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$",
        description="a letter or digit, then up to 254 of these and of `.` `_` `:` `-`",
    ),
]
TallyKey = Annotated[str, Path(alias="key", min_length=1, max_length=tallies.LONGEST)]
Limit = Annotated[int, Query(ge=1, le=1000), models.Decimal]

Integer = Annotated[int, msgspec.Meta(ge=0, lt=INTEGER_LIMIT)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=tallies.LONGEST)]


class TallySource(msgspec.Struct, forbid_unknown_fields=True):
    """Where a message stands in the log that it, or what it was made of, was read from first."""

    topic: Text
    partition: Integer
    offset: Integer
    child: Annotated[
        int,
        msgspec.Meta(ge=0, lt=INTEGER_LIMIT, description="which of the messages that were made of the one at `offset`"),
    ] = 0
    generation: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            lt=INTEGER_LIMIT,
            description="another value for a topic that was created again, from offset 0",
        ),
    ] = 0


class TallyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """The amount that one message adds to one key."""

    key: Text
    delta: Annotated[int, msgspec.Meta(gt=-INTEGER_LIMIT, lt=INTEGER_LIMIT)]
    source: TallySource


class TallyFence(msgspec.Struct, forbid_unknown_fields=True):
    """Apply only while this worker owns the partition at this epoch."""

    group: Text
    partition: Integer
    worker: Text
    epoch: Integer


class TallyEntries(msgspec.Struct, forbid_unknown_fields=True):
    """Entries in the order in which their messages came."""

    entries: list[TallyEntry]
    fence: TallyFence | None = None


class AppliedEntries(BaseModel):
    applied: int = Field(description="entries that were added")
    repeated: int = Field(description="entries that had been added before")


class TallyTotal(BaseModel):
    key: str
    value: int


class SubCounter(BaseModel):
    topic: str
    partition: int
    generation: int
    offset: int = Field(description="of the last message that was added")
    child: int
    value: int = Field(description="what this source has brought")


class TallyValue(TallyTotal):
    sources: list[SubCounter] = Field(description="they sum up to the value; empty where nothing was ever added")


class TallyPage(BaseModel):
    totals: list[TallyTotal]
    next: str | None


_DECODER: Final = msgspec.json.Decoder(TallyEntries)
_BODY: Final = {
    "requestBody": {
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/TallyEntries"}}},
        "required": True,
    }
}


@router.post(
    "/{tally}/apply",
    response_model=AppliedEntries,
    responses=documented("consumer_group_not_found", "stale_epoch", "out_of_order", *BODY),
    openapi_extra=_BODY,
)
@needs(Role.CONSUME)
async def apply_entries(tally: TallyName, request: Request) -> Response:
    """Add each entry once, all in one transaction: those that are at or below their guard had been added before. The
    messages of one source must come to a key in their order."""
    async with bodies.reading(request.scope, request.receive, request.app.state.room) as content:
        body = bodies.decoded(_DECODER, content)
    if len(body.entries) > MAX_ENTRIES:
        raise Problem("too_large", f"body.entries: expected at most {MAX_ENTRIES:,} entries, got {len(body.entries):,}")
    entries = [
        tallies.Entry(
            entry.key,
            entry.delta,
            entry.source.topic,
            entry.source.partition,
            entry.source.generation,
            entry.source.offset,
            entry.source.child,
        )
        for entry in body.entries
    ]
    access: Access = request.app.state.access
    access.rates.bring(caller_of(request), len(entries))
    lease = body.fence
    fence = None if lease is None else groups.Fence(lease.group, lease.partition, lease.worker, lease.epoch)
    answer = await run_in_threadpool(_service(request).tallies.apply, tally, entries, fence)
    return Response(b'{"applied":%d,"repeated":%d}' % (answer.applied, answer.repeated), media_type="application/json")


@router.get("/{tally}/{key:rest}", response_model=TallyValue, responses=documented("invalid_request"))
@needs(Role.READ)
def get_total(tally: TallyName, key: TallyKey, request: Request) -> dict[str, Any]:
    """The total of a key and the sub-counters that it is the sum of; 0 where nothing was ever added."""
    result = _service(request).tallies.get(tally, key)
    sources = [{name: getattr(source, name) for name in SubCounter.model_fields} for source in result.sources]
    return {"key": result.key, "value": result.value, "sources": sources}


@router.get("/{tally}", response_model=TallyPage, responses=documented("invalid_request"))
@needs(Role.READ)
def list_totals(
    tally: TallyName,
    request: Request,
    prefix: Annotated[str, Query(max_length=tallies.LONGEST, description="only keys that begin so")] = "",
    limit: Limit = 100,
    cursor: cursors.Cursor = None,
) -> dict[str, Any]:
    """The totals of the keys, by their bytes."""
    subject = f"tally:{tally}:{len(prefix)}:{prefix}"
    after = cursors.decode_name(subject, cursor)
    totals = _service(request).tallies.page(tally, prefix, after, limit)
    return {
        "totals": [{"key": total.key, "value": total.value} for total in totals],
        "next": cursors.encode(subject, totals[-1].key) if len(totals) == limit else None,
    }


@router.delete("/{tally}", status_code=204, responses=documented("invalid_request"))
@needs(Role.ADMIN)
def delete_tally(tally: TallyName, request: Request) -> Response:
    """Remove the tally and its guards: what is applied again counts again."""
    _service(request).tallies.delete(tally)
    return Response(status_code=204)


def document(openapi: dict[str, Any]) -> None:
    """Add the body of `apply` to an OpenAPI document."""
    _, components = msgspec.json.schema_components([TallyEntries], ref_template="#/components/schemas/{name}")
    openapi["components"]["schemas"].update(components)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
