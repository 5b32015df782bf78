"""Adapters for queues: an item's life cycle follows the life cycle of its message.

There is a module for each library, with an extra of the same name: `pip install 'lastbit[celery]'` brings what
`lastbit.integrations.celery` needs. A library is imported only with its module. The parts that all adapters share are
here, for queues without an adapter too: `fan_out` issues items and sends their messages, and can be killed and run
again.
"""

from __future__ import annotations

from lastbit.integrations._fan_out import CHUNK, fan_out, fan_out_async

__all__ = ["CHUNK", "Failed", "fan_out", "fan_out_async"]


class Failed(Exception):
    """For handlers to raise: this message has failed for good. Its item fails with the `reason`, and the message is not
    redelivered. After any other exception it is, and the item stays pending."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
