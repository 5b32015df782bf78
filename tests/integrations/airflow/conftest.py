"""Airflow itself, on SQLite in a temporary folder, and a real service, which runs in another environment.

`make test-airflow` runs these tests in .venv-airflow (Airflow 3) and .venv-airflow2; no other environment has Airflow.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SERVICE_PYTHON = ROOT / os.environ.get("LASTBIT_SERVICE_PYTHON", ".venv/bin/python")
HAS_AIRFLOW = importlib.util.find_spec("airflow") is not None

collect_ignore_glob = [] if HAS_AIRFLOW else ["test_*.py", "dags/*"]

if HAS_AIRFLOW:  # it reads its settings when it is imported
    HOME = Path(tempfile.mkdtemp(prefix="lastbit-airflow-"))
    atexit.register(shutil.rmtree, HOME, ignore_errors=True)
    os.environ.update(
        AIRFLOW_HOME=str(HOME),
        AIRFLOW__CORE__LOAD_EXAMPLES="False",
        AIRFLOW__LOGGING__LOGGING_LEVEL="WARNING",
    )


class Service:
    """`python -m api` on a new SQLite file, which can be killed and started again."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = environment
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._paths: list[str] = []
        self._news = threading.Condition()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Service:
        database = f"sqlite:///{self.folder}/lastbit.db"
        self._process = subprocess.Popen(
            [SERVICE_PYTHON, "-m", "api", "--port", str(self.port), "--database-url", database],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "LASTBIT_LOG_LEVEL": "info", **self.environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read_log, args=[self._process], daemon=True).start()
        self.wait_for_answers("started", 1)
        return self

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            entry: dict[str, Any] = json.loads(line)
            if entry["event"] == "Application startup complete.":
                entry["path"] = "started"
            with self._news:
                self._paths.append(entry.get("path", ""))
                self._news.notify_all()

    def wait_for_answers(self, path: str, number: int) -> None:
        """Wait until the service has answered `number` requests to `path`."""
        with self._news:
            assert self._news.wait_for(lambda: self._paths.count(path) >= number, 60), self._paths

    def forget_answers(self) -> None:
        with self._news:
            self._paths.clear()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service for all tests. The connection `lastbit_default` leads to it."""
    running = Service(tmp_path_factory.mktemp("service")).start()
    os.environ["AIRFLOW_CONN_LASTBIT_DEFAULT"] = f"lastbit://127.0.0.1:{running.port}"
    yield running
    running.kill()


@pytest.fixture
def client(service: Service) -> Iterator[Any]:
    from lastbit import Client

    with Client(service.url) as client:
        yield client


@pytest.fixture(scope="session")
def dags() -> Any:
    """All DAGs: those of the tests, the example and the page's. `dag.test()` needs them in Airflow's folder."""
    import airflow
    from airflow.utils.db import initdb

    try:
        from airflow.dag_processing.dagbag import DagBag
    except ImportError:  # before Airflow 3.1
        from airflow.models import DagBag

    initdb()
    folder = HOME / "dags"
    shutil.copytree(ROOT / "tests/integrations/airflow/dags", folder)
    shutil.copytree(ROOT / "examples/airflow", folder, dirs_exist_ok=True)
    page = (ROOT / "docs/airflow.md").read_text()
    for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)):
        if airflow.__version__.startswith("2."):  # as the page's comment tells
            snippet = snippet.replace("from airflow.sdk import DAG", "from airflow import DAG")
        (folder / f"page_{number}.py").write_text(snippet)
    bag = DagBag(folder)
    assert not bag.import_errors, bag.import_errors
    return bag.dags
