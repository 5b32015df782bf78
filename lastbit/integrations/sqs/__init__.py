"""Amazon SQS, through boto3: `pip install 'lastbit[sqs]'`.

    from lastbit.integrations import sqs

    client = boto3.client("sqs")
    sqs.fan_out(client, queue_url, bodies, key="catalog-42")    # the producer: a message and an item for each body
    sqs.consume(client, queue_url, handle, workers=8)           # a consumer process
    sqs.fail_dead_letters(client, dead_letters_url)             # fails the items of the dead-letter queue's messages

The id of a message's item is its attribute `lastbit-item`; bodies don't change. Messages without it are handled too,
unless `untracked="refuse"`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Unpack

from lastbit import integrations
from lastbit.batch import BatchHandle
from lastbit.client import Client, HasClients, client_of
from lastbit.failures import Redrive
from lastbit.integrations import Failed, FanOutOptions, Skipped
from lastbit.integrations._stopping import stopped_by_signals
from lastbit.integrations._untracked import WhenUntracked
from lastbit.integrations.sqs._consumer import Consumer, Handler, Options
from lastbit.integrations.sqs._fan_out import Body, Group, Sender
from lastbit.integrations.sqs._queue import ITEM, MOST_ENTRIES, Message, Queue, item_of, receives
from lastbit.models import Completed

__all__ = ["ITEM", "Failed", "Message", "Skipped", "consume", "fail_dead_letters", "fan_out", "item_of", "resend"]

log = logging.getLogger("lastbit.sqs")


def fan_out(
    client: Any,
    queue_url: str,
    bodies: Iterable[Body],
    *,
    batch: BatchHandle | int | None = None,
    identify: Callable[[Body], Any] | None = None,
    group: Group | None = None,
    senders: int = 8,
    lastbit: Client | HasClients | None = None,
    **options: Unpack[FanOutOptions],
) -> BatchHandle:
    """Issue an item for each body and send it as a message; then seal the batch and return it.

    `client`: boto3's client of SQS. A body is a text, or a mapping with the fields of an entry of `send_message_batch`
    (`MessageBody`, `MessageAttributes`, `DelaySeconds` and so on). `senders`: number of calls at a time. `lastbit`: the
    client of Lastbit, or a `lastbit.embedded.Lastbit`; by default a client for LASTBIT_URL and LASTBIT_TOKEN.

    On a FIFO queue, `group` is the messages' group, or a function of the body that returns it. The deduplication id is
    the item's id.

    Everything else is as in `lastbit.integrations.fan_out`, which takes the options of a new batch: with an idempotency
    key, a producer that was killed can be run again, with the same bodies in the same order. Texts or whole mappings
    are compared, or what `identify` returns. Raises `InvalidArgument`, also for a message that SQS will never accept,
    what `lastbit.integrations.fan_out` raises, and boto3's errors.
    """
    queue = Queue(client, queue_url)
    with ThreadPoolExecutor(senders, "lastbit-sqs-send") as executor:
        return integrations.fan_out(
            client_of(lastbit),  # stays open: the handle that is returned uses it
            bodies,
            Sender(client, queue, group, executor),
            batch=batch,
            identify=identify,
            **options,
        )


def resend(
    client: Any,
    queue_url: str,
    redrive: Redrive,
    bodies: Iterable[Body],
    *,
    group: Group | None = None,
    senders: int = 8,
    lastbit: Client | HasClients | None = None,
) -> int:
    """Send the messages of a redrive's items again, and return their number. Store the redrive's position afterwards.

    `bodies` are all bodies of the batch, in the order of its fan-outs; see `lastbit.integrations.resend`. On a FIFO
    queue, the deduplication id is that of the item and the redrive; a body with a deduplication id of its own is
    dropped by SQS within five minutes of the first one. Everything else is as in `fan_out`.
    """
    queue = Queue(client, queue_url)
    with ThreadPoolExecutor(senders, "lastbit-sqs-send") as executor:
        send = Sender(client, queue, group, executor, f"/{redrive.position}")
        return integrations.resend(client_of(lastbit), redrive, bodies, send)


def consume(
    client: Any,
    queue_url: str,
    handle: Handler,
    *,
    workers: int = 8,
    prefetch: int | None = None,
    receivers: int = 1,
    visibility_timeout: int | None = None,
    wait_seconds: int = 10,
    retry_delay: int | None = None,
    until_empty: bool = False,
    skip_ended: bool = True,
    untracked: WhenUntracked = "handle",
    on_completed: Callable[[Completed], object] | None = None,
    stop: threading.Event | None = None,
    lastbit: Client | HasClients | None = None,
) -> None:
    """Receive messages and call `handle` with each, in `workers` threads, until SIGTERM or SIGINT or until `stop` is
    set. It returns when the running handlers have ended and their outcomes are stored.

    `handle` gets boto3's dictionary of the message (`Body`, `MessageId`, `Attributes`, `MessageAttributes`).

    - It returns: the item is acked, and the message deleted after the commit.
    - It raises `Failed(reason)`: the item is failed, and the message deleted after the commit.
    - It raises `Skipped(reason)`: the item is skipped, and the message deleted after the commit.
    - It raises anything else: the item stays pending, and the message is delivered again, or goes to the dead-letter
      queue.

    Args:
        client: boto3's client of SQS.
        queue_url: The URL of a standard or FIFO queue.
        handle: Called from several threads at a time. Messages of a FIFO queue's group are handled in order, one at a
            time.
        workers: The number of threads.
        prefetch: The number of messages that wait here while all workers are busy, by default ten for each receiver.
            Set 0 if handlers take minutes.
        receivers: The number of receive calls at a time on a standard queue. One gets up to ten messages in a round
            trip. Raise it if handlers are so short that workers wait.
        visibility_timeout: Seconds after which the messages of a dead process are delivered again, by default the
            queue's. While a handler runs its message stays hidden, for up to 12 hours, so the timeout may be shorter
            than the work: 30 seconds suit most queues.
        wait_seconds: Seconds, up to 20, for which SQS holds a receive while the queue is empty. A stop may take as
            long, so keep it below the grace period of your deployment.
        retry_delay: Seconds after which a message is delivered again whose handler has raised; by default the rest of
            its visibility timeout.
        until_empty: Also return when a receive finds nothing and no message is held.
        skip_ended: Don't handle messages of batches that were cancelled, have expired or were deleted: delete them.
        untracked: What happens to messages without an item's id: `handle` them; handle them, and `warn` in the log
            once; or `refuse` them, with one line as well: they are left to the dead-letter queue, like those whose
            handler raises.
        on_completed: Called with a `Completed` for each batch that an ack completes, before the message is deleted; see
            `Client.acker`.
        stop: An event that ends it.
        lastbit: The client of Lastbit, or a `lastbit.embedded.Lastbit`; by default a client for LASTBIT_URL and
            LASTBIT_TOKEN.

    Raises:
        InvalidArgument: An argument is invalid, or the queue's visibility timeout is 0 or can't be read.
        ServiceError: Lastbit refuses acks for good, for example the token.
        botocore.exceptions.ClientError: SQS refuses calls for good, for example there is no such queue.
    """
    queue = Queue(client, queue_url)
    options = Options(
        workers=workers,
        prefetch=MOST_ENTRIES * receivers if prefetch is None else prefetch,
        receivers=receivers,
        visibility_timeout=visibility_timeout,
        wait_seconds=wait_seconds,
        retry_delay=retry_delay,
        until_empty=until_empty,
        skip_ended=skip_ended,
        untracked=untracked,
        on_completed=on_completed,
    )
    if queue.has_dead_letters() is False:
        log.warning(
            "%s has no dead-letter queue: a message whose handler always raises is delivered again until its retention "
            "ends, and then its item stays pending",
            queue.name,
        )
    _consume(queue, handle, options, stop, lastbit)


def fail_dead_letters(
    client: Any,
    queue_url: str,
    handle: Handler | None = None,
    *,
    wait_seconds: int = 20,
    until_empty: bool = False,
    on_completed: Callable[[Completed], object] | None = None,
    stop: threading.Event | None = None,
    lastbit: Client | HasClients | None = None,
) -> None:
    """Consume a dead-letter queue: fail the items of its messages, with the number of receives as the reason, and
    delete the messages. Runs until SIGTERM or SIGINT, until `stop` is set, or with `until_empty` until the queue is
    empty.

    `handle` is called with each message first, for example to store its body elsewhere; if it raises, the message stays
    in the queue. Without it, messages that have no item stay in the queue. An item that was acked before stays acked.
    `on_completed`: as in `consume`, for each batch whose last pending item fails here.
    """
    queue = Queue(client, queue_url)

    def give_up(message: Message) -> None:
        if handle is not None:
            handle(message)
        elif item_of(message) is None:
            raise LookupError("it has no item, so it stays in the dead-letter queue")
        count = receives(message) - 1
        raise Failed(f"dead-lettered after {count} {'receive' if count == 1 else 'receives'}")

    options = Options(
        workers=1,
        prefetch=MOST_ENTRIES,
        receivers=1,
        visibility_timeout=None,
        wait_seconds=wait_seconds,
        retry_delay=None,
        until_empty=until_empty,
        skip_ended=False,
        untracked="handle",
        on_completed=on_completed,
    )
    _consume(queue, give_up, options, stop, lastbit)


def _consume(
    queue: Queue, handle: Handler, options: Options, stop: threading.Event | None, lastbit: Client | HasClients | None
) -> None:
    stop = stop or threading.Event()
    with Client() if lastbit is None else nullcontext(client_of(lastbit)) as client, stopped_by_signals(stop):
        Consumer(queue, client, handle, options, stop).run()
