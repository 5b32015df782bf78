# The names of __init__.py for type checkers, which cannot look inside its table.
from lastbit.streams.backoff import Backoff as Backoff
from lastbit.streams.errors import (
    CommitFailed as CommitFailed,
    CorruptSnapshot as CorruptSnapshot,
    GroupReplaced as GroupReplaced,
    OffsetOutOfOrder as OffsetOutOfOrder,
    RecordFailed as RecordFailed,
    SessionEnded as SessionEnded,
    StreamError as StreamError,
    UnknownOffset as UnknownOffset,
    WindowClosed as WindowClosed,
    WindowFull as WindowFull,
)
from lastbit.streams.group import Assignment as Assignment, ConsumerGroup as ConsumerGroup
from lastbit.streams.group_async import AsyncAssignment as AsyncAssignment, AsyncConsumerGroup as AsyncConsumerGroup
from lastbit.streams.ordered import run_ordered as run_ordered
from lastbit.streams.ordered_async import run_ordered_async as run_ordered_async
from lastbit.streams.partitions import partition_of as partition_of
from lastbit.streams.snapshot import Snapshot as Snapshot
from lastbit.streams.window import AckWindow as AckWindow
