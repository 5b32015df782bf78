"""Drivers execute flows: one with blocking calls, one in the tasks of an event loop.

A flow yields steps, and a driver executes them: it sends the requests, sleeps for the pauses and passes the emitted
values to the caller. A client makes one driver. Its handles (batches, consumer groups, webhooks, tallies, processes,
ackers) hold that driver and never the client, so no handle imports the module of the clients.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from lastbit._protocol import Answer, Emit, Failure, Flow, Outcome, Request, Service
from lastbit.errors import ServiceUnreachable

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

P = ParamSpec("P")
T = TypeVar("T")


def unpicklable(connected: object) -> NoReturn:
    """In place of `__reduce__`. Raises `TypeError`."""
    raise TypeError(
        "a client of Lastbit, or what it has made, can't be sent to another process: make the client there. In Spark, "
        "lastbit.spark.ack(df) acks a frame from the executors"
    )


def without_frames(error: ServiceUnreachable) -> ServiceUnreachable:
    """The error without the frames of this package: its sentence says all, and should not stand below twenty lines."""
    return error.with_traceback(None)


@dataclass(frozen=True, slots=True)
class _Returned(Generic[T]):
    """The value of a finished flow."""

    value: T


class Driver:
    """Drives flows in the calling thread. `send` performs one request; several threads may call it at a time."""

    __slots__ = ("_send", "service")

    def __init__(self, service: Service, send: Callable[[Request], Answer | Failure]) -> None:
        self.service = service
        self._send = send

    __reduce__ = unpicklable

    def run(self, call: Callable[Concatenate[Service, P], Flow[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """The value of the flow that `call` makes of the service and the arguments. The flow emits nothing."""
        try:
            step = self._advance(call(self.service, *args, **kwargs))
        except ServiceUnreachable as error:
            raise without_frames(error) from None
        assert isinstance(step, _Returned), "a flow that emits is for iterate"
        return step.value

    def iterate(
        self, call: Callable[Concatenate[Service, P], Flow[None]], *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[Any]:
        """The values that the flow emits, each computed on demand. Arguments are checked before this returns."""
        return self._values(call(self.service, *args, **kwargs))

    def _values(self, flow: Flow[None]) -> Iterator[Any]:
        try:
            while isinstance(step := self._advance(flow), Emit):
                yield step.value
        except ServiceUnreachable as error:
            raise without_frames(error) from None

    def _advance(self, flow: Flow[T]) -> Emit | _Returned[T]:
        """Carry out the flow until it emits a value or returns one."""
        outcome: Outcome = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as end:
                return _Returned(end.value)
            if isinstance(step, Emit):
                return step
            if isinstance(step, Request):
                outcome = self._send(step)
            else:
                time.sleep(step.seconds)
                outcome = None


class AsyncDriver:
    """Drives flows in the tasks of one event loop."""

    __slots__ = ("_send", "service")

    def __init__(self, service: Service, send: Callable[[Request], Awaitable[Answer | Failure]]) -> None:
        self.service = service
        self._send = send

    __reduce__ = unpicklable

    def for_threads(self, loop: AbstractEventLoop) -> Driver:
        """A driver for other threads: their requests are sent in this driver's event loop. When that is closed, they
        raise `asyncio.CancelledError`."""
        from asyncio import CancelledError, run_coroutine_threadsafe

        async def send(request: Request) -> Answer | Failure:
            return await self._send(request)

        def send_in_loop(request: Request) -> Answer | Failure:
            if loop.is_closed():
                raise CancelledError
            return run_coroutine_threadsafe(send(request), loop).result()

        return Driver(self.service, send_in_loop)

    async def run(self, call: Callable[Concatenate[Service, P], Flow[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """The value of the flow that `call` makes of the service and the arguments. The flow emits nothing."""
        try:
            step = await self._advance(call(self.service, *args, **kwargs))
        except ServiceUnreachable as error:
            raise without_frames(error) from None
        assert isinstance(step, _Returned), "a flow that emits is for iterate"
        return step.value

    def iterate(
        self, call: Callable[Concatenate[Service, P], Flow[None]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[Any]:
        """The values that the flow emits, each computed on demand. Arguments are checked before this returns."""
        return self._values(call(self.service, *args, **kwargs))

    async def _values(self, flow: Flow[None]) -> AsyncIterator[Any]:
        try:
            while isinstance(step := await self._advance(flow), Emit):
                yield step.value
        except ServiceUnreachable as error:
            raise without_frames(error) from None

    async def _advance(self, flow: Flow[T]) -> Emit | _Returned[T]:
        """Carry out the flow until it emits a value or returns one."""
        outcome: Outcome = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as end:
                return _Returned(end.value)
            if isinstance(step, Emit):
                return step
            if isinstance(step, Request):
                outcome = await self._send(step)
            else:
                # Imported here, as the command line and Spark's executors import this module but need no event loop.
                import asyncio

                await asyncio.sleep(step.seconds)
                outcome = None


class HasDriver(Protocol):
    """The part of a `Client` that other objects of this package use."""

    @property
    def driver(self) -> Driver: ...


class HasAsyncDriver(Protocol):
    """The part of an `AsyncClient` that other objects of this package use."""

    @property
    def driver(self) -> AsyncDriver: ...
