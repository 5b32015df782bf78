"""The errors of core, with their data. `api` maps them to HTTP statuses.

Classes derive from `CoreError`. `code` is the stable name in responses.
"""

from __future__ import annotations

import enum
from typing import ClassVar

from core import programs
from lastbit.ids import ItemId

# CoreError
# ├── InvalidRequest            the input is invalid
# │   ├── IdempotencyKeyReused  the key was used before, with another body
# │   └── StepReused            another command of the instance has this step
# ├── BatchNotFound
# ├── GroupNotFound             no item of that group is issued
# ├── BatchEnded                the batch no longer allows the verb
# │   ├── BatchSealed
# │   ├── BatchComplete
# │   ├── BatchExpired
# │   └── BatchCancelled
# ├── BatchFull                 the batch would have more items than those at which it seals itself
# ├── ItemResolved              the item on whose behalf items were to be added is not pending
# ├── BatchLive                 it has not ended, so it can't be reopened
# ├── NothingPending            there is nothing to send again
# ├── NothingFailed             there is nothing to redrive
# ├── WebhookNotFound
# ├── WebhookDisabled           its receiver responded with 410 Gone
# ├── PositionTrimmed           the feed was trimmed past that position
# ├── OutOfOrder                a message reached its tally after a later one of its source
# ├── SourceConflict            entries for a source that has ranges, or the other way round
# ├── ConsumerGroupNotFound
# ├── ConsumerGroupInUse        it has live workers, so it can't be deleted
# ├── PartitionsFixed           a consumer group keeps its number of partitions
# ├── SessionReplaced           another process has the worker's name now
# ├── StaleEpoch                the partition has another owner now
# ├── ProcessNotFound
# ├── InstanceNotFound          the process has no instance of that name
# ├── VersionConflict           the instance has changed since it was read
# ├── TooLarge
# ├── Unavailable               nothing is wrong with the call: send it again
# │   ├── Overloaded
# │   ├── OutcomeUnknown
# │   ├── LockTimeout
# │   └── Contended
# ├── InconsistentBatch         the counts disagree with the bits: a bug or a broken row
# ├── UpgradeNotFinished        an earlier release may still work on the database
# └── Misconfigured             the service can't work with these settings


class CoreError(Exception):
    code: ClassVar[str] = "internal"


def copy_of(error: Exception) -> Exception:
    """The same error for another caller. Raising an error changes its traceback and its context, so callers that wait
    for one result can't share the object. The original is the copy's cause."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error
    return copy


class InvalidRequest(CoreError):
    """`place` is the path of the invalid value in the request; `expected` describes a valid one."""

    code = "invalid_request"

    def __init__(self, place: str, expected: str) -> None:
        self.place = place
        self.expected = expected
        super().__init__(f"{place}: {expected}")


class IdempotencyKeyReused(InvalidRequest):
    code = "idempotency_key_reused"

    def __init__(self, key: str, what: str) -> None:
        super().__init__("header Idempotency-Key", f"{key!r} was used before with another body ({what})")


class StepReused(InvalidRequest):
    """`issuer` is the event that issued the step first; it is `event` if two commands of one handling have it."""

    code = "step_reused"

    def __init__(self, place: str, step: str, issuer: str, event: str) -> None:
        if issuer == event:
            reason = f"event {event!r} issues it twice"
        else:
            reason = f"event {issuer!r} has issued it, so event {event!r} can't"
        super().__init__(
            place,
            f"expected a step of its own, not {step!r}: {reason}. Name another step, or set `once` if one command is "
            "enough",
        )


class BatchNotFound(CoreError):
    code = "batch_not_found"

    def __init__(self, batch: int) -> None:
        self.batch = batch
        super().__init__(f"there is no batch {batch}")


class GroupNotFound(CoreError):
    code = "group_not_found"

    def __init__(self, batch: int, group: int, groups: int) -> None:
        self.batch = batch
        self.group = group
        super().__init__(f"batch {batch} has no group {group}: it has {groups} {'group' if groups == 1 else 'groups'}")


class BatchEnded(CoreError):
    happened: ClassVar[str]

    def __init__(self, batch: int, verb: str) -> None:
        self.batch = batch
        self.verb = verb
        super().__init__(f"batch {batch} {self.happened}: {verb} is no longer possible")


class ItemResolved(CoreError):
    code = "item_resolved"

    def __init__(self, item: ItemId) -> None:
        super().__init__(f"item {item} is resolved: no more items can be added on its behalf")


class NothingFailed(CoreError):
    code = "nothing_failed"

    def __init__(self, batch: int) -> None:
        super().__init__(f"batch {batch} has no failed items, or none of those that were asked for: nothing to redrive")


class NothingPending(CoreError):
    code = "nothing_pending"

    def __init__(self, batch: int, unchanged_for: int | None = None) -> None:
        if unchanged_for is None:
            text = f"batch {batch} has no pending items, or only those of nested batches: nothing to send again"
        else:
            text = f"batch {batch} has changed within the last {unchanged_for:,} s: its items may still be under way"
        super().__init__(text)


class BatchLive(CoreError):
    code = "batch_live"

    def __init__(self, batch: int, state: str) -> None:
        super().__init__(f"batch {batch} is {state}: only a batch that was cancelled or has expired can be reopened")


class StateConflict(CoreError):
    """The call is for a batch in another state."""

    code = "state_conflict"

    def __init__(self, batch: int, state: str, expected: str) -> None:
        super().__init__(f"batch {batch} is {state}, and the call is for a batch that is {expected}")


class BatchSealed(BatchEnded):
    code = "batch_sealed"
    happened = "is sealed"


class BatchFull(CoreError):
    """The extend would go beyond the number of items at which the batch seals itself."""

    code = BatchSealed.code

    def __init__(self, batch: int, items: int, seal_at: int, count: int) -> None:
        super().__init__(f"batch {batch} is sealed at {seal_at} items and has {items}: it can't be extended by {count}")


class BatchComplete(BatchEnded):
    code = "batch_complete"
    happened = "is complete"


class BatchExpired(BatchEnded):
    code = "batch_expired"
    happened = "has expired"


class BatchCancelled(BatchEnded):
    code = "batch_cancelled"
    happened = "was cancelled"


class WebhookNotFound(CoreError):
    code = "webhook_not_found"

    def __init__(self, webhook: int) -> None:
        super().__init__(f"there is no webhook {webhook}")


class WebhookDisabled(CoreError):
    code = "webhook_disabled"

    def __init__(self, webhook: int) -> None:
        super().__init__(f"webhook {webhook} is disabled, as its receiver responded with 410 Gone: create another one")


class PositionTrimmed(CoreError):
    code = "position_trimmed"

    def __init__(self, after: int, trimmed: int) -> None:
        self.trimmed = trimmed
        super().__init__(
            f"events after position {after} were removed: the feed was trimmed up to {trimmed}; continue from there"
        )


class OutOfOrder(CoreError):
    """`position` and `reached` are the (offset, child) of the late message and of the last message before it."""

    code = "out_of_order"

    def __init__(self, place: str, key: str, position: tuple[int, int], reached: tuple[int, int]) -> None:
        self.place = place
        self.position = position
        self.reached = reached
        super().__init__(
            f"{place}: offset {position[0]}, child {position[1]} of its source reaches {key!r} for the first time, "
            f"but after offset {reached[0]}, child {reached[1]}: the messages of a source must reach a key in order"
        )


class SourceConflict(CoreError):
    """`source` is its topic, partition and generation; `counted_by` is what the source has added to the key by."""

    code = "source_conflict"

    def __init__(self, place: str, key: str, source: tuple[str, int, int], counted_by: str) -> None:
        self.place = place
        self.counted_by = counted_by
        topic, partition, generation = source
        super().__init__(
            f"{place}: topic {topic!r}, partition {partition}, generation {generation} has added to {key!r} by "
            f"{counted_by}: a source uses entries or ranges, not both"
        )


class ConsumerGroupNotFound(CoreError):
    code = "consumer_group_not_found"

    def __init__(self, group: str) -> None:
        super().__init__(f"there is no consumer group {group!r}")


class ConsumerGroupInUse(CoreError):
    code = "consumer_group_in_use"

    def __init__(self, group: str, workers: int) -> None:
        super().__init__(f"consumer group {group!r} has live workers ({workers}): stop them first")


class PartitionsFixed(CoreError):
    code = "partitions_fixed"

    def __init__(self, group: str, partitions: int) -> None:
        self.partitions = partitions
        super().__init__(
            f"consumer group {group!r} has {partitions} partitions, which can't be changed: with another number, keys "
            "would move to other partitions; delete the group, or create another one"
        )


class SessionReplaced(CoreError):
    code = "session_replaced"

    def __init__(self, group: str, worker: str) -> None:
        super().__init__(
            f"another process has joined {group!r} as worker {worker!r}, so this process has lost its partitions"
        )


class StaleEpoch(CoreError):
    code = "stale_epoch"

    def __init__(self, group: str, partition: int, worker: str, epoch: int) -> None:
        super().__init__(
            f"worker {worker!r} no longer owns partition {partition} of consumer group {group!r} at epoch {epoch}; "
            "nothing was written"
        )


class ProcessNotFound(CoreError):
    code = "process_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no process {name!r}")


class InstanceNotFound(CoreError):
    code = "instance_not_found"

    def __init__(self, name: str, instance: str) -> None:
        super().__init__(f"process {name!r} has no instance {instance!r}")


class VersionConflict(CoreError):
    code = "version_conflict"

    def __init__(self, name: str, instance: str, expected: int, version: int) -> None:
        self.version = version
        super().__init__(
            f"instance {instance!r} of process {name!r} is at version {version}, not {expected}: read it and compute "
            "the effects again; nothing was written"
        )


class TooLarge(CoreError):
    code = "too_large"


class Unavailable(CoreError):
    """The database can't be reached, or the service is overloaded. The same call may succeed later. Sending it again is
    safe, except after `OutcomeUnknown` for an open or extend without a key."""

    code = "unavailable"
    retry_after: ClassVar[int] = 1
    """Seconds after which a client may try again."""


class Overloaded(Unavailable):
    pass


class OutcomeUnknown(Unavailable):
    """A COMMIT got no answer, and the database can't be asked: it may have happened."""


class LockTimeout(Unavailable):
    """Another session has locked a row for longer than the transaction waits. `batches` has the batches of such rows,
    if known."""

    batches: frozenset[int] = frozenset()


class Contended(Unavailable):
    """The transaction met a conflict each time it began again."""


class InconsistentBatch(CoreError):
    def __init__(self, batch: int, facts: str) -> None:
        self.batch = batch
        super().__init__(f"batch {batch} is inconsistent, nothing was changed: {facts} (see `lastbit verify {batch}`)")


class UpgradeNotFinished(CoreError):
    code = "upgrade_not_finished"

    def __init__(self, revision: str) -> None:
        super().__init__(
            f"releases that don't know revision {revision} may still use this database: when none of their processes "
            f"is left, run `{programs.command('api', 'migrate', '--finish')}`; nothing was changed"
        )


class Fault(enum.Enum):
    """Kinds of database faults. `storage.faults` classifies a driver's error as one of them."""

    CONFLICT = "conflict"
    LOCK_WAIT = "lock_wait"
    HEAD_WAIT = "head_wait"
    """A lock wait for the feed's head, which no batch causes."""
    OUTAGE = "outage"


def batches_of(error: Exception) -> frozenset[int]:
    """The batches that an error names."""
    if isinstance(error, LockTimeout):
        return error.batches
    return frozenset([error.batch]) if isinstance(error, InconsistentBatch) else frozenset()


def is_outage(error: Exception) -> bool:
    """Whether no batch causes the error, so that no other call would succeed either."""
    return isinstance(error, Unavailable) and not isinstance(error, LockTimeout | Contended)


class Misconfigured(CoreError):
    pass
