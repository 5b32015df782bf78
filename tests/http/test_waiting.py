"""Waiting inside the service's process: who wakes whom, without the shared poll and by it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from api import events, waiting
from api.waiting import Waiting
from core import feed, schema
from core.combiner import Inline
from core.db import Database
from core.service import Service

NEVER = 10_000.0


@pytest.fixture
def service(sqlite_url: str) -> Iterator[Service]:
    with Database(sqlite_url) as database:
        schema.migrate(database)
        opened = Service(database, combiner=Inline)
        yield opened
        opened.stop()


def run(service: Service, work: Callable[[Waiting], Awaitable[Any]]) -> None:
    async def within() -> None:
        together = Waiting(service)
        try:
            await asyncio.wait_for(work(together), 30)
        finally:
            together.close()

    asyncio.run(within())


def in_a_thread(work: Callable[[], object]) -> None:
    """As a request's thread commits."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_commit_of_this_process_wakes_without_the_poll(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only those whom it is for."""
    monkeypatch.setattr(waiting, "POLL", NEVER)

    async def work(together: Waiting) -> None:
        async with together.follow(["mine"]) as mine, together.follow(["other"]) as other:
            in_a_thread(lambda: service.append([feed.New("1", "mine")]))
            await mine.woken.wait()
            assert not other.woken.is_set()
            page = await together.read(mine, 0, 10)
            assert [event.id for event in page.events] == ["1"]
            assert (page.next, page.last) == (1, 1)
            assert (await together.read(other, 0, 10)).events == []

    run(service, work)


def test_a_commit_of_another_process_wakes_by_one_poll_for_all(
    service: Service, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of those who wait."""
    monkeypatch.setattr(waiting, "POLL", 0.05)
    heads = 0
    count = service.feed_head

    def counted() -> int:
        nonlocal heads
        heads += 1
        return count()

    monkeypatch.setattr(service, "feed_head", counted)

    async def work(together: Waiting) -> None:
        followers = [together.follow() for _ in range(100)]
        woken = [await follower.__aenter__() for follower in followers]
        with Database(sqlite_url) as elsewhere:
            begun = heads
            feed_elsewhere = Service(elsewhere, combiner=Inline)
            in_a_thread(lambda: feed_elsewhere.append([feed.New("1", "theirs")]))
        await asyncio.gather(*(each.woken.wait() for each in woken))
        # One that found nothing may have been under way.
        assert heads - begun <= 2
        for follower in followers:
            await follower.__aexit__(None, None, None)

    run(service, work)


def test_a_silent_stream_says_how_far_it_was_read(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one who sees few events resumes behind all that were not for him."""
    monkeypatch.setattr(events, "PING", 0.05)

    async def work(together: Waiting) -> None:
        messages = events._stream(together, 0, ["mine"], None)
        assert await anext(messages) == b"retry: 1000\n\n"
        service.append([feed.New("1", "other"), feed.New("2", "other")])
        while (message := await anext(messages)) != b": alive\nid: 2\n\n":
            assert message == b": alive\nid: 0\n\n"
        service.append([feed.New("3", "mine")])
        assert (await anext(messages)).startswith((b"id: 3\ndata: ", b": alive\nid: 2\n\n"))
        await messages.aclose()  # type: ignore[attr-defined]

    run(service, work)
