"""The page and the example do what they say, with workers of Dramatiq's command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import pages
from tests.support.brokers import RedisServer


@pytest.fixture(autouse=True)
def addresses(store: Any, redis: RedisServer, service_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTBIT_URL", service_url)
    monkeypatch.setenv("REDIS_URL", redis.url(0))


def test_the_page_runs_as_written(redis: RedisServer, tmp_path: Path) -> None:
    """docs/dramatiq.md."""
    pages.follow("dramatiq.md", tmp_path, redis.url(0), ["dramatiq", "tasks"], "ready for action")


@pytest.mark.nightly
def test_the_example_runs() -> None:
    """One picture is retried, and one fails."""
    module = "examples.adapters.dramatiq"
    output = pages.run_example(module, ["dramatiq", module], "ready for action")
    assert output.splitlines()[0] == "99 rendered, 1 failed"
    assert output.splitlines()[1].endswith("ValueError: product 99 has no picture")
