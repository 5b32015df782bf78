"""The resend that all adapters share: a redrive's items get their own messages again, and a producer that dies before
it has stored the redrive's position sends them once more.

What could go wrong: an item gets the message of another one; a redrive of which only a part was sent is forgotten;
messages are sent whose items can't be acked any more, or whose batch is gone, and the producer stops at it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lastbit import AsyncClient, Client, errors
from lastbit.batch import BatchHandle
from lastbit.ids import item_id
from lastbit.integrations import fan_out, resend, resend_async
from tests.integrations.redrives import redriven
from tests.integrations.test_fan_out import Broker, Died, client, numbers

__all__ = ["client"]

FAILED = [0, 7, 8, 999, 1000, 1500, 4999, 5000, *range(6000, 9000, 2)]
"""Numbers of items in all chunks of messages but some, in two groups; more ranges than an event names."""
COUNT = 9500


def failed_batch(client: Client, failed: list[int] = FAILED) -> BatchHandle:
    batch = fan_out(client, numbers(COUNT), Broker().send)
    client.fail([item_id(batch.id, number) for number in failed], reason="no picture")
    return batch


def expected(batch: BatchHandle, failed: list[int] = FAILED) -> list[tuple[str, int]]:
    return [(item_id(batch.id, number), number) for number in failed]


def test_each_item_gets_its_own_message(client: Client) -> None:
    """Only the messages of redriven items are sent; the messages that the broker refuses are sent again."""
    batch, broker = failed_batch(client), Broker()
    broker.refused = {8: 2, 6500: 1}
    assert resend(client, redriven(client, batch), numbers(COUNT), broker.send) == len(FAILED)
    assert sorted(broker.sent, key=lambda pair: pair[1]) == expected(batch)


def test_pending_items_get_their_own_messages(client: Client) -> None:
    """More ranges of them than an event names."""
    batch, broker = fan_out(client, numbers(COUNT), Broker().send), Broker()
    client.ack([item_id(batch.id, number) for number in sorted({*range(COUNT)} - {*FAILED})])
    position = batch.redrive(pending=True).position
    request = next(iter(client.redrives(after=position - 1, batch=batch.id)))
    assert (request.pending, request.count, request.more) == (True, len(FAILED), len(request.spans) == 1000)
    assert resend(client, request, numbers(COUNT), broker.send) == len(FAILED)
    assert sorted(broker.sent, key=lambda pair: pair[1]) == expected(batch)


def test_awaited_it_sends_the_same(client: Client) -> None:
    """Also from an asynchronous generator."""
    batch = failed_batch(client)
    sent: list[tuple[str, int]] = []

    async def send(pairs: Any) -> Any:
        await asyncio.sleep(0)
        sent.extend(pairs)
        return []

    async def generated() -> AsyncIterator[int]:
        for number in range(COUNT):
            yield number

    async def run() -> list[int]:
        redrive = redriven(client, batch)
        async with AsyncClient(client.url) as own:
            return [await resend_async(own, redrive, messages, send) for messages in (range(COUNT), generated())]

    assert asyncio.run(run()) == [len(FAILED)] * 2
    assert sent == expected(batch) * 2


@pytest.mark.parametrize("dies_at", [0, 1, 1000, len(FAILED) - 1])
def test_a_producer_that_dies_sends_the_redrive_again(client: Client, dies_at: int) -> None:
    """As its position is stored after all of its messages were sent."""
    batch, broker = failed_batch(client), Broker()
    before = batch.redrive().position - 1
    positions = {"work": before}

    def follow() -> None:
        for redrive in itertools.islice(client.redrives(after=positions["work"], batch=batch.id), 1):
            resend(client, redrive, numbers(COUNT), broker.send)
            positions["work"] = redrive.position

    broker.dies_at = dies_at
    with pytest.raises(Died):
        follow()
    assert positions == {"work": before}
    broker.dies_at = None
    follow()
    assert positions == {"work": before + 1}
    assert broker.sent[dies_at:] == expected(batch)


def test_too_few_messages_are_refused(client: Client) -> None:
    batch, broker = failed_batch(client, [3, 99]), Broker()
    with pytest.raises(errors.InvalidArgument, match=f"item {batch.id}:0:99 has no message: there are only 99"):
        resend(client, redriven(client, batch), numbers(99), broker.send)
    assert broker.sent == []


@pytest.mark.parametrize("ended", ["cancel", "delete"])
def test_nothing_is_sent_of_a_batch_that_has_ended(client: Client, ended: str) -> None:
    """The producer goes on with the next redrive."""
    batch, broker = failed_batch(client), Broker()
    redrive = redriven(client, batch)
    batch.cancel()
    if ended == "delete":
        batch.delete()
    assert resend(client, redrive, numbers(COUNT), broker.send) == 0
    assert broker.sent == []


def test_a_batch_that_is_complete_is_sent(client: Client) -> None:
    """Its failures can still become acks."""
    batch, broker = failed_batch(client, list(range(COUNT))), Broker()
    assert batch.refresh().complete
    assert resend(client, redriven(client, batch), numbers(COUNT), broker.send) == COUNT
    client.ack(item for item, _ in broker.sent)
    assert batch.refresh().succeeded
