"""The route that reads the commands of processes."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from api.access.rules import ANY, needs
from api.problems import documented
from api.routes import fields
from api.routes.events import Position, goes_on
from api.routes.free_json import response, stored
from api.routes.route import JsonRoute, PrefixedRouter
from core import feed
from core.processes import outbox
from core.service import Service

router = PrefixedRouter(prefix="/v1/commands", route_class=JsonRoute, tags=["processes"])

Limit = Annotated[int, Query(ge=1, le=1000), fields.Decimal]


class Command(BaseModel):
    id: str = Field(description="derived from process, instance and step; execute each id once")
    position: int = Field(description="the position of its event in the feed")
    process: str
    instance: str
    step: str
    type: str
    data: Any
    at: datetime


class CommandPage(BaseModel):
    commands: list[Command]
    next: int = Field(
        description="the last position that was read; pass it as `after` to the next call, until it equals `last`"
    )
    last: int = Field(description="the feed's last position")


def command_json(command: outbox.Command) -> dict[str, Any]:
    return {**{name: getattr(command, name) for name in Command.model_fields}, "data": stored(command.data)}


@router.get("", response_model=CommandPage, responses=documented("position_trimmed", "invalid_request"))
@needs(*ANY)
async def read_commands(
    request: Request,
    after: Position = 0,
    limit: Limit = 100,
    wait: Annotated[fields.Wait, Query(description="seconds to wait for the first command")] = 0,
    types: Annotated[list[str], Query(alias="type", description="repeat it to allow several types")] = [],  # noqa: B006
    process: str | None = None,
) -> Response:
    """The commands after a position, in the order of the feed. With `wait`, waits until there is one."""
    service: Service = request.app.state.service
    waiting = request.app.state.waiting

    def read(start: int) -> outbox.CommandPage:
        return service.processes.commands(start, limit, types=types, process=process)

    if not wait:
        return _page(await run_in_threadpool(read, after))
    until = time.monotonic() + wait
    async with waiting.follow([f"{feed.COMMAND}.{type}" for type in types], beginning=f"{feed.COMMAND}.") as follower:
        start, page = after, await run_in_threadpool(read, after)
        while not page.commands and await goes_on(follower, start, page, until) and not waiting.closed:
            start = page.next
            page = await run_in_threadpool(read, start)
    return _page(page)


def _page(page: outbox.CommandPage) -> Response:
    return response(
        {"commands": [command_json(command) for command in page.commands], "next": page.next, "last": page.last}
    )
