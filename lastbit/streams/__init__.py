"""Handles a stream's events in parallel, in order per key, and computes the offset that is safe to commit.

`AckWindow`, `run_ordered` and `partition_of` need only the standard library. Each name is imported when it is first
used.
"""

from __future__ import annotations

from typing import Final

from lastbit._lazy import lazy

_HOMES: Final = {
    "lastbit.streams.backoff": ("Backoff",),
    "lastbit.streams.errors": (
        "CommitFailed",
        "CorruptSnapshot",
        "GroupReplaced",
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

__all__, __getattr__, __dir__ = lazy(__name__, _HOMES)
