"""A queue through boto3's client: batch calls whose refused entries are sent again, and the errors that pass.

Things that could go wrong, and why they can't:

*AWS refuses a whole call because two entries have the same id*, as after a message was received twice. The ids of
entries are their positions in the call.

*An answer 200 contains failed entries*, which boto3 doesn't raise. Each batch call looks for them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from lastbit import errors
from lastbit.retry import Retry

try:
    from botocore.exceptions import ClientError, HTTPClientError
    from botocore.exceptions import ConnectionError as NoConnection
except ImportError as cause:
    raise errors.MissingExtra("sqs", "lastbit.integrations.sqs") from cause

ITEM: Final = "lastbit-item"
"""The message attribute that holds the item's id."""
MOST_ENTRIES: Final = 10
"""Maximum entries of a batch call, and maximum messages of a receive."""
LONGEST_POLL: Final = 20
"""Maximum seconds for which SQS holds a receive that finds nothing."""
LONGEST_VISIBILITY: Final = 43_200
"""Seconds after which SQS makes a received message visible, however often its visibility is extended."""

Message = Mapping[str, Any]
"""A message as boto3 returns it: MessageId, ReceiptHandle, Body, Attributes, MessageAttributes."""

_PASSING_CODES: Final = frozenset(
    {
        "KmsThrottled",
        "OverLimit",  # 120,000 messages of the queue are in flight
        "RequestThrottled",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)


def passes(error: Exception) -> bool:
    """Whether the same call to SQS may succeed later. boto3 has retried it a few times before it raised the error."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(error.response.get("Error", {}).get("Code", ""))
        return status >= 500 or code.rpartition(".")[2] in _PASSING_CODES
    return isinstance(error, HTTPClientError | NoConnection)


def item_of(message: Message) -> str | None:
    """The id of the message's item, or None if it has none: then it is no message of a batch."""
    attribute = message.get("MessageAttributes", {}).get(ITEM)
    return None if attribute is None else str(attribute.get("StringValue"))


def receives(message: Message) -> int:
    """How often SQS has delivered the message, this time included. SQS calls the number approximate."""
    return int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1))


@dataclass(frozen=True, slots=True)
class Fault:
    """Why SQS refused an entry of a batch call. `is_lasting`: it would refuse the same entry again."""

    text: str
    is_lasting: bool

    def __str__(self) -> str:
        return self.text


def failed_entries(call: Callable[[], Any], positions: Iterable[int]) -> dict[int, Fault]:
    """Make a batch call whose entries are at `positions`, which are their ids too. Returns the entries that failed:
    all of them if the call failed with an error that passes. Raises boto3's other errors."""
    try:
        failed = call().get("Failed", [])
    except Exception as error:
        if not passes(error):
            raise
        return dict.fromkeys(positions, Fault(str(error), False))
    return {
        int(entry["Id"]): Fault(f"{entry.get('Message', '')} ({entry.get('Code')})", bool(entry.get("SenderFault")))
        for entry in failed
    }


class Queue:
    """A queue by its URL. Any number of threads may use it."""

    def __init__(self, client: Any, url: str) -> None:
        if not isinstance(url, str) or "/" not in url:
            raise errors.InvalidArgument(f"queue_url is a queue's URL, not {url!r}; get_queue_url returns it")
        self._client = client
        self.url = url
        self.name = url.rpartition("/")[2]
        self.is_fifo = url.endswith(".fifo")

    def visibility(self, seconds: int | None) -> int:
        """The visibility timeout to use: the given one, or the queue's own. Raises `InvalidArgument`."""
        if seconds is None:
            try:
                seconds = int(self._attribute("VisibilityTimeout") or 0)
            except ClientError as error:
                raise errors.InvalidArgument(
                    f"the visibility timeout of {self.name} can't be read, so pass visibility_timeout: {error}"
                ) from error
            if seconds < 1:
                raise errors.InvalidArgument(f"the visibility timeout of {self.name} is 0: pass visibility_timeout")
        return seconds

    def has_dead_letters(self) -> bool | None:
        """Whether messages that were received too often go to another queue. None if this client may not know."""
        try:
            return bool(self._attribute("RedrivePolicy"))
        except ClientError:
            return None

    def _attribute(self, name: str) -> str | None:
        answer = self._client.get_queue_attributes(QueueUrl=self.url, AttributeNames=[name])
        value: str | None = answer.get("Attributes", {}).get(name)
        return value

    def receive(self, count: int, wait: int, visibility: int) -> list[Message]:
        """Up to `count` messages. Waits up to `wait` seconds for the first; hides them for `visibility` seconds."""
        messages: list[Message] = self._client.receive_message(
            QueueUrl=self.url,
            MaxNumberOfMessages=count,
            WaitTimeSeconds=wait,
            VisibilityTimeout=visibility,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
        ).get("Messages", [])
        return messages

    def delete(self, messages: Sequence[Message], policy: Retry) -> list[tuple[Message, Fault]]:
        """Delete up to ten messages. Returns those that could not be deleted. Raises boto3's errors."""
        return self._batch(self._client.delete_message_batch, messages, policy)

    def hide(self, messages: Sequence[Message], seconds: int) -> list[tuple[Message, Fault]]:
        """Hide up to ten messages for `seconds` from now; with 0 they are delivered again at once. Returns those for
        which it was not possible. Raises boto3's errors."""
        policy = Retry(attempts=1)
        return self._batch(self._client.change_message_visibility_batch, messages, policy, VisibilityTimeout=seconds)

    def _batch(
        self, action: Callable[..., Any], messages: Sequence[Message], policy: Retry, **options: Any
    ) -> list[tuple[Message, Fault]]:
        """Carry out a batch action. Entries that SQS can't process now are sent again, as far as the policy allows.
        Returns the messages of those that stay refused."""
        start = time.monotonic()
        attempt = 1
        waiting = list(range(len(messages)))
        failures: list[tuple[Message, Fault]] = []
        while True:
            entries = [{"Id": str(n), "ReceiptHandle": messages[n]["ReceiptHandle"], **options} for n in waiting]
            faults = failed_entries(partial(action, QueueUrl=self.url, Entries=entries), waiting)
            failures += [(messages[n], fault) for n, fault in faults.items() if fault.is_lasting]
            waiting = [n for n, fault in faults.items() if not fault.is_lasting]
            if not waiting:
                return failures
            pause = policy.pause(attempt, time.monotonic() - start, None, random.random())  # noqa: S311  # jitter
            if pause is None:
                return failures + [(messages[n], faults[n]) for n in waiting]
            attempt += 1
            time.sleep(pause)
