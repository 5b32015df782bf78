"""What can go wrong with a stream.

    LastbitError
    └── StreamError
        ├── CorruptSnapshot      not even its floor can be trusted; also a ValueError
        ├── UnknownOffset        acked, but never tracked; also a ValueError
        ├── OffsetOutOfOrder     tracked, though a later one was before; also a ValueError
        ├── WindowFull           too many positions above the floor
        ├── WindowClosed         the stream was taken away: no more acks
        ├── RecordFailed         a handler failed, and the stream stopped
        ├── CommitFailed         the floor could not be committed
        └── SessionEnded         a broker's session is over, and what it handed out can't be committed any more

Each can be pickled.
"""

from __future__ import annotations

from lastbit.errors import LastbitError


class StreamError(LastbitError):
    """The root of the errors of `lastbit.streams`."""


class CorruptSnapshot(StreamError, ValueError):
    """These bytes are no snapshot, or not even its floor has survived: begin from what the source itself remembers."""


class UnknownOffset(StreamError, ValueError):
    """An offset was acked that was never tracked."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"offset {self.offset} was never tracked"


class OffsetOutOfOrder(StreamError, ValueError):
    """An offset was tracked after one that is as large or larger. Offsets of a stream ascend; gaps are fine."""

    def __init__(self, offset: int, last: int) -> None:
        super().__init__(offset, last)
        self.offset = offset
        self.last = last

    def __str__(self) -> str:
        return f"offset {self.offset} was tracked after {self.last}"


class WindowFull(StreamError):
    """As many positions as the window may have are above the floor; `oldest` is the offset that holds it."""

    def __init__(self, oldest: int) -> None:
        super().__init__(oldest)
        self.oldest = oldest

    def __str__(self) -> str:
        return f"the window is full; offset {self.oldest} is the first that is outstanding"


class WindowClosed(StreamError):
    """The window was closed, as its stream belongs to somebody else by now: nothing is tracked or acked any more."""

    def __str__(self) -> str:
        return "the window is closed"


class RecordFailed(StreamError):
    """A record could not be handled, and the stream stopped. `__cause__` is what was raised; `offset` is the record's
    own, as the source gave it."""

    def __init__(self, offset: object) -> None:
        super().__init__(offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"the record at offset {self.offset!r} failed"


class CommitFailed(StreamError):
    """The commit failed each time it was tried. `__cause__` is what it raised last, `floor` what was not committed."""

    def __init__(self, floor: object) -> None:
        super().__init__(floor)
        self.floor = floor

    def __str__(self) -> str:
        return f"offset {self.floor!r} could not be committed"


class SessionEnded(StreamError):
    """The session with the broker is over. What it handed out and was not committed comes again in another session, and
    can't be committed any more. `__cause__` is the client's own error, if there was one."""

    def __init__(self, session: str, reason: str) -> None:
        super().__init__(session, reason)
        self.session = session
        self.reason = reason

    def __str__(self) -> str:
        return f"the session with {self.session} is over: {self.reason}"
