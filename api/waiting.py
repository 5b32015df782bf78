"""Long polls: many wait, the database is asked once.

What ends in this process wakes its waiters at once. For what other processes end there is one shared poll, whatever the
number of waiters, and only while somebody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from starlette.concurrency import run_in_threadpool

from api import models
from core import errors
from core.service import Service

POLL: Final = 0.25
"""Seconds between two looks at the database."""


class Waiting:
    """Who waits for which batch. Belongs to one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._waiters: dict[int, set[asyncio.Event]] = {}
        self._looks: dict[int, asyncio.Task[bytes]] = {}
        self._poll: asyncio.Task[None] | None = None
        self._closed = False

    @contextlib.asynccontextmanager
    async def watch(self, batch: int) -> AsyncIterator[asyncio.Event]:
        """An event that is set once the batch has ended, or the service stops. Begin to watch, then look, then wait: so
        no end falls between."""
        event = asyncio.Event()
        if self._closed:
            event.set()
        self._waiters.setdefault(batch, set()).add(event)
        if self._poll is None or self._poll.done():
            self._poll = asyncio.create_task(self._run())
        try:
            yield event
        finally:
            waiters = self._waiters.get(batch, set())
            waiters.discard(event)
            if not waiters:
                self._waiters.pop(batch, None)

    async def look(self, batch: int) -> bytes:
        """For one who was woken: the batch as it is now, as JSON. Those who are woken together share one read of it and
        one text: a thousand of each, one after the other, would take seconds. Raises `errors.BatchNotFound`."""
        look = self._looks.get(batch)
        if look is None:
            look = self._looks[batch] = asyncio.create_task(self._look(batch))
            look.add_done_callback(lambda _: self._looks.pop(batch))
        return await asyncio.shield(look)

    async def _look(self, batch: int) -> bytes:
        found = await run_in_threadpool(self._service.get, batch)
        return models.Batch.model_validate(models.shown(found)).model_dump_json().encode()

    def ended(self, batch: int) -> None:
        """Wake those who wait for the batch."""
        for event in self._waiters.get(batch, ()):
            event.set()

    def close(self) -> None:
        """Wake everybody, now and from now on: the service stops, and a long poll must not hold it up."""
        self._closed = True
        for batch in list(self._waiters):
            self.ended(batch)

    async def _run(self) -> None:
        while self._waiters and not self._closed:
            await asyncio.sleep(POLL)
            # Not while the database is away: the waiters' own look will say so.
            with contextlib.suppress(errors.Unavailable):
                for batch in await run_in_threadpool(self._service.ended, list(self._waiters)):
                    self.ended(batch)
