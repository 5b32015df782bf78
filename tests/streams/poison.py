"""A record that always fails, in any source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from lastbit.streams import Backoff, run_ordered


def check_dead_letter(
    source: Any, count: int, key: Callable[[Any], Hashable], is_poison: Callable[[Any], bool]
) -> None:
    """It becomes a dead letter after its three tries. By the second one, all records of other keys are handled, and by
    the end all but itself. Then the source is stopped."""
    tries: list[Any] = []
    dead: list[Any] = []
    handled: list[Any] = []
    read: list[Any] = []
    changed = threading.Condition()

    def key_of(record: Any) -> Hashable:
        read.append(record)
        return key(record)

    def others_are_handled() -> bool:
        others = [record for record in read if key(record) != key(tries[0])]
        return len(read) == count and {id(record) for record in others} <= {id(record) for record in handled}

    def handle(record: Any) -> None:
        if is_poison(record):
            tries.append(record)
            if len(tries) == 2:
                with changed:
                    assert changed.wait_for(others_are_handled, 60)
            raise ValueError("no such order")
        with changed:
            handled.append(record)
            changed.notify_all()
        if len(handled) == count - 1:
            source.stop()

    run_ordered(
        source,
        handle,
        key=key_of,
        retry=Backoff(first=0.01, tries=3),
        dead_letter=lambda record, error: dead.append(record),
        window=source.window,
        commit=source.commit,
        every=0.05,
    )
    assert (len(tries), len(dead), len(handled)) == (3, 1, count - 1)
    assert is_poison(dead[0])
