"""AWS Lambda, through the batch processors of Powertools: `pip install 'lastbit[aws-lambda]'`.

    processor = LastbitBatchProcessor(event_type=EventType.SQS)

Everything else stays as Powertools documents it. When all records of an invocation were handled, the items of those
that succeeded are acked in one call, and then the failed records are reported. A record that succeeded and whose ack
failed is reported too: it is delivered again, and its item is acked then.

Things that could go wrong, and why they can't:

*A message is deleted and its item stays pending.* Lambda deletes a message after the function has returned without
reporting it. The acks are committed before.

*A FIFO queue's order is broken, because an ack failed and a later one didn't.* `LastbitSqsFifoPartialProcessor` reports
the later records of the group too.

*A batch is complete, and `on_completed` is never called for it*, because it raised or the function ended. It is called
again here, a few times. The messages are deleted after it returned. When they come again, their acks are repeats, whose
results name the batch as well.

*A wrong token makes dead letters without a word.* The invocation raises the error, and all of its messages come again.

*The function times out while Lastbit is away*, and the messages that it handled are delivered again with all others.
The client made here gives up after ten seconds, and the records are reported. The function's timeout must have room for
that.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from lastbit import errors
from lastbit.client import Client, HasClients, client_of
from lastbit.ids import InvalidItemId, ItemId
from lastbit.integrations._current import current_item, handling
from lastbit.integrations._ended import EndedBatches, watch_of
from lastbit.integrations._failed import Failed
from lastbit.integrations._reasons import reason_of
from lastbit.integrations._resolver import Verb
from lastbit.integrations._skipped import Skipped
from lastbit.integrations._untracked import NO_ITEM, UntrackedMessages, WhenUntracked
from lastbit.integrations._verdicts import Verdict, log_rejection, verdict_of
from lastbit.integrations._versions import warn_of_unknown
from lastbit.models import AckResult, Completed
from lastbit.retry import Retry

try:
    from aws_lambda_powertools.utilities.batch import (
        AsyncBatchProcessor,
        BasePartialBatchProcessor,
        BatchProcessor,
        EventType,
        SqsFifoPartialProcessor,
    )
except ImportError as cause:
    raise errors.MissingExtra("aws-lambda", "lastbit.integrations.aws_lambda") from cause

__all__ = [
    "ITEM",
    "Failed",
    "LastbitAsyncBatchProcessor",
    "LastbitBatchProcessor",
    "LastbitSqsFifoPartialProcessor",
    "Skipped",
]

log = logging.getLogger("lastbit.aws_lambda")

ITEM: Final = "lastbit-item"
"""The message attribute, or header of a Kafka record, that holds the item's id."""
TIMEOUT: Final = 5.0
"""Seconds for one request of the client made here."""
RETRY: Final = Retry(attempts=4, deadline=10)
"""The retries of that client, and of `on_completed`: few, since an invocation is short."""

Record = dict[str, Any]
"""A record as it is in Lambda's event."""
ItemOf = Callable[[Record], str | None]


def _of_sqs(record: Record) -> str | None:
    attribute = record.get("messageAttributes", {}).get(ITEM)
    return None if attribute is None else str(attribute.get("stringValue"))


def _of_kafka(record: Record) -> str | None:
    for header in record.get("headers", ()):
        if ITEM in header:
            # Lambda gives signed bytes.
            return bytes(number % 256 for number in header[ITEM]).decode(errors="replace")
    return None


_ITEM_OF: Final[Mapping[EventType, ItemOf]] = {EventType.SQS: _of_sqs, EventType.Kafka: _of_kafka}


class _Raising:
    """The result of a handler that raised `Failed` or `Skipped`."""

    def __init__(self, error: Failed | Skipped) -> None:
        self.verb: Verb = "skip" if isinstance(error, Skipped) else "fail"
        self.reason = reason_of(error)


class _Resolving(BasePartialBatchProcessor):
    """The part that all processors share."""

    def __init__(
        self,
        *args: Any,
        lastbit: Client | HasClients | None = None,
        item: ItemOf | None = None,
        on_completed: Callable[[Completed], object] | None = None,
        skip_ended: bool = True,
        untracked: WhenUntracked = "handle",
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        item = item or _ITEM_OF.get(self.event_type)
        if item is None:
            raise errors.InvalidArgument(
                f"records of {self.event_type.value} have no attributes: pass item, a function that returns the id of "
                "a record's item"
            )
        self._item_of = item
        self._given_client = lastbit
        self._on_completed = on_completed
        self._skip_ended = skip_ended
        self._untracked = UntrackedMessages(untracked, "this function")
        warn_of_unknown(log)
        self._received = 0.0
        """When the invocation began."""
        self._outcomes: list[tuple[Record, _Raising | None]] = []
        """The records that Lambda will not deliver again, in order. None: the handler returned."""

    @functools.cached_property
    def _lastbit(self) -> Client:
        # Made with the first ack, and kept for the later invocations of this environment.
        return client_of(self._given_client or Client(timeout=TIMEOUT, retry=RETRY))

    def __call__(self, records: Any, handler: Callable[..., Any], lambda_context: Any = None) -> Any:
        return super().__call__(records, self._catching(handler), lambda_context)

    def _process_record(self, record: Any) -> Any:
        if self._skips(record):
            return super().success_handler(record, None)
        with handling(self._item_of(record), self._ended):
            return super()._process_record(record)  # type: ignore[safe-super]

    @property
    def _ended(self) -> EndedBatches | None:
        return watch_of(self._lastbit.driver.service).batches if self._skip_ended else None

    def _skips(self, record: Record) -> bool:
        """Whether the record's batch has ended, as earlier invocations have learned: it is removed unhandled."""
        item = self._item_of(record)
        if not self._skip_ended or item is None:
            return False
        watch = watch_of(self._lastbit.driver.service)
        is_ended = watch.is_ended(self._lastbit.driver, item, self._received, self._received)
        if is_ended:
            watch.note(item)
        return is_ended

    def _learn(self, result: AckResult) -> None:
        for rejection in result.rejected:
            if not self._skip_ended or not watch_of(self._lastbit.driver.service).learn(rejection):
                log_rejection(rejection)

    def _catching(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """The handler, which returns `Failed` and `Skipped` instead of raising them. Powertools would report the
        record. A record that is refused is reported without the handler."""

        @functools.wraps(handler)  # Powertools reads the signature
        def handle(*args: Any, **options: Any) -> Any:
            self._refuse_untracked()
            try:
                return handler(*args, **options)
            except (Failed, Skipped) as error:
                return _Raising(error)

        return handle

    def _refuse_untracked(self) -> None:
        if self._untracked.refuses(current_item(None)):
            raise LookupError(NO_ITEM)

    def success_handler(self, record: Any, result: Any) -> Any:
        """Called with the record as it is in the event."""
        ending = result if isinstance(result, _Raising) else None
        self._outcomes.append((record, ending))
        if ending is None:
            return super().success_handler(record, result)
        if ending.verb == "skip":
            log.info("a record is skipped: %s", ending.reason)
            return super().success_handler(record, None)
        log.warning("a record has failed for good: %s", ending.reason)
        return ("fail", f"{Failed}:{ending.reason}", record)

    def _prepare(self) -> None:
        self._outcomes.clear()
        self._received = time.monotonic()
        super()._prepare()  # type: ignore[no-untyped-call]

    def _clean(self) -> None:
        """Resolve the items, then report."""
        positions, error = self._resolve()
        for position in self._with_successors(positions):
            record: Any = self._outcomes[position][0]
            if record in self.success_messages:
                self.success_messages.remove(record)
            self.failure_handler(self._to_batch_type(record, self.event_type), error)
        super()._clean()  # type: ignore[no-untyped-call]

    def _with_successors(self, positions: set[int]) -> list[int]:
        """The positions of records that must be delivered again because the items at `positions` are not resolved."""
        return sorted(positions)

    def _resolve(self) -> tuple[set[int], Any]:
        """Make one call for all acks, and one for the failures or skips of each reason. Returns the positions of the
        outcomes whose items could not be resolved, and the error."""
        waiting: dict[tuple[Verb, str | None], dict[int, str]] = {}
        for position, (record, ending) in enumerate(self._outcomes):
            item = self._valid_item(record)
            if item is not None:
                kind: tuple[Verb, str | None] = ("ack", None) if ending is None else (ending.verb, ending.reason)
                waiting.setdefault(kind, {})[position] = item
        # The acks first. If a call fails, the later ones would too, and take as long.
        for verb, reason in sorted(waiting, key=lambda kind: kind[0]):
            try:
                result = self._call(verb, list(waiting[verb, reason].values()), reason)
            except errors.LastbitError as error:
                if verdict_of(error) is Verdict.END:
                    raise
                log.warning("records are reported as failed, as their items are not resolved: %s", error)
                return {position for items_left in waiting.values() for position in items_left}, sys.exc_info()
            self._learn(result)
            try:
                for completion in result.completed:
                    self._announce(completion)
            except Exception:  # any error of the caller's function
                log.exception("records are reported as failed, as on_completed raises")
                return {position for items_left in waiting.values() for position in items_left}, sys.exc_info()
            waiting[verb, reason] = {}
        return set(), None

    def _call(self, verb: Verb, items: list[str], reason: str | None) -> AckResult:
        if verb == "ack":
            return self._lastbit.ack(items)
        return self._lastbit.skip(items, reason) if verb == "skip" else self._lastbit.fail(items, reason)

    def _announce(self, completion: Completed) -> None:
        """Call `on_completed` until it returns. Raises its exception after the attempts of `RETRY`."""
        begin = time.monotonic()
        for attempt in itertools.count(1):
            try:
                if self._on_completed is not None:
                    self._on_completed(completion)
                return
            except Exception:  # any error of the caller's function
                pause = RETRY.pause(attempt, time.monotonic() - begin, None, random.random())  # noqa: S311  # jitter
                if pause is None:
                    raise
                log.warning("on_completed is called again", exc_info=True)
            time.sleep(pause)

    def _valid_item(self, record: Record) -> str | None:
        item = self._item_of(record)
        if item is not None:
            try:
                ItemId.parse(item)
            except InvalidItemId as error:
                log.error("a record names no item, none was acked: %s", error)
                return None
        return item


class LastbitBatchProcessor(_Resolving, BatchProcessor):
    """Powertools' `BatchProcessor` that resolves the items of its records.

    It takes the arguments of `BatchProcessor`, and by name: `lastbit`, the client or a `lastbit.embedded.Lastbit`, by
    default a client for LASTBIT_URL and LASTBIT_TOKEN that retries for ten seconds; `item`, a function that gets a
    record as it is in the event and returns its item's id or None. Without `item`, the id is the message attribute
    `lastbit-item` of SQS, or that header of Kafka; Kinesis and DynamoDB need the function; `on_completed`, called with
    a `Completed` for each batch that the call for these records finds complete. If it raises, it is called again, up to
    four times; then the records are reported, and handled again. `skip_ended`: whether records of batches that were
    cancelled, have expired or were deleted are not handled. `untracked`: what happens to records without an item's id,
    which are handled by default; "warn" logs a line once, and "refuse" also reports them without handling them, so that
    they become dead letters. Raises `InvalidArgument`.

    A handler that raises `Failed(reason)` fails the item, and one that raises `Skipped(reason)` skips it. The record is
    not delivered again.
    """


class LastbitAsyncBatchProcessor(_Resolving, AsyncBatchProcessor):
    """`LastbitBatchProcessor`, with Powertools' `AsyncBatchProcessor` for coroutine functions."""

    async def _async_process_record(self, record: Any) -> Any:
        if self._skips(record):
            return BasePartialBatchProcessor.success_handler(self, record, None)
        with handling(self._item_of(record), self._ended):
            return await super()._async_process_record(record)

    def _catching(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(handler)
        async def handle(*args: Any, **options: Any) -> Any:
            self._refuse_untracked()
            try:
                return await handler(*args, **options)
            except (Failed, Skipped) as error:
                return _Raising(error)

        return handle


class LastbitSqsFifoPartialProcessor(_Resolving, SqsFifoPartialProcessor):
    """`LastbitBatchProcessor` for FIFO queues, with Powertools' `SqsFifoPartialProcessor`: after a record that raised,
    no later one is handled or acked; with `skip_group_on_error=True`, none of its group. If the item of a record that
    was handled is not resolved, the later records are delivered again too, even if their acks were stored."""

    def _with_successors(self, positions: set[int]) -> list[int]:
        groups: set[str | None] = set()
        successors: list[int] = []
        for position, (record, _) in enumerate(self._outcomes):
            group = record.get("attributes", {}).get("MessageGroupId") if self._skip_group_on_error else None
            if position in positions or group in groups:
                groups.add(group)
                successors.append(position)
        return successors
