"""Consumer groups: `client.groups` creates and shows them, and makes the calls of a worker.

A consumer group's partitions are shared equally by its workers. `lastbit.streams.ConsumerGroup` makes a process a
worker. It uses the calls `sync`, `commit` and `leave`; use these directly where it does not fit.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from lastbit import errors
from lastbit._calls import ask, pages
from lastbit._drivers import AsyncDriver, Driver
from lastbit._protocol import Flow, Service, resource, single
from lastbit._shapes import timestamp, timestamp_or_none
from lastbit.models import Fence, Json


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group. `partitions` can't be changed. `partition_of` names the function that maps a key to its
    partition. `ttl`: seconds without a sync after which a worker loses its partitions. `release`: seconds that a worker
    has to drain a partition."""

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
            "created_at": timestamp(data["created_at"]),
        }

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data))


@dataclass(frozen=True, slots=True)
class GroupSummary(Group):
    """A consumer group with the number of its live `workers` and of its `owned` partitions."""

    workers: int
    owned: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(**cls._fields(data), workers=data["workers"], owned=data["owned"])


@dataclass(frozen=True, slots=True)
class GroupWorker:
    """A worker of a consumer group. `live`: its lease has not ended. `partitions`: the number of partitions that it
    owns; `releasing`: the number of those that it must release."""

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
            timestamp(data["started_at"]),
            timestamp(data["last_seen"]),
            timestamp(data["lease_until"]),
            data["partitions"],
            data["releasing"],
        )


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """A partition, its `owner` and its position. All offsets up to `floor` are done; between `floor` and `high`,
    `outstanding` offsets are not. `head`: the source's last offset, as a worker reported it. `lag`: the distance from
    the floor to it. The position is None before the first commit."""

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
            timestamp_or_none(data["since"]),
            timestamp_or_none(data["release_by"]),
            data["floor"],
            data["high"],
            data["outstanding"],
            data["head"],
            data["lag"],
            data["token"],
            timestamp_or_none(data["updated_at"]),
        )


@dataclass(frozen=True, slots=True)
class GroupDetails(Group):
    """A consumer group with its workers, by name, and its partitions, by number."""

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
    """A partition assigned to a worker at this `epoch`. `snapshot` is for `AckWindow.restore`; `snapshot`, `floor` and
    `high` are None before the first commit."""

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
    """All partitions of a worker, for `ttl` seconds from when it sent the sync; and those that it must release, within
    `release_within` seconds from when it sent the first sync that may have been answered with them. `partitions`: the
    number of the group's partitions. `incarnation`: another one if the group was deleted and created again. Both are
    None from a service of an earlier release."""

    ttl: float
    assigned: tuple[Granted, ...]
    release: tuple[int, ...]
    release_within: float
    partitions: int | None = None
    incarnation: str | None = None

    @classmethod
    def from_json(cls, data: Json) -> Self:
        assigned = tuple(map(Granted.from_json, data["assigned"]))
        identity = data.get("partitions"), data.get("incarnation")
        return cls(data["ttl"], assigned, tuple(data["release"]), data["release_within"], *identity)


@dataclass(frozen=True, slots=True)
class Committed:
    """A partition's position after a commit, merged with the previous one."""

    partition: int
    epoch: int
    floor: int
    high: int
    outstanding: int
    token: str | None

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["partition"], data["epoch"], data["floor"], data["high"], data["outstanding"], data["token"])


@dataclass(frozen=True, slots=True)
class Commit:
    """A window to commit, for `Groups.commit_many`; the fields are the arguments of `Groups.commit`."""

    partition: int
    epoch: int
    snapshot: bytes
    token: str | None = None
    head: int | None = None

    def to_json(self) -> Json:
        """Raises `InvalidArgument`."""
        partition = self.partition
        if not isinstance(partition, int) or isinstance(partition, bool) or partition < 0:
            raise errors.InvalidArgument(f"a partition is a whole number, not {partition!r}")
        window = {"snapshot": b64encode(self.snapshot).decode(), "token": self.token, "head": self.head}
        return {"partition": partition, "epoch": self.epoch, **window}


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of one of many commits. `code`: None if it is committed, else why it was refused: `stale_epoch`, or
    `invalid_request` for a position of a process beyond the feed's end."""

    partition: int
    code: str | None

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["partition"], data["code"])


def _path(name: str, *rest: str) -> str:
    return resource("consumer-groups", single("the name of a consumer group", name), *rest)


def _create(service: Service, name: str, partitions: int, ttl: float | None, release: float | None) -> Flow[Group]:
    body = {"partitions": partitions, "ttl": ttl, "release": release}
    return ask(service, "PUT", _path(name), Group.from_json, body=body)


def _get(service: Service, name: str) -> Flow[GroupDetails]:
    return ask(service, "GET", _path(name), GroupDetails.from_json)


def _list(service: Service, page_size: int) -> Flow[None]:
    return pages(service, "/v1/consumer-groups", "groups", GroupSummary.from_json, [], page_size)


def _delete(service: Service, name: str) -> Flow[None]:
    yield from service.call("DELETE", _path(name))


Drained = int | tuple[int, int]
"""A partition and the epoch at which it was owned. A partition alone is released at any epoch, so such a call must not
arrive late."""


def _drained(partition_and_epoch: Drained) -> int | dict[str, int]:
    if isinstance(partition_and_epoch, int):
        return partition_and_epoch
    try:
        partition, epoch = partition_and_epoch
    except (TypeError, ValueError):
        raise errors.InvalidArgument(
            f"drained must contain pairs of a partition and its epoch, not {partition_and_epoch!r}"
        ) from None
    return {"partition": partition, "epoch": epoch}


def sync(
    service: Service, name: str, worker: str, session: str, drained: Iterable[Drained], capacity: int | None
) -> Flow[Synced]:
    body = {"worker": worker, "session": session, "drained": list(map(_drained, drained)), "capacity": capacity}
    return ask(service, "POST", _path(name, "sync"), Synced.from_json, body=body)


def commit(service: Service, fence: Fence, snapshot: bytes, token: str | None, head: int | None) -> Flow[Committed]:
    body = {"worker": fence.worker, **Commit(fence.partition, fence.epoch, snapshot, token, head).to_json()}
    path = _path(fence.group, "partitions", str(body.pop("partition")), "position")
    return ask(service, "PUT", path, Committed.from_json, body=body)


def commit_many(service: Service, name: str, worker: str, commits: Sequence[Commit]) -> Flow[tuple[CommitResult, ...]]:
    def decode(data: Json) -> tuple[CommitResult, ...]:
        results = tuple(map(CommitResult.from_json, data["results"]))
        if [result.partition for result in results] != [commit.partition for commit in commits]:
            raise ValueError("expected a result for each commit, in order")
        return results

    body = {"worker": worker, "positions": [commit.to_json() for commit in commits]}
    return ask(service, "PUT", _path(name, "positions"), decode, body=body)


def leave(service: Service, name: str, worker: str, session: str | None) -> Flow[None]:
    params = () if session is None else (("session", session),)
    yield from service.call("DELETE", _path(name, "workers", single("a worker's name", worker)), params=params)


class Groups:
    """`client.groups`. All methods raise `ServiceError` (`ConsumerGroupNotFound`, `InvalidRequest`) and
    `ServiceUnreachable`."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def create(self, name: str, *, partitions: int, ttl: float | None = None, release: float | None = None) -> Group:
        """Create a consumer group, or change the times of an existing one; every worker may do so at startup. Defaults
        for a new one: `ttl` 10 seconds, `release` 30 seconds. Raises `PartitionsFixed`."""
        return self._driver.run(_create, name, partitions, ttl, release)

    def get(self, name: str) -> GroupDetails:
        """The consumer group with its workers, partitions, owners and positions."""
        return self._driver.run(_get, name)

    def list(self, *, page_size: int = 100) -> Iterator[GroupSummary]:
        """The consumer groups by name, fetched page by page."""
        return self._driver.iterate(_list, page_size)

    def delete(self, name: str) -> None:
        """Delete a consumer group and its positions. Raises `ConsumerGroupInUse` while it has workers."""
        self._driver.run(_delete, name)

    def sync(
        self, name: str, worker: str, session: str, *, drained: Iterable[Drained] = (), capacity: int | None = None
    ) -> Synced:
        """Join the group or renew the lease, release the `drained` partitions, and receive the worker's share.
        `drained`: pairs of a partition and the epoch at which it was owned. `session`: random, new for each process.
        `capacity`: maximum partitions. The lease starts when this call is sent. Raises `SessionReplaced`."""
        return self._driver.run(sync, name, worker, session, drained, capacity)

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
        """Merge the `snapshot` of an `AckWindow` into the partition's position. `token`: the source's own name for the
        floor; `head`: the source's last offset. Commits may be repeated and reordered. Raises `StaleEpoch`."""
        return self._driver.run(commit, Fence(name, partition, worker, epoch), snapshot, token, head)

    def commit_many(self, name: str, commits: Iterable[Commit], *, worker: str) -> tuple[CommitResult, ...]:
        """`commit` for up to 1,000 partitions, in one transaction. The results are in the order of the `commits`; a
        refused one doesn't affect the others."""
        return self._driver.run(commit_many, name, worker, tuple(commits))

    def leave(self, name: str, worker: str, *, session: str | None = None) -> None:
        """Release all partitions of the worker at once; with `session`, only if that is still its current session."""
        self._driver.run(leave, name, worker, session)


class AsyncGroups:
    """`Groups`, awaited."""

    __slots__ = ("_driver",)

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    async def create(
        self, name: str, *, partitions: int, ttl: float | None = None, release: float | None = None
    ) -> Group:
        """Create a consumer group, or change the times of an existing one; every worker may do so at startup. Defaults
        for a new one: `ttl` 10 seconds, `release` 30 seconds. Raises `PartitionsFixed`."""
        return await self._driver.run(_create, name, partitions, ttl, release)

    async def get(self, name: str) -> GroupDetails:
        """The consumer group with its workers, partitions, owners and positions."""
        return await self._driver.run(_get, name)

    def list(self, *, page_size: int = 100) -> AsyncIterator[GroupSummary]:
        """The consumer groups by name, fetched page by page."""
        return self._driver.iterate(_list, page_size)

    async def delete(self, name: str) -> None:
        """Delete a consumer group and its positions. Raises `ConsumerGroupInUse` while it has workers."""
        await self._driver.run(_delete, name)

    async def sync(
        self, name: str, worker: str, session: str, *, drained: Iterable[Drained] = (), capacity: int | None = None
    ) -> Synced:
        """Join the group or renew the lease, release the `drained` partitions, and receive the worker's share.
        `drained`: pairs of a partition and the epoch at which it was owned. `session`: random, new for each process.
        `capacity`: maximum partitions. The lease starts when this call is sent. Raises `SessionReplaced`."""
        return await self._driver.run(sync, name, worker, session, drained, capacity)

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
        """Merge the `snapshot` of an `AckWindow` into the partition's position. `token`: the source's own name for the
        floor; `head`: the source's last offset. Commits may be repeated and reordered. Raises `StaleEpoch`."""
        return await self._driver.run(commit, Fence(name, partition, worker, epoch), snapshot, token, head)

    async def commit_many(self, name: str, commits: Iterable[Commit], *, worker: str) -> tuple[CommitResult, ...]:
        """`commit` for up to 1,000 partitions, in one transaction. The results are in the order of the `commits`; a
        refused one doesn't affect the others."""
        return await self._driver.run(commit_many, name, worker, tuple(commits))

    async def leave(self, name: str, worker: str, *, session: str | None = None) -> None:
        """Release all partitions of the worker at once; with `session`, only if that is still its current session."""
        await self._driver.run(leave, name, worker, session)
