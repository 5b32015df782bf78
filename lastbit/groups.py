"""Consumer groups: `client.groups` makes them, shows who works on what, and speaks for a worker.

A group's partitions are shared equally by its workers. `lastbit.streams.ConsumerGroup` makes a process a worker; it
stands on the calls `sync`, `commit` and `leave`, which are of use where that does not fit.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from lastbit import errors
from lastbit._calls import _ask, _pages
from lastbit._protocol import Flow, Service, resource
from lastbit.models import Fence, Json, _time, _time_or_none

if TYPE_CHECKING:
    from lastbit.client import AsyncClient, Client


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group. `partitions` is fixed, and `partition_of` says how a key finds its partition. `ttl` is how long
    a worker may be silent, `release` how long it may take to drain what it gives back, both in seconds."""

    name: str
    partitions: int
    partition_of: str
    ttl: float
    release: float
    created_at: datetime

    @classmethod
    def _fields(cls, data: Json) -> dict[str, Any]:
        return {
            "name": data["name"],
            "partitions": data["partitions"],
            "partition_of": data["partition_of"],
            "ttl": data["ttl"],
            "release": data["release"],
            "created_at": _time(data["created_at"]),
        }

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data))


@dataclass(frozen=True, slots=True)
class GroupSummary(Group):
    """A group with the number of its live `workers`, and of its partitions that are `owned`."""

    workers: int
    owned: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data), workers=data["workers"], owned=data["owned"])


@dataclass(frozen=True, slots=True)
class GroupWorker:
    """A worker of a group; `live`: its lease has not ended. It holds so many `partitions`, and is to give back
    `releasing` of them."""

    worker: str
    live: bool
    capacity: int | None
    started_at: datetime
    last_seen: datetime
    lease_until: datetime
    partitions: int
    releasing: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(
            data["worker"],
            data["live"],
            data["capacity"],
            _time(data["started_at"]),
            _time(data["last_seen"]),
            _time(data["lease_until"]),
            data["partitions"],
            data["releasing"],
        )


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """A partition: its `owner` since when, and how far it was read. All up to `floor` is done, of what lies between it
    and `high` so many offsets are `outstanding`, `head` is the source's last offset as a worker told, and `lag` how far
    the floor is behind; None before the first commit."""

    partition: int
    owner: str | None
    epoch: int
    since: datetime | None
    release_by: datetime | None
    floor: int | None
    high: int | None
    outstanding: int | None
    head: int | None
    lag: int | None
    token: str | None
    updated_at: datetime | None

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(
            data["partition"],
            data["owner"],
            data["epoch"],
            _time_or_none(data["since"]),
            _time_or_none(data["release_by"]),
            data["floor"],
            data["high"],
            data["outstanding"],
            data["head"],
            data["lag"],
            data["token"],
            _time_or_none(data["updated_at"]),
        )


@dataclass(frozen=True, slots=True)
class GroupDetails(Group):
    """A group with its workers, by name, and its partitions, by number."""

    workers: tuple[GroupWorker, ...]
    positions: tuple[GroupPosition, ...]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        workers = tuple(map(GroupWorker.from_json, data["workers"]))
        return cls(
            **cls._fields(data), workers=workers, positions=tuple(map(GroupPosition.from_json, data["positions"]))
        )


@dataclass(frozen=True, slots=True)
class Granted:
    """A partition that a worker holds at this `epoch`. `snapshot` is what `AckWindow.restore` takes; it, `floor` and
    `high` are None where nothing was committed yet."""

    partition: int
    epoch: int
    floor: int | None
    high: int | None
    snapshot: bytes | None
    token: str | None

    @classmethod
    def from_json(cls, data: Json) -> Self:
        text = data["outstanding"]
        snapshot = None if text is None else b64decode(text, validate=True)
        return cls(data["partition"], data["epoch"], data["floor"], data["high"], snapshot, data["token"])


@dataclass(frozen=True, slots=True)
class Synced:
    """All that a worker holds now, for `ttl` seconds from when it asked, and which of that it is to give back, within
    `release_within` seconds from when it was told first."""

    ttl: float
    assigned: tuple[Granted, ...]
    release: tuple[int, ...]
    release_within: float

    @classmethod
    def from_json(cls, data: Json) -> Self:
        assigned = tuple(map(Granted.from_json, data["assigned"]))
        return cls(data["ttl"], assigned, tuple(data["release"]), data["release_within"])


@dataclass(frozen=True, slots=True)
class Committed:
    """What a partition's position is after a commit, merged with what was there before."""

    partition: int
    epoch: int
    floor: int
    high: int
    outstanding: int
    token: str | None

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["partition"], data["epoch"], data["floor"], data["high"], data["outstanding"], data["token"])


def _path(name: str, *rest: str) -> str:
    if not isinstance(name, str) or not name:
        raise errors.InvalidArgument(f"a consumer group has a name, not {name!r}")
    return resource("consumer-groups", name, *rest)


def _create(service: Service, name: str, partitions: int, ttl: float | None, release: float | None) -> Flow[Group]:
    body = {"partitions": partitions, "ttl": ttl, "release": release}
    return _ask(service, "PUT", _path(name), Group.from_json, body=body)


def _get(service: Service, name: str) -> Flow[GroupDetails]:
    return _ask(service, "GET", _path(name), GroupDetails.from_json)


def _list(service: Service, page_size: int) -> Flow[None]:
    return _pages(service, "/v1/consumer-groups", "groups", GroupSummary.from_json, [], page_size)


def _delete(service: Service, name: str) -> Flow[None]:
    yield from service.call("DELETE", _path(name))


Drained = int | tuple[int, int]
"""A partition and the epoch at which it was held. A partition alone is freed at any epoch, so that call must not come
late."""


def _drained(given: Drained) -> int | dict[str, int]:
    if isinstance(given, int):
        return given
    try:
        partition, epoch = given
    except (TypeError, ValueError):
        raise errors.InvalidArgument(f"what is drained is a partition and its epoch, not {given!r}") from None
    return {"partition": partition, "epoch": epoch}


def _sync(
    service: Service, name: str, worker: str, session: str, drained: Iterable[Drained], capacity: int | None
) -> Flow[Synced]:
    body = {"worker": worker, "session": session, "drained": list(map(_drained, drained)), "capacity": capacity}
    return _ask(service, "POST", _path(name, "sync"), Synced.from_json, body=body)


def _commit(service: Service, fence: Fence, snapshot: bytes, token: str | None, head: int | None) -> Flow[Committed]:
    partition = fence.partition
    if not isinstance(partition, int) or isinstance(partition, bool) or partition < 0:
        raise errors.InvalidArgument(f"a partition is a whole number, not {partition!r}")
    held = {"worker": fence.worker, "epoch": fence.epoch}
    body = {**held, "snapshot": b64encode(snapshot).decode(), "token": token, "head": head}
    path = _path(fence.group, "partitions", str(partition), "position")
    return _ask(service, "PUT", path, Committed.from_json, body=body)


def _leave(service: Service, name: str, worker: str, session: str | None) -> Flow[None]:
    params = () if session is None else (("session", session),)
    yield from service.call("DELETE", _path(name, "workers", worker), params=params)


class Groups:
    """`client.groups`. All methods raise `ServiceError` (`ConsumerGroupNotFound`, `InvalidRequest`) and
    `ServiceUnreachable`."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(self, name: str, *, partitions: int, ttl: float | None = None, release: float | None = None) -> Group:
        """Make a group, or change the times of one that exists; each worker may do so when it starts. At first `ttl` is
        10 seconds, `release` 30. Raises `PartitionsFixed`."""
        return self._client._run(_create(self._client._service, name, partitions, ttl, release))

    def get(self, name: str) -> GroupDetails:
        """Who is in the group, who owns which partition since when, and how far each was read."""
        return self._client._run(_get(self._client._service, name))

    def list(self, *, page_size: int = 100) -> Iterator[GroupSummary]:
        """The groups by name, fetched as they are asked for."""
        return self._client._iterate(_list(self._client._service, page_size))

    def delete(self, name: str) -> None:
        """Remove a group with its positions. Raises `ConsumerGroupInUse` while workers are in it."""
        self._client._run(_delete(self._client._service, name))

    def sync(
        self, name: str, worker: str, session: str, *, drained: Iterable[Drained] = (), capacity: int | None = None
    ) -> Synced:
        """Join or stay, give back what is `drained`, and take what the worker's share asks for. `drained`: pairs of a
        partition and the epoch at which it was held. `session` is random and new for each process. The lease counts
        from before this call. Raises `SessionReplaced`."""
        return self._client._run(_sync(self._client._service, name, worker, session, drained, capacity))

    def commit(
        self,
        name: str,
        partition: int,
        *,
        worker: str,
        epoch: int,
        snapshot: bytes,
        token: str | None = None,
        head: int | None = None,
    ) -> Committed:
        """Merge the `snapshot` of an `AckWindow` into the partition's position. `token` is what the source calls the
        floor, `head` the source's last offset. May be repeated and overtaken. Raises `StaleEpoch`."""
        flow = _commit(self._client._service, Fence(name, partition, worker, epoch), snapshot, token, head)
        return self._client._run(flow)

    def leave(self, name: str, worker: str, *, session: str | None = None) -> None:
        """Free all that the worker holds, at once; with `session` only if it is still that one."""
        self._client._run(_leave(self._client._service, name, worker, session))


class AsyncGroups:
    """`Groups`, awaited."""

    __slots__ = ("_client",)

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(
        self, name: str, *, partitions: int, ttl: float | None = None, release: float | None = None
    ) -> Group:
        """Make a group; see `Groups.create`."""
        return await self._client._run(_create(self._client._service, name, partitions, ttl, release))

    async def get(self, name: str) -> GroupDetails:
        """Who owns what; see `Groups.get`."""
        return await self._client._run(_get(self._client._service, name))

    def list(self, *, page_size: int = 100) -> AsyncIterator[GroupSummary]:
        """The groups by name, fetched as they are asked for."""
        return self._client._iterate(_list(self._client._service, page_size))

    async def delete(self, name: str) -> None:
        """Remove a group; see `Groups.delete`."""
        await self._client._run(_delete(self._client._service, name))

    async def sync(
        self, name: str, worker: str, session: str, *, drained: Iterable[Drained] = (), capacity: int | None = None
    ) -> Synced:
        """Join or stay; see `Groups.sync`."""
        return await self._client._run(_sync(self._client._service, name, worker, session, drained, capacity))

    async def commit(
        self,
        name: str,
        partition: int,
        *,
        worker: str,
        epoch: int,
        snapshot: bytes,
        token: str | None = None,
        head: int | None = None,
    ) -> Committed:
        """Keep a partition's position; see `Groups.commit`."""
        flow = _commit(self._client._service, Fence(name, partition, worker, epoch), snapshot, token, head)
        return await self._client._run(flow)

    async def leave(self, name: str, worker: str, *, session: str | None = None) -> None:
        """Free all that the worker holds; see `Groups.leave`."""
        await self._client._run(_leave(self._client._service, name, worker, session))
