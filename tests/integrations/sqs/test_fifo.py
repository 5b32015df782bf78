"""FIFO queues: the order of a group holds on both sides."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest

from lastbit import Client, InvalidArgument, Retry
from lastbit.integrations import Failed, sqs
from tests.integrations.redrives import redriven
from tests.integrations.sqs.conftest import Consume, FailuresLost
from tests.support.aws import Moto


def group_of(body: Any) -> str:
    return str(body).split()[0]


def test_refused_messages_keep_their_groups_order(moto: Moto, lastbit: Client) -> None:
    """A message waits for its refused predecessor."""
    queue = moto.queue(fifo=True)
    bodies = [f"{group} {n}" + (" refuse 1 sends" if n == 1 else "") for n in range(5) for group in "abc"]
    batch = sqs.fan_out(queue.client, queue.url, bodies, group=group_of, lastbit=lastbit)
    numbers: dict[str, list[str]] = defaultdict(list)
    messages = queue.drain()
    for message in messages:
        group, number = message["Body"].split()[:2]
        assert message["Attributes"]["MessageGroupId"] == group
        assert message["Attributes"]["MessageDeduplicationId"] == sqs.item_of(message)
        numbers[group].append(number)
    assert numbers == {group: ["0", "1", "2", "3", "4"] for group in "abc"}
    assert batch.refresh().items == 15


def test_redriven_messages_are_not_dropped_as_repeats(moto: Moto, lastbit: Client) -> None:
    """Within five minutes of the first ones (which the simulator doesn't check): their deduplication ids are others. A
    repeated resend is dropped."""
    queue = moto.queue(fifo=True)
    bodies = [f"a {n}" for n in range(5)]
    batch = sqs.fan_out(queue.client, queue.url, bodies, group=group_of, lastbit=lastbit)
    queue.drain()
    lastbit.fail([f"{batch.id}:0:{n}" for n in (1, 3)])
    redrive = redriven(lastbit, batch)
    for _ in range(2):
        assert sqs.resend(queue.client, queue.url, redrive, bodies, group=group_of, lastbit=lastbit) == 2
    messages = queue.drain()
    assert [message["Body"] for message in messages] == ["a 1", "a 3"]
    assert [message["Attributes"]["MessageDeduplicationId"] for message in messages] == [
        f"{batch.id}:0:{n}/{redrive.position}" for n in (1, 3)
    ]


def test_a_message_needs_a_group(moto: Moto, lastbit: Client) -> None:
    """From the option, or its own."""
    queue = moto.queue(fifo=True)
    with pytest.raises(InvalidArgument, match="pass group"):
        sqs.fan_out(queue.client, queue.url, ["a"], lastbit=lastbit)
    own = {"MessageBody": "a", "MessageGroupId": "own", "MessageDeduplicationId": "1"}
    sqs.fan_out(queue.client, queue.url, [own, "b"], group="all", lastbit=lastbit)
    assert [message["Attributes"]["MessageGroupId"] for message in queue.drain()] == ["own", "all"]


def test_a_group_is_handled_in_order_by_one_worker_at_a_time(moto: Moto, lastbit: Client, consume: Consume) -> None:
    queue = moto.queue(fifo=True, most_receives=5)
    bodies = [f"{group} {n}" for n in range(12) for group in "abcd"]
    batch = sqs.fan_out(queue.client, queue.url, bodies, group=group_of, lastbit=lastbit)
    numbers: dict[str, list[int]] = defaultdict(list)
    busy = {group: threading.Lock() for group in "abcd"}

    def handle(message: Any) -> None:
        group, number = message["Body"].split()
        assert busy[group].acquire(blocking=False)
        numbers[group].append(int(number))
        busy[group].release()

    consume(queue, handle)
    assert numbers == {group: list(range(12)) for group in "abcd"}
    assert batch.refresh().succeeded
    assert queue.count() == 0


def test_a_failure_stops_its_group(moto: Moto, lastbit: Client, consume: Consume) -> None:
    """No later message of the group is handled or acked before it; other groups go on. A message that fails for good
    doesn't stop its group."""
    queue = moto.queue(fifo=True, visibility=1, most_receives=5)
    bodies = [f"{group} {n}" for n in range(4) for group in "ab"]
    batch = sqs.fan_out(queue.client, queue.url, bodies, group=group_of, lastbit=lastbit)
    handled: list[str] = []
    stop = threading.Event()

    def handle(message: Any) -> None:
        handled.append(message["Body"])
        if message["Body"] == "a 1" and handled.count("a 1") == 1:
            raise ValueError("not yet")
        if message["Body"] == "b 1":
            raise Failed("for good")
        if message["Body"] == "a 3":
            stop.set()

    consume(queue, handle)
    assert [body for body in handled if body[0] == "a"] == ["a 0", "a 1"]
    assert [body for body in handled if body[0] == "b"] == ["b 0", "b 1", "b 2", "b 3"]
    assert (batch.refresh().acked, batch.info.failed, batch.info.pending) == (4, 1, 3)
    assert queue.count() == 3
    consume(queue, handle, wait_seconds=1, until_empty=False, stop=stop)
    assert [body for body in handled if body[0] == "a"] == ["a 0", "a 1", "a 1", "a 2", "a 3"]
    assert batch.refresh().complete
    assert queue.count() == 0


def test_an_outcome_that_is_not_stored_leaves_the_later_messages_too(
    moto: Moto, lastbit: Client, consume: Consume
) -> None:
    """They come back with it, in order, and are not held until then."""
    queue = moto.queue(fifo=True, visibility=1, most_receives=5)
    for body in ("a 0", "a 1"):
        sqs.fan_out(queue.client, queue.url, [body], group="a", lastbit=lastbit)
    handled: list[str] = []
    completed: list[int] = []
    stops = [threading.Event(), threading.Event()]

    def handle(message: Any) -> None:
        handled.append(message["Body"])
        if message["Body"] == "a 0":
            raise Failed("no picture")

    def publish(completion: Any) -> None:
        completed.append(completion.batch)
        if len(completed) != 2:
            stops[len(completed) // 2].set()

    options: dict[str, Any] = {"on_completed": publish, "wait_seconds": 1, "until_empty": False}
    with Client(lastbit.url, retry=Retry(attempts=1), transport=FailuresLost()) as client:
        consume(queue, handle, **options, stop=stops[0], lastbit=client)
    assert (handled, queue.count()) == (["a 0", "a 1"], 2)
    consume(queue, handle, **options, stop=stops[1])
    assert (handled, queue.count()) == (["a 0", "a 1", "a 0", "a 1"], 0)
