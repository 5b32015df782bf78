"""Ten thousand messages, whose producer and workers are killed again and again."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from lastbit import Client
from tests.integrations import killing
from tests.integrations.dramatiq.conftest import StartWorker


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_fan_out_among_kills_completes_exactly(
    app: ModuleType, worker: StartWorker, client: Client, store: Any
) -> None:
    """Each message has run, and most of them once."""
    batch = killing.fan_out_among_kills(["tests.integrations.dramatiq.produce", "succeeds"], worker, client)
    killing.check(batch)
    runs = [int(count) for count in store.hvals("runs")]
    assert len(runs) == killing.COUNT
    # A killed producer repeats at most its chunk, and a killed worker at most what it had fetched or not settled.
    assert sum(runs) <= killing.COUNT + killing.KILLS * (1000 + 300)
