"""Workers without a service, whose children are forked after the app has made its `Lastbit`."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from lastbit import InvalidArgument
from lastbit.embedded import Lastbit as Embedded
from lastbit.integrations.celery import Lastbit
from tests.integrations.celery.workers import outcomes
from tests.mutants import mutant


@mutant(
    "a-forked-worker-uses-the-connections-of-its-parent",
    "lastbit.embedded:Lastbit._leave_to_parent",
    "self._running = None",
    "pass",
)
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_workers_need_no_service(new_place: Any, database_url: str, pool: str) -> None:
    """Children are replaced after a few tasks, and tasks open batches of their own."""
    with Embedded(database_url) as embedded:
        embedded.migrate()
    settings = {"worker_max_tasks_per_child": 3}
    place = new_place(service_url="http://127.0.0.1:9", settings=settings, options={"database": database_url})
    with place.worker(pool):
        batch = place.lastbit.fan_out([place.task("succeed") for _ in range(30)])
        assert outcomes(batch) == {}
        assert len(outcomes(place.publish("fail"))) == 1
        producers = place.lastbit.fan_out([place.task("complete_a_batch") for _ in range(8)])
        assert outcomes(producers) == {}
        for item in producers.item_ids():
            assert place.client.batch(int(place.read_note("batch", item))).refresh().complete
    place.client.close()


def test_a_service_and_a_database_exclude_each_other(sqlite_url: str) -> None:
    with pytest.raises(InvalidArgument, match="give either these or database"):
        Lastbit(Celery("both", set_as_current=False), "http://127.0.0.1:9", database=sqlite_url)
