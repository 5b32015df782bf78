"""The routes of the feed: read it, follow it, and append custom events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple, Protocol

from fastapi import Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, BaseModel, Field, StringConstraints, TypeAdapter, field_validator
from starlette.concurrency import run_in_threadpool

from api import expectations
from api.access.rules import Access, caller_of, forbidden, needs, outside
from api.limits import sizes
from api.problems import BODY, Place, documented, invalid
from api.routes import fields
from api.routes.consumer_groups import Fence
from api.routes.fields import Body, Key
from api.routes.free_json import DATA, Data
from api.routes.long_polls import Follower, Waiting, text_of
from api.routes.reply import EMPTY, Reply
from api.routes.route import JsonRoute, PrefixedRouter
from api.routes.writes import Reads, Writes
from core import errors, feed
from core.consumer_groups import positions
from core.service import Service
from lastbit.ids import INTEGER_LIMIT
from lastbit.tokens import Role, Token

router = PrefixedRouter(prefix="/v1/events", route_class=JsonRoute, tags=["events"])

MAX_EVENTS: Final = 1000
LIMIT: Final = 100
"""Events of a page, unless the query has another limit."""
STREAM_READ: Final = 500
STREAM_BYTES: Final = 128 * 1024
"""Maximum bytes of event data per write to a stream. Several copies stay in memory while a slow follower reads."""
PING: Final = 15.0
"""Seconds without an event after which a stream sends a comment to keep the connection alive."""

Name = Annotated[str, StringConstraints(pattern=expectations.visible_ascii(255))]
Position = Annotated[int, Query(ge=0, lt=INTEGER_LIMIT), fields.Decimal]
Types = Annotated[
    list[str],
    AfterValidator(fields.of_events),
    Query(alias="type", description="repeat it to allow several types"),
]
OfBatch = Annotated[int | None, Query(ge=0, lt=INTEGER_LIMIT), fields.Decimal]
Limit = Annotated[int, Query(ge=1, le=1000), fields.Decimal]
Seconds = Annotated[fields.Wait, Query(description="seconds to wait for the first event")]


def _words(beginnings: Sequence[str]) -> str:
    return ", ".join(f"`{beginning}`" for beginning in beginnings[:-1]) + f" or `{beginnings[-1]}`"


class NewEvent(Body):
    id: Name = Field(
        description=f"1 to 255 visible ASCII characters; ids that begin with {_words(feed.OWN_IDS)} are reserved"
    )
    type: Name = Field(description=f"types that begin with {_words(feed.OWN_TYPES)} are reserved")
    key: Key | None = None
    data: Data = Field(None, description=DATA)

    @field_validator("id")
    @classmethod
    def _own_id(cls, value: str) -> str:
        if value.startswith(feed.OWN_IDS):
            raise ValueError(f"expected an id of yours: ids that begin with {_words(feed.OWN_IDS)} are reserved")
        return value

    @field_validator("type")
    @classmethod
    def _own_type(cls, value: str) -> str:
        if value.startswith(feed.OWN_TYPES):
            raise ValueError(f"expected a type of yours: types that begin with {_words(feed.OWN_TYPES)} are reserved")
        return value


class NewEvents(Body):
    LIMIT = sizes.BODY
    HAS_ITEMS = True

    events: list[NewEvent] = Field(max_length=MAX_EVENTS)
    fence: Fence | None = Field(None, description="append only while this worker owns the partition at this epoch")


class Event(BaseModel):
    position: int = Field(description="1-based, without gaps, in the order of the commits")
    id: str = Field(
        description="unique; `batch:7:completed` for a batch's transition (`batch:7:completed:1` after a repair), "
        "otherwise the id that was appended"
    )
    type: str
    batch: int | None
    key: str | None
    data: Any
    at: datetime


class EventPage(BaseModel):
    events: list[Event]
    next: int = Field(
        description="the last position that was read; pass it as `after` to the next call, until it equals `last`"
    )
    last: int = Field(description="the feed's last position")


class AppendedEvent(BaseModel):
    id: str
    position: int
    repeated: bool = Field(description="an earlier call appended it, at this position")


class AppendedEvents(BaseModel):
    events: list[AppendedEvent]


@router.post("", response_model=AppendedEvents, responses=documented("consumer_group_not_found", "stale_epoch", *BODY))
@needs(Role.PRODUCE, is_limited=True)
async def append_events(body: NewEvents, request: Request) -> Response:
    """Append custom events, in one transaction. An event whose id is already in the feed is a repeat."""
    caller = caller_of(request)
    fence = _fence(body, caller)
    for place, new_event in enumerate(body.events):
        for name, value in (("key", new_event.key), ("id", new_event.id)):
            # The id too: an event under the id of another caller's event would make that event count as a repeat.
            if not caller.covers(value):
                raise outside(caller, f"body.events[{place}].{name}", "events whose key and id begin")
    access: Access = request.app.state.access
    access.rates.charge_items(caller, len(body.events))
    new = [feed.NewEvent(event.id, event.type, event.key, event.data) for event in body.events]
    writes: Writes = request.app.state.writes
    results: list[feed.Appended] = await writes.run(feed.Append(events=new, fence=fence, cost=max(1, len(new))))
    return appended(new, results).response()


def appended(events: Sequence[feed.NewEvent], results: Sequence[feed.Appended]) -> Reply:
    """The response to an append of these events."""
    return Reply.of(
        {
            "events": [
                {"id": event.id, "position": result.position, "repeated": result.repeated}
                for event, result in zip(events, results, strict=True)
            ]
        }
    )


def _fence(body: NewEvents, caller: Token) -> positions.Fence | None:
    if body.fence is None:
        return None
    if caller.prefix is not None:
        # Any other error would reveal which consumer groups exist.
        raise forbidden(
            f"body.fence: the token {caller.name} is limited, and consumer groups are not for limited tokens"
        )
    return body.fence.to_core()


@router.get("", response_model=EventPage, responses=documented("position_trimmed", "invalid_request"))
@needs(Role.READ, is_limited=True)
async def read_events(
    request: Request,
    after: Annotated[Position | None, Query(description="default: before the first event that is kept")] = None,
    limit: Limit = LIMIT,
    wait: Seconds = 0,
    types: Types = [],  # noqa: B006
    batch: OfBatch = None,
) -> Response:
    """Events after a position, in commit order. With `wait`, waits until there is one."""
    prefix = caller_of(request).prefix
    if not wait and limit <= feed.FIRST and batch is None and prefix is None and not types:
        reads: Reads = request.app.state.reads
        return paged(await reads.pages.get(feed.Span(after, limit))).response()
    asked = Asked(after, limit, types, batch, prefix)
    return paged(await asked.first_page(_service(request), _waiting(request), wait)).response()


class Asked(NamedTuple):
    """A question for events; see `core.feed.read`."""

    after: int | None
    limit: int
    types: Sequence[str] = ()
    batch: int | None = None
    prefix: str | None = None

    async def first_page(self, service: Service, waiting: Waiting, wait: float) -> feed.EventPage:
        """The first page with an event. It is empty if there is none within `wait` seconds, or if the service stops.
        Without `wait`, the page that begins there."""
        after, limit, types, batch, prefix = self

        def read() -> feed.EventPage:
            return service.feed.read(after, limit, types=types, batch=batch, prefix=prefix)

        if not wait:
            return await run_in_threadpool(read)
        until = time.monotonic() + wait
        async with waiting.follow(types, batch, prefix) as follower:
            # Followers that call again at once are served from memory, not from the database.
            if after is None or waiting.is_database_unreachable:
                page = await run_in_threadpool(read)
            else:
                page = await waiting.read(follower, after, limit)
            start = -1 if after is None else after
            while not page.events and await goes_on(follower, start, page, until) and not waiting.closed:
                start = page.next
                page = await waiting.read(follower, start, limit)
        return page


@router.get(
    "/stream",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
            "description": "Server-sent events; `id` is the position",
        },
        **documented("position_trimmed", "invalid_request"),
    },
)
@needs(Role.READ, is_limited=True)
async def stream_events(
    request: Request,
    after: Annotated[Position | None, Query(description="default: the current end of the feed")] = None,
    types: Types = [],  # noqa: B006
    batch: OfBatch = None,
    last_event_id: Annotated[
        str | None, Header(description="the position to resume after; takes precedence over `after`")
    ] = None,
) -> Response:
    """Follow the feed. The data of a message is an event in the format of `GET /v1/events`."""
    service, caller = _service(request), caller_of(request)
    access: Access = request.app.state.access
    if last_event_id:
        try:
            after = _POSITION.validate_python(last_event_id)
        except ValueError:
            raise invalid([Place(_RESUMED, "expected a position of the feed")]) from None
    if after is None:
        after = await run_in_threadpool(service.feed.head)
    # Read once before the response begins, as an invalid position can't be reported later.
    try:
        page = await run_in_threadpool(
            lambda: service.feed.read(after, 1, types=types, batch=batch, prefix=caller.prefix)
        )
    except errors.InvalidRequest as error:
        raise invalid([Place(_RESUMED if last_event_id else error.place, error.expected)]) from None
    start = after if page.events else page.next
    return StreamingResponse(
        _stream(_waiting(request), start, types, batch, caller.prefix, lambda: access.is_valid(request.scope)),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


_RESUMED: Final = "header Last-Event-ID"
_POSITION: Final = TypeAdapter(Annotated[int, Field(ge=0, lt=INTEGER_LIMIT), fields.Decimal])


async def _stream(
    waiting: Waiting,
    after: int,
    types: Sequence[str],
    batch: int | None,
    prefix: str | None = None,
    is_permitted: Callable[[], bool] = lambda: True,
) -> AsyncIterator[bytes]:
    """The messages of a stream. It ends soon after `is_permitted` returns False."""
    yield b"retry: 1000\n\n"
    async with waiting.follow(types, batch, prefix) as follower:
        ping_at = time.monotonic() + PING
        while not waiting.closed and is_permitted():
            start = after
            page = await waiting.read(follower, start, STREAM_READ, STREAM_BYTES)
            after = page.next
            if page.events:
                yield text_of(page, _messages)
            elif await goes_on(follower, start, page, ping_at):
                continue
            else:
                # The id advances even without events: otherwise a follower with a narrow filter would resume at a
                # position that may have been trimmed.
                yield b": alive\nid: %d\n\n" % after
            ping_at = time.monotonic() + PING


class Page(Protocol):
    """A page of the feed, or of the commands in it."""

    @property
    def next(self) -> int: ...

    @property
    def last(self) -> int: ...


async def goes_on(follower: Follower, start: int, page: Page, until: float) -> bool:
    """Whether to read on after an empty page, which began after the position `start`: at once if the page ended before
    the feed's end, otherwise as soon as `follower` is woken. False if the time is over. `until`: seconds of the
    monotonic clock."""
    if start < page.next < page.last:  # while the feed is in doubt, pages don't advance
        return time.monotonic() < until
    try:
        await asyncio.wait_for(follower.woken.wait(), max(0.0, until - time.monotonic()))
    except TimeoutError:
        return False
    follower.woken.clear()
    return True


def _messages(page: feed.EventPage) -> bytes:
    return b"".join(map(_message, page.events))


def _message(event: feed.Event) -> bytes:
    return b"id: %d\ndata: %b\n\n" % (event.position, feed.encoded(event))


def paged(page: feed.EventPage) -> Reply:
    """The response to a read of a page."""
    return Reply(text_of(page, _json), 200, EMPTY)


def _json(page: feed.EventPage) -> bytes:
    events = b",".join(map(feed.encoded, page.events))
    return b'{"events":[%b],"next":%d,"last":%d}' % (events, page.next, page.last)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _waiting(request: Request) -> Waiting:
    waiting: Waiting = request.app.state.waiting
    return waiting
