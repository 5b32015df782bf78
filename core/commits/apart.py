"""Work that fails when it is merged is tried again apart, so that only the cause of the failure fails."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from core import errors

Item = TypeVar("Item")


def attempt(
    work: Callable[[Sequence[Item]], Exception | None], items: Sequence[Item], key: Callable[[Item], Hashable]
) -> Iterator[tuple[Sequence[Item], Exception]]:
    """Attempt the items together. `work` does all or nothing, and returns the error if nothing was done. Yields the
    items that fail with their error, before the others are attempted again.

    Items with one `key`, such as a batch, fail together: those of the keys that the error names (see
    `errors.batches_of`). If it names none, each half is attempted by itself. An outage has no cause among the items, so
    all of them fail.
    """
    waiting = [items]
    while waiting:
        merged = waiting.pop()
        error = work(merged)
        if error is None:
            continue
        if errors.is_outage(error):
            yield merged, error
            continue
        keys = list(dict.fromkeys(map(key, merged)))
        culprits = frozenset(keys) if len(keys) == 1 else errors.batches_of(error).intersection(keys)
        separate = culprits or frozenset(keys[: len(keys) // 2])
        others = [item for item in merged if key(item) not in separate]
        if others:
            waiting.append(others)
        chosen = [item for item in merged if key(item) in separate]
        if culprits:
            yield chosen, error
        else:
            waiting.append(chosen)
