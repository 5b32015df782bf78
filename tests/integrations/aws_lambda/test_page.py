"""docs/aws-lambda.md and its example."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import boto3
import pytest

from lastbit import Client
from tests.integrations.aws_lambda.poller import poll
from tests.support.aws import Moto
from tests.support.servers import ROOT
from tests.test_docs import blocks


def test_the_page_runs(
    moto: Moto, service_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The function handles the producer's messages, with the service of its environment. One comes twice."""
    monkeypatch.setenv("LASTBIT_URL", service_url)
    monkeypatch.delenv("LASTBIT_TOKEN", raising=False)
    queue = moto.queue()
    monkeypatch.setattr(boto3, "client", lambda service: queue.client)
    function, producer = blocks(ROOT / "docs/aws-lambda.md", "python")
    name = queue.url.rpartition("/")[2]
    namespace: dict[str, Any] = {}
    exec(function + producer.replace('"pictures"', repr(name)), namespace)
    handle = namespace["lambda_handler"]
    assert [body for _ in range(3) for body in poll(queue, handle)] == ["picture 7"]
    assert capsys.readouterr().out == "pictures-lambda is complete\n"
    with Client(service_url) as lastbit:
        (batch,) = lastbit.batches(key="pictures-lambda")
        assert (batch.acked, batch.failed) == (19, 1)
        (failure,) = lastbit.batch(batch.id).failed()
        assert [*failure.reasons.values()] == ["the file is broken"]


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
