"""The event feed: append a user's own events, and read all events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from core import feed
from core.consumer_groups import positions
from core.service.reads import ReadService
from core.service.writes import WriteService
from core.storage.database import Database


class FeedService:
    def __init__(self, database: Database, write_service: WriteService, reads: ReadService) -> None:
        self._database = database
        self._writes = write_service
        self._reads = reads

    def append(self, events: Sequence[feed.NewEvent], fence: positions.Fence | None = None) -> list[feed.Appended]:
        """Append the events; returns the position of each. With a `fence`, only if it holds: raises
        `errors.StaleEpoch`, `ConsumerGroupNotFound`."""

        appended: list[feed.Appended] = self._writes.run(feed.Append(events=events, fence=fence))
        return appended

    def read(
        self,
        after: int | None,
        limit: int,
        *,
        types: Collection[str] = (),
        batch: int | None = None,
        prefix: str | None = None,
        size_limit: int | None = None,
    ) -> feed.EventPage:
        """See `feed.read`. Raises `errors.PositionTrimmed`; `InvalidRequest` for a position from the future."""
        if limit <= feed.FIRST and batch is None and prefix is None and size_limit is None and not types:
            return self._reads.pages.get(feed.Span(after, limit))
        return self._database.snapshot(
            lambda tx: feed.read(tx, after, limit, types=types, batch=batch, prefix=prefix, size_limit=size_limit)
        )

    def head(self) -> int:
        """The position of the last event."""
        return self._database.read(feed.head)

    def on_append(self, react: Callable[[int], None]) -> None:
        """See `Database.on_append`."""
        self._database.on_append(react)

    def on_doubt(self, react: Callable[[], None]) -> None:
        """See `Database.on_doubt`."""
        self._database.on_doubt(react)
