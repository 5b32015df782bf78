"""`client.processes`: processes, their instances, parked events and commands, and the calls of workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lastbit import errors
from lastbit._calls import LONGEST_HOLD, MOST_EVENTS, Poll, ask, pages, poll_forever
from lastbit._drivers import AsyncDriver, Driver
from lastbit._protocol import Flow, Service, resource, single
from lastbit._shapes import expect
from lastbit.models import Json
from lastbit.processes.models import (
    CommandPage,
    Definition,
    Handled,
    Instance,
    InstanceDetails,
    IssuedCommand,
    ProcessSummary,
)


def _path(name: str, *rest: str) -> str:
    if not all(isinstance(part, str) and part for part in rest):
        raise errors.InvalidArgument(f"the name of an instance is a text, not {rest!r}")
    return resource("processes", single("a process's name", name), *rest)


def _define(
    service: Service, name: str, partitions: int | None, ttl: float | None, release: float | None, after: int | None
) -> Flow[Definition]:
    body = {"partitions": partitions, "ttl": ttl, "release": release, "after": after}
    return ask(service, "PUT", _path(name), Definition.from_json, body=body)


def _count_unnamed(service: Service, name: str, after: int, upto: int, count: int) -> Flow[Definition]:
    body = {"after": after, "upto": upto, "count": count}
    return ask(service, "POST", f"{_path(name)}/unnamed", Definition.from_json, body=body)


def _list(service: Service) -> Flow[tuple[ProcessSummary, ...]]:
    def decode(data: Json) -> tuple[ProcessSummary, ...]:
        return tuple(map(ProcessSummary.from_json, data["processes"]))

    return ask(service, "GET", "/v1/processes", decode)


def _instances(service: Service, name: str, status: str | None, page_size: int) -> Flow[None]:
    params = [] if status is None else [("status", status)]
    return pages(service, _path(name), "instances", Instance.from_json, params, page_size)


def _get(service: Service, name: str, instance: str) -> Flow[InstanceDetails]:
    return ask(service, "GET", _path(name, instance), InstanceDetails.from_json)


def _delete(service: Service, name: str) -> Flow[None]:
    yield from service.call("DELETE", _path(name))


def _retry(service: Service, name: str, instance: str, event: str | None) -> Flow[int]:
    def count(data: Json) -> int:
        retrying: int = expect(data["retrying"], int)
        return retrying

    return ask(service, "POST", _path(name, instance, "retry"), count, body={"event": event})


def _handle(service: Service, name: str, instance: str, body: Mapping[str, Any]) -> Flow[Handled]:
    return ask(service, "POST", _path(name, instance, "handle"), Handled.from_json, body=body)


def _handle_many(
    service: Service, name: str, handlings: Sequence[Mapping[str, Any]]
) -> Flow[tuple[Handled | errors.ServiceError, ...]]:
    path = _path(name, "handle")

    def decode(data: Json) -> tuple[Handled | errors.ServiceError, ...]:
        results = tuple(map(result, data["results"]))
        if len(results) != len(handlings):
            raise ValueError(f"expected {len(handlings)} results, got {len(results)}")
        return results

    def result(data: Json) -> Handled | errors.ServiceError:
        problem = data["problem"]
        if problem is None:
            return Handled.from_json(data["handled"])
        status, places = expect(problem["status"], int), problem.get("errors") or ()
        return errors.service_error(status, expect(problem["code"], str), expect(problem["detail"], str), places, None)

    return ask(service, "POST", path, decode, body={"handlings": list(handlings)})


def _commands(
    service: Service, after: int | None, types: str | Iterable[str], process: str | None, wait: float, limit: int | None
) -> Flow[CommandPage]:
    options = [("after", after), ("process", process), ("wait", wait or None), ("limit", limit)]
    params = [(name, str(value)) for name, value in options if value is not None]
    params += [("type", name) for name in ((types,) if isinstance(types, str) else types)]
    return ask(service, "GET", "/v1/commands", CommandPage.from_json, params=tuple(params), hold=wait)


def _follow(service: Service, after: int, types: str | Iterable[str], process: str | None) -> Flow[None]:
    """Emits `IssuedCommand`s, without end."""
    types = types if isinstance(types, str) else tuple(types)

    def poll(service: Service, after: int | None) -> Flow[Poll]:
        page = yield from _commands(service, after, types, process, LONGEST_HOLD, MOST_EVENTS)
        return Poll(page.commands, page.next, page.last)

    return poll_forever(service, after, poll)


def handling(
    event: str, position: int, worker: str, epoch: int, version: int, outcome: Mapping[str, Any]
) -> dict[str, Any]:
    """The body of a `handle` call."""
    fence = {"worker": worker, "epoch": epoch}
    return {"event": {"id": event, "position": position}, "fence": fence, "version": version, **outcome}


class Processes:
    """`client.processes`. All methods raise `ServiceError` (`ProcessNotFound`, `InstanceNotFound`, `InvalidRequest`)
    and `ServiceUnreachable`."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def define(
        self,
        name: str,
        *,
        partitions: int | None = None,
        ttl: float | None = None,
        release: float | None = None,
        after: int | None = None,
    ) -> Definition:
        """Define a process, or change its workers' `ttl` and `release` times (as for a consumer group). A new process
        has 32 `partitions` by default; it starts with all stored events, or above the position `after`. Raises
        `PartitionsFixed`, `PositionTrimmed`."""
        return self._driver.run(_define, name, partitions, ttl, release, after)

    def count_unnamed(self, name: str, after: int, upto: int, count: int) -> Definition:
        """Add the number of events above the position `after`, up to `upto`, that named no instance. Workers call this.
        If these events were counted up to another position than `after`, it changes nothing. Returns the process as it
        is then. Raises `ProcessNotFound`."""
        return self._driver.run(_count_unnamed, name, after, upto, count)

    def list(self) -> tuple[ProcessSummary, ...]:
        """The processes, by name."""
        return self._driver.run(_list)

    def instances(self, name: str, *, status: str | None = None, page_size: int = 100) -> Iterator[Instance]:
        """The instances by name, fetched page by page: all of them, or by `status` those that are `running` or
        `finished`, or that have `parked` events."""
        return self._driver.iterate(_instances, name, status, page_size)

    def get(self, name: str, instance: str) -> InstanceDetails:
        """One instance: its state, the events that it received, its timers and commands."""
        return self._driver.run(_get, name, instance)

    def retry(self, name: str, instance: str, *, event: str | None = None) -> int:
        """Retry the instance's parked events, or only the event with this id. Returns their number; if a response was
        lost and the call repeated, without those that the first attempt retried."""
        return self._driver.run(_retry, name, instance, event)

    def delete(self, name: str) -> None:
        """Delete a process with its instances. The commands that it issued can be read as long as the feed keeps their
        events. Raises `ConsumerGroupInUse`."""
        self._driver.run(_delete, name)

    def commands(
        self,
        *,
        after: int = 0,
        types: str | Iterable[str] = (),
        process: str | None = None,
        wait: float = 0,
        limit: int | None = None,
    ) -> CommandPage:
        """One page of issued commands above the position `after`; 0 for all that are stored. `wait`: seconds to wait,
        up to 60, if there is none yet. `limit`: maximum number, up to 1,000; by default 100. Raises
        `PositionTrimmed`."""
        return self._driver.run(_commands, after, types, process, wait, limit)

    def follow(
        self, *, after: int = 0, types: str | Iterable[str] = (), process: str | None = None
    ) -> Iterator[IssuedCommand]:
        """The commands above `after`, and then new ones as they arrive, without end. Store the `position` of the last
        one you finished, and execute each `id` once. Raises `PositionTrimmed`."""
        return self._driver.iterate(_follow, after, types, process)

    def handle(
        self,
        name: str,
        instance: str,
        *,
        event: str,
        position: int,
        worker: str,
        epoch: int,
        version: int,
        outcome: Mapping[str, Any],
    ) -> Handled:
        """Store the outcome of an event; `outcome` is the result of `Process.decide`. Raises `StaleEpoch`,
        `VersionConflict`."""
        body = handling(event, position, worker, epoch, version, outcome)
        return self._driver.run(_handle, name, instance, body)

    def handle_many(
        self, name: str, handlings: Sequence[Mapping[str, Any]]
    ) -> tuple[Handled | errors.ServiceError, ...]:
        """Store the outcomes of up to 100 events, with one call. Each handling has the fields of the body of `POST
        /v1/processes/{process}/handle`. The results are in the same order; a refused handling has its error as its
        result, and does not affect the others."""
        return self._driver.run(_handle_many, name, handlings)


class AsyncProcesses:
    """`Processes`, awaited."""

    __slots__ = ("_driver",)

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    async def define(
        self,
        name: str,
        *,
        partitions: int | None = None,
        ttl: float | None = None,
        release: float | None = None,
        after: int | None = None,
    ) -> Definition:
        """Define a process, or change its workers' `ttl` and `release` times (as for a consumer group). A new process
        has 32 `partitions` by default; it starts with all stored events, or above the position `after`. Raises
        `PartitionsFixed`, `PositionTrimmed`."""
        return await self._driver.run(_define, name, partitions, ttl, release, after)

    async def count_unnamed(self, name: str, after: int, upto: int, count: int) -> Definition:
        """Add the number of events above the position `after`, up to `upto`, that named no instance. Workers call this.
        If these events were counted up to another position than `after`, it changes nothing. Returns the process as it
        is then. Raises `ProcessNotFound`."""
        return await self._driver.run(_count_unnamed, name, after, upto, count)

    async def list(self) -> tuple[ProcessSummary, ...]:
        """The processes, by name."""
        return await self._driver.run(_list)

    def instances(self, name: str, *, status: str | None = None, page_size: int = 100) -> AsyncIterator[Instance]:
        """The instances by name, fetched page by page: all of them, or by `status` those that are `running` or
        `finished`, or that have `parked` events."""
        return self._driver.iterate(_instances, name, status, page_size)

    async def get(self, name: str, instance: str) -> InstanceDetails:
        """One instance: its state, the events that it received, its timers and commands."""
        return await self._driver.run(_get, name, instance)

    async def retry(self, name: str, instance: str, *, event: str | None = None) -> int:
        """Retry the instance's parked events, or only the event with this id. Returns their number; if a response was
        lost and the call repeated, without those that the first attempt retried."""
        return await self._driver.run(_retry, name, instance, event)

    async def delete(self, name: str) -> None:
        """Delete a process with its instances. The commands that it issued can be read as long as the feed keeps their
        events. Raises `ConsumerGroupInUse`."""
        await self._driver.run(_delete, name)

    async def commands(
        self,
        *,
        after: int = 0,
        types: str | Iterable[str] = (),
        process: str | None = None,
        wait: float = 0,
        limit: int | None = None,
    ) -> CommandPage:
        """One page of issued commands above the position `after`; 0 for all that are stored. `wait`: seconds to wait,
        up to 60, if there is none yet. `limit`: maximum number, up to 1,000; by default 100. Raises
        `PositionTrimmed`."""
        return await self._driver.run(_commands, after, types, process, wait, limit)

    def follow(
        self, *, after: int = 0, types: str | Iterable[str] = (), process: str | None = None
    ) -> AsyncIterator[IssuedCommand]:
        """The commands above `after`, and then new ones as they arrive, without end. Store the `position` of the last
        one you finished, and execute each `id` once. Raises `PositionTrimmed`."""
        return self._driver.iterate(_follow, after, types, process)

    async def handle(
        self,
        name: str,
        instance: str,
        *,
        event: str,
        position: int,
        worker: str,
        epoch: int,
        version: int,
        outcome: Mapping[str, Any],
    ) -> Handled:
        """Store the outcome of an event; `outcome` is the result of `Process.decide`. Raises `StaleEpoch`,
        `VersionConflict`."""
        body = handling(event, position, worker, epoch, version, outcome)
        return await self._driver.run(_handle, name, instance, body)

    async def handle_many(
        self, name: str, handlings: Sequence[Mapping[str, Any]]
    ) -> tuple[Handled | errors.ServiceError, ...]:
        """Store the outcomes of up to 100 events, with one call. Each handling has the fields of the body of `POST
        /v1/processes/{process}/handle`. The results are in the same order; a refused handling has its error as its
        result, and does not affect the others."""
        return await self._driver.run(_handle_many, name, handlings)
