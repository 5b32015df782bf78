"""Ten thousand messages, whose producer and consumers are killed again and again."""

from __future__ import annotations

import pytest

from lastbit import Client
from tests.integrations import killing, workers
from tests.support.aws import Moto


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_fan_out_among_kills_completes_exactly(moto: Moto, lastbit: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no message is left, neither in the queue nor as a dead letter."""
    monkeypatch.setenv("LASTBIT_URL", lastbit.url)
    queue = moto.queue(visibility=2, most_receives=100)
    producer = ["tests.integrations.sqs.producer", moto.url, queue.url, "1000"]
    consumer = ("tests.integrations.sqs.consumer", moto.url, queue.url, "quiet")
    batch = killing.fan_out_among_kills(producer, lambda: workers.running(*consumer, prints="consuming"), lastbit)
    killing.check(batch)
    # Repeats of killed processes may still be there.
    with workers.running(*consumer, prints="consuming"):
        workers.wait_until(lambda: queue.count() == 0, "the queue is empty")
    assert queue.dead_letters() == 0
