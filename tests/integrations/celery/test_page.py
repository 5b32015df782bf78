"""The page, the example and the demo do what they say, with Celery's own command and a Redis."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations import pages
from tests.support.brokers import RedisServer
from tests.support.examples import Example

WORKER = ["celery", "-A", "tasks", "worker", "--loglevel", "INFO"]


def test_the_page_runs_as_written(
    redis: RedisServer, celery_service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/celery.md."""
    monkeypatch.setenv("LASTBIT_URL", celery_service)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::UserWarning")  # run by root, as in a container
    pages.follow("celery.md", tmp_path, redis.url(4), WORKER, " ready.")


@pytest.mark.nightly
def test_the_example_runs(redis: RedisServer, celery_service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pictures are retried, one fails, and one crashes its process."""
    monkeypatch.setenv("LASTBIT_URL", celery_service)
    monkeypatch.setenv("REDIS_URL", redis.url(5))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::UserWarning")
    module = "examples.adapters.celery"
    output = pages.run_example(module, ["celery", "-A", module, "worker", "--loglevel", "INFO"], " ready.").splitlines()
    assert output[0] == "998 rendered, 2 failed"
    assert output[1].endswith(":0:13: ValueError: product 13 has no picture")
    assert re.search(r":0:666: WorkerLostError: Worker exited prematurely: signal 9", output[2])
    assert output[3] == "recounted: 998 acked, 2 failed, ok: True"


@pytest.mark.nightly
def test_the_demo_survives_a_killed_worker(tmp_path: Path) -> None:
    """`make demo-celery`."""
    output = Example("adapters.celery_demo", tmp_path).run()
    assert "Worker 1 is killed (SIGKILL) after" in output
    assert "is complete: 998 pictures rendered, 2 failed." in output
    assert output.endswith("Recounted: 998 + 2 = 1000.\nEach item was counted once.\n")
