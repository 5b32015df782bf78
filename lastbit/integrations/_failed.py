"""The exception with which a handler gives up a message."""

from __future__ import annotations


class Failed(Exception):
    """For handlers to raise: this message has failed for good. Its item fails with the `reason`, and the message is not
    redelivered. After any other exception it is, and the item stays pending."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(*(() if reason is None else (reason,)))  # without one, str() is empty, and not "None"
        self.reason = reason
