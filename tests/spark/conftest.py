"""One small Spark session on the loopback for all tests of a process, and job submission as users do it.

With LASTBIT_SPARK=connect the session is a client of Spark Connect, and the executors get the package as an artifact.
A process has sessions of one kind only: `make test-spark`, `make test-spark-connect` and `make test-spark-35` run the
same tests.

Every module here sets `pytestmark = pytest.mark.xdist_group("spark")`, so that a single test process runs all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from lastbit import Client
from scripts import zip_sdk
from tests.sdk.conftest import scripted_service, unused_port  # noqa: F401  # fixtures
from tests.support import profiles
from tests.support.servers import ROOT, free_port, running_service, sqlite_file, wait_until_it_prints

LOOPBACK = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "768m",
    "spark.sql.shuffle.partitions": "3",
    "spark.log.level": "ERROR",
    # Tests are short: the second compiler and the collector's threads would cost more time than they save.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


PYSPARK_35 = pyspark.__version__.startswith("3.5.")

if PYSPARK_35:  # its environment lacks what tests/conftest.py imports
    profiles.load()
    # PySpark 3.5 has no data sources in Python.
    collect_ignore = ["test_source.py"]

    @pytest.fixture(scope="module")
    def service_url() -> Iterator[str]:
        with sqlite_file() as url, running_service(url) as running:
            yield running.url

else:
    from pyspark.logger import PySparkLogger

    # pytest lends its log handlers to loggers that do not propagate. PySpark's are such, and set a JSON formatter on
    # each handler they get, which the whole process would keep.
    PySparkLogger.addHandler = logging.Logger.addHandler


@pytest.fixture(scope="session")
def java() -> None:
    """Require a Java for Spark: without one, tests fail in CI and are skipped elsewhere."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("a JDK 17 or later is not installed")


CONNECT = os.environ.get("LASTBIT_SPARK") == "connect"


@pytest.fixture(scope="session")
def spark(java: None, sdk_zip: Path) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    if CONNECT:
        os.environ["SPARK_TESTING"] = "1"  # the server takes any free port, and the client finds it
    folder = tempfile.mkdtemp(prefix="lastbit-spark-")
    builder = SparkSession.builder.remote("local[2]") if CONNECT else SparkSession.builder.master("local[2]")
    builder = builder.appName("lastbit tests")
    settings = {**LOOPBACK, "spark.sql.warehouse.dir": f"{folder}/warehouse", "spark.local.dir": f"{folder}/local"}
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    if CONNECT:
        assert type(session).__module__.startswith("pyspark.sql.connect")
        session.addArtifacts(str(sdk_zip), pyfile=True)
        _start_queries_on_a_busy_machine()
    yield session
    session.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _start_queries_on_a_busy_machine() -> None:
    """Start a query again if its Python process did not connect within the ten seconds that Spark always allows it."""
    from pyspark.sql.connect.streaming.readwriter import DataStreamWriter

    start_once = DataStreamWriter.start

    def start(self: Any, *arguments: Any, **options: Any) -> Any:
        for _ in range(9):
            try:
                return start_once(self, *arguments, **options)
            except Exception as error:
                if "Python worker failed to connect back" not in str(error):
                    raise
        return start_once(self, *arguments, **options)

    DataStreamWriter.start = start


@pytest.fixture
def client(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client_:
        yield client_


@pytest.fixture(scope="session")
def sdk_zip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive that `make zip` builds."""
    target = tmp_path_factory.mktemp("dist") / "lastbit.zip"
    zip_sdk.build(target)
    return target


@pytest.fixture(scope="session")
def bare_python(java: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python as on a bare cluster node: PySpark and py4j, without httpx, pyarrow or pandas."""
    import py4j

    bare = tmp_path_factory.mktemp("bare")
    for package in (pyspark, py4j):
        assert package.__file__ is not None
        (bare / package.__name__).symlink_to(Path(package.__file__).parent)
    launcher = bare / "python"
    # -S: without any site-packages.
    launcher.write_text(f'#!/bin/sh\nPYTHONPATH="{bare}:$PYTHONPATH" exec {sys.executable} -S "$@"\n')
    launcher.chmod(0o755)
    for package in ("httpx", "pyarrow", "pandas", "lastbit"):
        # A PYTHONPATH that names this checkout is removed on the node.
        process = subprocess.run(
            [str(launcher), "-c", f"import {package}"],
            cwd=bare,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
        )
        assert "ModuleNotFoundError" in process.stderr, f"{package} can be imported on the bare node"
    return launcher


def submit(
    zipped: Path, script: Path, *arguments: str, bare: Path | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run `spark-submit --py-files lastbit.zip script …` in a folder where this checkout is not importable. `bare` is
    the Python of the driver and the executors, by default this one. On Connect, run the script as a client of a server
    of its own, with this Python, as a client needs more packages."""
    if CONNECT:
        return _run_as_client(zipped, script, *arguments, **settings)
    assert pyspark.__file__ is not None
    home = Path(pyspark.__file__).parent
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    environment.pop("PYTHONPATH", None)
    if bare is not None:
        environment |= {"PYSPARK_PYTHON": str(bare), "PYSPARK_DRIVER_PYTHON": str(bare)}
    spark_settings = LOOPBACK | {name.replace("_", "."): value for name, value in settings.items()}
    options = [part for name, value in spark_settings.items() for part in ("--conf", f"{name}={value}")]
    with tempfile.TemporaryDirectory(prefix="lastbit-submit-") as folder:
        return subprocess.run(
            [
                *(str(home / "bin" / "spark-submit"), *options),
                *(() if "spark.master" in spark_settings else ("--master", "local[2]")),
                *("--py-files", str(zipped), str(script), *arguments),
            ],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )


def _run_as_client(zipped: Path, script: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="lastbit-connect-") as folder, connect_server(folder, **settings) as url:
        return subprocess.run(
            [sys.executable, str(script), *arguments, "--artifact", str(zipped)],
            cwd=folder,
            env={**outside_this_session(), "SPARK_REMOTE": url, "PYTHONPATH": str(zipped)},
            capture_output=True,
            text=True,
            timeout=240,
        )


@contextlib.contextmanager
def connect_server(folder: str, **settings: str) -> Iterator[str]:
    """The address of a new server of Spark Connect, which has neither this checkout nor the zip."""
    assert pyspark.__file__ is not None
    port = free_port()
    # Without the package that an editable installation adds: -S ignores .pth files.
    launcher = Path(folder) / "python"
    packages = sysconfig.get_path("purelib")
    launcher.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}:$PYTHONPATH" exec {sys.executable} -S "$@"\n')
    launcher.chmod(0o755)
    environment = {**outside_this_session(), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": str(launcher)}
    check = [str(launcher), "-c", "import pyarrow, lastbit"]
    importing = subprocess.run(check, cwd=folder, env=environment, capture_output=True, text=True)
    assert "No module named 'lastbit'" in importing.stderr
    spark_settings = {"spark.master": "local[2]"} | {name.replace("_", "."): value for name, value in settings.items()}
    # The server logs at INFO when it has started.
    spark_settings |= {name: value for name, value in LOOPBACK.items() if name != "spark.log.level"}
    spark_settings |= {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port)}
    process = subprocess.Popen(
        [
            str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
            *(part for name, value in spark_settings.items() for part in ("--conf", f"{name}={value}")),
            *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"),
        ],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until_it_prints(process, "Spark Connect server started")
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def outside_this_session() -> dict[str, str]:
    """The environment without what a session of this process has added."""
    added = ("SPARK_", "PYSPARK_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(added)}
    return {**kept, "PYSPARK_PYTHON": sys.executable}


BULK_ACK = ROOT / "jobs" / "bulk_ack.py"
