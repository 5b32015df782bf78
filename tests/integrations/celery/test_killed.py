"""Ten thousand tasks, whose producer and workers are killed again and again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from tests.integrations import killing, workers
from tests.integrations.celery.workers import Place


class Killable:
    """A worker as `killing` expects it."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def kill(self) -> None:
        self._worker.stop(9)


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.xdist_group("rabbitmq"))])
def test_a_fan_out_among_kills_completes_exactly(
    new_place: Any, celery_service: str, monkeypatch: pytest.MonkeyPatch, broker: str
) -> None:
    settings: dict[str, Any] = {"worker_prefetch_multiplier": 32, "task_ignore_result": True}
    if broker == "redis":
        # A worker returns older messages to the queue when it starts, and about every 100 s.
        settings["broker_transport_options"] = {"visibility_timeout": 1}
    place: Place = new_place(broker, settings=settings)

    @contextlib.contextmanager
    def worker() -> Iterator[workers.Workers]:
        with place.worker() as started:
            yield cast(workers.Workers, Killable(started))

    monkeypatch.setenv("LASTBIT_URL", celery_service)
    producer = ["tests.integrations.celery.produce", place.broker_url, json.dumps(place.settings)]
    batch = killing.fan_out_among_kills(producer, worker, place.client)
    killing.check(batch)
    runs = sum(int(place.notes.get(key) or 0) for key in place.notes.scan_iter(f"{place.queue}:runs:*", count=1000))
    # A killed producer repeats at most its chunk. A killed worker repeats what it had not removed from the broker.
    assert killing.COUNT <= runs <= killing.COUNT + killing.KILLS * 1000 * 2
