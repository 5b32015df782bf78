"""`client.tally(name)`: its calls and its buffers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator

from lastbit import _arguments
from lastbit._drivers import AsyncDriver, Driver
from lastbit._protocol import Flow, Service
from lastbit.chains import TallyRange
from lastbit.models import Fence
from lastbit.tallies import calls
from lastbit.tallies.buffer import DEFAULT_EVERY, DEFAULT_MOST, AsyncTallyBuffer, TallyBuffer, Window
from lastbit.tallies.calls import Entry
from lastbit.tallies.models import RangeResult, TallyApplied, TallyTotal, TallyValue
from lastbit.tallies.ranges import By


def _apply(service: Service, tally: str, entries: Iterable[Entry], fence: Fence | None) -> Flow[TallyApplied]:
    if not isinstance(entries, Iterable):
        raise _arguments.refusal("entries", "an iterable of entries", entries)
    return calls.apply(service, tally, map(calls.entry_json, entries), fence)


def _apply_ranges(
    service: Service, tally: str, ranges: Iterable[TallyRange], fence: Fence | None
) -> Flow[list[RangeResult]]:
    if not isinstance(ranges, Iterable):
        raise _arguments.refusal("ranges", "an iterable of ranges", ranges)
    return calls.apply_ranges(service, tally, ranges, fence)


class Tally:
    """`client.tally(name)`. All methods raise `ServiceError` (`InvalidRequest`) and `ServiceUnreachable`."""

    __slots__ = ("_driver", "name")

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self.name = name

    def apply(self, entries: Iterable[Entry], *, fence: Fence | None = None) -> TallyApplied:
        """Add each entry (key, delta, source) once: at most 10,000 in one transaction, in the order of their messages.
        Commit the messages to the broker afterwards. With the `fence` of an assignment, only while the worker owns the
        partition. Raises `OutOfOrder` or `StaleEpoch`; then nothing was added."""
        return self._driver.run(_apply, self.name, entries, fence)

    def apply_ranges(self, ranges: Iterable[TallyRange], *, fence: Fence | None = None) -> list[RangeResult]:
        """Add each range that begins where its source stands, in one transaction: at most 10,000 sums. One result for
        each. After "moved", leave out what its position covers, and send what remains from there; a `buffer` does all
        of it. With the `fence` of an assignment, only while the worker owns the partition. Raises `Conflict` for a
        source that has entries, and `StaleEpoch`; then nothing was added."""
        return self._driver.run(_apply_ranges, self.name, ranges, fence)

    def value(self, key: str) -> int:
        """The total of a key; 0 if nothing was ever added."""
        return self.get(key).value

    def get(self, key: str) -> TallyValue:
        """The total of a key and its sub-counters by source."""
        return self._driver.run(calls.value, self.name, key)

    def totals(self, *, prefix: str = "", page_size: int = 1000) -> Iterator[TallyTotal]:
        """The totals of the keys that begin with `prefix`, in byte order, fetched page by page."""
        return self._driver.iterate(calls.totals, self.name, prefix, page_size)

    def delete(self) -> None:
        """Delete the tally with its guards and positions. Messages that are applied again count again."""
        self._driver.run(calls.delete, self.name)

    def buffer(
        self,
        window: Window | None = None,
        *,
        by: By = "entry",
        every: float = DEFAULT_EVERY,
        most: int = DEFAULT_MOST,
    ) -> TallyBuffer:
        """A context manager that combines messages into few calls, and acks them in `window`, an `AckWindow`, after
        they were counted. `by`: "range" adds them up, for messages that are added in the order of their partition; see
        `TallyBuffer`."""
        return TallyBuffer(self._driver, self.name, window, every, most, by)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} at {self._driver.service.url}>"


class AsyncTally:
    """`Tally`, awaited: same names, same arguments, same errors."""

    __slots__ = ("_driver", "name")

    def __init__(self, driver: AsyncDriver, name: str) -> None:
        self._driver = driver
        self.name = name

    async def apply(self, entries: Iterable[Entry], *, fence: Fence | None = None) -> TallyApplied:
        """Add each entry (key, delta, source) once: at most 10,000 in one transaction, in the order of their messages.
        Commit the messages to the broker afterwards. With the `fence` of an assignment, only while the worker owns the
        partition. Raises `OutOfOrder` or `StaleEpoch`; then nothing was added."""
        return await self._driver.run(_apply, self.name, entries, fence)

    async def apply_ranges(self, ranges: Iterable[TallyRange], *, fence: Fence | None = None) -> list[RangeResult]:
        """Add each range that begins where its source stands, in one transaction: at most 10,000 sums. One result for
        each. After "moved", leave out what its position covers, and send what remains from there; a `buffer` does all
        of it. With the `fence` of an assignment, only while the worker owns the partition. Raises `Conflict` for a
        source that has entries, and `StaleEpoch`; then nothing was added."""
        return await self._driver.run(_apply_ranges, self.name, ranges, fence)

    async def value(self, key: str) -> int:
        """The total of a key; 0 if nothing was ever added."""
        return (await self.get(key)).value

    async def get(self, key: str) -> TallyValue:
        """The total of a key and its sub-counters by source."""
        return await self._driver.run(calls.value, self.name, key)

    def totals(self, *, prefix: str = "", page_size: int = 1000) -> AsyncIterator[TallyTotal]:
        """The totals of the keys that begin with `prefix`, in byte order, fetched page by page."""
        return self._driver.iterate(calls.totals, self.name, prefix, page_size)

    async def delete(self) -> None:
        """Delete the tally with its guards and positions. Messages that are applied again count again."""
        await self._driver.run(calls.delete, self.name)

    def buffer(
        self,
        window: Window | None = None,
        *,
        by: By = "entry",
        every: float = DEFAULT_EVERY,
        most: int = DEFAULT_MOST,
    ) -> AsyncTallyBuffer:
        """A context manager that combines messages into few calls, and acks them in `window`, an `AckWindow`, after
        they were counted. `by`: "range" adds them up, for messages that are added in the order of their partition; see
        `TallyBuffer`."""
        return AsyncTallyBuffer(self._driver, self.name, window, every, most, by)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} at {self._driver.service.url}>"
