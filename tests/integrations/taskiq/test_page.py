"""The page and the example do what they say, with workers of taskiq's command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import pages
from tests.integrations.taskiq.conftest import READY
from tests.support.brokers import RedisServer


@pytest.fixture(autouse=True)
def addresses(store: Any, redis: RedisServer, service_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTBIT_URL", service_url)
    monkeypatch.setenv("REDIS_URL", redis.url(0))


def test_the_page_runs_as_written(redis: RedisServer, tmp_path: Path) -> None:
    """docs/taskiq.md."""
    pages.follow("taskiq.md", tmp_path, redis.url(0), ["taskiq", "worker", "tasks:broker"], READY)


@pytest.mark.nightly
def test_the_example_runs() -> None:
    """One picture fails."""
    module = "examples.adapters.taskiq"
    output = pages.run_example(module, ["taskiq", "worker", f"{module}:broker"], READY)
    assert output.splitlines()[0] == "99 rendered, 1 failed"
    assert output.splitlines()[1].endswith("ValueError: product 99 has no picture")
