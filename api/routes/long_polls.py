"""Long polls and event streams: one query of the database serves all waiting requests.

All waiting requests, for the end of a batch or for events, are woken by one reader of the feed. Commits of this process
are read at once. Commits of other processes are found by one shared poll of the feed's last position, which runs only
while a request waits.

Acks and all other requests share the event loop with the followers. Five hundred followers that each read every one of
a thousand events a second would leave no time for anything else. So followers are woken in groups with pauses between,
and the feed is read again when all are awake: everything appended meanwhile is one page for them. Followers that ask
for the same events above the same position share the page and its text. A follower that wants no event of a page is not
woken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from starlette.concurrency import run_in_threadpool

from api.routes import models
from core import errors, feed
from core.batches.batch import ended
from core.service import Service
from core.storage import limits
from core.storage.statements import chunks

POLL: Final = 0.25
"""Seconds between two looks at the feed."""
READ: Final = 1000
"""Events of one reading."""
KEPT: Final = 10_000
"""Events that were read and stay at hand: so many followers don't read them again each for himself."""
KEPT_BYTES: Final = 32 * 2**20
"""Of their data, at most: one event may bear 64 KiB."""
BETWEEN: Final = 0.01
"""Seconds between two readings, so that commits that follow each other closely are read together."""
SLICE: Final = 25
"""Followers that are woken at once."""
PAUSE: Final = 0.0002
"""Seconds of pause for each of them; fewer where they are so many that a round would take longer than `POLL`."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events a follower wants. `prefix`: with which the keys of the events begin that it may see; `beginning`: of
    the types that are wanted."""

    types: frozenset[str]
    batch: int | None
    prefix: str | None = None
    beginning: str = ""

    def wants(self, event: feed.Event) -> bool:
        return (
            (not self.types or event.type in self.types)
            and (self.batch is None or event.batch == self.batch)
            and (self.prefix is None or (event.key is not None and event.key.startswith(self.prefix)))
            and event.type.startswith(self.beginning)
        )

    def last_wanted(self, page: Sequence[feed.Event], types: Set[str], batches: Set[int | None]) -> int | None:
        """The position of the last event of the page that is wanted. `types` and `batches` are those of the page."""
        if (self.types and self.types.isdisjoint(types)) or (self.batch is not None and self.batch not in batches):
            return None
        return next((event.position for event in reversed(page) if self.wants(event)), None)


@dataclass(slots=True, eq=False)
class Follower:
    """Somebody who waits for events. `woken` is set once there may be some for it, or the service stops."""

    filter: Filter
    wanted_until: int
    """Nothing that was read of the feed above this position is wanted."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class SharedPage(feed.EventPage):
    """A page that several followers are given, with the texts that were made of it."""

    texts: dict[Callable[[feed.EventPage], bytes], bytes] = field(default_factory=dict)


def text_of(page: feed.EventPage, encode: Callable[[feed.EventPage], bytes]) -> bytes:
    """`encode(page)`, computed once for all followers that share the page."""
    if not isinstance(page, SharedPage):
        return encode(page)
    text = page.texts.get(encode)
    if text is None:
        text = page.texts[encode] = encode(page)
    return text


class Waiting:
    """The waiting requests of one event loop, the running one."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._batches: dict[int, set[asyncio.Event]] = {}
        self._followers: set[Follower] = set()
        self._looks: dict[int, asyncio.Task[bytes]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._begun: asyncio.Future[None] | None = None
        """Done once the reader knows where the feed stood: what is appended after that, it will tell."""
        self._position = 0
        self._kept: deque[feed.Event] = deque()
        self._kept_bytes = 0
        self._pages: dict[tuple[Filter, int, int, int | None], SharedPage] = {}
        """From what is kept, since the last reading."""
        self._appended = asyncio.Event()
        self._away = False
        self._closed = False
        service.feed.on_append(self._hear)

    @contextlib.asynccontextmanager
    async def watch(self, batch: int) -> AsyncIterator[asyncio.Event]:
        """An event that is set once the batch has ended, or the service stops. Begin to watch, then look, then wait: so
        no end falls between. Raises `errors.Unavailable`."""
        event = asyncio.Event()
        self._batches.setdefault(batch, set()).add(event)
        try:
            await self._begin(event)
            yield event
        finally:
            waiters = self._batches[batch]
            waiters.discard(event)
            if not waiters:
                del self._batches[batch]

    @contextlib.asynccontextmanager
    async def follow(
        self, types: Collection[str] = (), batch: int | None = None, prefix: str | None = None, *, beginning: str = ""
    ) -> AsyncIterator[Follower]:
        """Begin to follow, then read, then wait. Raises `errors.Unavailable`."""
        follower = Follower(Filter(frozenset(types), batch, prefix, beginning), self._position)
        self._followers.add(follower)
        try:
            await self._begin(follower.woken)
            yield follower
        finally:
            self._followers.discard(follower)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def position(self) -> int:
        """Up to which the feed was read, while somebody waits."""
        return self._position

    @property
    def away(self) -> bool:
        """Whether the database could not be reached at the last look."""
        return self._away

    async def look(self, batch: int) -> bytes:
        """For one who was woken: the batch as it is now, as JSON. Those who are woken together share one read of it and
        one text: a thousand of each, one after the other, would take seconds. Raises `errors.BatchNotFound`."""
        look = self._looks.get(batch)
        if look is None:
            look = self._looks[batch] = asyncio.create_task(self._look(batch))
            look.add_done_callback(lambda _: self._looks.pop(batch))
        return await asyncio.shield(look)

    async def _look(self, batch: int) -> bytes:
        state = await run_in_threadpool(self._service.batches.get, batch)
        return models.Batch.model_validate(models.shown(state)).model_dump_json().encode()

    async def read(self, follower: Follower, after: int, limit: int, size_limit: int | None = None) -> feed.EventPage:
        """The next events for a follower: from memory if it reaches back that far, otherwise from the database.

        Raises `errors.PositionTrimmed`, `errors.InvalidRequest` for a position from the future.
        """
        position, wanted_filter = self._position, follower.filter
        if follower.wanted_until <= after <= position:
            return feed.EventPage([], position, position)
        if after < position and self._kept and self._kept[0].position <= after + 1:
            key = (wanted_filter, after, limit, size_limit)
            page = self._pages.get(key)
            if page is None:
                newer = filter(wanted_filter.wants, _above(self._kept, after))
                events, is_cut = limits.within(newer, feed.size, limit, size_limit)
                page = self._pages[key] = SharedPage(events, events[-1].position if is_cut else position, position)
            return page
        return await run_in_threadpool(
            lambda: self._service.feed.read(
                after,
                limit,
                types=wanted_filter.types,
                batch=wanted_filter.batch,
                prefix=wanted_filter.prefix,
                size_limit=size_limit,
            )
        )

    def close(self) -> None:
        """Wake everybody, now and from now on: the service stops, and who waits must not hold it up."""
        self._closed = True
        self._appended.set()
        self._wake_all()

    def _wake_all(self) -> None:
        for waiters in self._batches.values():
            for event in waiters:
                event.set()
        for follower in self._followers:
            follower.woken.set()

    def _hear(self, position: int) -> None:
        """From the thread that committed."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all who wait
            self._loop.call_soon_threadsafe(self._heard, position)

    def _heard(self, position: int) -> None:
        if position > self._position:
            self._appended.set()

    async def _begin(self, event: asyncio.Event) -> None:
        if self._closed:
            event.set()
            return
        if self._begun is None or self._reader is None or self._reader.done():
            self._begun = self._loop.create_future()
            self._reader = asyncio.create_task(self._run(self._begun))
        await asyncio.shield(self._begun)

    async def _run(self, started: asyncio.Future[None]) -> None:
        self._forget()
        try:
            self._position = await run_in_threadpool(self._service.feed.head)
        except Exception as error:  # noqa: BLE001  # it is raised in the waiting requests
            started.set_exception(error)
            started.exception()  # the waiting requests may be gone; asyncio would log it
            return
        for follower in self._followers:
            follower.wanted_until = self._position
        started.set_result(None)
        while (self._batches or self._followers) and not self._closed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._appended.wait(), POLL)
            try:
                if self._appended.is_set() or await run_in_threadpool(self._service.feed.head) > self._position:
                    self._appended.clear()
                    await self._read_on()
                    await self._pause(BETWEEN)
                self._away = False
            except errors.Unavailable:
                self._away = True  # their own reading will say so

    async def _read_on(self) -> None:
        while True:
            try:
                page = await run_in_threadpool(self._service.feed.read, self._position, READ)
            except errors.PositionTrimmed as error:
                # This reader was away too long: each follower reads for itself.
                self._forget()
                self._position = error.trimmed
                for follower in self._followers:
                    follower.wanted_until = error.trimmed
                self._wake_all()
                continue
            self._position = page.next
            self._keep(page.events)
            await self._wake(self._tell(page.events))
            if page.next == page.last:
                return

    def _keep(self, events: Sequence[feed.Event]) -> None:
        self._pages.clear()
        self._kept.extend(events)
        self._kept_bytes += sum(map(feed.size, events))
        while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= feed.size(self._kept.popleft())

    def _forget(self) -> None:
        self._pages.clear()
        self._kept.clear()
        self._kept_bytes = 0

    def _tell(self, events: Sequence[feed.Event]) -> list[Follower]:
        """Wake those who wait for the end of a batch. The followers that want some of these events."""
        types, batches = {event.type for event in events}, {event.batch for event in events}
        for event in events:
            if event.batch is not None and ended(event):
                for waiter in self._batches.get(event.batch, ()):
                    waiter.set()
        starts: dict[Filter, int | None] = {}
        pages = []
        for follower in self._followers:
            if follower.filter not in starts:
                starts[follower.filter] = follower.filter.last_wanted(events, types, batches)
            last = starts[follower.filter]
            if last is not None:
                follower.wanted_until = last
                pages.append(follower)
        return pages

    async def _wake(self, followers: list[Follower]) -> None:
        """Some at a time."""
        for chunk in chunks(followers, SLICE):
            for follower in chunk:
                follower.woken.set()
            if self._closed:
                return
            await self._pause(len(chunk) * min(PAUSE, POLL / len(followers)))

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _above(events: deque[feed.Event], after: int) -> Iterable[feed.Event]:
    """Those above a position, ascending. Followers are mostly near the end, where a deque is quick."""
    first = after + 1 - events[0].position
    for place in range(first, len(events)):
        yield events[place]
