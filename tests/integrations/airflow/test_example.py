"""The example and the page, as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastbit import Client
from tests.integrations.airflow.conftest import ROOT, Service
from tests.integrations.airflow.test_producing import SAME_RUN, returned


def test_the_example_renders_its_catalog(
    dags: Any, service: Service, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its worker in a process of its own."""
    monkeypatch.setenv("CATALOG_QUEUE", str(tmp_path))
    worker = subprocess.Popen(
        [sys.executable, "-m", "examples.airflow.worker", tmp_path],
        cwd=ROOT,
        env={**os.environ, "LASTBIT_URL": service.url},
    )
    try:
        dag_run = dags["catalog"].test()
    finally:
        worker.kill()
        worker.wait(60)
    assert dag_run.state == "success"
    assert returned(dag_run, "announce") == "300 pages are rendered"
    batch = client.batch(returned(dag_run, "publish"))
    assert batch.refresh().key == f"catalog {dag_run.run_id}"
    assert batch.verify().ok


def test_the_page_shows_lines_of_the_example() -> None:
    """Each of them."""
    (excerpt,) = re.findall(r"^```py\n(.*?)^```", (ROOT / "docs/airflow.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = {line.strip() for line in (ROOT / "examples/airflow/catalog.py").read_text().splitlines()}
    assert {line.strip() for line in excerpt.splitlines()} <= lines


def test_the_dag_of_the_page_waits(dags: Any, client: Client) -> None:
    """docs/airflow.md shows a batch of the day."""
    batch = client.open(key="catalog-2026-11-25", items=1, sealed=True)
    client.ack(batch.ids)
    dag_run = dags["after_catalog"].test(**SAME_RUN)
    assert dag_run.state == "success"
    assert returned(dag_run, "done")["id"] == batch.id
