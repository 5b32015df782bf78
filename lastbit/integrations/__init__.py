"""Adapters for queues: an item's life cycle follows the life cycle of its message.

There is a module for each library, with an extra of the same name: `pip install 'lastbit[celery]'` brings what
`lastbit.integrations.celery` needs. A library is imported only with its module. The parts that all adapters share are
here, for queues without an adapter too: `fan_out` issues items and sends their messages, and can be killed and run
again; `resend` sends those of a redrive again; `resolving` acks or fails an item by the outcome of a block of code. A
handler learns its own item from `current_item`, the item's batch from `current_batch`, and from `current_batch_ended`
whether it may stop early.
"""

from __future__ import annotations

from lastbit.integrations._current import current_batch, current_batch_ended, current_item
from lastbit.integrations._failed import Failed
from lastbit.integrations._fan_out import CHUNK, FanOutOptions, fan_out, fan_out_async, resend, resend_async
from lastbit.integrations._resolving import resolving, resolving_async
from lastbit.integrations._skipped import Skipped

__all__ = [
    "CHUNK",
    "Failed",
    "FanOutOptions",
    "Skipped",
    "current_batch",
    "current_batch_ended",
    "current_item",
    "fan_out",
    "fan_out_async",
    "resend",
    "resend_async",
    "resolving",
    "resolving_async",
]
