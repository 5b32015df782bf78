"""Both drivers carry out a flow step by step: requests, pauses, emitted values and the value at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from lastbit import InvalidArgument
from lastbit._drivers import AsyncDriver, Driver
from lastbit._protocol import Answer, Emit, Flow, Pause, Request, Service
from lastbit.webhooks import AsyncWebhooks, Webhooks

SERVICE = Service("http://service")


class Sender:
    """Answers each request with its path, and records the paths."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def send(self, request: Request) -> Answer:
        self.paths.append(request.url)
        return Answer(200, {}, request.url.encode())

    async def send_async(self, request: Request) -> Answer:
        await asyncio.sleep(0)
        return self.send(request)


def asks(service: Service, *paths: str) -> Flow[list[bytes]]:
    bodies = []
    for path in paths:
        answer = yield from service.call("GET", path)
        bodies.append(answer.body)
        assert (yield Pause(0.001)) is None
    return bodies


def emits(service: Service, count: int) -> Flow[None]:
    for number in range(count):
        yield from service.call("GET", f"/{number}")
        assert (yield Emit(number)) is None


async def first(values: AsyncIterator[int], count: int) -> list[int]:
    results = []
    async for value in values:
        results.append(value)
        if len(results) == count:
            break
    return results


def test_a_flow_gets_its_answers_and_returns_its_value() -> None:
    """In the order of its requests, with either driver."""
    expected = [b"http://service/a", b"http://service/b"]
    assert Driver(SERVICE, Sender().send).run(asks, "/a", "/b") == expected
    assert asyncio.run(AsyncDriver(SERVICE, Sender().send_async).run(asks, "/a", "/b")) == expected


def test_values_are_fetched_on_demand() -> None:
    """A caller that stops after two values of a thousand has sent two requests."""
    sender = Sender()
    values = Driver(SERVICE, sender.send).iterate(emits, 1000)
    assert sender.paths == []
    assert [next(values), next(values)] == [0, 1]
    assert len(sender.paths) == 2

    sender = Sender()
    assert asyncio.run(first(AsyncDriver(SERVICE, sender.send_async).iterate(emits, 1000), 2)) == [0, 1]
    assert len(sender.paths) == 2


def test_iteration_ends_after_the_last_value() -> None:
    """The end of the flow is the end of the iteration."""
    assert list(Driver(SERVICE, Sender().send).iterate(emits, 3)) == [0, 1, 2]
    assert asyncio.run(first(AsyncDriver(SERVICE, Sender().send_async).iterate(emits, 3), 10)) == [0, 1, 2]


def test_arguments_are_checked_before_the_first_value() -> None:
    """Not only in the loop over the values."""
    sender = Sender()
    with pytest.raises(InvalidArgument):
        Webhooks(Driver(SERVICE, sender.send)).deliveries(-1)
    with pytest.raises(InvalidArgument):
        AsyncWebhooks(AsyncDriver(SERVICE, sender.send_async)).deliveries(-1)
    assert sender.paths == []
