"""Ten thousand tasks, whose producer and workers are killed again and again."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from lastbit import Client
from tests.integrations import killing
from tests.integrations.taskiq.conftest import StartWorker


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_fan_out_among_kills_completes_exactly(
    app: ModuleType, worker: StartWorker, client: Client, store: Any
) -> None:
    """Each task has run."""
    killing.check(killing.fan_out_among_kills(["tests.integrations.taskiq.produce", "succeeds"], worker, client))
    assert store.hlen("runs") == killing.COUNT
