"""A handler knows its item, in every adapter, and opens batches under it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lastbit import Client, NoCurrentItem, errors
from lastbit.integrations import current_batch, current_item, fan_out, resolving, resolving_async
from tests.integrations.drivers import Driver, Link
from tests.mutants import mutant


def test_outside_of_a_handler_there_is_no_item() -> None:
    """Unless a default is given, that is an error which says what to do."""
    for current in (current_item, current_batch):
        with pytest.raises(NoCurrentItem, match=r"copy_context\(\)\.run"):
            current()
        assert current(None) is None


@mutant(
    "a-worker-does-not-tell-the-item",
    "lastbit.integrations._workers:Workers._handled",
    "handling(delivery.item)",
    "handling(None)",
    case="rabbitmq",
)
@mutant(
    "a-consumer-of-sqs-does-not-tell-the-item",
    "lastbit.integrations.sqs._consumer:Consumer._handled",
    "item_of(message)",
    "None",
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
    found: list[tuple[str, object, object]] = []
    strangers: list[object] = []
    executor = ThreadPoolExecutor(1)

    def handle(body: str) -> None:
        context = contextvars.copy_context()
        found.append((body, current_item(), current_batch()))
        found.append((body, executor.submit(context.run, current_item).result(), current_batch()))
        strangers.append(executor.submit(current_item, None).result())
        if body == "is retried" and len([entry for entry in found if entry[0] == body]) < 4:
            raise ConnectionError

    batch = driver.send(producer, ["a", "is retried"])
    driver.work(link, handle, lambda: batch.refresh().complete)
    executor.shutdown()
    assert Counter(found) == {
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
    sent: list[tuple[str, int]] = []
    children: list[int] = []
    has_ended = threading.Event()

    def send(pairs: Any) -> Any:
        if len(sent) == 4 and len(children) == 0:
            children.append(0)
            raise ConnectionError("killed")
        sent.extend(pairs)
        return ()

    def handle(body: str) -> None:
        child = fan_out(link.client, range(6), send, parent=current_item(), key="pages", tolerated_failures=1, chunk=2)
        children.append(child.id)
        has_ended.set()

    batch = driver.send(producer, ["lists pages"])
    driver.work(link, handle, lambda: has_ended.is_set() and driver.left() == 0)
    (_, child_id) = children
    assert dict(sent) == {f"{child_id}:0:{number}": number for number in range(6)}
    assert not [line for line in caplog.messages if "rejected" in line]
    child = producer.client.batch(child_id)
    assert (batch.refresh().pending, child.refresh().parent, child.info.key) == (1, f"{batch.id}:0:0", "pages")
    producer.client.fail(f"{child_id}:0:0")
    producer.client.ack([item for item, _ in sent[1:]])
    assert (batch.refresh().acked, child.refresh().succeeded) == (1, True)


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
