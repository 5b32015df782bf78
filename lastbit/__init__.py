"""The client of Lastbit, which knows exactly when parallel work is finished.

Each name is imported when it is first used. `Client` and `AsyncClient` need httpx. Item ids need only the standard
library, for example on the executors of a cluster.
"""

from __future__ import annotations

from typing import Final

from lastbit._lazy import lazy

__version__: Final = "0.1.0"

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
        "ClientClosed",
        "Conflict",
        "ConsumerGroupInUse",
        "ConsumerGroupNotFound",
        "Forbidden",
        "IdempotencyKeyReused",
        "InstanceNotFound",
        "InvalidArgument",
        "InvalidRequest",
        "ItemRejected",
        "ItemResolved",
        "LastbitError",
        "MalformedItem",
        "MessagesDiffer",
        "MessagesRefused",
        "MissingExtra",
        "NoCurrentItem",
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
        "UsedAfterFork",
        "VersionConflict",
        "WaitTimeout",
        "WebhookNotFound",
    ),
    "lastbit.failures": ("FailureReason", "FailureReasons", "Redrive", "Redriven"),
    "lastbit.ids": ("InvalidItemId", "ItemId", "ItemIds", "item_id"),
    "lastbit.models": (
        "AckResult",
        "Appended",
        "Batch",
        "BatchCounts",
        "Callback",
        "Completed",
        "Counted",
        "Event",
        "EventPage",
        "Explanation",
        "Extended",
        "FailedRange",
        "SkippedRange",
        "Fence",
        "HistoryPoint",
        "Opened",
        "OpenedCallback",
        "PendingRange",
        "Reason",
        "Rejected",
        "Repair",
        "Sealed",
        "TreeProgress",
        "Verification",
        "Watermark",
    ),
    "lastbit.retry": ("Retry",),
    "lastbit.search": ("StateCounts",),
    "lastbit.tallies.buffer": ("AsyncTallyBuffer", "TallyBuffer"),
    "lastbit.tallies.models": ("SubCounter", "TallyApplied", "TallyTotal", "TallyValue"),
    "lastbit.tallies.tally": ("AsyncTally", "Tally"),
    "lastbit.webhooks": (
        "AsyncWebhooks",
        "Attempt",
        "CreatedWebhook",
        "Delivery",
        "RotatedWebhook",
        "Tested",
        "Webhook",
        "Webhooks",
    ),
}

__all__, __getattr__, __dir__ = lazy(__name__, _HOMES)
