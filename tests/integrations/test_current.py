"""A handler knows its item, in every adapter, and opens batches under it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest

from lastbit import Client, NoCurrentItem, errors
from lastbit.integrations import current_batch, current_item, fan_out, resolving, resolving_async
from lastbit.integrations._current import handling
from tests.integrations.drivers import Driver, Link
from tests.mutants import mutant


def test_outside_of_a_handler_there_is_no_item() -> None:
    """Unless a default is given, that is an error which says what to do."""
    for current in (current_item, current_batch):
        with pytest.raises(NoCurrentItem, match=r"copy_context\(\)\.run"):
            current()
        assert current(None) is None


@mutant(
    "a-message-at-the-end-does-not-know-its-batch",
    "lastbit.integrations._current:enter",
    "_Handling(message_id, item_of(message_id), _handling.get(), ended)",
    "_Handling(None, item_of(message_id), _handling.get(), ended)",
)
def test_a_message_at_the_end_of_a_batch_knows_it() -> None:
    """Whichever end it is; it has no item."""
    for message_id in ("batch:7:succeeded", "batch:7:completed:2", "batch:7:expired", "batch:7:cancelled"):
        with handling(message_id):
            assert (current_batch(), current_item(None)) == (7, None)
            with handling("9:0:1"):
                assert current_batch() == 9
    for message_id in ("batch:7:opened", "batch:07:succeeded", "my-batch:7:succeeded", "batch:7:succeeded:", None):
        with handling(message_id):
            assert current_batch(None) is None


@mutant(
    "a-worker-does-not-tell-the-item",
    "lastbit.integrations._workers:Workers._handled",
    "handling(delivery.item, self._resolver.ended)",
    "handling(None)",
    case="rabbitmq",
)
@mutant(
    "a-consumer-of-sqs-does-not-tell-the-item",
    "lastbit.integrations.sqs._consumer:Consumer._handled",
    "handling(item, self._settler.ended)",
    "handling(None)",
    case="sqs",
)
@mutant(
    "a-task-of-celery-does-not-know-its-item",
    "lastbit.integrations.celery.current:item_of",
    "is_item(task_id)",
    "False",
    case="celery",
)
@mutant(
    "an-item-is-current-after-its-end",
    "lastbit.integrations._current:handling",
    "leave()",
    "pass",
    case="aws_lambda",
)
def test_a_handler_knows_its_item(driver: Driver, producer: Link, link: Link) -> None:
    """In each attempt; so does a thread in a copy of its context, and no other thread. Afterwards nobody does."""
    notes: list[tuple[str, object, object]] = []
    strangers: list[object] = []
    executor = ThreadPoolExecutor(1)

    def handle(body: str) -> None:
        context = contextvars.copy_context()
        notes.append((body, current_item(), current_batch()))
        notes.append((body, executor.submit(context.run, current_item).result(), current_batch()))
        strangers.append(executor.submit(current_item, None).result())
        if body == "is retried" and len([entry for entry in notes if entry[0] == body]) < 4:
            raise ConnectionError

    batch = driver.send(producer, ["a", "is retried"])
    driver.work(link, handle, lambda: batch.refresh().complete)
    executor.shutdown()
    assert Counter(notes) == {
        ("a", f"{batch.id}:0:0", batch.id): 2,
        ("is retried", f"{batch.id}:0:1", batch.id): 4,
    }
    assert strangers == [None] * 3
    assert current_item(None) is None


@mutant(
    "a-second-delivery-opens-another-batch",
    "lastbit.integrations._fan_out:_Plan.of",
    "'parent' in opening",
    "False",
    case="sqs",
)
def test_a_handler_opens_a_batch_under_its_item(
    driver: Driver, producer: Link, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first attempt dies when half of the messages are sent; the second one continues the same batch. The item's
    message is removed without a warning, and the item stays pending until the new batch has ended."""
    caplog.set_level(logging.WARNING, "lastbit")
    outbox: list[tuple[str, int]] = []
    children: list[int] = []
    has_ended = threading.Event()

    def send(pairs: Any) -> Any:
        if len(outbox) == 4 and len(children) == 0:
            children.append(0)
            raise ConnectionError("killed")
        outbox.extend(pairs)
        return ()

    def handle(body: str) -> None:
        child = fan_out(link.client, range(6), send, parent=current_item(), key="pages", tolerated_failures=1, chunk=2)
        children.append(child.id)
        has_ended.set()

    batch = driver.send(producer, ["lists pages"])
    driver.work(link, handle, lambda: has_ended.is_set() and driver.left() == 0)
    (_, child_id) = children
    assert dict(outbox) == {f"{child_id}:0:{number}": number for number in range(6)}
    assert not [line for line in caplog.messages if "rejected" in line]
    child = producer.client.batch(child_id)
    assert (batch.refresh().pending, child.refresh().parent, child.info.key) == (1, f"{batch.id}:0:0", "pages")
    producer.client.fail(f"{child_id}:0:0")
    producer.client.ack([item for item, _ in outbox[1:]])
    assert (batch.refresh().acked, child.refresh().succeeded) == (1, True)


@mutant(
    "a-second-delivery-adds-its-messages-again",
    "lastbit.integrations._fan_out:_Plan.of",
    "number is not None",
    "False",
    case="rabbitmq",
)
@mutant(
    "an-attempt-in-place-continues-the-numbers-of-the-one-before",
    "lastbit.integrations.kafka._consumer:Attempts.__call__",
    "with again():\n    self._handle(record)",
    "self._handle(record)",
    case="kafka",
)
@mutant(
    "a-handler-seals-the-batch-that-it-adds-to",
    "lastbit.integrations._fan_out:_Plan.of",
    "values.setdefault('seal', False)",
    "pass",
    case="rq",
)
def test_a_handler_adds_to_its_batch(driver: Driver, producer: Link, link: Link) -> None:
    """In two fan-outs, each of which has messages of its own. The first attempt dies in the second one. Each message
    has one item in the end. The batch is sealed or not, and complete when the added items are resolved too."""
    outbox: list[tuple[str, str]] = []
    attempts: list[str] = []

    def send(pairs: Any) -> Any:
        if len(outbox) == 6 and len(attempts) == 1:
            raise ConnectionError("killed")
        outbox.extend(pairs)
        return ()

    def handle(body: str) -> None:
        attempts.append(body)
        for kind in ("page", "picture"):
            messages = [f"{kind} {number}" for number in range(4)]
            fan_out(link.client, messages, send, by=current_item(), chunk=2)

    batch = driver.send(producer, ["lists pages"], seal=False)
    driver.work(link, handle, lambda: batch.refresh().acked == 1)
    assert (len(attempts), batch.refresh().items, batch.state) == (2, 9, "open")
    assert set(dict(outbox).values()) == {f"{kind} {number}" for kind in ("page", "picture") for number in range(4)}
    assert len(outbox) <= 8 + 2
    batch.seal()
    producer.client.ack([item for item, _ in outbox])
    assert batch.refresh().succeeded


@pytest.mark.parametrize("dies_at", range(7))
def test_a_handler_that_dies_anywhere_adds_its_messages_once(client: Client, dies_at: int) -> None:
    """To a sealed batch, which is complete when the last of them is resolved. After the item is acked, another
    delivery repeats only what is issued, and adds nothing."""
    batch = client.open(items=1, sealed=True)
    (item,) = batch.ids
    outbox: list[tuple[str, int]] = []

    def send(pairs: Any) -> Any:
        for pair in pairs:
            if len(outbox) == dies_at:
                raise KeyboardInterrupt
            outbox.append(pair)
        return ()

    def deliver(fan_outs: int = 2) -> None:
        with resolving(client, item):
            for number in range(fan_outs):
                fan_out(client, range(3 * number, 3 * number + 3), send, by=current_item(), chunk=2)

    with pytest.raises(KeyboardInterrupt) if dies_at < 6 else nullcontext():
        deliver()
    dies_at = -1
    deliver()
    deliver()
    assert {number: item for item, number in outbox} == {number: f"{batch.id}:0:{number + 1}" for number in range(6)}
    assert (batch.refresh().state, batch.items, batch.info.acked) == ("sealed", 7, 1)
    with pytest.raises(errors.ItemResolved):
        deliver(3)
    client.ack([item for item, _ in outbox])
    assert batch.refresh().succeeded


def test_fan_outs_by_an_item_without_its_handler(client: Client) -> None:
    """They need a key to be repeated, as there is no order of them. Wrong arguments are named."""
    batch = client.open(items=1, sealed=True)
    (item,) = batch.ids
    for key in (None, None, "links", "links"):
        fan_out(client, ["a"], lambda pairs: (), by=item, idempotency_key=key)
    assert batch.refresh().items == 4
    for wrong in ({"batch": batch}, {"key": "other"}, {"parent": item}):
        with pytest.raises(errors.InvalidArgument, match="by names the batch to extend"):
            fan_out(client, ["a"], lambda pairs: (), by=item, **wrong)  # type: ignore[arg-type]
    client.ack(f"{batch.id}:0:1")
    fan_out(client, ["b"], lambda pairs: (), by=item, seal=True)
    assert batch.refresh().items == 5


@mutant(
    "a-failed-child-is-acked",
    "lastbit.integrations._fan_out:_check_child",
    "not handle.info.succeeded",
    "False",
)
def test_a_rerun_under_an_item_whose_batch_has_failed_is_refused(client: Client) -> None:
    """Otherwise the handler of a redriven message would return, and ack the item of a batch that has failed."""
    batch = client.open(items=1, sealed=True)
    (item,) = batch.ids
    child = fan_out(client, ["a"], lambda pairs: (), parent=item)
    assert fan_out(client, ["a"], lambda pairs: (), parent=item).id == child.id
    client.fail(f"{child.id}:0:0")
    with pytest.raises(errors.BatchEnded, match="complete without success: redrive its failed items"):
        fan_out(client, ["a"], lambda pairs: (), parent=item)
    client.ack(f"{child.id}:0:0")
    assert fan_out(client, ["a"], lambda pairs: (), parent=item).info.succeeded


def test_resolving_tells_the_item(client: Client) -> None:
    """For queues without an adapter; one block within another has its own. Tasks that it starts have the item too."""
    batch = client.open(items=3, sealed=True)
    outer, inner, last = batch.ids

    async def ask() -> str:
        return current_item()

    async def in_tasks() -> list[str]:
        from lastbit import AsyncClient

        async with AsyncClient(client.url) as other, resolving_async(other, last):
            return [await asyncio.create_task(ask()), await asyncio.to_thread(current_item)]

    with resolving(client, outer):
        with resolving(client, inner):
            assert current_item() == inner
        assert current_item() == outer
    assert asyncio.run(in_tasks()) == [last, last]
    assert current_item(None) is None
    assert batch.refresh().succeeded
