"""Lastbit knows, exactly, when parallel work is finished: the client.

`Client` and `AsyncClient` need httpx, and it is imported when one of them is first named: whoever needs only item ids
and their arithmetic, an executor of a cluster for example, gets by on the standard library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

__version__: Final = "0.1.0"

if TYPE_CHECKING:
    from lastbit.acker import Acker, AsyncAcker
    from lastbit.batch import AsyncBatchHandle, BatchHandle
    from lastbit.chains import Hop, Source, SourceChain, TallyEntry
    from lastbit.client import AsyncClient, Client
    from lastbit.errors import (
        AckerClosed,
        BatchEnded,
        BatchNotFound,
        BatchSealed,
        BufferClosed,
        Conflict,
        ConsumerGroupInUse,
        ConsumerGroupNotFound,
        Forbidden,
        IdempotencyKeyReused,
        InstanceNotFound,
        InvalidArgument,
        InvalidRequest,
        ItemRejected,
        LastbitError,
        MalformedItem,
        MissingExtra,
        NotFound,
        NotRefreshed,
        OutOfOrder,
        PartitionsFixed,
        PositionTrimmed,
        ProcessNotFound,
        RateLimited,
        ServiceError,
        ServiceUnreachable,
        SessionReplaced,
        StaleEpoch,
        TooLarge,
        Unauthorized,
        Unavailable,
        UnexpectedAnswer,
        VersionConflict,
        WaitTimeout,
        WebhookNotFound,
    )
    from lastbit.ids import InvalidItemId, ItemId, ItemIds, item_id
    from lastbit.models import (
        AckResult,
        Appended,
        Batch,
        Completed,
        Counted,
        Event,
        EventPage,
        Explanation,
        Extended,
        FailedRange,
        Fence,
        Opened,
        PendingRange,
        Reason,
        Rejected,
        Sealed,
        Verification,
        Watermark,
    )
    from lastbit.retry import Retry
    from lastbit.tallies.buffer import AsyncTallyBuffer, TallyBuffer
    from lastbit.tallies.models import SubCounter, TallyApplied, TallyTotal, TallyValue
    from lastbit.tallies.tally import AsyncTally, Tally
    from lastbit.webhooks import AsyncWebhooks, Attempt, CreatedWebhook, Delivery, Tested, Webhook, Webhooks

_HOMES: Final = {
    "lastbit.acker": ("Acker", "AsyncAcker"),
    "lastbit.batch": ("AsyncBatchHandle", "BatchHandle"),
    "lastbit.chains": ("Hop", "Source", "SourceChain", "TallyEntry"),
    "lastbit.client": ("AsyncClient", "Client"),
    "lastbit.errors": (
        "AckerClosed",
        "BatchEnded",
        "BatchNotFound",
        "BatchSealed",
        "BufferClosed",
        "Conflict",
        "ConsumerGroupInUse",
        "ConsumerGroupNotFound",
        "Forbidden",
        "IdempotencyKeyReused",
        "InstanceNotFound",
        "InvalidArgument",
        "InvalidRequest",
        "ItemRejected",
        "LastbitError",
        "MalformedItem",
        "MissingExtra",
        "NotFound",
        "NotRefreshed",
        "OutOfOrder",
        "PartitionsFixed",
        "PositionTrimmed",
        "ProcessNotFound",
        "RateLimited",
        "ServiceError",
        "ServiceUnreachable",
        "SessionReplaced",
        "StaleEpoch",
        "TooLarge",
        "Unauthorized",
        "Unavailable",
        "UnexpectedAnswer",
        "VersionConflict",
        "WaitTimeout",
        "WebhookNotFound",
    ),
    "lastbit.ids": ("InvalidItemId", "ItemId", "ItemIds", "item_id"),
    "lastbit.models": (
        "AckResult",
        "Appended",
        "Batch",
        "Completed",
        "Counted",
        "Event",
        "EventPage",
        "Explanation",
        "Extended",
        "FailedRange",
        "Fence",
        "Opened",
        "PendingRange",
        "Reason",
        "Rejected",
        "Sealed",
        "Verification",
        "Watermark",
    ),
    "lastbit.retry": ("Retry",),
    "lastbit.tallies.buffer": ("AsyncTallyBuffer", "TallyBuffer"),
    "lastbit.tallies.models": ("SubCounter", "TallyApplied", "TallyTotal", "TallyValue"),
    "lastbit.tallies.tally": ("AsyncTally", "Tally"),
    "lastbit.webhooks": (
        "AsyncWebhooks",
        "Attempt",
        "CreatedWebhook",
        "Delivery",
        "Tested",
        "Webhook",
        "Webhooks",
    ),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AckResult",
    "Acker",
    "AckerClosed",
    "Appended",
    "AsyncAcker",
    "AsyncBatchHandle",
    "AsyncClient",
    "AsyncTally",
    "AsyncTallyBuffer",
    "AsyncWebhooks",
    "Attempt",
    "Batch",
    "BatchEnded",
    "BatchHandle",
    "BatchNotFound",
    "BatchSealed",
    "BufferClosed",
    "Client",
    "Completed",
    "Conflict",
    "ConsumerGroupInUse",
    "ConsumerGroupNotFound",
    "Counted",
    "CreatedWebhook",
    "Delivery",
    "Event",
    "EventPage",
    "Explanation",
    "Extended",
    "FailedRange",
    "Fence",
    "Forbidden",
    "Hop",
    "IdempotencyKeyReused",
    "InstanceNotFound",
    "InvalidArgument",
    "InvalidItemId",
    "InvalidRequest",
    "ItemId",
    "ItemIds",
    "ItemRejected",
    "LastbitError",
    "MalformedItem",
    "MissingExtra",
    "NotFound",
    "NotRefreshed",
    "Opened",
    "OutOfOrder",
    "PartitionsFixed",
    "PendingRange",
    "PositionTrimmed",
    "ProcessNotFound",
    "RateLimited",
    "Reason",
    "Rejected",
    "Retry",
    "Sealed",
    "ServiceError",
    "ServiceUnreachable",
    "SessionReplaced",
    "Source",
    "SourceChain",
    "StaleEpoch",
    "SubCounter",
    "Tally",
    "TallyApplied",
    "TallyBuffer",
    "TallyEntry",
    "TallyTotal",
    "TallyValue",
    "Tested",
    "TooLarge",
    "Unauthorized",
    "Unavailable",
    "UnexpectedAnswer",
    "Verification",
    "VersionConflict",
    "WaitTimeout",
    "Watermark",
    "Webhook",
    "WebhookNotFound",
    "Webhooks",
    "__version__",
    "item_id",
]


if not TYPE_CHECKING:
    # Hidden from type checkers, which would else believe in any name.
    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'lastbit' has no attribute {name!r}")
        found = getattr(import_module(home), name)
        globals()[name] = found  # the next look-up does not come here
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
