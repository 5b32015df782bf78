"""Long polls and event streams: one query of the database serves all waiting requests.

One reader of the feed wakes all requests that wait for the end of a batch or for events. It reads commits of this
process at once. It finds commits of other processes by polling the feed's last position, only while a request waits.

The followers share the event loop with all other requests. Five hundred followers that each handled a thousand events a
second separately would leave no time for anything else. So followers are woken in groups with pauses between, and the
feed is read again when all are awake: all events appended meanwhile are one page for them. Followers with the same
filter and position share the page and its text. If a follower's filter matches no event of a page, it is not woken.

If the database is in doubt (see `core.storage.continuity`), its feed may end earlier now, and have other events. So the
pages in memory are dropped at once, the reader starts again at the feed's end, and all requests are woken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
import structlog
from starlette.concurrency import run_in_threadpool

from api.routes import models
from core import errors, feed
from core.batches.batch import ended
from core.batches.lifecycle import TERMINAL
from core.service import Service
from core.storage import limits
from core.storage.statements import chunks

CATCHING_UP: Final = 2
"""Maximum streams whose pages are read from the database at the same time. Reading and decoding rows needs the GIL:
forty such threads made each step of a commit wait for all of them, and acks for half a minute."""
POLL: Final = 0.25
"""Seconds between two polls of the feed's last position."""
READ_FIRST: Final = feed.FIRST
"""Maximum events of the first read after a commit. Mostly a few events are new, and such a page is cheap."""
READ: Final = 1000
"""Maximum events of each further read."""
KEPT: Final = 10_000
"""Maximum events that stay in memory after a read, so that followers don't read them from the database again."""
KEPT_BYTES: Final = 32 * 2**20
"""Maximum bytes of their data. One event may have 64 KiB."""
PAGES: Final = 16
"""Maximum pages in memory that followers share. Each follower could ask for another one."""
BETWEEN: Final = 0.01
"""Seconds between two reads, so that commits shortly after each other are read together."""
SLICE: Final = 25
"""Followers that are woken at once."""
PAUSE: Final = 0.0002
"""Seconds of pause per woken follower. Shorter if there are so many that waking all would take longer than `POLL`."""


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects the events for a follower. `types`: empty for all. `prefix`: only events whose keys begin with it.
    `beginning`: only events whose types begin with it."""

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
        """The position of the last matching event of a page, or None. `types` and `batches` are those of the page."""
        if (self.types and self.types.isdisjoint(types)) or (self.batch is not None and self.batch not in batches):
            return None
        return next((event.position for event in reversed(page) if self.wants(event)), None)


@dataclass(slots=True, eq=False)
class Follower:
    """A request that waits for events. `woken` is set when there may be matching events, or the service stops."""

    filter: Filter
    wanted_until: int
    """After this position, the reader has found no event that matches `filter`."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Look:
    """A batch at one moment. `text`: the batch as JSON."""

    has_ended: bool
    text: bytes


@dataclass(frozen=True, slots=True)
class SharedPage(feed.EventPage):
    """A page that several followers share, with its encoded texts."""

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
    """The waiting requests of the running event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._batches: dict[int, set[asyncio.Event]] = {}
        self._followers: set[Follower] = set()
        self._looks: dict[int, asyncio.Task[Look]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._begun: asyncio.Future[None] | None = None
        """Done when the reader has read the feed's last position. It notifies followers of all events after that."""
        self._position = 0
        self._kept: deque[feed.Event] = deque()
        self._kept_bytes = 0
        self._pages: dict[tuple[Filter, int, int, int | None], SharedPage] = {}
        """Pages made of `_kept` since the last read, by (filter, after, limit, size limit)."""
        self._appended = asyncio.Event()
        self._is_database_unreachable = False
        self._doubts = self._settled = 0
        """The number of doubts, and how many of them the reader had noticed when it last started."""
        self._closed = False
        self._catching_up = anyio.CapacityLimiter(CATCHING_UP)
        service.feed.on_append(partial(self._call_in_loop, self._notify_reader))
        service.feed.on_doubt(partial(self._call_in_loop, self._doubt))

    async def end_of(self, batch: int, seconds: float) -> bytes:
        """The batch as JSON once it has ended, or as it is when the seconds are over or the service stops. Raises
        `errors.BatchNotFound` and `errors.Unavailable`."""
        woken = asyncio.Event()
        self._batches.setdefault(batch, set()).add(woken)
        try:
            await self._begin(woken)
            over = self._loop.time() + seconds
            look = await self._read_batch(batch)  # after the beginning, so that no end is missed
            while not (look.has_ended or self._closed):
                try:
                    await asyncio.wait_for(woken.wait(), over - self._loop.time())
                except TimeoutError:
                    return (await self._read_batch(batch)).text
                woken.clear()  # it may have been a doubt
                look = await self._shared_look(batch)
            return look.text
        finally:
            waiters = self._batches[batch]
            waiters.discard(woken)
            if not waiters:
                del self._batches[batch]

    @contextlib.asynccontextmanager
    async def follow(
        self, types: Collection[str] = (), batch: int | None = None, prefix: str | None = None, *, beginning: str = ""
    ) -> AsyncIterator[Follower]:
        """A follower. First enter the context, then read, then wait: in this order, no event is missed. Raises
        `errors.Unavailable`."""
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
        """The position up to which the feed was read. It advances only while a request waits."""
        return self._position

    @property
    def is_database_unreachable(self) -> bool:
        """Whether the last poll could not reach the database."""
        return self._is_database_unreachable

    async def _shared_look(self, batch: int) -> Look:
        """Requests that are woken together share one read and one text, as a thousand separate reads would take
        seconds."""
        task = self._looks.get(batch)
        if task is None or task.done():
            task = self._looks[batch] = asyncio.create_task(self._read_batch(batch))
            task.add_done_callback(lambda done: self._looks.get(batch) is done and self._looks.pop(batch))
        return await asyncio.shield(task)

    async def _read_batch(self, batch: int) -> Look:
        state = await run_in_threadpool(self._service.batches.get, batch)
        text = models.Batch.model_validate(models.shown(state)).model_dump_json().encode()
        return Look(state.state in TERMINAL, text)

    async def read(self, follower: Follower, after: int, limit: int, size_limit: int | None = None) -> feed.EventPage:
        """The next events for a follower: from memory if that has all events after `after`, otherwise from the
        database. `size_limit`: bytes of data.

        Raises `errors.PositionTrimmed`, and `errors.InvalidRequest` for a position after the feed's last.
        """
        position, wanted_filter = self._position, follower.filter
        if self._is_in_doubt:  # the reader wakes all followers when it is over
            return feed.EventPage([], after, max(after, position))
        if follower.wanted_until <= after <= position:
            return feed.EventPage([], position, position)
        if after < position and self._kept and self._kept[0].position <= after + 1:
            key = (wanted_filter, after, limit, size_limit)
            page = self._pages.get(key)
            if page is None:
                newer = filter(wanted_filter.wants, _above(self._kept, after))
                events, is_cut = limits.within(newer, feed.size, limit, size_limit)
                if len(self._pages) >= PAGES:
                    del self._pages[next(iter(self._pages))]
                page = self._pages[key] = SharedPage(events, events[-1].position if is_cut else position, position)
            return page
        return await anyio.to_thread.run_sync(
            lambda: self._service.feed.read(
                after,
                limit,
                types=wanted_filter.types,
                batch=wanted_filter.batch,
                prefix=wanted_filter.prefix,
                size_limit=size_limit,
            ),
            # For streams alone. Polls take threads of the pool, where the number of those that wait is bounded.
            limiter=None if size_limit is None else self._catching_up,
        )

    def close(self) -> None:
        """Wake all waiting requests, and let no later request wait, as the service stops."""
        self._closed = True
        self._appended.set()
        self._wake_all()

    def _wake_all(self) -> None:
        for waiters in self._batches.values():
            for event in waiters:
                event.set()
        for follower in self._followers:
            follower.woken.set()

    def _call_in_loop(self, react: Callable[..., None], *args: object) -> None:
        """Called in the thread that committed, or that found the doubt."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so have all waiting requests
            self._loop.call_soon_threadsafe(react, *args)

    def _notify_reader(self, position: int) -> None:
        if position > self._position:
            self._appended.set()

    @property
    def _is_in_doubt(self) -> bool:
        """Whether the feed may have changed below `_position`."""
        return self._doubts > self._settled

    def _doubt(self) -> None:
        self._doubts += 1
        self._forget()
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
            await self._start()
        except Exception as error:  # noqa: BLE001  # it is raised in the waiting requests
            started.set_exception(error)
            started.exception()  # the waiting requests may be gone; asyncio would log it
            return
        started.set_result(None)
        while (self._batches or self._followers) and not self._closed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._appended.wait(), POLL)
            try:
                if self._is_in_doubt:
                    self._appended.clear()
                    await self._start()
                    self._wake_all()
                elif self._appended.is_set() or await run_in_threadpool(self._service.feed.head) > self._position:
                    self._appended.clear()
                    await self._read_on()
                    await self._pause(BETWEEN)
                self._is_database_unreachable = False
            except errors.Unavailable:
                self._is_database_unreachable = True  # the followers' own reads raise the error
            except Exception:  # a bug, or a lack of memory or threads: it is unknown which followers were woken
                log.exception("reader_failed")
                self._doubt()
                await self._pause(POLL)

    async def _start(self) -> None:
        """Start at the feed's end."""
        doubts = self._doubts
        self._position = await run_in_threadpool(self._service.feed.head)
        self._settled = doubts
        for follower in self._followers:
            follower.wanted_until = self._position

    async def _read_on(self) -> None:
        limit = READ_FIRST
        while True:
            try:
                page = await run_in_threadpool(self._service.feed.read, self._position, limit)
            except errors.InvalidRequest:  # the feed ends earlier
                self._doubt()
                return
            except errors.PositionTrimmed as error:
                # The events that this reader missed are trimmed. Each follower must read from the database.
                self._forget()
                self._position = error.trimmed
                for follower in self._followers:
                    follower.wanted_until = error.trimmed
                self._wake_all()
                continue
            if self._is_in_doubt:
                return
            self._position = page.next
            self._keep(page.events)
            await self._wake(self._followers_of(page.events))
            if page.next == page.last:
                return
            limit = READ

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

    def _followers_of(self, events: Sequence[feed.Event]) -> list[Follower]:
        """The followers to wake for these events. Requests that wait for the end of a batch are woken here."""
        types, batches = {event.type for event in events}, {event.batch for event in events}
        for event in events:
            if event.batch is not None and ended(event):
                self._looks.pop(event.batch, None)  # it may have begun before the end
                for waiter in self._batches.get(event.batch, ()):
                    waiter.set()
        last_wanted: dict[Filter, int | None] = {}
        wanting = []
        for follower in self._followers:
            if follower.filter not in last_wanted:
                last_wanted[follower.filter] = follower.filter.last_wanted(events, types, batches)
            last = last_wanted[follower.filter]
            if last is not None:
                follower.wanted_until = last
                wanting.append(follower)
        return wanting

    async def _wake(self, followers: list[Follower]) -> None:
        """Wake the followers in groups of `SLICE`, with pauses."""
        for chunk in chunks(followers, SLICE):
            for follower in chunk:
                follower.woken.set()
            if self._closed:
                return
            await self._pause(len(chunk) * min(PAUSE, POLL / len(followers)))

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _above(events: deque[feed.Event], after: int) -> Iterable[feed.Event]:
    """The events after a position, ascending. Most followers are near the end, where access to a deque is fast."""
    first = after + 1 - events[0].position
    for place in range(first, len(events)):
        yield events[place]
