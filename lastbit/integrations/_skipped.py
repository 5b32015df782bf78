"""The exception with which a handler skips a message."""

from __future__ import annotations


class Skipped(Exception):
    """For handlers to raise: this message needs no work. Its item is skipped with the `reason`, and the message is
    removed like one that was handled."""

    def __init__(self, reason: str | None = None) -> None:
        # Not by super(): a subclass may be an exception of a library too, which takes other arguments.
        Exception.__init__(self, *(() if reason is None else (reason,)))  # without one, str() is empty
        self.reason = reason
