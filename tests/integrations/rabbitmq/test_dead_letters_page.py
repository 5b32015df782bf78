"""docs/dead-letters.md: messages that lost their items' ids are refused, and sent again; the batch completes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastbit import Client
from tests.integrations.rabbitmq.test_page import URL
from tests.support.brokers import RabbitMQ
from tests.support.servers import ROOT
from tests.test_docs import blocks

pytestmark = pytest.mark.xdist_group("rabbitmq")

PAGE = ROOT / "docs/dead-letters.md"


@pytest.fixture
def queues(channel: Any) -> Any:
    yield
    for queue in ("pictures", "pictures.dead"):
        channel.queue_delete(queue)


def run_program(program: str, client: Client, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "letters.py").write_text(program)
    process = subprocess.run(
        [sys.executable, "letters.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LASTBIT_URL": client.url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process


@pytest.mark.usefixtures("queues")
def test_the_program_runs_as_printed(rabbitmq: RabbitMQ, client: Client, tmp_path: Path) -> None:
    (program,) = blocks(PAGE, "python")
    process = run_program(program.replace(URL, rabbitmq.url), client, tmp_path)
    assert process.stdout == blocks(PAGE, "text")[0]
    assert process.stderr.count("messages of pictures carry no item's id, and are refused") == 1
    (batch,) = client.batches(key="pictures")
    assert client.batch(batch.id).verify().ok


@pytest.mark.usefixtures("queues")
def test_letters_that_are_moved_with_their_properties_complete_the_batch(
    rabbitmq: RabbitMQ, client: Client, tmp_path: Path
) -> None:
    """As the page says: nothing is to be sent again. The program's move is changed, and its redrive left out."""
    (program,) = blocks(PAGE, "python")
    moved, _, _ = program.partition("    # An operator")
    program = moved.replace('"pictures", body)', '"pictures", body, properties)')
    program = program.replace("lambda: letters() == 2)", "lambda: batch.refresh().complete)")
    process = run_program(program.replace(URL, rabbitmq.url), client, tmp_path)
    assert process.stdout.splitlines()[-1] == "moved by hand: 20 acked, 0 pending, 0 dead letters"
