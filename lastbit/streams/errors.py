"""Errors of streams.

    LastbitError
    └── StreamError
        ├── CorruptSnapshot      its floor cannot be read; also a ValueError
        ├── UnknownOffset        acked, but never tracked; also a ValueError
        ├── OffsetOutOfOrder     tracked after a larger or equal offset; also a ValueError
        ├── WindowFull           too many positions above the floor
        ├── WindowClosed         the stream has another owner, so the window accepts no more acks
        ├── RecordFailed         a handler failed, and the stream stopped
        ├── CommitFailed         the floor could not be committed
        ├── GroupReplaced        the consumer group was deleted and created again
        └── SessionEnded         the session with the broker has ended: its records can no longer be committed

Each can be pickled.
"""

from __future__ import annotations

from lastbit.errors import LastbitError


class StreamError(LastbitError):
    """The root of the errors of `lastbit.streams`."""


class CorruptSnapshot(StreamError, ValueError):
    """The bytes are not a snapshot, or its floor is damaged: start from the position that the source itself stores."""


class UnknownOffset(StreamError, ValueError):
    """An offset was acked without being tracked before."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"offset {self.offset} was never tracked"


class OffsetOutOfOrder(StreamError, ValueError):
    """An offset was tracked after a larger or equal one. Offsets of a stream must ascend; gaps are allowed."""

    def __init__(self, offset: int, last: int) -> None:
        super().__init__(offset, last)
        self.offset = offset
        self.last = last

    def __str__(self) -> str:
        return f"offset {self.offset} was tracked after {self.last}"


class WindowFull(StreamError):
    """The window has `capacity` positions above the floor; `oldest` is the first outstanding offset."""

    def __init__(self, oldest: int) -> None:
        super().__init__(oldest)
        self.oldest = oldest

    def __str__(self) -> str:
        return f"the window is full; its first outstanding offset is {self.oldest}"


class WindowClosed(StreamError):
    """The window is closed because its stream has another owner. It accepts no more offsets and acks."""

    def __str__(self) -> str:
        return "the window is closed"


class RecordFailed(StreamError):
    """A record could not be handled, and the stream stopped. `__cause__` is the handler's exception; `offset` is the
    record's offset, as the source gave it."""

    def __init__(self, offset: object) -> None:
        super().__init__(offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"the record at offset {self.offset!r} failed"


class CommitFailed(StreamError):
    """Every attempt at the commit failed. `__cause__` is the last exception, `floor` the offset that was not
    committed."""

    def __init__(self, floor: object) -> None:
        super().__init__(floor)
        self.floor = floor

    def __str__(self) -> str:
        return f"offset {self.floor!r} could not be committed"


class GroupReplaced(StreamError):
    """The consumer group was deleted, and another one with its name was created: keys may have other partitions, and
    partitions other positions. Start the worker again, with what it must know of the new group. `partitions` is the
    number that the new group has."""

    def __init__(self, group: str, partitions: int) -> None:
        super().__init__(group, partitions)
        self.group = group
        self.partitions = partitions

    def __str__(self) -> str:
        return (
            f"consumer group {self.group!r} was deleted and created again, now with {self.partitions} partitions; "
            "start its workers again"
        )


class SessionEnded(StreamError):
    """The session with the broker has ended. Its uncommitted records will be delivered in another session, and can't be
    committed in this one. `__cause__` is the broker client's error, if there was one."""

    def __init__(self, session: str, reason: str) -> None:
        super().__init__(session, reason)
        self.session = session
        self.reason = reason

    def __str__(self) -> str:
        return f"the session with {self.session} has ended: {self.reason}"
