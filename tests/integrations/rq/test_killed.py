"""Ten thousand jobs, whose producer and workers are killed again and again."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from lastbit import Client
from tests.integrations import killing, workers
from tests.integrations.rq.conftest import READY


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_fan_out_among_kills_completes_exactly(app: ModuleType, client: Client, store: Any) -> None:
    """Each job has run. Jobs that a killed worker had taken are retried when RQ notices it."""
    batch = killing.fan_out_among_kills(
        ["tests.integrations.rq.produce", "succeeds"],
        lambda: workers.running("tests.integrations.rq.worker", prints=READY),
        client,
    )
    killing.check(batch)
    assert store.hlen("runs") == killing.COUNT
