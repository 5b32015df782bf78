# The names of __init__.py for type checkers, which cannot look inside its table.
from lastbit.acker import Acker as Acker, AsyncAcker as AsyncAcker
from lastbit.batch import AsyncBatchHandle as AsyncBatchHandle, BatchHandle as BatchHandle
from lastbit.chains import (
    Hop as Hop,
    Source as Source,
    SourceChain as SourceChain,
    TallyEntry as TallyEntry,
    TallyRange as TallyRange,
)
from lastbit.client import AsyncClient as AsyncClient, Client as Client
from lastbit.errors import (
    AckerClosed as AckerClosed,
    BatchEnded as BatchEnded,
    BatchNotFound as BatchNotFound,
    BatchSealed as BatchSealed,
    BufferClosed as BufferClosed,
    ClientClosed as ClientClosed,
    Conflict as Conflict,
    ConsumerGroupInUse as ConsumerGroupInUse,
    ConsumerGroupNotFound as ConsumerGroupNotFound,
    DatabaseUnreachable as DatabaseUnreachable,
    Forbidden as Forbidden,
    IdempotencyKeyReused as IdempotencyKeyReused,
    InstanceNotFound as InstanceNotFound,
    InvalidArgument as InvalidArgument,
    InvalidRequest as InvalidRequest,
    ItemRejected as ItemRejected,
    ItemResolved as ItemResolved,
    LastbitError as LastbitError,
    MalformedItem as MalformedItem,
    MessagesDiffer as MessagesDiffer,
    MessagesRefused as MessagesRefused,
    MissingExtra as MissingExtra,
    NoCurrentItem as NoCurrentItem,
    NotFound as NotFound,
    NotRefreshed as NotRefreshed,
    OutOfOrder as OutOfOrder,
    PartitionsFixed as PartitionsFixed,
    PositionTrimmed as PositionTrimmed,
    ProcessNotFound as ProcessNotFound,
    RateLimited as RateLimited,
    SchemaMismatch as SchemaMismatch,
    ServiceError as ServiceError,
    ServiceUnreachable as ServiceUnreachable,
    SessionReplaced as SessionReplaced,
    SourceRewound as SourceRewound,
    StaleEpoch as StaleEpoch,
    TooLarge as TooLarge,
    Unauthorized as Unauthorized,
    Unavailable as Unavailable,
    UnexpectedAnswer as UnexpectedAnswer,
    UsedAfterFork as UsedAfterFork,
    VersionConflict as VersionConflict,
    WaitTimeout as WaitTimeout,
    WebhookNotFound as WebhookNotFound,
)
from lastbit.failures import (
    Failure as Failure,
    FailureReason as FailureReason,
    FailureReasons as FailureReasons,
    Redrive as Redrive,
    Redriven as Redriven,
)
from lastbit.ids import InvalidItemId as InvalidItemId, ItemId as ItemId, ItemIds as ItemIds, item_id as item_id
from lastbit.models import (
    AckResult as AckResult,
    Appended as Appended,
    Batch as Batch,
    BatchCounts as BatchCounts,
    Callback as Callback,
    Completed as Completed,
    Counted as Counted,
    Event as Event,
    EventPage as EventPage,
    Explanation as Explanation,
    Extended as Extended,
    FailedRange as FailedRange,
    SkippedRange as SkippedRange,
    Fence as Fence,
    HistoryPoint as HistoryPoint,
    Opened as Opened,
    OpenedCallback as OpenedCallback,
    PendingRange as PendingRange,
    Reason as Reason,
    Rejected as Rejected,
    Repair as Repair,
    Sealed as Sealed,
    TreeProgress as TreeProgress,
    Verification as Verification,
    Watermark as Watermark,
)
from lastbit.retry import Retry as Retry
from lastbit.search import StateCounts as StateCounts
from lastbit.tallies.buffer import AsyncTallyBuffer as AsyncTallyBuffer, TallyBuffer as TallyBuffer
from lastbit.tallies.models import (
    RangeResult as RangeResult,
    SubCounter as SubCounter,
    TallyApplied as TallyApplied,
    TallyTotal as TallyTotal,
    TallyValue as TallyValue,
)
from lastbit.tallies.tally import AsyncTally as AsyncTally, Tally as Tally
from lastbit.webhooks import (
    AsyncWebhooks as AsyncWebhooks,
    Attempt as Attempt,
    CreatedWebhook as CreatedWebhook,
    Delivery as Delivery,
    RotatedWebhook as RotatedWebhook,
    Tested as Tested,
    Webhook as Webhook,
    Webhooks as Webhooks,
)

__version__: str
