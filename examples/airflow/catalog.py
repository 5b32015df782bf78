"""Renders a catalog's pages with workers outside of Airflow, and goes on when all of them are done.

Copy this file into Airflow's folder of DAGs, add a connection `lastbit_default`, and start a worker:

    python -m examples.airflow.worker /tmp/catalog-queue

The queue is a folder here, so that the example needs no broker. CATALOG_QUEUE names another one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

try:
    from airflow.sdk import DAG, task
except ImportError:  # Airflow 2
    from airflow import DAG
    from airflow.decorators import task

from lastbit.integrations.airflow import LastbitBatchSensor, LastbitHook

PAGES = 300


def pages() -> Iterator[str]:
    """In the same order each time, so that a second try continues where the first one was interrupted."""
    for number in range(PAGES):
        yield f"page {number}"


def send(messages: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Put messages into the queue, each named by its item. None is ever refused."""
    folder = Path(os.environ.get("CATALOG_QUEUE", "/tmp/catalog-queue"))  # noqa: S108  # an example
    folder.mkdir(parents=True, exist_ok=True)
    for item, text in messages:
        unfinished = folder / f"{item}.unfinished"
        unfinished.write_text(text)
        unfinished.rename(folder / f"{item}.message")
    return []


with DAG("catalog", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)):

    @task(retries=2)
    def publish(run_id: str | None = None) -> int:
        return LastbitHook().fan_out(pages(), send, key=f"catalog {run_id}", chunk=100)

    @task
    def announce(batch: dict[str, Any]) -> str:
        return f"{batch['acked']} pages are rendered"

    done = LastbitBatchSensor(task_id="done", batch_id=publish(), fail_on_failed_items=True, deferrable=True)
    announce(done.output)
