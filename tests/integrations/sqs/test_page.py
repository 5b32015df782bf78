"""docs/sqs.md and its example, as a user runs them: only the servers' addresses and the polls' durations differ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lastbit import Client
from lastbit.integrations import sqs
from tests.support.aws import CREDENTIALS, Moto
from tests.support.servers import ROOT
from tests.test_docs import blocks

pytestmark = pytest.mark.nightly


def environment(moto: Moto, lastbit: Client) -> dict[str, str]:
    return {
        **os.environ,
        **CREDENTIALS,
        "AWS_ENDPOINT_URL": moto.url,
        "LASTBIT_URL": lastbit.url,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }


def test_the_page_runs(moto: Moto, lastbit: Client, tmp_path: Path) -> None:
    """As one script. The first SIGTERM ends the consumer, the second one that of the dead letters."""
    client = moto.client()
    letters_url = client.create_queue(QueueName="pictures-dead")["QueueUrl"]
    dead_batch = sqs.fan_out(client, letters_url, ["picture 99"], lastbit=lastbit)
    page = ROOT / "docs/sqs.md"
    script = "\n".join(blocks(page, "python"))
    for old, new in (("workers=8,", "workers=8, wait_seconds=1,"), (", store)", ", store, wait_seconds=1)")):
        assert script.count(old) == 1
        script = script.replace(old, new)
    (tmp_path / "page.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env=environment(moto, lastbit),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in blocks(page, "text"):
            assert process.stdout.readline() == line
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "gave up picture 99\n"
        assert dead_batch.wait(20).failed == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(20)


def test_the_example_runs(moto: Moto, lastbit: Client) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "examples.adapters.sqs"],
        cwd=ROOT,
        env=environment(moto, lastbit),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0].startswith("sent 50 messages of batch lastbit-example-")
    assert lines[1:] == [
        "consumed: 48 acked, 1 failed, 1 pending",
        "dead letters: 48 acked, 2 failed, the batch is complete",
        "  item 7: the file is broken",
        "  item 8: dead-lettered after 3 receives",
    ]
