"""A stream's events, handled in parallel and in order per key, and the offset that is safe to commit.

`AckWindow`, `run_ordered` and `partition_of` need the standard library alone; each name is imported when it is first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lastbit._lazy import lazy

if TYPE_CHECKING:
    from lastbit.streams.errors import (
        CommitFailed,
        CorruptSnapshot,
        OffsetOutOfOrder,
        RecordFailed,
        SessionEnded,
        StreamError,
        UnknownOffset,
        WindowClosed,
        WindowFull,
    )
    from lastbit.streams.group import Assignment, ConsumerGroup
    from lastbit.streams.group_async import AsyncAssignment, AsyncConsumerGroup
    from lastbit.streams.ordered import run_ordered
    from lastbit.streams.ordered_async import run_ordered_async
    from lastbit.streams.partitions import partition_of
    from lastbit.streams.snapshot import Snapshot
    from lastbit.streams.window import AckWindow

_HOMES: Final = {
    "lastbit.streams.errors": (
        "CommitFailed",
        "CorruptSnapshot",
        "OffsetOutOfOrder",
        "RecordFailed",
        "SessionEnded",
        "StreamError",
        "UnknownOffset",
        "WindowClosed",
        "WindowFull",
    ),
    "lastbit.streams.group": ("Assignment", "ConsumerGroup"),
    "lastbit.streams.group_async": ("AsyncAssignment", "AsyncConsumerGroup"),
    "lastbit.streams.ordered": ("run_ordered",),
    "lastbit.streams.ordered_async": ("run_ordered_async",),
    "lastbit.streams.partitions": ("partition_of",),
    "lastbit.streams.snapshot": ("Snapshot",),
    "lastbit.streams.window": ("AckWindow",),
}

__all__ = [
    "AckWindow",
    "Assignment",
    "AsyncAssignment",
    "AsyncConsumerGroup",
    "CommitFailed",
    "ConsumerGroup",
    "CorruptSnapshot",
    "OffsetOutOfOrder",
    "RecordFailed",
    "SessionEnded",
    "Snapshot",
    "StreamError",
    "UnknownOffset",
    "WindowClosed",
    "WindowFull",
    "partition_of",
    "run_ordered",
    "run_ordered_async",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)
