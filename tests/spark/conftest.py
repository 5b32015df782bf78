"""One small Spark session on the loopback for all tests of a process, and job submission as users do it.

Every module here sets `pytestmark = pytest.mark.xdist_group("spark")`, so that a single test process runs all of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastbit import Client
from scripts import zip_sdk
from tests.sdk.conftest import scripted, unused_port  # noqa: F401  # fixtures
from tests.support.servers import ROOT

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


@pytest.fixture(scope="session")
def java() -> None:
    """Require a Java for Spark: without one, tests fail in CI and are skipped elsewhere."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("a JDK 17 or later is not installed")


@pytest.fixture(scope="session")
def spark(java: None) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    folder = tempfile.mkdtemp(prefix="lastbit-spark-")
    builder = SparkSession.builder.master("local[2]").appName("lastbit tests")
    settings = {**LOOPBACK, "spark.sql.warehouse.dir": f"{folder}/warehouse", "spark.local.dir": f"{folder}/local"}
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()
    shutil.rmtree(folder, ignore_errors=True)


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
    import pyspark

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
    the Python of the driver and the executors, by default this one."""
    import pyspark

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


BULK_ACK = ROOT / "jobs" / "bulk_ack.py"
