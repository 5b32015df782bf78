"""Redis Streams, read as a consumer of a Redis consumer group. Needs redis-py: `pip install 'lastbit[redis]'`.

XREADGROUP, not XREAD: Redis keeps a list of the group's pending entries, which are exactly the outstanding ones. So a
restarted reader needs no stored position: it first reads its pending entries, in order, and then new ones. With XREAD
it would store one id, and all entries above it would replay.

One thing could go wrong, a lost response: Redis has added its entries to the list, but the reader has not received
them. A second request for new entries would return later ones. So no request is repeated: a connection failure ends the
reading, and the next reader starts with the list.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from lastbit.errors import MissingExtra
from lastbit.streams.sources.unsettled import Unsettled
from lastbit.streams.window import AckWindow

log = logging.getLogger("lastbit.streams")

PAGE = 500
"""Entries read or acked in one call."""
BLOCK = 1.0
"""Seconds that Redis waits for new entries; `stop()` may take this long."""
CAPACITY = 8192
"""Maximum entries handed out, from the first unfinished one."""


@dataclass(frozen=True, slots=True)
class Entry:
    id: str
    """The Redis entry id: milliseconds-sequence."""
    fields: Mapping[Any, Any]


class RedisStream:
    """Entries of a stream, as (sequence number, `Entry`). Pass its `window` and `commit` to `run_ordered`:

        with RedisStream(url, "orders", group="billing") as orders:
            run_ordered(orders, handle, key=…, commit=orders.commit, window=orders.window)

    The group is created if it does not exist, starting at the first entry (`start="$"`: at new entries only). A
    restarted process must use the same `consumer` name, and only one process at a time may use it: another name has
    another pending list, and entries of one key would be divided between the two. At most `capacity` entries are handed
    out, from the first unfinished one. `options` are those of redis-py's client; text is decoded by default. Iterating
    raises redis-py's own errors. `trimmed` counts entries that were trimmed from the stream while outstanding: they
    can no longer be handled, so they are logged and acked.
    """

    def __init__(
        self,
        url: str,
        stream: str,
        group: str,
        *,
        consumer: str = "lastbit",
        start: str = "0",
        capacity: int = CAPACITY,
        **options: Any,
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as cause:
            raise MissingExtra("redis", "a source on Redis Streams") from cause
        self.stream, self.group, self.consumer = stream, group, consumer
        self.trimmed = 0
        self._unsettled: Unsettled[str] = Unsettled(AckWindow(capacity=capacity))
        self._numbers = itertools.count()
        self._stopped = threading.Event()
        # Longer than Redis waits, so that a dead server is noticed.
        settings = {"decode_responses": True, "socket_timeout": 10 + BLOCK, **options}
        self._client: Any = redis.Redis.from_url(url, **settings, protocol=2, retry=Retry(NoBackoff(), 0))
        try:
            self._client.xgroup_create(stream, group, id=start, mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    @property
    def window(self) -> AckWindow:
        return self._unsettled.window

    def __iter__(self) -> Iterator[tuple[int, Entry] | None]:
        for item in itertools.chain(self._pending(), self._new()):
            if self._stopped.is_set():
                break
            if item is None:
                yield None
                continue
            entry, fields = item
            if fields:
                number = next(self._numbers)
                self._unsettled.hand_out(number, entry)
                yield number, Entry(entry, fields)
            else:
                self._forget(entry)

    def _pending(self) -> Iterator[tuple[str, Any]]:
        page = self._read("0")
        while page:
            yield from page
            page = self._read(page[-1][0])

    def _new(self) -> Iterator[tuple[str, Any] | None]:
        while not self._stopped.is_set():
            page = self._read(">", block=int(1000 * BLOCK))
            yield from page
            if not page:
                yield None

    def _read(self, after: str, **options: int) -> list[tuple[str, Any]]:
        answer = self._client.xreadgroup(self.group, self.consumer, {self.stream: after}, count=PAGE, **options)
        return [
            (entry.decode() if isinstance(entry, bytes) else entry, fields)
            for _, entries in answer
            for entry, fields in entries
        ]

    def _forget(self, entry: str) -> None:
        self.trimmed += 1
        log.warning("%s was trimmed from %s before %s handled it", entry, self.stream, self.group)
        self._client.xack(self.stream, self.group, entry)

    def commit(self, floor: int) -> None:
        """XACK finished entries, including those above the floor."""
        resolved = list(self._unsettled.resolved(floor).items())
        for begin in range(0, len(resolved), PAGE):
            page = resolved[begin : begin + PAGE]
            self._client.xack(self.stream, self.group, *(entry for _, entry in page))
            self._unsettled.settle(number for number, _ in page)

    def stop(self) -> None:
        """Hand out nothing more. May be called from any thread or signal handler."""
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
