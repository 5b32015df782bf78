"""docs/aws-lambda.md and its example."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from lastbit import Client
from lastbit.integrations import sqs
from tests.integrations.aws_lambda.poller import poll
from tests.support.aws import Moto
from tests.support.servers import ROOT
from tests.test_docs import blocks


def test_the_pages_functions_run(moto: Moto, service_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the queue, and that of the dead-letter queue, with the service of their environment."""
    monkeypatch.setenv("LASTBIT_URL", service_url)
    monkeypatch.delenv("LASTBIT_TOKEN", raising=False)
    namespace: dict[str, Any] = {}
    exec("\n".join(blocks(ROOT / "docs/aws-lambda.md", "python")), namespace)
    with Client(service_url) as lastbit:
        for function, acked, reasons in (
            ("lambda_handler", 1, ["the file is broken"]),
            ("dead_letters_lambda_handler", 0, ["dead letter, receives: 1"] * 2),
        ):
            queue = moto.queue()
            batch = sqs.fan_out(queue.client, queue.url, ["picture 12", "picture 13"], lastbit=lastbit)
            assert poll(queue, namespace[function]) == []
            assert queue.count() == 0
            assert batch.refresh().acked == acked
            assert [reason for failure in batch.failed() for reason in failure.reasons.values()] == reasons


def test_the_example_runs(service_url: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "examples.adapters.aws_lambda"],
        cwd=ROOT,
        env={**os.environ, "LASTBIT_URL": service_url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        "3 acked, 1 failed, 1 pending; to be delivered again: picture 4",
        "4 acked, 1 failed, 0 pending; to be delivered again: nothing",
    ]
