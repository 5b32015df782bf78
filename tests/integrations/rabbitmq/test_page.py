"""docs/rabbitmq.md and the example, as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pika
import pytest

from lastbit import Client
from lastbit.integrations.rabbitmq import ITEM
from tests.support.brokers import RabbitMQ
from tests.support.servers import ROOT
from tests.test_docs import blocks

pytestmark = pytest.mark.xdist_group("rabbitmq")

URL = "amqp://guest:guest@127.0.0.1:5672/%2F"


def test_the_snippets_run(
    rabbitmq: RabbitMQ,
    client: Client,
    channel: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One after the other; the consumers until their queue is empty."""
    monkeypatch.setenv("LASTBIT_URL", client.url)
    namespace: dict[str, Any] = {}
    *producing, consuming, giving_up = blocks(ROOT / "docs/rabbitmq.md", "python")
    for snippet in producing:
        exec(snippet.replace(URL, rabbitmq.url), namespace)
    sent, handled = blocks(ROOT / "docs/rabbitmq.md", "text")
    assert capsys.readouterr().out == sent
    run_until(consuming.replace(URL, rabbitmq.url), namespace, lambda: namespace["batch"].refresh().complete)
    assert capsys.readouterr().out == handled
    late = client.open(items=1, sealed=True)
    channel.basic_publish("", "pictures.dead", b"picture 7", pika.BasicProperties(headers={ITEM: late.ids[0]}))
    run_until(giving_up.replace(URL, rabbitmq.url), namespace, lambda: late.refresh().failed == 1)
    assert capsys.readouterr().out == "gave up b'picture 7'\n"
    for queue in ("pictures", "pictures.dead"):
        channel.queue_delete(queue)


def run_until(snippet: str, namespace: dict[str, Any], is_over: Callable[[], bool]) -> None:
    """Run a snippet that ends with a consumer, in a thread; then stop it."""
    stop = threading.Event()
    code = snippet.rstrip().removesuffix(")") + ", stop=stop)\n"
    thread = threading.Thread(target=exec, args=(code, {**namespace, "stop": stop}))
    thread.start()
    pause = threading.Event()
    for _ in range(600):
        if is_over():
            break
        pause.wait(0.05)
    stop.set()
    thread.join(30)
    assert is_over()


@pytest.mark.nightly
def test_the_example_runs(rabbitmq: RabbitMQ, client: Client) -> None:
    """It ends with all items resolved, and leaves no queue."""
    process = subprocess.run(
        [sys.executable, "-m", "examples.rabbitmq"], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, "LASTBIT_URL": client.url, "RABBITMQ_URL": rabbitmq.url},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    first, *failed = process.stdout.splitlines()
    assert first.endswith("998 acked, 2 failed, 0 pending")
    assert [line.split(": ", 1)[1] for line in failed] == [
        "the file is broken",
        "dead-lettered by queue lastbit-example: delivery_limit, once",
    ]
