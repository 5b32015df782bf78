"""taskiq: each task of a fan-out resolves its item when it ends. Needs `pip install 'lastbit[taskiq]'`.

    broker.add_middlewares(LastbitMiddleware())
    batch = await fan_out(render, ((product,) for product in products), key="catalog-42")

The item's id is the task's id, which survives retries. What could go wrong, and why it can't:

*A failed task is retried*, and must stay pending. A retrying middleware replaces the error by `NoResultError`, if it is
not told otherwise, and sends a message with the same task id. Either is a sign: then the later run decides.

*The message is acked before the item is resolved.* The item is resolved in `post_execute`, which comes before the ack
of the type WHEN_SAVED, taskiq's default. It does not return before the service has responded, however long that takes.
No thread waits meanwhile, only a coroutine. If the worker ends first, the message is not acked, and comes again.

*The service refuses the token.* taskiq would start another worker process at once, which would run more tasks in vain.
So the worker is paused: it runs no more items, and holds their messages until it is stopped.

*The worker cancels a task when it ends.* taskiq would ack its message. So the cancellation continues, which leaves the
message in the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, Unpack

from lastbit import errors
from lastbit._drivers import Driver
from lastbit.acker import AsyncAcker, ItemResult
from lastbit.batch import AsyncBatchHandle
from lastbit.client import AsyncClient, HasClients
from lastbit.failures import Redrive
from lastbit.integrations import _current, _fan_out, _skipped, _verdicts
from lastbit.integrations._ended import Watch, watch_of
from lastbit.integrations._endings import EndingsWorker, call_of, text_of, with_endings_async
from lastbit.integrations._fan_out import FanOutOptions
from lastbit.integrations._messages import item_of
from lastbit.integrations._reasons import reason_of
from lastbit.integrations._resolver import PAUSE
from lastbit.integrations._settler import Resolution
from lastbit.integrations._tracking import announce_async
from lastbit.integrations._verdicts import (
    Verdict,
    log_raising,
    log_refusal,
    log_rejection,
    log_removal,
    marking_errors_async,
    verdict_of,
)
from lastbit.integrations._versions import warn_of_unknown
from lastbit.models import Completed

try:
    from taskiq import (
        AsyncBroker,
        AsyncTaskiqDecoratedTask,
        NoResultError,
        SendTaskError,
        TaskiqError,
        TaskiqMessage,
        TaskiqMiddleware,
        TaskiqResult,
    )
    from taskiq.kicker import AsyncKicker
except ImportError as cause:
    raise errors.MissingExtra("taskiq", "the adapter for taskiq") from cause

log = logging.getLogger("lastbit.integrations")

LINGER: Final = 0.02
"""Seconds for which resolutions are gathered. No thread waits meanwhile."""
SAVED: Final = "when_saved"
APP: Final = "taskiq"
"""The default name that the producers and workers of an app share."""

Task: TypeAlias = "AsyncTaskiqDecoratedTask[Any, Any] | AsyncKicker[Any, Any]"
Arguments: TypeAlias = "Sequence[Any] | Mapping[str, Any]"
"""Of one call of a task: a tuple of positional ones, or a mapping of keyword arguments."""
Call: TypeAlias = "tuple[AsyncTaskiqDecoratedTask[Any, Any], Arguments]"


class Skipped(_skipped.Skipped, NoResultError):
    """`lastbit.integrations.Skipped`, which taskiq does not take for an error: it neither logs it as one nor retries
    the task."""


@dataclass(slots=True)
class _Run:
    """A run of a task, and whether a message with its id was sent meanwhile."""

    task_id: str
    was_sent: bool = False
    is_skipped: bool = False
    """Whether its batch has ended, so that it does not run."""


_run: ContextVar[_Run | None] = ContextVar("lastbit_run", default=None)


@dataclass(frozen=True, slots=True)
class _Session:
    """The client of one event loop."""

    loop: asyncio.AbstractEventLoop
    client: AsyncClient
    acker: AsyncAcker
    following: asyncio.Task[None] | None
    """Follows the feed for batches that end."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a run that asks whether its batch has ended. The others wait for the answer, and share it."""


class LastbitMiddleware(TaskiqMiddleware):
    """Resolves the items of tasks that `fan_out` has sent. Other tasks are not touched.

    `url`, `token`: the service's, by default LASTBIT_URL and LASTBIT_TOKEN; or a `client`, which may be a
    `lastbit.embedded.Lastbit`. `on_completed`: a function or coroutine function, called with a `Completed` for each
    complete batch in a result, repeatedly if it raises; see `AsyncAcker`. `linger`: seconds for which resolutions are
    gathered, by default 0.02. `skip_ended`: whether tasks of batches that were cancelled, have expired or were deleted
    do not run. `app_name`: the name that the producers and workers of an app share, whose workers send `on_success`
    and `on_complete`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        client: AsyncClient | HasClients | None = None,
        on_completed: Callable[[Completed], Awaitable[object] | object] | None = None,
        linger: float = LINGER,
        skip_ended: bool = True,
        app_name: str = APP,
    ) -> None:
        super().__init__()
        if client is not None and not (url is None and token is None):
            raise errors.InvalidArgument("url and token are for a new client: give either these or client")
        self._url, self._token = url, token
        self._given_client = client if client is None or isinstance(client, AsyncClient) else client.async_client()
        self._on_completed = marking_errors_async(on_completed)
        self._linger = linger
        self._skip_ended = skip_ended
        self.app_name = app_name
        self._endings_worker: EndingsWorker | None = None
        self._session: _Session | None = None
        self._refusal: BaseException | None = None
        """The error with which the service refuses acks for good."""
        self._calling: set[asyncio.Task[None]] = set()
        """Tasks that call `on_completed` without holding a message. The event loop holds no reference to them."""

    @property
    def client(self) -> AsyncClient:
        """The client of the running event loop: the given one, or one that is made when it is first needed."""
        return self._in_this_loop().client

    def _in_this_loop(self) -> _Session:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.loop is not loop:
            client = self._given_client or AsyncClient(self._url, token=self._token)
            following = None
            if self._skip_ended and self.broker.is_worker_process:
                following = asyncio.create_task(watch_of(client.driver.service).follow(client.driver))
            acker = client.acker(self._on_completed, linger=self._linger)
            self._session = _Session(loop, client, acker, following)
        return self._session

    @property
    def _watch(self) -> Watch | None:
        return watch_of(self._in_this_loop().client.driver.service) if self._skip_ended else None

    async def startup(self) -> None:
        if self.broker.is_worker_process:
            for warning in _broken_promises(self.broker, sys.argv):
                log.warning("items may stay pending: %s", warning)
            await announce_async(self.client.driver, log)
            loop = asyncio.get_running_loop()
            client = _ForThreads(self.client.driver.for_threads(loop))
            self._endings_worker = EndingsWorker(client, self.app_name, partial(_publish, self.broker, loop))
            self._endings_worker.start()
            warn_of_unknown(log)

    async def shutdown(self) -> None:
        """Send what waits, and close the client, if it was not given."""
        if self._endings_worker is not None:
            await asyncio.to_thread(self._endings_worker.stop)  # it needs this event loop
        session, self._session = self._session, None
        if session is not None and session.loop is asyncio.get_running_loop():
            if session.following is not None:
                session.following.cancel()
            await session.acker.close()
            if self._given_client is None:
                await session.client.close()

    async def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        item = item_of(message.task_id)
        if self._refusal is not None and item is not None:
            await self._refuse(self._refusal)
        run = _Run(message.task_id)
        _run.set(run)
        watch = self._watch if item is not None else None
        if item is not None and watch is not None:
            run.is_skipped = await watch.is_ended_async(self.client.driver, item, self._in_this_loop().asking)
            if run.is_skipped:
                watch.note(item)
                _make_skippable(self.broker.find_task(message.task_name))
        _current.enter(message.task_id, None if watch is None else watch.batches)
        return message

    def post_send(self, message: TaskiqMessage) -> None:
        run = _run.get()
        if run is not None and run.task_id == message.task_id:
            run.was_sent = True

    async def post_execute(self, message: TaskiqMessage, result: TaskiqResult[Any]) -> None:
        _current.leave()
        item = item_of(message.task_id)
        run = _run.get()
        if run is not None and run.task_id != message.task_id:
            run = None  # of a task that this one has sent, and that the broker has run in place
        error = result.error
        if item is None or (run is not None and run.was_sent):
            return
        if isinstance(error, NoResultError) and not isinstance(error, Skipped):
            return
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise error
        await self._resolve(_resolution(item, error))

    async def _resolve(self, resolution: Resolution) -> None:
        """Return when the item's message may be removed. Raises `AckerClosed`."""
        raises_since: float | None = None
        while (error := await self._outcome(resolution)) is not None:
            match verdict_of(error):
                case Verdict.END:
                    await self._refuse(error)
                case Verdict.SEND_AGAIN:
                    log.warning("item %s is not resolved yet, and is sent again: %s", resolution.item, error)
                case Verdict.CALL_AGAIN:
                    if raises_since is None:
                        log_raising(error)
                        raises_since = time.monotonic()
                    elif time.monotonic() - raises_since >= _verdicts.PATIENCE:
                        log_removal(error)
                        self._go_on(resolution)
                        return
            await asyncio.sleep(PAUSE)

    async def _outcome(self, resolution: Resolution) -> BaseException | None:
        """The error of one attempt; None if the item is resolved, or was rejected."""
        try:
            await (await self._put(resolution))
        except errors.AckerClosed:
            raise  # the message is not acked
        except errors.ItemRejected as error:
            if self._watch is None or not self._watch.learn(error):
                log_rejection(error)
        except Exception as error:  # noqa: BLE001  # its verdict decides
            return error
        return None

    async def _put(self, resolution: Resolution) -> asyncio.Future[ItemResult]:
        acker = self._in_this_loop().acker
        match resolution.verb:
            case "ack":
                return await acker.ack(resolution.item)
            case "skip":
                return await acker.skip(resolution.item, resolution.reason)
            case "fail":
                return await acker.fail(resolution.item, resolution.reason)

    async def _refuse(self, error: BaseException) -> None:
        """Pause a worker until it is stopped. Raises the error if this process is no worker, as in tests."""
        if self._refusal is None:
            self._refusal = error
            log_refusal(error)
        if not self.broker.is_worker_process:
            raise error
        await asyncio.Event().wait()

    def _go_on(self, resolution: Resolution) -> None:
        """Call `on_completed` again without holding the message."""

        async def resolve() -> None:
            with contextlib.suppress(errors.AckerClosed):
                await self._resolve(resolution)

        task = asyncio.create_task(resolve())
        self._calling.add(task)
        task.add_done_callback(self._calling.discard)


def _resolution(item: str, error: BaseException | None) -> Resolution:
    """How a task that has ended with this error resolves its item."""
    if error is None:
        return Resolution(item)
    if isinstance(error, _skipped.Skipped):
        return Resolution(item, "skip", reason_of(error))
    return Resolution(item, "fail", reason_of(error) or "failed")


@dataclass(frozen=True, slots=True)
class _ForThreads:
    """What threads use of the client of an event loop."""

    driver: Driver


def _make_skippable(task: Any) -> None:
    """Replace the task's function in runs that are skipped: no result is stored, no retry follows, and the message is
    removed. taskiq has no way to end a run before it begins, but reads the function of a task for each run."""
    kind = type(task)
    if not hasattr(kind, "lastbit"):

        def original_func(self: Any) -> Any:
            function = vars(self)["original_func"]
            run = _run.get()
            if run is None or not run.is_skipped:
                return function

            @functools.wraps(function)  # taskiq reads the signature
            async def skip(*args: Any, **kwargs: Any) -> None:
                raise NoResultError

            return skip

        task.__class__ = type(kind.__name__, (kind,), {"lastbit": True, "original_func": property(original_func)})


def _is_cancelled() -> bool:
    """Whether the worker cancels this task, and not the task's own code itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def fan_out(
    task: Task,
    arguments: Iterable[Arguments] | AsyncIterable[Arguments],
    *,
    batch: AsyncBatchHandle | int | None = None,
    identify: Callable[[Arguments], Any] | None = None,
    on_success: Call | None = None,
    on_complete: Call | None = None,
    **options: Unpack[FanOutOptions],
) -> AsyncBatchHandle:
    """Issue an item for each call of the task and send its message; then seal the batch and return it.

    `task`: a decorated task, or a kicker, like `render.kicker().with_labels(delay=5)`. `arguments`: a tuple for each
    call, or a mapping of keyword arguments. `labels` are the batch's. The broker's `LastbitMiddleware` has the client.
    Everything else is as in `lastbit.integrations.fan_out`: `idempotency_key` makes it safe to run a killed producer
    again, with the same arguments in the same order; these are compared, or what `identify` returns for them.

    When the new batch has succeeded, a worker sends `on_success`, such as `(publish, ("catalog-42",))`; when it has
    ended in any way, `on_complete`. At least once, and normally once: the id of the task is the same each time.

    Raises `InvalidArgument` also if the broker has no `LastbitMiddleware`.
    """
    kicker = _kicker(task)
    middleware = _middleware(kicker.broker)
    texts = _text_of("on_success", on_success), _text_of("on_complete", on_complete)
    return await _fan_out.fan_out_async(
        middleware.client,
        _checked(arguments),
        partial(_send, kicker),
        batch=batch,
        identify=identify or partial(_identity, kicker.task_name),
        **await with_endings_async(middleware.client, middleware.app_name, batch, options, *texts),
    )


async def resend(task: Task, redrive: Redrive, arguments: Iterable[Arguments] | AsyncIterable[Arguments]) -> int:
    """Send the messages of a redrive's items again, and return their number. Store the redrive's position afterwards.

    `arguments` are those of all calls of the batch, in the order of its fan-outs; see `lastbit.integrations.resend`.
    All messages are for one task, so not for a batch with several.
    """
    kicker = _kicker(task)
    client = _middleware(kicker.broker).client
    return await _fan_out.resend_async(client, redrive, _checked(arguments), partial(_send, kicker))


def _identity(task_name: str, call: Arguments) -> Any:
    """What stands for a call in a rerun."""
    return task_name, call


def _text_of(option: str, call: Call | None) -> str | None:
    """The call at an end, as it is stored. Raises `InvalidArgument`."""
    if call is None:
        return None
    task, args, kwargs = call_of(option, call)
    if not isinstance(task, AsyncTaskiqDecoratedTask):
        raise errors.InvalidArgument(f"{option}: expected a task, whose own labels are used, not {task!r}")
    _kicker(task)
    return text_of(option, {"task": task.task_name, "arguments": kwargs or args})


def _publish(broker: AsyncBroker, loop: asyncio.AbstractEventLoop, message_id: str, text: str) -> bool:
    """Send the message at an end, from a thread. Returns False if the broker is unreachable; raises `LookupError`."""
    call = json.loads(text)
    task = broker.find_task(call["task"])
    if task is None:
        raise LookupError(f"this worker has no task {call['task']}")
    kicker: AsyncKicker[Any, Any] = AsyncKicker(task.task_name, broker, dict(task.labels))
    return not asyncio.run_coroutine_threadsafe(_send(kicker, [(message_id, call["arguments"])]), loop).result()


def _kicker(task: Task) -> AsyncKicker[Any, Any]:
    """Raises `InvalidArgument` if messages of the task would be acked too early."""
    kicker = task if isinstance(task, AsyncKicker) else task.kicker()
    ack_type = str(getattr(kicker.labels.get("ack_type", SAVED), "value", kicker.labels.get("ack_type", SAVED)))
    if ack_type.lower() != SAVED:
        raise errors.InvalidArgument(
            f"the label ack_type is {ack_type!r}: the message would be acked before its item; remove the label"
        )
    return kicker


def _middleware(broker: AsyncBroker) -> LastbitMiddleware:
    for middleware in broker.middlewares:
        if isinstance(middleware, LastbitMiddleware):
            return middleware
    raise errors.InvalidArgument(
        "the broker has no LastbitMiddleware, so nothing would resolve the items: "
        "call broker.add_middlewares(LastbitMiddleware()) where the broker is made, for producers and workers"
    )


async def _checked(arguments: Iterable[Arguments] | AsyncIterable[Arguments]) -> AsyncIterator[Arguments]:
    position = 0
    async for call in arguments if isinstance(arguments, AsyncIterable) else _asynchronous(arguments):
        if not isinstance(call, tuple | list | Mapping):
            raise errors.InvalidArgument(
                f"position {position}: expected a tuple of arguments, like (product,), or a mapping of keyword "
                f"arguments, not {type(call).__name__}"
            )
        yield call
        position += 1


async def _asynchronous(arguments: Iterable[Arguments]) -> AsyncIterator[Arguments]:
    for call in arguments:
        yield call


async def _send(
    kicker: AsyncKicker[Any, Any], pairs: Sequence[tuple[str, Arguments]]
) -> Sequence[tuple[str, Arguments]]:
    for position, (item, call) in enumerate(pairs):
        args, kwargs = ((), call) if isinstance(call, Mapping) else (call, {})
        own: AsyncKicker[Any, Any] = AsyncKicker(kicker.task_name, kicker.broker, dict(kicker.labels))
        try:
            await own.with_task_id(item).kiq(*args, **kwargs)
        except SendTaskError as error:
            if isinstance(error.__cause__, TypeError | ValueError | TaskiqError):
                raise  # the message is wrong, and no repetition helps
            log.warning("the broker is unreachable, and %d messages wait: %s", len(pairs) - position, error.__cause__)
            return pairs[position:]
    return []


def _broken_promises(broker: AsyncBroker, command: Sequence[str]) -> list[str]:
    """Settings of the worker with which a message can be lost, or a dead worker's messages never come back."""
    found = []
    match = re.search(r"--ack-type[= ](\S+)", " ".join(command))
    if match and match[1].lower() != SAVED:
        found.append(f"--ack-type {match[1]} acks messages before their items are resolved; use {SAVED}")
    name = type(broker).__name__
    if name.startswith(("ListQueue", "PubSub")):
        found.append(f"{name} has no acks, so a killed worker's messages are lost; use RedisStreamBroker")
    if (maxlen := getattr(broker, "maxlen", None)) is not None:
        found.append(f"with maxlen={maxlen}, Redis drops the oldest messages, also those that nobody has handled")
    if getattr(broker, "unacknowledged_lock_timeout", 0) is None:
        found.append(
            "without unacknowledged_lock_timeout, a worker that is killed while it reclaims messages keeps the others "
            "from it forever"
        )
    return found
