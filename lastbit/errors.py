"""The exceptions of this package. Catch the branch that you can handle.

    LastbitError
    ├── ServiceError             the service responded with a problem: status, code, detail, errors, retry_after
    │   ├── InvalidRequest       invalid_request, method_not_allowed, unsupported_media_type
    │   │   ├── IdempotencyKeyReused
    │   │   └── TooLarge
    │   ├── Unauthorized
    │   ├── Forbidden
    │   ├── NotFound             no such path
    │   │   ├── BatchNotFound
    │   │   ├── ConsumerGroupNotFound
    │   │   ├── InstanceNotFound
    │   │   ├── ProcessNotFound
    │   │   └── WebhookNotFound
    │   ├── Conflict             the current state does not allow the request
    │   │   ├── BatchSealed
    │   │   ├── BatchEnded       batch_complete, batch_expired, batch_cancelled
    │   │   ├── ConsumerGroupInUse
    │   │   ├── ItemResolved     the item that was to add items is not pending
    │   │   ├── PartitionsFixed  the consumer group has another number of partitions
    │   │   ├── SessionReplaced  another process uses the worker's name now
    │   │   ├── StaleEpoch       the partition has another owner
    │   │   └── VersionConflict  the instance has changed since it was read
    │   ├── PositionTrimmed      the requested events are no longer stored
    │   ├── OutOfOrder           a message reached its tally after a later one of its source
    │   ├── RateLimited
    │   └── Unavailable          overloaded, or its database is unreachable; also a gateway's 502 or 504
    ├── ServiceUnreachable       no response at all
    │   └── DatabaseUnreachable  the database of `lastbit.embedded` can't be used
    ├── SchemaMismatch           that database has no schema, or one of another release
    ├── UnexpectedAnswer         a response that does not follow the contract, perhaps from other software
    ├── WaitTimeout              also a TimeoutError; has the batch as last seen
    ├── ItemRejected             an acker's item was not applied, with the service's reason
    ├── AckerClosed
    ├── BufferClosed
    ├── SourceRewound            a tally has lost what a buffer had counted
    ├── ClientClosed
    ├── UsedAfterFork            also a RuntimeError; the thread that would do the work is in the parent process
    ├── MessagesRefused          a broker refused messages of a fan-out, however often they were sent
    ├── NotRefreshed             a handle's state was read before it was fetched
    ├── NoCurrentItem            also a LookupError; no message of an item is being handled here
    ├── MissingExtra             also an ImportError
    └── InvalidArgument          also a ValueError; detected locally, nothing was sent
        ├── MessagesDiffer       a fan-out was run again with other messages, or in another order
        └── MalformedItem        also an InvalidItemId; has the position in the call

All can be pickled, for example to leave a worker process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from lastbit.ids import InvalidItemId

if TYPE_CHECKING:
    from lastbit.models import AckResult, Batch


class LastbitError(Exception):
    """The base class of all errors of this package."""

    partial: AckResult | None = None
    """The merged results of the requests that succeeded, if a call of several requests failed after some of them."""
    is_temporary: bool = False
    """Whether the same call may succeed later, with nothing changed: the service was unreachable or overloaded, it
    failed, or a gateway responded in its place. Whether the call had an effect is another question."""


class ServiceError(LastbitError):
    """The service refused the request. `code` is stable, for programs; `detail` is for people; `errors` lists the
    places in the request; `retry_after` is in seconds, or None."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        errors: Sequence[Mapping[str, Any]] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(status, code, detail, errors, retry_after)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = tuple(errors)
        self.retry_after = retry_after
        self.is_temporary = status >= 500 or self.is_temporary

    def __str__(self) -> str:
        return f"{self.detail} ({self.status} {self.code})"


class InvalidRequest(ServiceError):
    """The request is malformed. `errors` lists the places. Nothing was applied."""


class IdempotencyKeyReused(InvalidRequest):
    """The idempotency key was used before with another body."""


class TooLarge(InvalidRequest):
    """The request is larger than the service accepts."""


class Unauthorized(ServiceError):
    """The token is missing or unknown: set LASTBIT_TOKEN, or pass `token` to the client."""


class Forbidden(ServiceError):
    """The token does not allow this: it lacks the role that `detail` names, or is limited to other keys."""


class NotFound(ServiceError):
    """The resource does not exist."""


class BatchNotFound(NotFound):
    """There is no such batch: it was never opened, or it was deleted."""


class ConsumerGroupNotFound(NotFound):
    """There is no such consumer group: it was never created, or it was deleted."""


class ProcessNotFound(NotFound):
    """There is no such process: it was never defined, or it was deleted."""


class InstanceNotFound(NotFound):
    """The process has no such instance: it has not received an event."""


class WebhookNotFound(NotFound):
    """There is no such webhook."""


class Conflict(ServiceError):
    """The current state does not allow the request."""


class BatchSealed(Conflict):
    """The batch is sealed and issues no more items."""


class BatchEnded(Conflict):
    """The batch is complete, expired or cancelled; see `code`."""

    @classmethod
    def of_rerun(cls, batch: Batch) -> Self:
        """The error of a program that was run again, and whose batch was cancelled or has expired."""
        fate = "was cancelled" if batch.state == "cancelled" else "has expired"
        why = "" if batch.reason is None else f": {batch.reason!r}"
        advice = f"`lastbit reopen {batch.id}` brings it back, and another idempotency key makes a new one"
        detail = f"batch {batch.id}, which was opened with this idempotency key, {fate}{why}; {advice}"
        return cls(409, f"batch_{batch.state}", detail)


class ItemResolved(Conflict):
    """The item that was to add items is resolved already. Nothing was issued."""


class ConsumerGroupInUse(Conflict):
    """The consumer group has live workers."""


class PartitionsFixed(Conflict):
    """The consumer group was created with another number of partitions, which cannot change."""


class SessionReplaced(Conflict):
    """Another process has joined the consumer group under this worker's name, so this process owns no partitions."""


class StaleEpoch(Conflict):
    """The worker no longer owns the partition at this epoch. Nothing was written."""


class VersionConflict(Conflict):
    """The instance has changed since it was read: read it and compute the effects again. Nothing was written."""


class PositionTrimmed(ServiceError):
    """Events after the position were trimmed before they were read."""


class OutOfOrder(ServiceError):
    """A message reached a tally's key for the first time after a later message of its source. It would look like a
    replay, so nothing of the call was applied."""


class RateLimited(ServiceError):
    """Too many requests; the retries failed too."""

    is_temporary = True


class Unavailable(ServiceError):
    """The service is overloaded or its database is unreachable; the retries failed too. The call may have been carried
    out: give an open or extend an idempotency key before you send it again."""


_BY_CODE: dict[str, type[ServiceError]] = {
    "invalid_request": InvalidRequest,
    "idempotency_key_reused": IdempotencyKeyReused,
    "step_reused": InvalidRequest,
    "too_large": TooLarge,
    "method_not_allowed": InvalidRequest,
    "unsupported_media_type": InvalidRequest,
    "unauthorized": Unauthorized,
    "forbidden": Forbidden,
    "not_found": NotFound,
    "batch_not_found": BatchNotFound,
    "webhook_not_found": WebhookNotFound,
    "webhook_disabled": Conflict,
    "batch_sealed": BatchSealed,
    "batch_complete": BatchEnded,
    "batch_expired": BatchEnded,
    "batch_cancelled": BatchEnded,
    "item_resolved": ItemResolved,
    "batch_live": Conflict,
    "state_conflict": Conflict,
    "nothing_failed": Conflict,
    "nothing_pending": Conflict,
    "consumer_group_not_found": ConsumerGroupNotFound,
    "consumer_group_in_use": ConsumerGroupInUse,
    "partitions_fixed": PartitionsFixed,
    "session_replaced": SessionReplaced,
    "stale_epoch": StaleEpoch,
    "process_not_found": ProcessNotFound,
    "instance_not_found": InstanceNotFound,
    "version_conflict": VersionConflict,
    "position_trimmed": PositionTrimmed,
    "out_of_order": OutOfOrder,
    "source_conflict": Conflict,
    "rate_limited": RateLimited,
    "unavailable": Unavailable,
}
# For codes newer than this client, and for responses of gateways, which have no codes.
_BY_STATUS: dict[int, type[ServiceError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: InvalidRequest,
    409: Conflict,
    413: TooLarge,
    415: InvalidRequest,
    422: InvalidRequest,
    429: RateLimited,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def service_error(
    status: int, code: str, detail: str, errors: Sequence[Mapping[str, Any]] = (), retry_after: float | None = None
) -> ServiceError:
    """The error for `code`, or for `status` if the code is unknown."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, ServiceError)
    return kind(status, code, detail, errors, retry_after)


Obstacle = Literal["name", "plain", "tls", "response"]
"""What prevented a response: the host's name is unknown, the server does not speak TLS, TLS failed otherwise, or there
was a connection but no response."""


class ServiceUnreachable(LastbitError):
    """The service did not respond. The request may or may not have been carried out; if it is `repeatable`, sending it
    again is safe. Once they were sent, an open, an extend or a redrive without an idempotency key of yours is not, nor
    the creation or test of a webhook."""

    is_temporary = True

    def __init__(
        self,
        url: str,
        request: str,
        cause: str,
        attempts: int,
        seconds: float,
        repeatable: bool = True,
        sent: bool = True,
        obstacle: Obstacle | None = None,
    ) -> None:
        super().__init__(url, request, cause, attempts, seconds, repeatable, sent, obstacle)
        self.url = url
        self.request = request
        """Method and path, like `POST /v1/acks`."""
        self.cause = cause
        self.attempts = attempts
        self.seconds = seconds
        """Seconds from the first attempt to the last."""
        self.repeatable = repeatable
        """False: the request would have its effect twice, such as a second batch."""
        self.sent = sent
        """False: no attempt got a connection, so the request has had no effect."""
        self.obstacle = obstacle
        """What prevented a response to the last attempt; None for others, such as a refused connection."""

    def __str__(self) -> str:
        attempts = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        return (
            f"no response from {self.url} to {self.request}: {self.cause} ({attempts} in {self.seconds:.1f} s). "
            "Check that the service runs there (`lastbit-server` starts one at http://127.0.0.1:8000), or set another "
            f"address with LASTBIT_URL or the url argument. {self.advice}"
        )

    @property
    def advice(self) -> str:
        """Whether to send the request again, in a sentence."""
        if self.repeatable:
            return "Sending the request again is safe."
        return "The request may have been carried out: check that before you send it again."


class DatabaseUnreachable(ServiceUnreachable):
    """The database of a `lastbit.embedded.Lastbit` can't be used: its server doesn't respond or refuses the account,
    all connections are busy, or the file can't be written. `cause` tells which. The call may or may not have been
    carried out; if it is `repeatable`, sending it again is safe."""

    def __str__(self) -> str:
        attempts = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        return f"{self.cause} ({self.request}, {attempts} in {self.seconds:.1f} s). {self.advice}"


class SchemaMismatch(LastbitError):
    """The database of a `lastbit.embedded.Lastbit` has no schema, or one that this release can't use. The message says
    what to do. Nothing was sent."""


class UnexpectedAnswer(LastbitError):
    """The response does not follow the contract. It may come from other software, or from a much older release."""

    is_temporary = True

    def __init__(self, url: str, request: str, status: int, found: str) -> None:
        super().__init__(url, request, status, found)
        self.url = url
        self.request = request
        self.status = status
        self.found = found

    def __str__(self) -> str:
        return (
            f"{self.url} responded with {self.status} to {self.request}, but {self.found}. Is this the address of a "
            "Lastbit service?"
        )


class WaitTimeout(LastbitError, TimeoutError):
    """The batch did not end in time. `batch` is its last known state."""

    def __init__(self, batch: Batch, timeout: float) -> None:
        super().__init__(batch, timeout)
        self.batch = batch
        self.timeout = timeout

    def __str__(self) -> str:
        batch = self.batch
        return (
            f"batch {batch.id} did not end within {self.timeout:g} s: it is {batch.state}, "
            f"{batch.pending:,} of {batch.items:,} items pending"
        )


class ItemRejected(LastbitError):
    """The service did not apply the item. `reason` is `unknown_batch`, `unknown_item`, `expired`, `cancelled`, or
    `held`: a nested batch stands for the item, and resolves it when it ends."""

    MEANINGS: ClassVar[dict[str, str]] = {
        "unknown_batch": "there is no such batch",
        "unknown_item": "never issued",
        "expired": "its batch has expired",
        "cancelled": "its batch was cancelled",
        "held": "a nested batch stands for it and will resolve it",
    }

    def __init__(self, item: str, reason: str) -> None:
        super().__init__(item, reason)
        self.item = item
        self.reason = reason

    def __str__(self) -> str:
        return f"item {self.item} was rejected: {self.MEANINGS.get(self.reason, self.reason)} ({self.reason})"


class AckerClosed(LastbitError):
    """The acker is closed and accepts no more items."""

    def __init__(self) -> None:
        super().__init__()

    def __str__(self) -> str:
        return "the acker is closed and accepts no more items"


class SourceRewound(LastbitError):
    """A tally's source stands before the position that this buffer had reached: the database was restored from a
    backup, or the tally was deleted. Read again from before `position`, which is None if nothing of the source is
    counted."""

    def __init__(self, topic: str, partition: int, reached: str, position: str | None) -> None:
        super().__init__(topic, partition, reached, position)
        self.topic = topic
        self.partition = partition
        self.reached = reached
        self.position = position

    def __str__(self) -> str:
        stands = "is not counted any more" if self.position is None else f"stands at {self.position}"
        return f"topic {self.topic!r}, partition {self.partition} was counted up to {self.reached}, but now it {stands}"


class BufferClosed(LastbitError):
    """The tally buffer is closed and accepts no more messages."""

    def __init__(self) -> None:
        super().__init__()

    def __str__(self) -> str:
        return "the buffer is closed and accepts no more messages"


class ClientClosed(LastbitError):
    """The client is closed and sends no more requests."""

    def __init__(self) -> None:
        super().__init__()

    def __str__(self) -> str:
        return "the client is closed and sends no more requests: make another one, or close it later"


class UsedAfterFork(LastbitError, RuntimeError):
    """An object with a thread was used in a child process, where the thread does not exist."""

    def __init__(self, thing: str) -> None:
        super().__init__(thing)
        self.thing = thing

    def __str__(self) -> str:
        return f"{self.thing} belongs to the parent process: make another one, and another client, after the fork"


class NotRefreshed(LastbitError):
    """The handle was made without a request and has not fetched the batch's state."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.batch = batch

    def __str__(self) -> str:
        return f"the state of batch {self.batch} has not been fetched: call refresh() first"


class NoCurrentItem(LastbitError, LookupError):
    """The current item was asked for where no message of an item is being handled."""

    def __str__(self) -> str:
        return (
            "no item is being handled here: this is not a handler of an adapter, or its message belongs to no batch. "
            "In a thread that a handler starts, run the code by contextvars.copy_context().run, or pass the item to it"
        )


class MessagesRefused(LastbitError):
    """A broker refused messages of a fan-out, however often they were sent. `items` are their ids; later messages were
    not sent, and the batch is not sealed. With an idempotency key, run the fan-out again."""

    def __init__(self, items: Sequence[str]) -> None:
        super().__init__(items)
        self.items = items

    def __str__(self) -> str:
        return f"the broker refused {len(self.items):,} messages, the first one that of item {self.items[0]}"


class MissingExtra(LastbitError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(extra, purpose)
        self.extra = extra
        self.purpose = purpose

    def __str__(self) -> str:
        return f"{self.purpose} needs more than the bare client: pip install 'lastbit[{self.extra}]'"


class InvalidArgument(LastbitError, ValueError):
    """An argument is invalid. Nothing was sent."""


class MalformedItem(InvalidArgument, InvalidItemId):
    """An id of a call is not a valid item id. `position` is its index in the call, from 0."""

    def __init__(self, text: object, position: int) -> None:
        InvalidItemId.__init__(self, text)
        self.fact: str = self.args[0]
        self.args = (text, position)
        self.position = position

    def __str__(self) -> str:
        return f"position {self.position}: {self.fact}"


class MessagesDiffer(InvalidArgument):
    """A fan-out was run again under its idempotency key, but its messages are not those of the earlier run, or come in
    another order. `start` and `end` are numbers of messages, from 0: the first difference is among the messages from
    `start` to before `end`, or earlier if a release that compared only counts has issued the items before; if `end` is
    None, the earlier run had more messages than these `start`. None of these messages was sent, and no items were
    issued for them."""

    def __init__(self, idempotency_key: str, start: int, end: int | None) -> None:
        super().__init__(idempotency_key, start, end)
        self.idempotency_key = idempotency_key
        self.start = start
        self.end = end

    def __str__(self) -> str:
        key = repr(self.idempotency_key)
        if self.end is None:
            found = f"an earlier run with the idempotency key {key} had more than these {self.start:,} messages"
        else:
            found = (
                f"the messages {self.start:,} to {self.end - 1:,} are not those of an earlier run with the idempotency "
                f"key {key}, or come in another order"
            )
        return (
            f"{found}: none of them was sent. A rerun has the same messages in the same order, and chunks of the same "
            "size: sort the messages, or pass identify= if they hold something that changes with each run"
        )
