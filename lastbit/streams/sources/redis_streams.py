"""Redis Streams, read as a consumer of a group. Needs redis-py: `pip install 'lastbit[redis]'`.

XREADGROUP, not XREAD: the group's list of pending entries, kept by Redis beside the stream, is exactly what is
outstanding. So a reader that comes back needs no position of its own: it first reads what is pending for it, in order,
and then what is new. With XREAD there would be one id to remember, and all above it would replay.

What could go wrong is an answer that gets lost: Redis has put its entries on the list, and the reader has never seen
them. Asked again for what is new, Redis would give what lies behind. So nothing is asked again: the connection's
failure ends the reading, and the next reader begins with the list.
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
"""Entries that are read, and acked, in one call."""
BLOCK = 1.0
"""Seconds that Redis waits for new entries before it answers that there are none; so long may `stop()` take."""
CAPACITY = 8192
"""Entries that are handed out, from the first that is not done on."""


@dataclass(frozen=True, slots=True)
class Entry:
    id: str
    """As Redis gave it: milliseconds-sequence."""
    fields: Mapping[Any, Any]


class RedisStream:
    """Entries of a stream, as (a number of this reading, `Entry`). Give its `window` and its `commit` to `run_ordered`:

        with RedisStream(url, "orders", group="billing") as orders:
            run_ordered(orders, handle, key=…, commit=orders.commit, window=orders.window)

    The group is created if there is none, to begin with the first entry (`start="$"`: with those that come from now
    on). A process that starts again has the same `consumer` name as before, and never runs twice at a time: another
    name is another list, and entries of one key would be divided between them. From the first entry that is not done
    on, at most `capacity` are handed out. `options` are those of redis-py's client; text is decoded unless they say
    otherwise. Iterating raises redis-py's own errors. `trimmed` counts entries that were trimmed from the stream while
    they were outstanding: they can't be handled any more, they are logged and acked.
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
        # Waits for Redis longer than Redis waits, so that one that is gone is noticed.
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
        for found in itertools.chain(self._pending(), self._new()):
            if self._stopped.is_set():
                break
            if found is None:
                yield None
                continue
            entry, fields = found
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

    def _read(self, after: str, **how: int) -> list[tuple[str, Any]]:
        answer = self._client.xreadgroup(self.group, self.consumer, {self.stream: after}, count=PAGE, **how)
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
        """XACK what is done, above the floor as well."""
        resolved = list(self._unsettled.resolved(floor).items())
        for begin in range(0, len(resolved), PAGE):
            page = resolved[begin : begin + PAGE]
            self._client.xack(self.stream, self.group, *(entry for _, entry in page))
            self._unsettled.settle(number for number, _ in page)

    def stop(self) -> None:
        """Nothing more is handed out, from any thread or signal handler."""
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
