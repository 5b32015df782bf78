"""Fan-out: issue items and send a message for each, chunk by chunk, so that a producer may be killed and run again.

What could go wrong, and why it can't:

*A message is never sent.* A chunk's items are issued only after all messages of the chunk before were sent. If the
producer dies between issuing and sending, the next run with the same idempotency key gets the same items for this
chunk, and sends its messages. Messages that the broker refuses are sent again, and the batch is sealed only after the
last one.

*Messages are sent again and again.* A chunk is known to be sent if the next chunk was issued. So a rerun sends only the
last issued chunk again, of which some messages may have been sent. Their items are acked twice, which changes nothing.

*A rerun has other messages, or the same in another order*, as those of a set or of a query without ORDER BY. What its
skipped chunks hold would never be sent. So each chunk is issued under an idempotency key of its own, with the number of
its messages and a digest of all messages so far. The service compares both with those of the earlier run, and refuses
the chunk if they differ. A rerun sends nothing before the last issued chunk has passed, and with it all before. On the
way there it asks for the chunks 0, 1, 2, 4, 8 and so on, to fail early.

*A redrive is forgotten.* `resend` returns when the broker has all messages of a redrive, and its position is stored
after that. A producer that dies in between sends them again.

*The handle has the ids of others.* Several producers may extend a batch, and handlers add to it. So a rerun concludes
from the ids of two chunks on those between only if there is room for no others; else it asks.

*Memory.* One chunk of messages is held at a time, and of ids only where they begin and end.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from lastbit import _arguments, _calls, errors, progress
from lastbit._drivers import without_frames
from lastbit.ids import ItemId, ItemIds
from lastbit.integrations import _current
from lastbit.integrations._digests import Digest
from lastbit.models import BatchOptions
from lastbit.retry import Retry

if TYPE_CHECKING:
    from lastbit.batch import AsyncBatchHandle, BatchHandle
    from lastbit.client import AsyncClient, Client
    from lastbit.failures import Redrive

T = TypeVar("T")

CHUNK: Final = 1000
"""The default number of messages in a chunk."""


class FanOutOptions(BatchOptions, total=False):
    """What every `fan_out` can be told, beside the options of a new batch. The docstring of `fan_out` explains them."""

    by: str | ItemId | None
    seal: bool | None
    idempotency_key: str | None
    chunk: int
    progress: bool


PATIENCE: Final = Retry(attempts=1000)
"""How long messages are sent again while the broker accepts none: a minute. The client's eight attempts are over within
seconds, and a broker that restarts takes longer."""
MOST_KEY: Final = 235
"""Maximum characters of an idempotency key, so that the keys of the chunks are at most 255."""

Pairs = Sequence[tuple[str, T]]
"""Item ids, each with its message."""
Send = Callable[[Pairs[T]], Pairs[T]]
"""Sends the messages, and returns those that the broker refused. Raises if the broker can't be reached."""
SendAsync = Callable[[Pairs[T]], Awaitable[Pairs[T]]]
_Steps = Generator[Callable[[], Any], Any, Any]
"""Yields calls, and receives their results: the same steps serve both kinds of client."""


def fan_out(
    client: Client,
    messages: Iterable[T],
    send: Send[T],
    *,
    batch: BatchHandle | int | None = None,
    identify: Callable[[T], Any] | None = None,
    **options: Unpack[FanOutOptions],
) -> BatchHandle:
    """Issue an item for each message and send the messages, `chunk` at a time; then seal the batch and return it.

    It opens a batch, with the options of `Client.open`, or extends the open `batch`. `seal=False` leaves it open for
    more, until `batch.seal()` or a fan-out that seals. `send` publishes pairs of item id and message, and returns those
    that the broker refused; they are sent again with growing pauses. `progress=True` shows the number of sent messages
    on standard error (needs `lastbit[cli]`).

    `parent=current_item()`, in a handler, opens the batch under the item whose message is being handled: the new batch
    resolves that item when it ends. An item has one such batch, so its idempotency key is by default made of the item,
    and a second delivery of the message continues where the first one was interrupted.

    `by=current_item()`, in a handler, adds to the batch of that item, which may be sealed as long as the item is
    pending, and does not seal it. The idempotency keys of an item are its own. By default they number the handler's
    fan-outs in their order, so a second delivery of the message continues here too.

    With an `idempotency_key`, a producer that was killed is simply run again: it gets the same batch and the same ids,
    sends everything that it had not sent, and repeats at most one chunk. The messages must be the same, in the same
    order, and so must `chunk`; otherwise it raises `MessagesDiffer` before it sends any. They are compared by a digest,
    so each is text, bytes, a number, None, a date, or a tuple, list, set, mapping or dataclass of such; or `identify`
    returns what stands for a message, without what changes with each run. Without the key, a rerun is a new batch.

    The handle's `item_ids()` are those of the messages, in their order, also after a rerun.

    Raises `MessagesDiffer`, `MessagesRefused`, `InvalidArgument`, `ServiceError` (a `BatchEnded` if the batch was
    cancelled, or if that under `parent` is complete without success), `ServiceUnreachable`, and the exceptions of
    `messages` and `send`.
    """
    plan = _Plan.of(batch, identify, options)
    with _counting(plan.progress) as show:
        try:
            handle: BatchHandle = _run(_steps(client, _reader(messages, plan.chunk), send, time.sleep, plan, show))
        except errors.ServiceUnreachable as error:
            raise without_frames(error) from None
        return handle


async def fan_out_async(
    client: AsyncClient,
    messages: Iterable[T] | AsyncIterable[T],
    send: SendAsync[T],
    *,
    batch: AsyncBatchHandle | int | None = None,
    identify: Callable[[T], Any] | None = None,
    **options: Unpack[FanOutOptions],
) -> AsyncBatchHandle:
    """`fan_out`, awaited. `send` is a coroutine function; the messages may come from an asynchronous generator."""
    plan = _Plan.of(batch, identify, options)
    with _counting(plan.progress) as show:
        steps = _steps(client, _async_reader(messages, plan.chunk), send, asyncio.sleep, plan, show)
        try:
            handle: AsyncBatchHandle = await _run_async(steps)
        except errors.ServiceUnreachable as error:
            raise without_frames(error) from None
        return handle


def resend(client: Client, redrive: Redrive, messages: Iterable[T], send: Send[T]) -> int:
    """Send the messages of a redrive's items again, and return their number. Store the redrive's position afterwards:

        for redrive in client.redrives(after=positions.get("thumbnails")):
            resend(client, redrive, messages_of(redrive.key), send)
            positions["thumbnails"] = redrive.position

    `messages` are all messages of the batch, in the order in which their items were issued: those of its `fan_out`
    again. `send` as there. Nothing is sent for a batch that was cancelled, has expired or was deleted meanwhile, as
    its items can't be acked any more.

    A producer that is killed before it has stored the position sends the messages once more; the items count once.

    Raises `InvalidArgument` if there are too few messages, `MessagesRefused`, `ServiceError`, `ServiceUnreachable`, and
    the exceptions of `messages` and `send`.
    """
    batch = client.batch(redrive.batch)
    ids = _reader(batch.redriven(redrive), CHUNK)
    count: int = _run(_resend_steps(batch, redrive, ids, _reader(messages, CHUNK), send, time.sleep))
    return count


async def resend_async(
    client: AsyncClient, redrive: Redrive, messages: Iterable[T] | AsyncIterable[T], send: SendAsync[T]
) -> int:
    """`resend`, awaited. `send` is a coroutine function; the messages may come from an asynchronous generator."""
    batch = client.batch(redrive.batch)
    ids = _async_reader(batch.redriven(redrive), CHUNK)
    count: int = await _run_async(
        _resend_steps(batch, redrive, ids, _async_reader(messages, CHUNK), send, asyncio.sleep)
    )
    return count


def send_items(ids: Iterable[str], group_size: int, messages: Iterable[T], send: Send[T]) -> int:
    """Send the messages of these items, whose ids ascend, and return their number. `messages` are all messages of the
    batch. Raises as `resend`."""
    count: int = _run(_item_steps(_reader(ids, CHUNK), group_size, _reader(messages, CHUNK), send, time.sleep))
    return count


def _run(steps: _Steps) -> Any:
    """Run the steps, and return their result."""
    try:
        step = next(steps)
        while True:
            try:
                result = step()
            except Exception as error:  # noqa: BLE001  # the steps handle it, or raise it again
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        return end.value


async def _run_async(steps: _Steps) -> Any:
    """`_run`, awaited."""
    try:
        step = next(steps)
        while True:
            try:
                result = await step()
            except Exception as error:  # noqa: BLE001  # the steps handle it, or raise it again
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        return end.value


@dataclass(frozen=True)
class _Plan:
    """What both functions were told."""

    batch: Any
    """The one to extend; None for a new one."""
    identify: Callable[[Any], Any] | None
    opening: BatchOptions
    """Of a new batch."""
    by: str | None = None
    seal: bool = True
    idempotency_key: str | None = None
    chunk: int = CHUNK
    progress: bool = False

    @classmethod
    def of(cls, batch: Any, identify: Callable[[Any], Any] | None, options: FanOutOptions) -> _Plan:
        """Raises `TypeError` for an unknown option, and `InvalidArgument`."""
        _arguments.check_names("option", options, FanOutOptions)
        values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        opening: Any = {name: values.pop(name) for name in BatchOptions.__annotations__ if name in values}
        if "by" in values:
            if batch is not None or opening:
                raise errors.InvalidArgument(
                    "by names the batch to extend: give neither batch nor options of a new one"
                )
            values["by"] = str(values["by"])
            batch = ItemId.parse(values["by"]).batch
            values.setdefault("seal", False)
            number = _current.fan_out_number(values["by"])
            if number is not None:
                values.setdefault("idempotency_key", f"fan-out-{number}")
        if "parent" in opening:
            values.setdefault("idempotency_key", f"fan-out-under-{opening['parent']}")
        return cls(batch, identify, opening, **values)

    def __post_init__(self) -> None:
        if self.batch is not None and self.opening:
            raise errors.InvalidArgument(
                f"give either batch, or the options of a new batch ({', '.join(self.opening)})"
            )
        if self.idempotency_key is not None and isinstance(self.opening.get("deadline"), timedelta):
            raise errors.InvalidArgument(
                "a deadline counts from now, and a rerun must give the same one: pass a datetime, or expires_in"
            )
        if self.chunk < 1:
            raise errors.InvalidArgument(f"chunk is at least 1, not {self.chunk!r}")
        if self.idempotency_key is not None and not 0 < len(self.idempotency_key) <= MOST_KEY:
            raise errors.InvalidArgument(
                f"idempotency_key has 1 to {MOST_KEY} characters here, not {len(self.idempotency_key)}"
            )

    def chunk_key(self, number: int) -> str | None:
        return None if self.idempotency_key is None else f"{self.idempotency_key}/{number}"


def _steps(
    client: Any,
    read: Callable[[], Any],
    send: Callable[[Pairs[T]], Any],
    sleep: Callable[[float], Any],
    plan: _Plan,
    show: Callable[[int], None],
) -> _Steps:
    """The whole fan-out. `read` returns the next chunk of messages, which is empty at the end."""
    if plan.batch is None:
        handle = yield partial(client.open, idempotency_key=plan.idempotency_key, **plan.opening)
        resumed = handle.replayed
        if resumed and handle.info.complete:
            _check_child(handle, plan)
            handle.issued = yield from _issued_before(client, handle, read, plan)
            return handle
        if resumed and handle.info.ended:
            raise errors.BatchEnded.of_rerun(handle.info)
    else:
        handle = client.batch(plan.batch) if isinstance(plan.batch, int) else plan.batch
        resumed = plan.idempotency_key is not None
    digest = None if plan.idempotency_key is None else Digest(plan.identify)
    taken = compared = 0  # the numbers of messages
    first_unsent = gap = 0
    runs: list[ItemIds] = []
    for number in count():
        messages = yield read
        if not messages:
            break
        digest_so_far = None if digest is None else digest.after(messages)
        taken += len(messages)
        if number < first_unsent and not _is_power_of_two(number):
            gap += 1
            continue
        try:
            ids = yield from _issue(handle, len(messages), plan, number, digest_so_far)
        except errors.IdempotencyKeyReused as error:
            raise errors.MessagesDiffer(plan.idempotency_key or "", compared, taken) from error
        compared = taken
        if gap:
            yield from _add_between(handle, plan, range(number - gap, number), runs, ids)
            gap = 0
        _add(runs, ids)
        if resumed and number == 0:
            first_unsent = yield from _last_issued(client, handle.id, plan)
        if number >= first_unsent:
            yield from _send_all(list(zip(ids, messages, strict=True)), send, sleep)
            show(taken)
    if number <= first_unsent and (first_unsent or (resumed and plan.batch is None and handle.items)):
        raise errors.MessagesDiffer(plan.idempotency_key or "", taken, None)
    handle.issued = tuple(runs)
    if plan.seal:
        yield handle.seal
    return handle


def _add(runs: list[ItemIds], ids: ItemIds) -> None:
    if runs and runs[-1].numbers.stop == ids.numbers.start:
        begin = runs.pop().numbers.start
        ids = ItemIds(ids.batch, ids.group_size, range(begin, ids.numbers.stop))
    runs.append(ids)


def _add_between(handle: Any, plan: _Plan, chunks: range, runs: list[ItemIds], next_ids: ItemIds) -> _Steps:
    """Add the ids of full chunks that an earlier run has issued, after those in `runs` and before `next_ids`."""
    numbers = range(runs[-1].numbers.stop, next_ids.numbers.start)
    if len(numbers) == len(chunks) * plan.chunk:
        _add(runs, ItemIds(next_ids.batch, next_ids.group_size, numbers))
        return
    for number in chunks:
        _add(runs, (yield from _issue(handle, plan.chunk, plan, number, None)))


def _issued_before(client: Any, handle: Any, read: Callable[[], Any], plan: _Plan) -> _Steps:
    """What earlier runs have issued in a batch that is complete. The messages are counted only if others have extended
    it too. Raises `MessagesDiffer` if their number is another one then."""
    if not handle.items or not (yield _is_issued(client, handle.id, plan, 0)):
        return ()
    last_chunk = yield from _last_issued(client, handle.id, plan)
    try:
        # What the last chunk has if there are no items of others; otherwise it has fewer.
        ids = yield from _issue(handle, handle.items - last_chunk * plan.chunk, plan, last_chunk, None)
    except errors.IdempotencyKeyReused:
        pass
    else:
        return (ItemIds(handle.id, ids.group_size, range(handle.items)),)
    runs: list[ItemIds] = []
    message_count = 0
    for number in range(last_chunk + 1):
        messages = yield read
        message_count += len(messages)
        try:
            _add(runs, (yield from _issue(handle, len(messages), plan, number, None)))
        except errors.InvalidRequest as error:
            raise errors.MessagesDiffer(plan.idempotency_key or "", number * plan.chunk, message_count) from error
    return tuple(runs)


def _check_child(handle: Any, plan: _Plan) -> None:
    """Raises `BatchEnded` if a handler would go on, and ack its item, although the batch under it has failed."""
    if "parent" in plan.opening and not handle.info.succeeded:
        text = f"batch {handle.id}, which stands for item {plan.opening['parent']}, is complete without success"
        raise errors.BatchEnded(409, "batch_complete", f"{text}: redrive its failed items")


def _issue(handle: Any, count: int, plan: _Plan, chunk: int, digest: str | None) -> _Steps:
    """The ids of a chunk. Raises `IdempotencyKeyReused` if an earlier run issued them for other messages."""
    extend = partial(handle.extend, count, by=plan.by, idempotency_key=plan.chunk_key(chunk))
    if digest is not None:
        try:
            return (yield partial(extend, digest=digest))
        except errors.InvalidRequest as error:
            if all(problem.get("place") != "body.digest" for problem in error.errors):
                raise
            # The service is of an earlier release, which compares only the count.
    return (yield extend)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _last_issued(client: Any, batch: int, plan: _Plan) -> _Steps:
    """The number of the last chunk that was issued; chunk 0 was. All chunks before it have been sent."""

    last, beyond = 0, 1
    while (yield _is_issued(client, batch, plan, beyond)):
        last, beyond = beyond, 2 * beyond
    while beyond - last > 1:
        middle = (last + beyond) // 2
        if (yield _is_issued(client, batch, plan, middle)):
            last = middle
        else:
            beyond = middle
    return last


def _is_issued(client: Any, batch: int, plan: _Plan, number: int) -> Callable[[], Any]:
    return partial(client.driver.run, _calls.is_issued, batch, plan.chunk_key(number), plan.by)


def _send_all(pairs: Pairs[T], send: Callable[[Pairs[T]], Any], sleep: Callable[[float], Any]) -> _Steps:
    """Send the messages, then those that the broker refused, until none is left. Gives up if the broker accepts nothing
    for a minute."""
    start = time.monotonic()
    attempt = 1
    while refused := (yield partial(send, pairs)):
        if len(refused) < len(pairs):  # the broker accepts some
            start, attempt = time.monotonic(), 1
        pause = PATIENCE.pause(attempt, time.monotonic() - start, None, random.random())  # noqa: S311  # jitter
        if pause is None:
            raise errors.MessagesRefused([item for item, _ in refused])
        pairs = refused
        attempt += 1
        yield partial(sleep, pause)


def _resend_steps(
    batch: Any,
    redrive: Redrive,
    read_ids: Callable[[], Any],
    read: Callable[[], Any],
    send: Callable[[Pairs[T]], Any],
    sleep: Callable[[float], Any],
) -> _Steps:
    """Send the messages of a redrive's items, unless these can't be acked any more."""
    try:
        info = yield batch.refresh
    except errors.BatchNotFound:
        return 0
    if info.ended and not info.complete:
        return 0
    return (yield from _item_steps(read_ids, redrive.group_size, read, send, sleep))


def _item_steps(
    read_ids: Callable[[], Any],
    group_size: int,
    read: Callable[[], Any],
    send: Callable[[Pairs[T]], Any],
    sleep: Callable[[float], Any],
) -> _Steps:
    """Send the messages of items, and return their number. `read_ids` and `read` return the next ids, which ascend, and
    the next of all messages of the batch."""
    sent = start = 0
    messages: Sequence[T] = ()  # those of the items from the number `start` on
    while ids := (yield read_ids):
        pairs = []
        for id in ids:
            number = ItemId.parse(id).number(group_size) or 0
            while number >= start + len(messages):
                start += len(messages)
                messages = yield read
                if not messages:
                    raise errors.InvalidArgument(f"item {id} has no message: there are only {start} messages")
            pairs.append((id, messages[number - start]))
        yield from _send_all(pairs, send, sleep)
        sent += len(pairs)
    return sent


def _reader(messages: Iterable[T], chunk: int) -> Callable[[], list[T]]:
    """A function that returns the next `chunk` messages."""
    iterator = iter(messages)
    return lambda: list(islice(iterator, chunk))


def _async_reader(messages: Iterable[T] | AsyncIterable[T], chunk: int) -> Callable[[], Awaitable[list[T]]]:
    """`_reader`, awaited."""
    if isinstance(messages, AsyncIterable):
        source = aiter(messages)

        async def read() -> list[T]:
            taken: list[T] = []
            async for message in source:
                taken.append(message)
                if len(taken) == chunk:
                    break
            return taken
    else:
        following = _reader(messages, chunk)

        async def read() -> list[T]:
            return following()

    return read


def _counting(option: bool) -> AbstractContextManager[Callable[[int], None]]:
    return progress.counter("messages sent") if option else nullcontext(lambda number: None)
