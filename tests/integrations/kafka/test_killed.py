"""Processes that are killed by SIGKILL, on the mock cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import killable
from tests.support.servers import running_service, sqlite_file


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_items_complete_exactly_whoever_is_killed(address: str, tmp_path: Path) -> None:
    """Producer and consumers."""
    with sqlite_file() as url, running_service(url) as service:
        killable.check_exact("kafka", address, "chaos", service.url, tmp_path, pause=3.0)
