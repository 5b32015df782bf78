"""The page and the example do what they say, with workers of RQ's command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import pages
from tests.integrations.rq.conftest import COMMAND, READY
from tests.support.brokers import RedisServer

pytestmark = pytest.mark.usefixtures("app")


def test_the_page_runs_as_written(redis: RedisServer, tmp_path: Path) -> None:
    """docs/rq.md."""
    pages.follow("rq.md", tmp_path, redis.url(0), [*COMMAND[:-1], "tasks.Worker"], READY)


@pytest.mark.nightly
def test_the_example_runs() -> None:
    """One picture fails."""
    output = pages.run_example("examples.adapters.rq", COMMAND, READY)
    assert output.splitlines()[0] == "19 rendered, 1 failed"
    assert output.splitlines()[1].endswith("ValueError: product 19 has no picture")
