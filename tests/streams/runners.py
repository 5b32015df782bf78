"""Both runners behind one function, so that a test runs on each, and a log that is read from the committed floor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import pytest

from lastbit.streams import run_ordered, run_ordered_async

Run = Callable[..., None]


def in_threads(source: Iterable[Any], handle: Callable[[Any], object], **options: Any) -> None:
    run_ordered(source, handle, **options)


def in_tasks(source: Iterable[Any], handle: Callable[[Any], object], **options: Any) -> None:
    """Each call pauses, so that tasks alternate as threads would."""

    async def handle_it(record: Any) -> object:
        await asyncio.sleep(0)
        return handle(record)

    async def items() -> AsyncIterator[Any]:
        for item in source:
            yield item
            await asyncio.sleep(0)

    if "commit" in options:
        commit = options["commit"]

        async def commit_it(offset: Any) -> None:
            await asyncio.sleep(0)
            commit(offset)

        options["commit"] = commit_it
    asyncio.run(run_ordered_async(items(), handle_it, **options))


on_both_runners = pytest.mark.parametrize("run", [in_threads, in_tasks])


def log_from(records: dict[int, Any], floor: int) -> Iterator[tuple[int, Any]]:
    """The records above the floor, in the order in which a broker delivers them."""
    return ((offset, record) for offset, record in sorted(records.items()) if offset > floor)
