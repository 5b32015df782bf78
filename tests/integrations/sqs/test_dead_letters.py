"""The consumer of the dead-letter queue."""

from __future__ import annotations

from typing import Any

from lastbit import Client, Completed
from lastbit.integrations import sqs
from tests.integrations.sqs.conftest import Consume
from tests.support.aws import Moto, TestQueue


def always_raise(message: Any) -> None:
    raise ValueError("never")


def bury(queue: TestQueue, consume: Consume) -> None:
    """Handle each message until it is a dead letter."""
    consume(queue, always_raise, retry_delay=0)


def test_the_item_of_a_dead_letter_fails(moto: Moto, lastbit: Client, consume: Consume) -> None:
    """With the number of receives as its reason; the message is deleted."""
    queue = moto.queue(most_receives=3)
    batch = sqs.fan_out(queue.client, queue.url, ["a", "b"], lastbit=lastbit)
    bury(queue, consume)
    assert (queue.count(), queue.dead_letters(), batch.refresh().pending) == (0, 2, 2)
    stored: list[str] = []
    completed: list[Completed] = []
    sqs.fail_dead_letters(
        queue.client,
        queue.dead_letters_url,
        lambda message: stored.append(message["Body"]),
        wait_seconds=0,
        until_empty=True,
        on_completed=completed.append,
        lastbit=lastbit,
    )
    assert sorted(stored) == ["a", "b"]
    assert [(completion.batch, completion.newly, completion.succeeded) for completion in completed] == [
        (batch.id, True, False)
    ]
    reasons = [reason for failure in batch.failed() for reason in failure.reasons.values()]
    assert reasons == ["dead-lettered after 3 receives"] * 2
    assert batch.refresh().complete
    assert queue.dead_letters() == 0


def test_dead_letters_without_an_item_stay(moto: Moto, lastbit: Client, consume: Consume) -> None:
    """Unless a function takes care of them. If it raises, the letter stays too."""
    queue = moto.queue(most_receives=1)
    queue.send("untracked")
    bury(queue, consume)
    options: dict[str, Any] = {"wait_seconds": 0, "until_empty": True, "lastbit": lastbit}
    sqs.fail_dead_letters(queue.client, queue.dead_letters_url, **options)
    assert queue.dead_letters() == 1
    queue = moto.queue(most_receives=1)
    queue.send("untracked")
    bury(queue, consume)
    sqs.fail_dead_letters(queue.client, queue.dead_letters_url, always_raise, **options)
    assert queue.dead_letters() == 1
    queue = moto.queue(most_receives=1)
    queue.send("untracked")
    bury(queue, consume)
    sqs.fail_dead_letters(queue.client, queue.dead_letters_url, lambda message: None, **options)
    assert queue.dead_letters() == 0


def test_an_item_that_was_acked_stays_acked(moto: Moto, lastbit: Client, consume: Consume) -> None:
    """As when the deletion of its message failed too often."""
    queue = moto.queue(most_receives=1)
    batch = sqs.fan_out(queue.client, queue.url, ["a"], lastbit=lastbit)
    lastbit.ack(f"{batch.id}:0:0")
    bury(queue, consume)
    sqs.fail_dead_letters(queue.client, queue.dead_letters_url, wait_seconds=0, until_empty=True, lastbit=lastbit)
    assert batch.refresh().succeeded
