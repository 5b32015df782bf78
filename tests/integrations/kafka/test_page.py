"""docs/kafka.md and the example, as a user runs them, on the mock cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import confluent_kafka
import pytest

from lastbit import Client
from tests.integrations.kafka.conftest import records
from tests.integrations.rabbitmq.test_page import run_until
from tests.support.servers import ROOT
from tests.test_docs import blocks

BROKERS = "127.0.0.1:9092"


@pytest.mark.nightly
def test_the_snippets_run(
    address: str,
    producer: confluent_kafka.Producer,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One after the other."""
    monkeypatch.setenv("LASTBIT_URL", client.url)
    namespace: dict[str, Any] = {}
    producing, consuming, giving_up, burying, *_ = (
        block.replace(BROKERS, address)
        for language in ("python", "py")
        for block in blocks(ROOT / "docs/kafka.md", language)
    )
    exec(producing, namespace)
    sent, handled = blocks(ROOT / "docs/kafka.md", "text")
    assert capsys.readouterr().out == sent
    exec(burying, namespace)
    burying_too = consuming.rstrip().removesuffix(")") + ", dead_letter=bury)\n"
    run_until(burying_too, namespace, lambda: namespace["batch"].refresh().complete)
    assert capsys.readouterr().out == handled
    assert [letter.value() for letter in records(address, "pictures.dead", 1)] == [b"picture 13"]
    late = client.open(items=1, sealed=True)
    producer.produce("pictures.dead", value="x", headers={"lastbit-item": late.ids[0]})
    producer.flush()
    run_until(giving_up, namespace, lambda: late.refresh().failed == 1)


@pytest.mark.nightly
def test_the_example_runs(client: Client) -> None:
    """It ends with all items resolved."""
    process = subprocess.run(
        [sys.executable, "-m", "examples.kafka"], cwd=ROOT, capture_output=True, text=True, timeout=90,
        env={**os.environ, "LASTBIT_URL": client.url},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    first, *failed = process.stdout.splitlines()
    assert first.endswith("998 acked, 2 failed, 0 pending")
    assert [line.split(": ", 1)[1] for line in failed] == [
        "the file is broken",
        "OSError: this picture fails at each attempt",
    ]
