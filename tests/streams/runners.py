"""Both runners behind one call, so that a test runs once on each, and a log that is read from what was committed."""

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
    """Each call pauses, so that tasks take turns where threads would."""

    async def handle_it(record: Any) -> None:
        await asyncio.sleep(0)
        handle(record)

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


both = pytest.mark.parametrize("run", [in_threads, in_tasks])


def log_from(records: dict[int, Any], floor: int) -> Iterator[tuple[int, Any]]:
    """As a broker brings it: all behind the floor."""
    return ((offset, record) for offset, record in sorted(records.items()) if offset > floor)
