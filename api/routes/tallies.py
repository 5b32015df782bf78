"""The routes of tallies. The bodies of `apply` and `ranges` may be long, so msgspec decodes them, as it does acks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import Path, Query, Request, Response
from pydantic import BaseModel, Field

from api import expectations
from api.access.rules import Access, caller_of, needs
from api.limits import sizes
from api.problems import BODY, Problem, documented
from api.routes import cursors, fields
from api.routes.reply import EMPTY, Reply
from api.routes.route import GuardedRoute, PrefixedRouter, reading
from api.routes.writes import Writes
from api.server import bodies
from core import tallies
from core.consumer_groups import positions
from core.service import Service
from core.service.tallies import apply_of, apply_ranges_of
from lastbit.ids import INTEGER_LIMIT
from lastbit.tokens import Role

router = PrefixedRouter(prefix="/v1/tallies", route_class=GuardedRoute, tags=["tallies"])

MAX_ENTRIES: Final = 10_000

NAME: Final = "[A-Za-z0-9][A-Za-z0-9._:-]{0,254}"
_IN_WORDS: Final = "a letter or digit, then up to 254 letters, digits, `.`, `_`, `:` or `-`"

TallyName = Annotated[
    str,
    Path(
        alias="tally",
        pattern=expectations.worded(rf"^{NAME}$", _IN_WORDS),
        description=_IN_WORDS,
    ),
]
TallyKey = Annotated[str, Path(alias="key", min_length=1, max_length=tallies.LONGEST)]
Limit = Annotated[int, Query(ge=1, le=1000), fields.Decimal]

Integer = Annotated[int, msgspec.Meta(ge=0, lt=INTEGER_LIMIT)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=tallies.LONGEST)]


class TallySource(msgspec.Struct, forbid_unknown_fields=True):
    """The position of a message in the source log. A message that was derived from another has the position of the
    original."""

    topic: Text
    partition: Integer
    offset: Integer
    child: Annotated[
        int,
        msgspec.Meta(ge=0, lt=INTEGER_LIMIT, description="the index among the messages derived from `offset`"),
    ] = 0
    generation: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            lt=INTEGER_LIMIT,
            description="use another value if the topic is deleted and created again, with offsets from 0",
        ),
    ] = 0


class TallyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """The amount that one message adds to one key."""

    key: Text
    delta: Annotated[int, msgspec.Meta(gt=-INTEGER_LIMIT, lt=INTEGER_LIMIT)]
    source: TallySource


Delta = Annotated[int, msgspec.Meta(gt=-INTEGER_LIMIT, lt=INTEGER_LIMIT)]
Position = Annotated[str, msgspec.Meta(min_length=1, max_length=tallies.LONGEST_POSITION)]


class TallyRange(msgspec.Struct, forbid_unknown_fields=True):
    """What the messages between two positions of a source add to each key."""

    topic: Text
    partition: Integer
    after: Annotated[
        Position | None,
        msgspec.Meta(description="the position up to which the source was counted; null if nothing was"),
    ]
    upto: Annotated[Position, msgspec.Meta(description="the position of the last message of the range")]
    totals: dict[Text, Delta]
    generation: Annotated[
        Integer, msgspec.Meta(description="use another value if the topic is deleted and created again")
    ] = 0


class TallyFence(msgspec.Struct, forbid_unknown_fields=True):
    """Apply only while this worker owns the partition at this epoch."""

    group: Text
    partition: Integer
    worker: Text
    epoch: Integer


class TallyEntries(msgspec.Struct, forbid_unknown_fields=True):
    """Entries in the order of their messages."""

    entries: list[TallyEntry]
    fence: TallyFence | None = None


class TallyRanges(msgspec.Struct, forbid_unknown_fields=True):
    """Ranges. Those of one source follow one another."""

    ranges: list[TallyRange]
    fence: TallyFence | None = None


class AppliedEntries(BaseModel):
    applied: int = Field(description="entries that were added")
    repeated: int = Field(description="entries that had been added before")


class CountedRange(BaseModel):
    status: Literal["applied", "repeated", "moved"] = Field(
        description="`repeated`: it was applied before; `moved`: it doesn't begin at the position of its source, and "
        "nothing of it was added"
    )
    position: str | None = Field(
        default=None,
        description="only if `moved`: the position up to which the source was counted; null if nothing was",
    )


class CountedRanges(BaseModel):
    results: list[CountedRange] = Field(description="one for each range")


class TallyTotal(BaseModel):
    key: str
    value: int


class SubCounter(BaseModel):
    topic: str
    partition: int
    generation: int
    offset: int | None = Field(description="the offset of the last message that was added; null if it was in a range")
    child: int | None
    position: str | None = Field(description="the end of the last range; null if the source has entries")
    value: int = Field(description="the sum of this source's amounts")


class TallyValue(TallyTotal):
    sources: list[SubCounter] = Field(description="their values add up to `value`; empty if nothing was ever added")


class TallyPage(BaseModel):
    totals: list[TallyTotal]
    next: str | None


_DECODER: Final = msgspec.json.Decoder(TallyEntries)
_RANGES_DECODER: Final = msgspec.json.Decoder(TallyRanges)


def _body(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"requestBody": {"content": content, "required": True}}


@router.post(
    "/{tally}/apply",
    response_model=AppliedEntries,
    responses=documented("consumer_group_not_found", "stale_epoch", "out_of_order", "source_conflict", *BODY),
    openapi_extra=_body("TallyEntries"),
)
@needs(Role.CONSUME)
async def apply_entries(tally: TallyName, request: Request) -> Response:
    """Add each entry once, all in one transaction. An entry at or below the last added position of its source is a
    repeat, so the entries of one source must reach a key in order."""
    access: Access = request.app.state.access
    async with reading(request) as content:
        if len(content) > sizes.IN_LOOP:
            access.rates.require_items(caller_of(request))
        operation = operation_of(tally, content)
    access.rates.charge_items(caller_of(request), len(operation.entries))
    writes: Writes = request.app.state.writes
    return applied(await writes.run(operation)).response()


def operation_of(tally: str, content: bytes) -> tallies.Apply:
    """What the body asks for. Raises `Problem`."""
    body: TallyEntries = bodies.decoded(_DECODER, content)
    if len(body.entries) > MAX_ENTRIES:
        raise Problem("too_large", f"body.entries: expected at most {MAX_ENTRIES:,} entries, got {len(body.entries):,}")
    entries = [
        tallies.Entry(entry.key, entry.delta, source.topic, source.partition, source.generation, source.offset,
                      source.child)
        for entry in body.entries
        for source in (entry.source,)
    ]  # fmt: skip
    return apply_of(tally, entries, _fence(body.fence))


def _fence(lease: TallyFence | None) -> positions.Fence | None:
    return None if lease is None else positions.Fence(lease.group, lease.partition, lease.worker, lease.epoch)


def applied(result: tallies.Applied) -> Reply:
    """The response to applied entries."""
    return Reply(b'{"applied":%d,"repeated":%d}' % (result.applied, result.repeated), 200, EMPTY)


@router.post(
    "/{tally}/ranges",
    response_model=CountedRanges,
    response_model_exclude_unset=True,
    responses=documented("consumer_group_not_found", "stale_epoch", "source_conflict", *BODY),
    openapi_extra=_body("TallyRanges"),
)
@needs(Role.CONSUME)
async def apply_ranges(tally: TallyName, request: Request) -> Response:
    """Add each range whose `after` is its source's position, and move the position to `upto`, all in one transaction. A
    range that was added before is a repeat, wherever the position is within the call. Any other range is refused alone:
    leave out what the position covers, and send what remains."""
    access: Access = request.app.state.access
    async with reading(request) as content:
        if len(content) > sizes.IN_LOOP:
            access.rates.require_items(caller_of(request))
        operation = ranges_of(tally, content)
    access.rates.charge_items(caller_of(request), sum(len(span.totals) for span in operation.ranges))
    writes: Writes = request.app.state.writes
    return counted(await writes.run(operation)).response()


def ranges_of(tally: str, content: bytes) -> tallies.ApplyRanges:
    """What the body asks for. Raises `Problem`."""
    body: TallyRanges = bodies.decoded(_RANGES_DECODER, content)
    count = sum([max(1, len(span.totals)) for span in body.ranges])
    if count > MAX_ENTRIES:
        raise Problem("too_large", f"body.ranges: expected at most {MAX_ENTRIES:,} sums, got {count:,}")
    ranges = [
        tallies.Range(span.topic, span.partition, span.generation, span.after, span.upto, span.totals)
        for span in body.ranges
    ]
    return apply_ranges_of(tally, ranges, _fence(body.fence))


def counted(results: Sequence[tallies.Counted]) -> Reply:
    """The response to ranges."""
    bodies_of_results = [
        {"status": result.status, "position": result.position}
        if result.status == "moved"
        else {"status": result.status}
        for result in results
    ]
    return Reply(msgspec.json.encode({"results": bodies_of_results}), 200, EMPTY)


@router.get("/{tally}/{key:rest}", response_model=TallyValue, responses=documented("invalid_request"))
@needs(Role.READ)
def get_total(tally: TallyName, key: TallyKey, request: Request) -> dict[str, Any]:
    """The total of a key, and the sub-counters that add up to it. The total is 0 if nothing was ever added."""
    result = _service(request).tallies.get(tally, key)
    sources = [{name: getattr(source, name) for name in SubCounter.model_fields} for source in result.sources]
    return {"key": result.key, "value": result.value, "sources": sources}


@router.get("/{tally}", response_model=TallyPage, responses=documented("invalid_request"))
@needs(Role.READ)
def list_totals(
    tally: TallyName,
    request: Request,
    prefix: Annotated[str, Query(max_length=tallies.LONGEST, description="only keys that begin with this text")] = "",
    limit: Limit = 100,
    cursor: cursors.Cursor = None,
) -> dict[str, Any]:
    """The totals of the keys, ordered by the keys' bytes."""
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
    """Delete the tally with its guards and positions. Messages that are applied again are added again."""
    _service(request).tallies.delete(tally)
    return Response(status_code=204)


def document(openapi: dict[str, Any]) -> None:
    """Add the bodies of `apply` and `ranges` to an OpenAPI document."""
    _, components = msgspec.json.schema_components(
        [TallyEntries, TallyRanges], ref_template="#/components/schemas/{name}"
    )
    openapi["components"]["schemas"].update(components)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
