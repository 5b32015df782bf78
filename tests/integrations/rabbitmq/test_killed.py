"""Processes that are killed by SIGKILL, on a real node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastbit import Client
from lastbit.integrations import rabbitmq as adapter
from tests.integrations import killable
from tests.integrations.rabbitmq.conftest import Consuming, left
from tests.support.brokers import RabbitMQ
from tests.support.servers import ROOT, running_service, sqlite_file

pytestmark = [pytest.mark.xdist_group("rabbitmq"), pytest.mark.slow]

DYING = """
import os, sys
from lastbit.integrations import rabbitmq
def handle(message):
    if message.body == b"3":
        print("holding", flush=True)
        input()
rabbitmq.consume(sys.argv[1], "work", handle, workers=2)
"""


def test_messages_of_a_killed_consumer_count_once(
    rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str, consuming: Consuming
) -> None:
    """It dies while it handles one, with others prefetched, and after it has acked some: they are delivered again."""
    batch = adapter.fan_out(rabbitmq.url, queue, map(str, range(20)), lastbit=client)
    with subprocess.Popen(
        [sys.executable, "-c", DYING, rabbitmq.url],
        cwd=ROOT, env={**os.environ, "LASTBIT_URL": client.url, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        process.kill()
    assert batch.refresh().pending >= 1
    with consuming(queue, lambda message: None):
        assert batch.wait(30).succeeded
    assert (batch.refresh().acked, batch.verify().ok) == (20, True)
    assert left(channel, queue) == 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["unlimited", "classic"])
def test_ten_thousand_items_complete_exactly_whoever_is_killed(
    rabbitmq: RabbitMQ, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """On a quorum queue and a classic one. A limit of deliveries would count the kills."""
    name = request.getfixturevalue(kind)
    with sqlite_file() as url, running_service(url) as service:
        killable.check_exact("rabbitmq", rabbitmq.url, name, service.url, tmp_path)
