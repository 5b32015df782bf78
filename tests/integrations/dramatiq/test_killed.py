"""Ten thousand messages, whose producer and workers are killed again and again."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from lastbit import Client
from lastbit.integrations.dramatiq import fan_out
from tests.integrations import killing
from tests.integrations.dramatiq.conftest import StartWorker
from tests.integrations.workers import wait_until


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


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_each_batch_has_its_message_at_the_end_among_kills(
    app: ModuleType, worker: StartWorker, client: Client, store: Any
) -> None:
    """A hundred batches of a hundred messages, whose workers are killed: each has its message at the end, never early,
    and few of them again."""
    with killing.killed(worker, kills=12):
        batches = [
            fan_out([app.succeeds.message(number) for number in range(100)], on_complete=app.notes_the_end.message())
            for _ in range(killing.COUNT // 100)
        ]
        for batch in batches:
            killing.wait_while_it_proceeds(batch, 180)
        expected = {f"{batch.id} 100" for batch in batches}
        wait_until(lambda: set(store.lrange("ended", 0, -1)) >= expected, "each batch has its message", 300)
    ended = store.lrange("ended", 0, -1)
    assert set(ended) == expected
    print(f"{len(ended) - len(expected)} messages ran again")
