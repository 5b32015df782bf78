"""Ten thousand tasks, whose producer and workers are killed again and again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from lastbit import BatchHandle, ItemIds
from tests.integrations import crawling, killing, workers
from tests.integrations.celery.workers import Place


class Killable:
    """A worker as `killing` expects it."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def kill(self) -> None:
        self._worker.stop(9)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.xdist_group("rabbitmq")), "sqs"]
)
def test_a_fan_out_among_kills_completes_exactly(
    new_place: Any, celery_service: str, monkeypatch: pytest.MonkeyPatch, broker: str
) -> None:
    settings: dict[str, Any] = {"worker_prefetch_multiplier": 32, "task_ignore_result": True}
    if broker == "redis":
        # A worker returns older messages to the queue when it starts, and about every 100 s.
        settings["broker_transport_options"] = {"visibility_timeout": 1}
    elif broker == "sqs":
        settings["broker_transport_options"] = {"visibility_timeout": 10}
    place: Place = new_place(broker, settings=settings)

    @contextlib.contextmanager
    def worker() -> Iterator[workers.Workers]:
        with place.worker() as started:
            yield cast(workers.Workers, Killable(started))

    monkeypatch.setenv("LASTBIT_URL", celery_service)
    producer = ["tests.integrations.celery.produce", place.broker_url, json.dumps(place.settings), "succeed"]

    def publish_lost_tasks(batch: BatchHandle) -> None:
        """Redis may lose a message with each killed worker, as docs/celery.md explains."""
        workers.wait_until(lambda: not place.messages() or batch.refresh().complete, "the broker is empty", 900)
        count = place.lastbit.republish(batch, (place.task("succeed", page) for page in crawling.roots(killing.COUNT)))
        assert count <= 2 * killing.KILLS

    idle, repair = (30, publish_lost_tasks) if broker == "redis" else (300, None)
    batch = killing.fan_out_among_kills(producer, worker, place.client, idle=idle, repair=repair)
    killing.check(batch)
    runs = [place.runs(item) for item in ItemIds(batch.id, batch.info.group_size, range(killing.COUNT))]
    assert min(runs) >= 1
