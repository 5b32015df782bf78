"""Many clients wait, and the database is asked once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from api.routes import events, long_polls
from api.routes.long_polls import Filter, Follower, Waiting
from core import errors, feed
from core.batches.batch import Opening
from core.commits.combiner import Inline
from core.service import Service
from core.storage import schema, tables
from core.storage.database import Database
from tests.conftest import Server
from tests.mutants import mutant
from tests.support.servers import running_service


class CountingService(Service):
    """A service that counts its database reads."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, combiner=Inline)
        self.counts: Counter[str] = Counter()
        self.on_head: Callable[[], object] = lambda: None
        self.on_get: Callable[[], object] = lambda: None

        head, read, get = self.feed.head, self.feed.read, self.batches.get

        def counted_head() -> int:
            self.counts["head"] += 1
            self.on_head()
            return head()

        def counted_read(*arguments: Any, **names: Any) -> feed.EventPage:
            self.counts["events"] += 1
            return read(*arguments, **names)

        def counted_get(batch: int) -> Any:
            self.counts["get"] += 1
            state = get(batch)
            self.on_get()
            return state

        self.feed.head = counted_head  # type: ignore[method-assign]
        self.feed.read = counted_read  # type: ignore[method-assign]
        self.batches.get = counted_get  # type: ignore[method-assign]


@pytest.fixture
def asked(sqlite_url: str) -> Iterator[CountingService]:
    with Database(sqlite_url) as database:
        schema.migrate(database)
        yield CountingService(database)


async def _reads(asked: CountingService, count: int, start: Callable[[], None] = lambda: None) -> None:
    """Return once `count` more batches were read."""
    read, loop = asyncio.Semaphore(0), asyncio.get_running_loop()
    asked.on_get = lambda: loop.call_soon_threadsafe(read.release)
    start()
    for _ in range(count):
        await asyncio.wait_for(read.acquire(), 30)
    asked.on_get = lambda: None


async def _follow(waiters: Waiting, after: int, watching: asyncio.Semaphore) -> feed.EventPage:
    async with waiters.follow(["batch.completed"]) as follower:
        watching.release()
        await follower.woken.wait()
        return await waiters.read(follower, after, 100)


def test_the_feed_is_polled_once_for_all_waiters(asked: CountingService, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, each interval reads the feed's position once; another process's commits are read once, and
    each waiter gets them."""
    monkeypatch.setattr(long_polls, "POLL", 0.01)

    async def scene() -> None:
        batches = [asked.batches.open(Opening(items=0)).batch.id for _ in range(100)]
        start = asked.feed.head()
        waiters, watching, loop = Waiting(asked), asyncio.Semaphore(0), asyncio.get_running_loop()
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(waiters.end_of(batch, 60)) for batch in batches]
        await _reads(asked, len(tasks))
        tasks += [asyncio.create_task(_follow(waiters, start, watching)) for _ in range(50)]
        for _ in range(50):
            await watching.acquire()
        polled = asyncio.Event()
        asked.counts.clear()
        asked.on_head = lambda: asked.counts["head"] >= 10 and loop.call_soon_threadsafe(polled.set)
        await asyncio.wait_for(polled.wait(), 30)
        asked.on_head = lambda: None
        assert asked.counts["events"] == asked.counts["get"] == 0

        def append_elsewhere() -> None:
            with Database(str(asked.database.url)) as database:
                other = Service(database, combiner=Inline)
                for batch in batches:
                    other.batches.seal(batch)

        await asyncio.to_thread(append_elsewhere)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert all(b'"state":"complete"' in answer for answer in answers[:100])
        assert all(page.events for page in answers[100:])
        assert asked.counts["get"] == 100
        assert asked.counts["events"] <= 100 < len(tasks), "each commit may be read on its own, but not by each waiter"

    asyncio.run(scene())


@mutant(
    "all-streams-catch-up-at-once",
    "api.routes.long_polls:Waiting.__init__",
    "anyio.CapacityLimiter(CATCHING_UP)",
    "anyio.CapacityLimiter(40)",
)
def test_few_streams_catch_up_at_the_same_time(asked: CountingService) -> None:
    """The others wait without a thread, as each that decodes events makes commits wait for the GIL."""
    asked.feed.append([feed.NewEvent("one", "mine")])
    entered, may_end, read = threading.Semaphore(0), threading.Event(), asked.feed.read

    def held(*arguments: Any, **names: Any) -> feed.EventPage:
        entered.release()
        assert may_end.wait(30)
        return read(*arguments, **names)

    asked.feed.read = held  # type: ignore[method-assign]

    async def catch_up(waiters: Waiting) -> feed.EventPage:
        async with waiters.follow(["mine"]) as follower:
            return await waiters.read(follower, 0, 100, size_limit=2**20)

    async def scene() -> None:
        waiters = Waiting(asked)
        tasks = [asyncio.create_task(catch_up(waiters)) for _ in range(10)]
        for _ in range(long_polls.CATCHING_UP):
            assert await asyncio.to_thread(entered.acquire, timeout=30)
        is_one_more = await asyncio.to_thread(entered.acquire, timeout=0.2)
        may_end.set()
        assert all(len(page.events) == 1 for page in await asyncio.wait_for(asyncio.gather(*tasks), 30))
        assert not is_one_more

    asyncio.run(scene())


def test_without_waiters_the_database_is_not_polled(asked: CountingService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader ends with the last waiter and starts again with the next one; no event is lost in between."""
    monkeypatch.setattr(long_polls, "POLL", 0.01)

    async def scene() -> None:
        waiters = Waiting(asked)
        for _ in range(3):
            batch = asked.batches.open(Opening(items=0)).batch.id
            task = asyncio.create_task(waiters.end_of(batch, 60))
            await _reads(asked, 1)
            await asyncio.to_thread(asked.batches.seal, batch)
            assert b'"state":"complete"' in await asyncio.wait_for(task, 30)
            reader = waiters._reader
            assert reader is not None
            await asyncio.wait_for(reader, 30)
        asked.counts.clear()
        await asyncio.to_thread(asked.batches.seal, asked.batches.open(Opening(items=0)).batch.id)
        assert asked.counts == Counter()

    asyncio.run(scene())


def test_a_doubt_about_the_database_ends_no_wait(asked: CountingService) -> None:
    """The batch is read again, and the request waits on for its end."""

    async def scene() -> None:
        waiters = Waiting(asked)
        batch = asked.batches.open(Opening(items=0)).batch.id
        task = asyncio.create_task(waiters.end_of(batch, 60))
        await _reads(asked, 1)
        for _ in range(3):
            await _reads(asked, 1, asked.database._doubt)
        await asyncio.to_thread(asked.batches.seal, batch)
        assert b'"state":"complete"' in await asyncio.wait_for(task, 30)

    asyncio.run(scene())


def test_the_time_of_a_wait_includes_its_doubts(asked: CountingService) -> None:
    async def scene() -> None:
        waiters = Waiting(asked)
        batch = asked.batches.open(Opening(items=0)).batch.id
        task = asyncio.create_task(waiters.end_of(batch, 1))
        await _reads(asked, 1)
        while not task.done():
            asked.database._doubt()
            await asyncio.wait({task}, timeout=0.05)
        assert b'"state":"open"' in task.result()

    asyncio.run(scene())


def test_the_end_of_a_batch_is_not_answered_from_an_earlier_read(asked: CountingService) -> None:
    """A request that a doubt woke has read the batch as it was; one that its end wakes reads it again."""

    async def scene() -> None:
        waiters = Waiting(asked)
        batch = asked.batches.open(Opening(items=0)).batch.id
        first = asyncio.create_task(waiters.end_of(batch, 60))
        await _reads(asked, 1)
        has_read, may_return = threading.Event(), threading.Event()

        def stay() -> None:
            asked.on_get = lambda: None
            has_read.set()
            may_return.wait(30)

        asked.on_get = stay
        asked.database._doubt()
        assert await asyncio.to_thread(has_read.wait, 30)
        second = asyncio.create_task(waiters.end_of(batch, 60))
        await _reads(asked, 1)
        await asyncio.to_thread(asked.batches.seal, batch)
        assert b'"state":"complete"' in await asyncio.wait_for(second, 30)
        may_return.set()
        assert b'"state":"complete"' in await asyncio.wait_for(first, 30)

    asyncio.run(scene())


def test_a_commit_of_this_process_wakes_waiters_without_the_poll(
    asked: CountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only the waiters that it concerns."""
    monkeypatch.setattr(long_polls, "POLL", 10_000.0)

    async def scene() -> None:
        waiters = Waiting(asked)
        async with waiters.follow(["mine"]) as follower, waiters.follow(["other"]) as other:
            await asyncio.to_thread(asked.feed.append, [feed.NewEvent("1", "mine")])
            await asyncio.wait_for(follower.woken.wait(), 30)
            assert not other.woken.is_set()
            page = await waiters.read(follower, 0, 10)
            assert [event.id for event in page.events] == ["1"]
            assert (page.next, page.last) == (1, 1)
            assert (await waiters.read(other, 0, 10)).events == []
        waiters.close()

    asyncio.run(scene())


def test_a_commit_of_many_events_is_read_to_its_end_without_the_poll(
    asked: CountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_polls, "POLL", 10_000.0)
    new = [feed.NewEvent(str(number), "other") for number in range(2 * long_polls.READ_FIRST)]

    async def scene() -> None:
        waiters = Waiting(asked)
        async with waiters.follow(["last"]) as follower:
            await asyncio.to_thread(asked.feed.append, [*new, feed.NewEvent("end", "last")])
            await asyncio.wait_for(follower.woken.wait(), 30)
            page = await waiters.read(follower, 0, 10)
            assert [event.id for event in page.events] == ["end"]
        waiters.close()

    asyncio.run(scene())


def test_a_silent_stream_reports_how_far_it_has_read(asked: CountingService, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a follower that sees few events resumes after all events that it didn't want."""
    monkeypatch.setattr(events, "PING", 0.05)

    async def scene() -> None:
        messages = events._stream(Waiting(asked), 0, ["mine"], None)
        assert await anext(messages) == b"retry: 1000\n\n"
        asked.feed.append([feed.NewEvent("1", "other"), feed.NewEvent("2", "other")])
        while (message := await asyncio.wait_for(anext(messages), 30)) != b": alive\nid: 2\n\n":
            assert message == b": alive\nid: 0\n\n"
        asked.feed.append([feed.NewEvent("3", "mine")])
        while (message := await asyncio.wait_for(anext(messages), 30)) == b": alive\nid: 2\n\n":
            pass
        assert message.startswith(b"id: 3\ndata: ")
        await messages.aclose()  # type: ignore[attr-defined]

    asyncio.run(scene())


class Limited(Waiting):
    """Fails if followers read more than fifty pages, as they would if they read on without a pause."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.reads = 0

    async def read(self, follower: Follower, after: int, limit: int, size_limit: int | None = None) -> feed.EventPage:
        self.reads += 1
        assert self.reads <= 50
        return await super().read(follower, after, limit, size_limit)


@pytest.fixture
def behind(asked: CountingService, monkeypatch: pytest.MonkeyPatch) -> CountingService:
    """A feed of 1,000 events, of which a page examines 100. Nothing is found by polls of the feed's end."""
    monkeypatch.setattr(long_polls, "POLL", 10_000.0)
    monkeypatch.setattr(feed, "EXAMINED", 100)
    asked.feed.append([feed.NewEvent(str(number), "other") for number in range(1000)])
    return asked


@mutant(
    "a-follower-far-behind-waits-for-an-event", "api.routes.events:goes_on", "start < page.next < page.last", "False"
)
@mutant(
    "a-follower-reads-on-at-the-end-of-the-feed",
    "api.routes.events:goes_on",
    "start < page.next < page.last",
    "-1 < page.next <= page.last",
)
def test_a_follower_far_behind_reads_on_at_once_and_waits_at_the_end(behind: CountingService) -> None:
    """A long poll that finds nothing below the feed's end waits there for a new event."""

    async def scene() -> None:
        waiters = Limited(behind)
        poll = asyncio.create_task(events.Asked(0, 10, ["mine"]).first_page(behind, waiters, 60))
        async with asyncio.timeout(30):
            while waiters.reads < 10:
                await asyncio.sleep(0)
        await asyncio.to_thread(behind.feed.append, [feed.NewEvent("wanted", "mine")])
        page = await asyncio.wait_for(poll, 30)
        assert ([event.id for event in page.events], page.next, page.last) == (["wanted"], 1001, 1001)
        # It may have been appended before the last page.
        assert waiters.reads <= 12
        waiters.close()

    asyncio.run(scene())


@mutant("a-long-poll-far-behind-has-no-end", "api.routes.events:goes_on", "time.monotonic() < until", "True")
def test_a_long_poll_far_behind_ends_with_its_time(behind: CountingService, monkeypatch: pytest.MonkeyPatch) -> None:
    """And tells how far it has read."""
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: behind.counts["events"]))

    async def scene() -> None:
        waiters = Limited(behind)
        for after in (None, 0):
            behind.counts.clear()
            page = await events.Asked(after, 10, ["mine"]).first_page(behind, waiters, 3)
            assert page == feed.EventPage([], 300, 1000)
        waiters.close()

    asyncio.run(scene())


def test_a_stream_far_behind_reads_on_and_reports_how_far(
    behind: CountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PING", 3)
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: behind.counts["events"]))
    behind.feed.append([feed.NewEvent("wanted", "mine")])

    async def scene() -> None:
        messages = events._stream(Limited(behind), 0, ["mine"], None)
        assert await anext(messages) == b"retry: 1000\n\n"
        for position in (300, 600, 900):
            assert await asyncio.wait_for(anext(messages), 30) == b": alive\nid: %d\n\n" % position
        assert (await asyncio.wait_for(anext(messages), 30)).startswith(b"id: 1001\ndata: ")
        await messages.aclose()  # type: ignore[attr-defined]

    asyncio.run(scene())


@mutant(
    "a-follower-reads-on-while-the-feed-is-in-doubt",
    "api.routes.events:goes_on",
    "start < page.next < page.last",
    "start <= page.next < page.last",
)
def test_a_follower_far_behind_waits_while_the_feed_is_in_doubt(behind: CountingService) -> None:
    """Pages don't advance then."""
    is_certain = threading.Event()

    async def scene() -> None:
        waiters = Limited(behind)
        async with waiters.follow():
            behind.on_head = lambda: is_certain.wait(30)
            behind.database._doubt()
            await asyncio.sleep(0)
            poll = asyncio.create_task(events.Asked(0, 10, ["mine"]).first_page(behind, waiters, 60))
            async with asyncio.timeout(30):
                while not waiters.reads:
                    await asyncio.sleep(0)
            for _ in range(100):  # enough for a hundred reads, if it did not wait
                await asyncio.sleep(0)
            assert waiters.reads == 1
            is_certain.set()
            await asyncio.to_thread(behind.feed.append, [feed.NewEvent("wanted", "mine")])
            assert [event.id for event in (await asyncio.wait_for(poll, 30)).events] == ["wanted"]
        waiters.close()

    asyncio.run(scene())


class Paused(Waiting):
    """Pauses until `gate` is open, between two groups of followers and between two reads."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.gate = asyncio.Event()
        self.paused = asyncio.Event()

    async def _pause(self, seconds: float) -> None:
        self.paused.set()
        await self.gate.wait()
        await super()._pause(seconds)


def positions(message: bytes) -> list[int]:
    """The positions of the events in a stream's message."""
    return [int(line[4:]) for line in message.splitlines() if line.startswith(b"id: ")]


@mutant(
    "followers-are-woken-all-at-once",
    "api.routes.long_polls:Waiting._wake",
    "await self._pause(len(chunk) * min(PAUSE, POLL / len(followers)))",
    "abs(len(chunk) * min(PAUSE, POLL / len(followers)))",
)
@mutant("each-follower-makes-its-own-text", "api.routes.long_polls:text_of", "not isinstance(page, SharedPage)", "True")
def test_many_followers_share_reads_and_encoding(asked: CountingService, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are woken in groups. Events appended until the last follower is awake are read once and encoded once for
    all."""
    monkeypatch.setattr(long_polls, "POLL", 10_000.0)
    followers, event_count = 4 * long_polls.SLICE, 60
    encoded_pages: list[feed.EventPage] = []
    monkeypatch.setattr(events, "_messages", lambda page: encoded_pages.append(page) or b"id: %d\n" % page.next)

    async def scene() -> None:
        waiters, last_positions = Paused(asked), [0] * followers
        start, finished = asyncio.Semaphore(0), asyncio.Semaphore(0)
        reads: Counter[int] = Counter()

        async def follow(number: int) -> None:
            async for message in events._stream(waiters, 0, [], None):
                start.release()
                if message.startswith(b"id: "):
                    reads[number] += 1
                    last_positions[number] = positions(message)[-1]
                if last_positions[number] == event_count:
                    finished.release()

        tasks = [asyncio.create_task(follow(number)) for number in range(followers)]
        for _ in tasks:
            await start.acquire()
        while len(waiters._followers) < followers:
            await asyncio.sleep(0)
        await waiters._begin(asyncio.Event())  # they started to wait for it earlier
        asked.counts.clear()
        for number in range(event_count):
            await asyncio.to_thread(asked.feed.append, [feed.NewEvent(f"{number}", "any")])
        await asyncio.wait_for(waiters.paused.wait(), 30)
        awake = sum(position > 0 for position in last_positions)
        assert awake <= long_polls.SLICE
        waiters.gate.set()
        for _ in tasks:
            await asyncio.wait_for(finished.acquire(), 30)
        assert asked.counts["events"] <= 3
        assert max(reads.values()) <= 3
        assert len(encoded_pages) <= 6
        waiters.close()
        await asyncio.gather(*tasks)

    asyncio.run(scene())


def test_followers_of_other_events_stay_asleep_at_no_cost(
    asked: CountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is checked against each filter once, whatever the number of followers, and not at all if its types and
    batches suffice. A follower that comes later has nothing to search."""
    judged: list[int] = []
    wants = Filter.wants
    monkeypatch.setattr(Filter, "wants", lambda self, event: judged.append(event.position) or wants(self, event))
    monkeypatch.setattr(long_polls, "POLL", 10_000.0)

    async def scene() -> None:
        waiters = Waiting(asked)
        async with contextlib.AsyncExitStack() as stack:
            follower = await stack.enter_async_context(waiters.follow(["mine"]))
            others = [await stack.enter_async_context(waiters.follow(["other"])) for _ in range(50)]
            others += [await stack.enter_async_context(waiters.follow([], 7)) for _ in range(50)]
            limited = [await stack.enter_async_context(waiters.follow([], None, "a/")) for _ in range(50)]
            asked.feed.append(
                [*(feed.NewEvent(f"{number}", "some", "b/1") for number in range(100)), feed.NewEvent("last", "mine")]
            )
            await asyncio.wait_for(follower.woken.wait(), 30)
            assert len(judged) == 101 + 1, "each event for the prefix, and the last one for its follower"
            asked.counts.clear()
            judged.clear()
            for entry in (*others, *limited):
                assert not entry.woken.is_set()
                assert await waiters.read(entry, 0, 10) == feed.EventPage([], 101, 101)
            assert judged == []
            assert [event.id for event in (await waiters.read(follower, 0, 10)).events] == ["last"]
            assert asked.counts == Counter()
        waiters.close()

    asyncio.run(scene())


@mutant(
    "a-followers-wanted-position-is-not-stored",
    "api.routes.long_polls:Waiting._followers_of",
    "follower.wanted_until = last",
    "pass",
)
def test_each_follower_gets_its_events_once_and_in_order(
    asked: CountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any filter, arriving and returning at any time, and with pages of any size."""
    monkeypatch.setattr(long_polls, "KEPT", 40)
    monkeypatch.setattr(long_polls, "SLICE", 3)
    monkeypatch.setattr(long_polls, "READ_FIRST", 2)
    monkeypatch.setattr(long_polls, "READ", 7)
    monkeypatch.setattr(long_polls, "PAUSE", 0.0005)
    monkeypatch.setattr(long_polls, "BETWEEN", 0.0)
    dice = random.Random(5)
    types = ["a", "b", "c"]
    rare = 0.02
    new = [
        feed.NewEvent(f"{n}", "rare" if dice.random() < rare else dice.choice(types), dice.choice("xy"))
        for n in range(600)
    ]
    new.append(feed.NewEvent("end", "end", "x/y"))
    filters = [
        ([], None),
        (["a", "end"], None),
        (["rare", "end"], None),
        (["end"], None),
        ([], "x"),
        (["b", "end"], "x"),
    ]

    async def scene() -> None:
        waiters = Waiting(asked)
        progress = asyncio.Condition()
        newest = 0  # the last position that a follower has received

        async def follow(wanted_types: list[str], prefix: str | None) -> list[int]:
            nonlocal newest
            received: list[int] = []
            after = 0
            while not received or received[-1] < len(new):
                stream = events._stream(waiters, after, wanted_types, None, prefix)
                left = dice.randrange(1, 6)
                async for message in stream:
                    received += positions(message)
                    after = received[-1] if received else after
                    async with progress:
                        newest = max(newest, after)
                        progress.notify_all()
                    left -= 1
                    if not left or after == len(new):
                        break
                await stream.aclose()  # type: ignore[attr-defined]
            return received

        async def append() -> None:
            """Append all events; now and then, some followers have received all and wait for more."""
            for start in range(0, len(new), 3):
                await asyncio.to_thread(asked.feed.append, new[start : start + 3])
                if start % 30 == 0:
                    async with progress:
                        while newest < min(start + 3, len(new)):
                            await progress.wait()

        tasks = [asyncio.create_task(follow(*entry)) for entry in filters * 5]
        await asyncio.wait_for(append(), 60)
        for (wanted_types, prefix), received in zip(
            filters * 5, await asyncio.wait_for(asyncio.gather(*tasks), 60), strict=True
        ):
            expected = [
                position
                for position, event in enumerate(new, 1)
                if (not wanted_types or event.type in wanted_types)
                and (prefix is None or str(event.key).startswith(prefix))
            ]
            assert received == expected
        waiters.close()

    asyncio.run(scene())


@mutant(
    "a-trim-passes-a-follower-unseen",
    "api.routes.long_polls:Waiting._read_on",
    "follower.wanted_until = error.trimmed",
    "pass",
)
def test_a_follower_that_sleeps_through_a_trim_gets_an_error(
    asked: CountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events were removed before this process read them: followers get an error, neither a gap nor an empty page."""
    monkeypatch.setattr(long_polls, "POLL", 10_000.0)

    async def scene() -> None:
        waiters = Paused(asked)
        async with waiters.follow(["first"]) as first, waiters.follow(["rare"]) as rare:
            asked.feed.append([feed.NewEvent("1", "first")])
            await asyncio.wait_for(waiters.paused.wait(), 30)
            asked.feed.append([feed.NewEvent(f"{number}", "rare") for number in range(2, 5)])
            feed.trim(asked.database, timedelta(0))
            asked.feed.append([feed.NewEvent("5", "any")])
            waiters.gate.set()
            await asyncio.wait_for(rare.woken.wait(), 30)
            assert first.woken.is_set()
            with pytest.raises(errors.PositionTrimmed):
                await waiters.read(rare, 1, 10)
        waiters.close()

    asyncio.run(scene())


@mutant("shared-pages-outlive-a-reading", "api.routes.long_polls:Waiting._keep", "self._pages.clear()", "pass")
def test_followers_share_a_page_until_newer_events_are_read(
    asked: CountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that comes later with the same filter also gets the newer events."""
    monkeypatch.setattr(long_polls, "POLL", 10_000.0)

    async def scene() -> None:
        waiters = Waiting(asked)
        async with waiters.follow() as any_event, contextlib.AsyncExitStack() as stack:
            asked.feed.append([feed.NewEvent("1", "other"), feed.NewEvent("2", "other")])
            await asyncio.wait_for(any_event.woken.wait(), 30)
            early = [await stack.enter_async_context(waiters.follow(["mine"])) for _ in range(2)]
            pages = [await waiters.read(entry, 0, 10) for entry in early]
            assert pages[0] is pages[1]
            assert pages[0].events == []
            asked.feed.append([feed.NewEvent("3", "mine")])
            await asyncio.wait_for(early[0].woken.wait(), 30)
            late = await stack.enter_async_context(waiters.follow(["mine"]))
            assert [event.position for event in (await waiters.read(late, 0, 10)).events] == [3]
        waiters.close()

    asyncio.run(scene())


def test_few_pages_stay_in_memory(asked: CountingService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each follower may ask for another one."""
    monkeypatch.setattr(long_polls, "POLL", 10_000.0)

    async def scene() -> None:
        waiters = Waiting(asked)
        async with waiters.follow() as follower:
            asked.feed.append([feed.NewEvent(str(number), "any") for number in range(100)])
            while waiters.position < 100:
                await asyncio.wait_for(follower.woken.wait(), 30)
                await asyncio.sleep(0)
            pages = [await waiters.read(follower, after, 10) for after in range(90)]
            assert [page.events[0].position for page in pages] == list(range(1, 91))
            assert len(waiters._pages) <= long_polls.PAGES
            assert await waiters.read(follower, 89, 10) is pages[-1]
        waiters.close()

    asyncio.run(scene())


@pytest.mark.parametrize("broken", ["head", "read"])
def test_an_unexpected_error_of_the_reader_ends_no_wait(
    asked: CountingService, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A bug, or a lack of memory or threads: followers get the events that came meanwhile, and later ones."""
    monkeypatch.setattr(long_polls, "POLL", 0.01)

    async def scene() -> None:
        waiters = Waiting(asked)
        async with waiters.follow() as follower:
            works = getattr(asked.feed, broken)

            def fails(*arguments: Any) -> Any:
                setattr(asked.feed, broken, works)
                raise RuntimeError("can't start new thread")

            setattr(asked.feed, broken, fails)
            for number in (1, 2):
                follower.woken.clear()
                asked.feed.append([feed.NewEvent(str(number), "any")])
                async with asyncio.timeout(30):
                    while not (page := await waiters.read(follower, number - 1, 10)).events:
                        await follower.woken.wait()
                        follower.woken.clear()
                assert [event.position for event in page.events] == [number]
        waiters.close()

    asyncio.run(scene())


@mutant(
    "followers-keep-the-events-of-another-server",
    "core.service.feed:FeedService.on_doubt",
    "self._database.on_doubt(react)",
    "pass",
)
@pytest.mark.mariadb
def test_followers_read_the_events_of_the_server_that_took_over(
    server: Server, server_database: Database, server_url: str
) -> None:
    """It lacked the last events, which this process keeps in memory for followers, and used their positions for
    others."""
    with running_service(server_url) as running, httpx.Client(base_url=running.url, timeout=60) as http:

        def append(id: str) -> int:
            answer = http.post("/v1/events", json={"events": [{"id": id, "type": "t"}]}).json()
            return int(answer["events"][0]["position"])

        def ids(**query: Any) -> list[str]:
            return [event["id"] for event in http.get("/v1/events", params=query).json()["events"]]

        append("kept")
        with http.stream("GET", "/v1/events/stream", params={"after": 0}) as stream:
            lines = stream.iter_lines()  # the connection lasts as long as this
            append("lost-1")
            append("lost-2")
            assert any("lost-2" in line for line in lines)
            assert ids(type="none", wait=1) == []  # for longer than the interval of the polls
            with server_database.engine.begin() as tx:
                tx.execute(sa.delete(tables.feed).where(tables.feed.c.position > 1))
                tx.execute(sa.update(tables.feed_head).values(position=1))
            assert server.end_sessions(server_url)
            assert append("new-1") == 2
            assert ids(type="none", wait=1) == []
            assert ids(after=1, wait=30) == ["new-1"]
            assert append("new-2") == 3
            assert ids(after=2, wait=30) == ["new-2"]
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(ids, after=3, wait=30)
                assert append("new-3") == 4
                assert waiting.result() == ["new-3"]
