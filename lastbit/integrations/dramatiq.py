"""Dramatiq: each message of a fan-out resolves its item when it ends. Needs `pip install 'lastbit[dramatiq]'`.

    broker.add_middleware(LastbitMiddleware())
    batch = fan_out((render.message(product) for product in products), key="catalog-42")

The item's id is the message's id, which survives retries. What could go wrong, and why it can't:

*A failed message looks like a successful one.* `Retries` puts a copy of the message on the queue again and acks the old
one. So an ack alone says nothing. The middleware notices each message that is sent while another one is processed: if
both belong to the same item, the later one decides. That also holds for the next stage of a pipeline.

*An error of a hook is swallowed*, and the message is acked although its item is not resolved. So the hooks only take
notes. The message is settled where Dramatiq acks it, in `ConsumerThread.post_process_message`, which each consumer
thread gets replaced when it starts. First the item is resolved, then Dramatiq's own method runs. No worker thread waits
for that (see `_settler`).

*The service refuses the token.* A worker process of Dramatiq's command ends, with exit code 1, and returns its
messages. A worker inside of another program can't be ended by its middleware: it is paused.

*An ack removes another message*, as RabbitMQ's consumer has connected again, and the new connection uses the same
delivery tags. A message of an earlier connection is not acked: it is delivered again.

*A retry is lost*, as the broker was unreachable for a moment: Dramatiq logs that, and acks the message. Its item fails,
with the exception as reason, as no message is left that could resolve it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, Unpack

from lastbit import errors
from lastbit.batch import BatchHandle
from lastbit.client import Client, HasClients, client_of
from lastbit.failures import Redrive
from lastbit.integrations import _current, _fan_out, _skipped
from lastbit.integrations._endings import EndingsWorker, text_of, with_endings
from lastbit.integrations._fan_out import FanOutOptions
from lastbit.integrations._messages import item_of
from lastbit.integrations._reasons import reason_of
from lastbit.integrations._resolver import VERBS, Verb
from lastbit.integrations._settler import Resolution, Settler
from lastbit.models import Completed

try:
    from dramatiq import Broker, Message, Middleware, get_broker, pipeline
    from dramatiq.broker import MessageProxy
    from dramatiq.errors import ConnectionClosed, ConnectionFailed
    from dramatiq.middleware import MiddlewareError, SkipMessage
    from dramatiq.worker import ConsumerThread, Worker, WorkerThread
except ImportError as cause:
    raise errors.MissingExtra("dramatiq", "the adapter for Dramatiq") from cause
try:
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import TimeoutError as RedisTimeoutError

    _UNREACHABLE: tuple[type[Exception], ...] = (
        *(ConnectionClosed, ConnectionFailed),
        *(RedisConnectionError, RedisTimeoutError),  # which the Redis broker does not wrap when it enqueues
    )
except ImportError:  # another broker is used
    _UNREACHABLE = (ConnectionClosed, ConnectionFailed)

log = logging.getLogger("lastbit.integrations")

LINGER: Final = 0.02
"""Seconds for which resolutions are gathered. No thread waits meanwhile."""
REMOVERS: Final = 2
"""Threads that ack messages to the broker."""
MOST_UNSETTLED: Final = 200
"""The number of handled messages that may wait for their resolution in addition to the messages that a worker
prefetches."""
APP: Final = "dramatiq"
"""The default name that the producers and workers of an app share."""
STAGE: Final = "lastbit-item"
"""The option with the item's id, of all messages of a pipeline but the last one: these can only fail the item."""

Sendable: TypeAlias = "Message[Any] | pipeline"


class Skipped(_skipped.Skipped, SkipMessage):
    """`lastbit.integrations.Skipped`, which Dramatiq does not take for an error: it neither logs it as one nor retries
    the message."""


class _Notes(threading.local):
    """What the hooks have noticed about the message that this worker thread processes."""

    message: MessageProxy | None = None
    item: str | None = None
    was_sent: bool = False
    """Whether another message of the same item was sent meanwhile."""
    skipped: bool = False
    is_dropped: bool = False
    """Whether the message was skipped because its batch has ended."""
    ended: bool = False
    error: BaseException | None = None

    def start(self, message: MessageProxy | None) -> None:
        self.message = message
        self.item = None if message is None else _item(message)
        if message is None:
            _current.replace(None)
        self.was_sent = self.skipped = self.ended = self.is_dropped = False
        self.error = None


class LastbitMiddleware(Middleware):
    """Resolves the items of messages that `fan_out` has sent. Other messages are not touched.

    `url`, `token`: the service's, by default LASTBIT_URL and LASTBIT_TOKEN; or a `client`, which may be a
    `lastbit.embedded.Lastbit`. `on_completed`: called with a `Completed` for each complete batch in a result,
    repeatedly if it raises; see `Acker`. `skipped`: whether a message that a middleware skipped acks, fails or skips
    its item. `linger`: seconds for which items are gathered, by default 0.02.
    `skip_ended`: whether messages of batches that were cancelled, have expired or were deleted are not processed.
    `app_name`: the name that the producers and workers of an app share, whose workers send `on_success` and
    `on_complete`.
    `shutdown_timeout`: seconds for which a stopping worker waits for the service after its last message has ended;
    messages that are not settled then are returned to the broker, and run again.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        client: Client | HasClients | None = None,
        on_completed: Callable[[Completed], object] | None = None,
        skipped: Verb = "ack",
        linger: float = LINGER,
        skip_ended: bool = True,
        app_name: str = APP,
        shutdown_timeout: float = 10.0,
    ) -> None:
        if client is not None and not (url is None and token is None):
            raise errors.InvalidArgument("url and token are for a new client: give either these or client")
        if skipped not in VERBS:
            raise errors.InvalidArgument(f"skipped is one of {', '.join(VERBS)}, not {skipped!r}")
        self._url, self._token = url, token
        self._given_client = None if client is None else client_of(client)
        self._client: Client | None = None
        self._client_process: int | None = None
        self._on_completed = on_completed
        self._skipped = skipped
        self._linger = linger
        self._skip_ended = skip_ended
        self.app_name = app_name
        self._shutdown_timeout = shutdown_timeout
        self._notes = _Notes()
        self._settler: Settler | None = None
        self._endings_worker: EndingsWorker | None = None
        self._is_stopping = False

    @property
    def client(self) -> Client:
        """The client of this process: the given one, or one that is made when it is first needed, as servers fork after
        imports."""
        if self._given_client is not None:
            return self._given_client
        if self._client is None or self._client_process != os.getpid():
            self._client = Client(self._url, token=self._token)
            self._client_process = os.getpid()
        return self._client

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        try:
            self._settler = Settler(
                self.client,
                partial(self._end, worker),
                self._on_completed,
                threads=REMOVERS,
                linger=self._linger,
                skip_ended=self._skip_ended,
            )
            self._settler.start()
            self._endings_worker = EndingsWorker(self.client, self.app_name, partial(_publish, broker))
            self._endings_worker.start()
        except Exception as error:
            # Dramatiq only logs other exceptions. The worker would go on and remove messages whose items are pending.
            raise MiddlewareError(f"the worker can't resolve items: {error}") from error

    def after_consumer_thread_boot(self, broker: Broker, thread: ConsumerThread) -> None:
        _keep_tags_apart(thread)
        settle = partial(self._settle, thread, thread.post_process_message)
        thread.post_process_message = settle  # type: ignore[method-assign]

    def before_worker_thread_shutdown(self, broker: Broker, thread: WorkerThread) -> None:
        # Here the consumers still run; RabbitMQ's need that to ack.
        if self._settler is not None:
            self._settler.drain(self._shutdown_timeout)

    def before_consumer_thread_shutdown(self, broker: Broker, thread: ConsumerThread) -> None:
        if self._settler is not None and (messages := self._settler.abandon(thread)):
            log.warning("%d messages end unsettled, and return to %s", len(messages), thread.queue_name)
            thread.requeue_messages(messages)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self._is_stopping = True
        if self._endings_worker is not None:
            self._endings_worker.stop()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        if self._settler is not None:
            self._settler.leave()
        if self._settler is not None and self._settler.refusal is not None and _is_worker_command():
            sys.exit(1)

    def _end(self, worker: Worker, error: BaseException) -> None:
        if self._is_stopping:
            return  # a second signal would kill the process before it returns its messages
        if _is_worker_command():
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            threads: list[ConsumerThread | WorkerThread] = [*worker.consumers.values(), *worker.workers]
            for thread in threads:
                thread.pause()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self._notes.start(message)
        item, settler = self._notes.item, self._settler
        if item is None or settler is None:
            _current.replace(message.message_id)
            return
        if settler.skips(item, getattr(message, "lastbit_received", None)):
            self._notes.is_dropped = True
            raise SkipMessage("its batch has ended")
        _current.replace(item, settler.ended)

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int) -> None:
        if self._notes.item is not None and _item(message) == self._notes.item:
            self._notes.was_sent = True

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._begun(message)
        # Called twice if an interrupt arrives during the first call: then the last call decides.
        self._notes.ended, self._notes.error = True, exception

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._begun(message)
        self._notes.ended, self._notes.skipped = True, True
        self._notes.error = sys.exception()  # Dramatiq calls this while it handles the `SkipMessage`

    def _begun(self, message: MessageProxy) -> None:
        # A middleware that skips a message keeps later ones from seeing its begin.
        if self._notes.message is not message:
            self._notes.start(message)

    def _settle(
        self, thread: ConsumerThread, post_process: Callable[[MessageProxy], None], message: MessageProxy
    ) -> None:
        """In place of `thread.post_process_message`."""
        try:
            resolution = self._resolution(message)
        finally:
            self._notes.start(None)
        if resolution is None or self._settler is None:
            post_process(message)
            return
        error = message._exception

        def remove() -> None:
            # Dramatiq has cleared it meanwhile, but stores it as the result of a rejected message.
            if error is not None:
                message.stuff_exception(error)
            post_process(message)
            message.clear_exception()

        self._settler.settle([resolution], remove, message, thread)
        if len(self._settler) < MOST_UNSETTLED:
            _make_room(thread, message)

    def _resolution(self, message: MessageProxy) -> Resolution | None:
        """How the message resolves its item; None if it belongs to none, or if the item stays pending."""
        item = _item(message)
        notes = self._notes
        was_processed = notes.message is message
        if item is None or (was_processed and (notes.was_sent or notes.is_dropped)):
            return None
        error = notes.error if was_processed and notes.error is not None else message._exception
        if isinstance(error, _skipped.Skipped):
            return Resolution(item, "skip", reason_of(error))
        if message.failed:
            return Resolution(item, "fail", "rejected" if error is None else reason_of(error))
        if not was_processed:
            return None  # a delayed copy, which its consumer has put on the queue
        if notes.skipped:
            return Resolution(item, self._skipped, None if self._skipped == "ack" else "skipped")
        if not notes.ended or error is not None:
            return Resolution(item, "fail", "interrupted" if error is None else reason_of(error))
        if STAGE in message.options:
            return Resolution(item, "fail", "the next message of its pipeline was not sent")
        return Resolution(item)


def fan_out(
    messages: Iterable[Sendable],
    *,
    broker: Broker | None = None,
    batch: BatchHandle | int | None = None,
    identify: Callable[[Sendable], Any] | None = None,
    on_success: Message[Any] | None = None,
    on_complete: Message[Any] | None = None,
    **options: Unpack[FanOutOptions],
) -> BatchHandle:
    """Issue an item for each message and send the messages; then seal the batch and return it.

    A pipeline is one item: its last message acks it, and each of its messages can fail it. `broker`: by default
    Dramatiq's global one; its `LastbitMiddleware` has the client. Everything else is as in
    `lastbit.integrations.fan_out`: `idempotency_key` makes it safe to run a killed producer again, with the same
    messages in the same order. Actors and arguments are compared, or what `identify` returns for a message.

    When the new batch has succeeded, a worker sends the message `on_success`; when it has ended in any way,
    `on_complete`. At least once, and normally once: the id of the message is the same each time.

    Raises `InvalidArgument` also if the broker has no `LastbitMiddleware`.
    """
    broker = broker or get_broker()
    middleware = _middleware(broker)
    client = middleware.client
    texts = _text_of("on_success", on_success), _text_of("on_complete", on_complete)
    if getattr(broker, "confirm_delivery", True) is False:
        log.warning("the broker may lose messages, whose items stay pending: use RabbitmqBroker(confirm_delivery=True)")
    return _fan_out.fan_out(
        client,
        _checked(messages),
        partial(_send, broker),
        batch=batch,
        identify=identify or _identity,
        **with_endings(client, middleware.app_name, batch, options, *texts),
    )


def _identity(message: Sendable) -> Any:
    """What stands for a message in a rerun: actor, queue and arguments. Each run makes new ids and times."""
    if isinstance(message, pipeline):
        return [_identity(stage) for stage in message.messages]
    return message.queue_name, message.actor_name, message.args, message.kwargs


def resend(redrive: Redrive, messages: Iterable[Sendable], *, broker: Broker | None = None) -> int:
    """Send the messages of a redrive's items again, and return their number. Store the redrive's position afterwards.

    `messages` are all messages of the batch, in the order of its fan-outs; see `lastbit.integrations.resend`.
    """
    broker = broker or get_broker()
    return _fan_out.resend(_middleware(broker).client, redrive, _checked(messages), partial(_send, broker))


def _text_of(option: str, message: Message[Any] | None) -> str | None:
    """The message at an end, as it is stored. Raises `InvalidArgument`."""
    if message is None:
        return None
    if not isinstance(message, Message):
        raise errors.InvalidArgument(f"{option}: expected a message, like actor.message(…), not {message!r}")
    names = ("args", "kwargs", "options")
    return text_of(option, {"actor": message.actor_name, **{name: getattr(message, name) for name in names}})


def _publish(broker: Broker, message_id: str, text: str) -> bool:
    """Send the message at an end. Returns False if the broker is unreachable; raises `ActorNotFound`."""
    fields = json.loads(text)
    actor = broker.get_actor(fields.pop("actor"))
    message = actor.message_with_options(args=tuple(fields["args"]), kwargs=fields["kwargs"], **fields["options"])
    return not _send(broker, [(message_id, message)])


def _is_worker_command() -> bool:
    """Whether this process stops its worker, and ends, after a SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    return getattr(handler, "__module__", None) == "dramatiq.cli"


def _keep_tags_apart(thread: ConsumerThread) -> None:
    """Let no message be acked on another connection to RabbitMQ than the one that delivered it, and note when it came.

    A consumer that has connected again counts its delivery tags from 1, so the ack would remove another message, which
    perhaps nobody has handled.
    """
    handle, post_process = thread.handle_message, thread.post_process_message

    def handle_message(message: Any) -> None:
        message.lastbit_consumer = thread.consumer
        message.lastbit_received = time.monotonic()
        handle(message)

    def post_process_message(message: Any) -> None:
        if hasattr(message, "_tag") and message.lastbit_consumer is not thread.consumer:
            message._tag = None  # no consumer has such a tag; Dramatiq logs that, and the message comes again
        post_process(message)

    thread.handle_message = handle_message  # type: ignore[method-assign]
    thread.post_process_message = post_process_message  # type: ignore[method-assign]


def _make_room(thread: ConsumerThread, message: MessageProxy) -> None:
    """Let a consumer of Redis fetch another message in place of one that only waits for its resolution.

    Otherwise a worker with short tasks would idle, as it has at most twice as many messages as threads.
    """
    fetched = getattr(thread.consumer, "queued_message_ids", None)
    if isinstance(fetched, set):
        fetched.discard(message.message_id)


def _middleware(broker: Broker) -> LastbitMiddleware:
    for middleware in broker.middleware:
        if isinstance(middleware, LastbitMiddleware):
            return middleware
    raise errors.InvalidArgument(
        "the broker has no LastbitMiddleware, so nothing would resolve the items: "
        "call broker.add_middleware(LastbitMiddleware()) where the broker is made, for producers and workers"
    )


def _checked(messages: Iterable[Sendable]) -> Iterator[Sendable]:
    for position, message in enumerate(messages):
        if not isinstance(message, Message | pipeline):
            raise errors.InvalidArgument(
                f"position {position}: expected a message, like actor.message(…), or a pipeline, "
                f"not {type(message).__name__}"
            )
        yield message


def _send(broker: Broker, pairs: Sequence[tuple[str, Sendable]]) -> Sequence[tuple[str, Sendable]]:
    for position, (item, message) in enumerate(pairs):
        first = _with_item(item, message)
        try:
            broker.enqueue(first, delay=first.options.get("delay"))
        except _UNREACHABLE as error:
            log.warning("the broker is unreachable, and %d messages wait: %s", len(pairs) - position, error)
            return pairs[position:]
    return []


def _with_item(item: str, message: Sendable) -> Message[Any]:
    """The message to send: with the item's id as its own, or the first one of a pipeline."""
    if isinstance(message, Message):
        return message.copy(message_id=item)
    *stages, last = message.messages
    marked = [stage.copy(options={STAGE: item}) for stage in stages]
    return pipeline([*marked, last.copy(message_id=item)], broker=message.broker).messages[0]


def _item(message: Message[Any] | MessageProxy) -> str | None:
    return item_of(message.options.get(STAGE, message.message_id))
