"""The routes of consumer groups: the owner of each partition, and its committed position."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final

from fastapi import Path, Query, Request, Response
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StringConstraints, WithJsonSchema
from starlette.concurrency import run_in_threadpool

from api import expectations
from api.access.rules import ANY, needs
from api.limits import sizes
from api.problems import BODY, Place, documented, invalid
from api.routes import cursors, fields
from api.routes.fields import Body
from api.routes.reply import Reply
from api.routes.route import JsonRoute, PrefixedRouter
from api.routes.writes import Writes
from api.server.bodies import from_base64
from core.consumer_groups import groups, leases, positions
from core.errors import ConsumerGroupNotFound, CoreError
from core.service import Service
from core.service.consumer_groups import commits_of, committed
from lastbit.ids import INTEGER_LIMIT
from lastbit.streams.errors import CorruptSnapshot
from lastbit.streams.snapshot import MAX_BYTES, MAX_OFFSET, Snapshot
from lastbit.tokens import Role

router = PrefixedRouter(prefix="/v1/consumer-groups", route_class=JsonRoute, tags=["consumer groups"])

LONGEST: Final = 3600
"""Maximum seconds of a ttl or a release."""

MAX_POSITIONS: Final = 1000
"""Positions in one call, which are committed in one transaction."""

SMALL: Final = 4096
"""Characters of the snapshots that may be decoded in the event loop."""


def _not_reserved(name: str) -> str:
    if name.startswith(groups.OWN_NAMES):
        raise ValueError(f"expected a group of yours: names that begin with {groups.OWN_NAMES} are reserved")
    return name


# Names are parts of paths, so they contain no slash, and aren't "." or "..".
_NAME: Final = r"^[A-Za-z0-9_][\x21-\x2e\x30-\x7e]{0,254}$"
_IN_WORDS: Final = (
    "a letter, digit or underscore, then up to 254 visible ASCII characters other than a blank or a slash"
)
Name = Annotated[str, StringConstraints(pattern=expectations.worded(_NAME, _IN_WORDS))]
AnyGroup = Annotated[Name, Path(alias="group")]
GroupName = Annotated[Name, AfterValidator(_not_reserved), Path(alias="group")]
PartitionNumber = Annotated[int, Path(alias="partition", ge=0, lt=groups.MOST_PARTITIONS), fields.Decimal]
WorkerName = Annotated[Name, Path(alias="worker")]
Session = Annotated[str, StringConstraints(pattern=expectations.visible_ascii(64))]
Partition = Annotated[int, Field(ge=0, lt=groups.MOST_PARTITIONS)]
Epoch = Annotated[int, Field(ge=0, lt=INTEGER_LIMIT)]


class GroupBody(Body):
    partitions: int = Field(ge=1, le=groups.MOST_PARTITIONS, description="can't be changed later")
    ttl: float | None = Field(
        None,
        ge=0.1,
        le=LONGEST,
        allow_inf_nan=False,
        description="seconds without a sync after which a worker loses its partitions; default 10",
    )
    release: float | None = Field(
        None,
        ge=0,
        le=LONGEST,
        allow_inf_nan=False,
        description="seconds that a worker has to drain a partition that it must release; default 30",
    )


class DrainedPartition(Body):
    """A drained partition, and the epoch at which the worker held it."""

    partition: Partition
    epoch: Epoch


def _with_epoch(value: Any) -> Any:
    """Accept a plain number, which has no epoch: clients of earlier releases send it."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if not 0 <= value < groups.MOST_PARTITIONS:
        raise ValueError(f"expected a partition: 0 to {groups.MOST_PARTITIONS - 1}")
    return DrainedPartition.model_construct(partition=value, epoch=None)


Drained = Annotated[
    DrainedPartition,
    BeforeValidator(_with_epoch),
    WithJsonSchema(
        {
            "oneOf": [
                {"$ref": "#/components/schemas/DrainedPartition"},
                {"type": "integer", "minimum": 0, "exclusiveMaximum": groups.MOST_PARTITIONS},
            ]
        }
    ),
]


class SyncBody(Body):
    LIMIT = 1024 * 1024

    worker: Name = Field(description="the worker's name, stable and unique in the group")
    session: Session = Field(description="random, new for each process: 1 to 64 visible ASCII characters")
    drained: list[Drained] = Field(
        default_factory=list,
        max_length=groups.MOST_PARTITIONS,
        description="partitions of `release` that the worker has drained, with the epochs at which it held them; "
        "a plain number, as clients of earlier releases send, means the partition at its current epoch",
    )
    capacity: int | None = Field(
        None,
        ge=0,
        le=groups.MOST_PARTITIONS,
        description="the maximum number of partitions for this worker; null: no limit",
    )


class Window(Body):
    """What a worker commits for one partition."""

    epoch: Epoch
    snapshot: str = Field(
        max_length=4 * (MAX_BYTES + 2) // 3,
        description="base64 of `AckWindow.snapshot()`",
        json_schema_extra={"contentEncoding": "base64"},
    )
    token: str | None = Field(
        None, max_length=1024, description="the source's own name for the floor; stored unchanged"
    )
    head: int | None = Field(None, ge=0, le=MAX_OFFSET, description="the source's last offset, to compute the lag")

    def commit(self, group: str, partition: int, worker: str, place: str) -> positions.Commit:
        """`place` is that of this object in the request. Raises `Problem`, which names the place."""
        fence = positions.Fence(group, partition, worker, self.epoch)
        return positions.Commit(fence, _snapshot(f"{place}.snapshot", self.snapshot), self.token, self.head)


class PositionBody(Window):
    LIMIT = sizes.BODY

    worker: Name

    @property
    def is_small(self) -> bool:
        """Whether it may be decoded in the event loop."""
        return len(self.snapshot) <= SMALL

    def to_core(self, group: str, partition: int) -> positions.Commit:
        """Raises `Problem`."""
        return self.commit(group, partition, self.worker, "body")


class NewPosition(Window):
    partition: Partition


class PositionsBody(Body):
    LIMIT = sizes.BODY

    worker: Name
    positions: list[NewPosition] = Field(min_length=1, max_length=MAX_POSITIONS)

    @property
    def is_small(self) -> bool:
        """Whether it may be decoded in the event loop."""
        return sum([len(position.snapshot) for position in self.positions]) <= SMALL


class Fence(Body):
    group: Name
    partition: Partition
    worker: Name
    epoch: Epoch

    def to_core(self) -> positions.Fence:
        return positions.Fence(self.group, self.partition, self.worker, self.epoch)


class Group(BaseModel):
    name: str
    partitions: int
    partition_of: str = Field(description="a key's partition is the `crc32` of its bytes, modulo `partitions`")
    ttl: float
    release: float
    created_at: datetime


class GroupSummary(Group):
    workers: int = Field(description="the number of live workers")
    owned: int = Field(description="the number of partitions with an owner")


class GroupPage(BaseModel):
    groups: list[GroupSummary]
    next: str | None


class Worker(BaseModel):
    worker: str
    live: bool = Field(description="whether its lease is valid")
    capacity: int | None
    started_at: datetime
    last_seen: datetime
    lease_until: datetime
    partitions: int = Field(description="the number of partitions that it holds")
    releasing: int = Field(description="the number of these that it must release")


class Position(BaseModel):
    partition: int
    owner: str | None
    epoch: int = Field(description="increases with every new owner")
    since: datetime | None = Field(description="when the current owner got the partition")
    release_by: datetime | None = Field(description="when the owner loses the partition, even if it isn't drained")
    floor: int | None = Field(description="the offset that is safe to commit; null before the first commit")
    high: int | None = Field(description="the highest offset that was begun")
    outstanding: int | None = Field(description="the number of unfinished offsets from `floor` to `high`")
    head: int | None = Field(description="the source's last offset, as a worker last reported it")
    lag: int | None = Field(description="the distance from `floor` to the higher of `head` and `high`")
    token: str | None
    updated_at: datetime | None


class GroupDetails(Group):
    workers: list[Worker]
    positions: list[Position]


class Held(BaseModel):
    partition: int
    epoch: int = Field(description="send it with every write for the partition")
    floor: int | None = Field(description="null: nothing has been committed")
    high: int | None
    outstanding: str | None = Field(
        description="base64 of the snapshot for `AckWindow.restore`", json_schema_extra={"contentEncoding": "base64"}
    )
    token: str | None


class Synced(BaseModel):
    ttl: float = Field(description="seconds until the lease ends; sync every third of it")
    assigned: list[Held] = Field(description="all partitions that the worker holds, including those in `release`")
    release: list[int] = Field(description="assigned partitions to stop and drain; repeated until they are drained")
    release_within: float = Field(
        description="seconds for draining, from the first sync that may have been answered with the partition"
    )
    partitions: int = Field(description="the number of the group's partitions")
    incarnation: str = Field(
        description="changes if the group is deleted and created again under its name: then stop, as nothing that was "
        "known of the group need be true of this one"
    )


class Committed(BaseModel):
    partition: int
    epoch: int
    floor: int
    high: int
    outstanding: int = Field(description="the number of unfinished offsets from `floor` to `high`")
    token: str | None


class PositionResult(BaseModel):
    partition: int
    code: str | None = Field(
        description="null: the position is committed; `stale_epoch`: the worker no longer owns the partition at this "
        "epoch; `invalid_request`: a position of a process is beyond the feed's end. Nothing was changed then"
    )


class PositionResults(BaseModel):
    results: list[PositionResult] = Field(description="one for each entry, in order")


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _group(group: groups.ConsumerGroup) -> dict[str, Any]:
    document = {name: getattr(group, name) for name in Group.model_fields}
    return {**document, "ttl": group.ttl.total_seconds(), "release": group.release.total_seconds()}


def _seconds(value: float | None) -> timedelta | None:
    return None if value is None else timedelta(seconds=value)


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _snapshot(place: str, text: str) -> Snapshot:
    try:
        return Snapshot.decode(from_base64(place, text))
    except CorruptSnapshot as error:
        raise invalid([Place(place, str(error))]) from None


@router.put(
    "/{group}",
    response_model=Group,
    responses={201: {"model": Group, "description": "created"}, **documented("partitions_fixed", *BODY)},
)
@needs(Role.CONSUME)
def put_consumer_group(group: GroupName, body: GroupBody, request: Request, response: Response) -> dict[str, Any]:
    """Create a group, or change its `ttl` and `release`. The number of partitions can't be changed. 201 if the group is
    new, else 200."""
    created_group, new = _service(request).consumer_groups.put(
        group, body.partitions, _seconds(body.ttl), _seconds(body.release)
    )
    response.status_code = 201 if new else 200
    return _group(created_group)


@router.get("", response_model=GroupPage, responses=documented("invalid_request"))
@needs(*ANY)
def list_consumer_groups(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000), fields.Decimal] = 100,
    cursor: cursors.Cursor = None,
) -> dict[str, Any]:
    """The groups, by name, including the service's own."""
    summaries = _service(request).consumer_groups.page(cursors.decode_name("groups", cursor), limit)
    documents = [{**_group(summary.group), "workers": summary.workers, "owned": summary.owned} for summary in summaries]
    return {
        "groups": documents,
        "next": cursors.encode("groups", summaries[-1].group.name) if len(summaries) == limit else None,
    }


@router.get(
    "/{group}", response_model=GroupDetails, responses=documented("consumer_group_not_found", "invalid_request")
)
@needs(*ANY)
def get_consumer_group(group: AnyGroup, request: Request) -> dict[str, Any]:
    """A consumer group's workers, and the owner and position of each partition."""
    details = _service(request).consumer_groups.get(group)
    return {
        **_group(details.group),
        "workers": [{name: getattr(worker, name) for name in Worker.model_fields} for worker in details.workers],
        "positions": [
            {name: getattr(position, name) for name in Position.model_fields} for position in details.positions
        ],
    }


@router.delete(
    "/{group}",
    status_code=204,
    responses=documented("consumer_group_not_found", "consumer_group_in_use", "invalid_request"),
)
@needs(Role.ADMIN)
def delete_consumer_group(group: GroupName, request: Request) -> Response:
    """Delete a group with its positions. Refused while it has workers."""
    _service(request).consumer_groups.delete(group)
    return Response(status_code=204)


@router.post(
    "/{group}/sync", response_model=Synced, responses=documented("consumer_group_not_found", "session_replaced", *BODY)
)
@needs(Role.CONSUME)
def sync_worker(group: GroupName, body: SyncBody, request: Request) -> dict[str, Any]:
    """Join the group or stay in it: renew the worker's lease, release drained partitions, and get assigned partitions.
    It may be repeated at any time. The response has all partitions that the worker holds."""
    drained = [(lease.partition, lease.epoch) for lease in body.drained]
    result = _service(request).consumer_groups.sync(
        group, leases.Caller(body.worker, body.session, body.capacity, drained)
    )
    assigned = [
        {
            **{name: getattr(lease, name) for name in Held.model_fields if name != "outstanding"},
            "outstanding": _base64(lease.outstanding),
        }
        for lease in result.assigned
    ]
    return {
        "ttl": result.ttl.total_seconds(),
        "assigned": assigned,
        "release": result.release,
        "release_within": result.release_within.total_seconds(),
        "partitions": result.group_partitions,
        "incarnation": result.incarnation,
    }


@router.delete(
    "/{group}/workers/{worker}", status_code=204, responses=documented("consumer_group_not_found", "invalid_request")
)
@needs(Role.CONSUME)
def remove_worker(
    group: GroupName,
    worker: WorkerName,
    request: Request,
    session: Annotated[
        Session | None, Query(description="leave only if the worker's current session is this one")
    ] = None,
) -> Response:
    """Leave the group. The worker's partitions are free at once. No effect if the worker is not in the group."""
    _service(request).consumer_groups.leave(group, worker, session)
    return Response(status_code=204)


@router.put(
    "/{group}/partitions/{partition}/position",
    response_model=Committed,
    responses=documented("consumer_group_not_found", "stale_epoch", *BODY),
)
@needs(Role.CONSUME)
async def commit_position(
    group: GroupName, partition: PartitionNumber, body: PositionBody, request: Request
) -> Response:
    """Commit a window. It is merged with the stored position, so commits may be repeated or arrive in any order. 409
    `stale_epoch`: the worker no longer owns the partition at this epoch. In the group of a process, a position beyond
    the feed's end is a 422."""
    decode = partial(body.to_core, group, partition)
    commit = decode() if body.is_small else await run_in_threadpool(decode)
    writes: Writes = request.app.state.writes
    return single(await writes.run(commits_of([commit]))).response()


@router.put(
    "/{group}/positions",
    response_model=PositionResults,
    responses=documented("consumer_group_not_found", *BODY),
)
@needs(Role.CONSUME)
async def commit_positions(group: GroupName, body: PositionsBody, request: Request) -> Response:
    """Commit the windows of many partitions, in one transaction. A refused entry has its code in its result; it changes
    nothing, and the others are committed. Each window is merged with the stored position, as in a single commit."""
    decode = partial(commits_in, body, group)
    commits = decode() if body.is_small else await run_in_threadpool(decode)
    writes: Writes = request.app.state.writes
    return many(commits, await writes.run(commits_of(commits))).response()


def single(results: Sequence[positions.Committed | CoreError]) -> Reply:
    """The response to a single commit. Raises its error."""
    position = committed(results)
    return Reply.of({name: getattr(position, name) for name in Committed.model_fields})


def commits_in(body: PositionsBody, group: str) -> list[positions.Commit]:
    """Raises `Problem`."""
    return [
        position.commit(group, position.partition, body.worker, f"body.positions[{place}]")
        for place, position in enumerate(body.positions)
    ]


def many(commits: Sequence[positions.Commit], results: Sequence[positions.Committed | CoreError]) -> Reply:
    """The response to many commits for one group. Raises `ConsumerGroupNotFound`, which is the result of all of them,
    as one transaction found the group or didn't."""
    for result in results:
        if isinstance(result, ConsumerGroupNotFound):
            raise result
    return Reply.of(
        {
            "results": [
                {"partition": commit.fence.partition, "code": result.code if isinstance(result, CoreError) else None}
                for commit, result in zip(commits, results, strict=True)
            ]
        }
    )
