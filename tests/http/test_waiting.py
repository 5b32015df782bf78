"""Many wait, the database is asked once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from api import events, waiting
from api.waiting import Waiting
from core import feed, schema
from core.batches import Opening
from core.combiner import Inline
from core.db import Database
from core.service import Service


class Asked(Service):
    """Counts what the database is asked."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, combiner=Inline)
        self.counts: Counter[str] = Counter()
        self.on_head: Callable[[], object] = lambda: None

    def feed_head(self) -> int:
        self.counts["head"] += 1
        self.on_head()
        return super().feed_head()

    def events(self, *arguments: Any, **named: Any) -> feed.Page:
        self.counts["events"] += 1
        return super().events(*arguments, **named)

    def get(self, batch: int) -> Any:
        self.counts["get"] += 1
        return super().get(batch)


@pytest.fixture
def asked(sqlite_url: str) -> Iterator[Asked]:
    with Database(sqlite_url) as database:
        schema.migrate(database)
        yield Asked(database)


async def _watch(waiters: Waiting, batch: int, watching: asyncio.Semaphore) -> bytes:
    async with waiters.watch(batch) as ended:
        watching.release()
        await ended.wait()
        return await waiters.look(batch)


async def _follow(waiters: Waiting, after: int, watching: asyncio.Semaphore) -> feed.Page:
    async with waiters.follow(["batch.completed"]) as follower:
        watching.release()
        await follower.woken.wait()
        return await waiters.read(follower, after, 100)


def test_the_feed_is_polled_once_for_all_who_wait(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, an interval is one look at the feed's position; what another process commits is read once, and
    each waiter is told."""
    monkeypatch.setattr(waiting, "POLL", 0.01)

    async def scene() -> None:
        batches = [asked.open(Opening(items=0)).batch.id for _ in range(100)]
        start = asked.feed_head()
        waiters, watching, loop = Waiting(asked), asyncio.Semaphore(0), asyncio.get_running_loop()
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(_watch(waiters, each, watching)) for each in batches]
        tasks += [asyncio.create_task(_follow(waiters, start, watching)) for _ in range(50)]
        for _ in tasks:
            await watching.acquire()
        polled = asyncio.Event()
        asked.counts.clear()
        asked.on_head = lambda: asked.counts["head"] >= 10 and loop.call_soon_threadsafe(polled.set)
        await asyncio.wait_for(polled.wait(), 30)
        asked.on_head = lambda: None
        assert asked.counts["events"] == asked.counts["get"] == 0

        def of_another_process() -> None:
            with Database(str(asked.database.url)) as database:
                other = Service(database, combiner=Inline)
                for batch in batches:
                    other.seal(batch)

        await asyncio.to_thread(of_another_process)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert all(b'"state":"complete"' in answer for answer in answers[:100])
        assert all(page.events for page in answers[100:])
        assert asked.counts["get"] == 100
        assert asked.counts["events"] <= 100 < len(tasks), "each commit may be read by itself, but not by each waiter"

    asyncio.run(scene())


def test_nobody_waits_nobody_asks(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader ends with the last waiter, and begins anew with the next; nothing falls between."""
    monkeypatch.setattr(waiting, "POLL", 0.01)

    async def scene() -> None:
        waiters = Waiting(asked)
        for _ in range(3):
            batch = asked.open(Opening(items=0)).batch.id
            task = asyncio.create_task(_watch(waiters, batch, watching := asyncio.Semaphore(0)))
            await watching.acquire()
            await asyncio.to_thread(asked.seal, batch)
            assert b'"state":"complete"' in await asyncio.wait_for(task, 30)
            reader = waiters._reader
            assert reader is not None
            await asyncio.wait_for(reader, 30)
        asked.counts.clear()
        await asyncio.to_thread(asked.seal, asked.open(Opening(items=0)).batch.id)
        assert asked.counts == Counter()

    asyncio.run(scene())


def test_a_commit_of_this_process_wakes_without_the_poll(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only those whom it is for."""
    monkeypatch.setattr(waiting, "POLL", 10_000.0)

    async def scene() -> None:
        waiters = Waiting(asked)
        async with waiters.follow(["mine"]) as mine, waiters.follow(["other"]) as other:
            await asyncio.to_thread(asked.append, [feed.New("1", "mine")])
            await asyncio.wait_for(mine.woken.wait(), 30)
            assert not other.woken.is_set()
            page = await waiters.read(mine, 0, 10)
            assert [event.id for event in page.events] == ["1"]
            assert (page.next, page.last) == (1, 1)
            assert (await waiters.read(other, 0, 10)).events == []
        waiters.close()

    asyncio.run(scene())


def test_a_silent_stream_says_how_far_it_was_read(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one who sees few events resumes behind all that were not for him."""
    monkeypatch.setattr(events, "PING", 0.05)

    async def scene() -> None:
        messages = events._stream(Waiting(asked), 0, ["mine"], None)
        assert await anext(messages) == b"retry: 1000\n\n"
        asked.append([feed.New("1", "other"), feed.New("2", "other")])
        while (message := await asyncio.wait_for(anext(messages), 30)) != b": alive\nid: 2\n\n":
            assert message == b": alive\nid: 0\n\n"
        asked.append([feed.New("3", "mine")])
        while (message := await asyncio.wait_for(anext(messages), 30)) == b": alive\nid: 2\n\n":
            pass
        assert message.startswith(b"id: 3\ndata: ")
        await messages.aclose()  # type: ignore[attr-defined]

    asyncio.run(scene())
