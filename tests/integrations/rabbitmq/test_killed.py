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
from tests.integrations.workers import wait_until
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

FOLLOWING = """
import sys
from pathlib import Path
from lastbit import Client
from lastbit.integrations import rabbitmq
url, position = sys.argv[1], Path(sys.argv[2])
with Client() as client:
    for redrive in client.redrives(after=int(position.read_text())):
        print(rabbitmq.resend(url, "work", redrive, map(str, range(20)), lastbit=client), flush=True)
        input()
        position.write_text(str(redrive.position))
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


def test_a_redrive_is_sent_again_if_its_producer_is_killed(
    rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str, consuming: Consuming, tmp_path: Path
) -> None:
    """After it has sent the messages, before it has stored the position. Its successor sends them once more, stores it,
    and goes on with the next redrive. The items count once."""
    batch = adapter.fan_out(rabbitmq.url, queue, map(str, range(20)), lastbit=client)

    def refuse(message: adapter.Message) -> None:
        if int(message.body) % 7 == 0:
            raise adapter.Failed("no picture")

    with consuming(queue, refuse):
        assert batch.wait(30).failed == 3
    position = tmp_path / "position"
    position.write_text(str(batch.redrive().position - 1))
    for ending in ("killed", "stored"):
        with subprocess.Popen(
            [sys.executable, "-c", FOLLOWING, rabbitmq.url, str(position)],
            cwd=ROOT, env={**os.environ, "LASTBIT_URL": client.url, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "3\n"
            if ending == "stored":
                later = batch.redrive(items=[f"{batch.id}:0:14"])
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "1\n"
                assert int(position.read_text()) == later.position - 1
            process.kill()
    handled: list[bytes] = []
    with consuming(queue, lambda message: handled.append(message.body)):
        wait_until(lambda: batch.refresh().succeeded, "the failed items are acked")
        wait_until(lambda: len(handled) == 7, "all messages are handled")
    assert sorted(handled) == [b"0"] * 2 + [b"14"] * 3 + [b"7"] * 2
    assert (batch.refresh().acked, batch.verify().ok) == (20, True)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["unlimited", "classic"])
def test_ten_thousand_items_complete_exactly_whoever_is_killed(
    rabbitmq: RabbitMQ, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """On a quorum queue and a classic one. A limit of deliveries would count the kills."""
    name = request.getfixturevalue(kind)
    with sqlite_file() as url, running_service(url) as service:
        killable.check_exact("rabbitmq", rabbitmq.url, name, service.url, tmp_path)
