"""The worker of the Airflow example, which needs no Airflow itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lastbit import Client
from tests.support.exposition import eventually
from tests.support.servers import ROOT, running_service, sqlite_file


def test_a_worker_goes_on_without_a_message_and_without_a_batch(tmp_path: Path) -> None:
    """Another worker has removed the first message after it was listed, and the second one's batch is cancelled."""
    with sqlite_file() as database, running_service(database) as service, Client(service.url) as client:
        cancelled, live = client.open(items=1), client.open(items=2, sealed=True)
        (tmp_path / "0:0:0.message").symlink_to(tmp_path / "removed")
        messages = [tmp_path / f"{item}.message" for item in [*cancelled.ids, *live.ids]]
        for message in messages:
            message.write_text("page")
        cancelled.cancel()
        worker = subprocess.Popen(
            [sys.executable, "-m", "examples.airflow.worker", tmp_path],
            cwd=ROOT,
            env={**os.environ, "LASTBIT_URL": service.url},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            eventually(lambda: (worker.poll(), any(message.exists() for message in messages)), (None, False))
        finally:
            worker.kill()
            _, reported = worker.communicate()
        assert live.refresh().succeeded
    assert reported == f"item {cancelled.ids[0]} was rejected: its batch was cancelled (cancelled)\n"
