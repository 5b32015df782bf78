"""Run Celery's own tests of its canvas with and without tracking, and compare their outcomes.

    python -m tests.integrations.celery.canvas_check CLONE [--ref v5.6.3] [-k EXPRESSION]

CLONE is a clone of Celery's repository, since its packages don't contain these tests. The tests are those of `--ref`,
by default of the installed version. The exit status is 1 if a test has another outcome with tracking than without, or
if none passes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import celery
from celery.contrib.testing import app as testing

from tests.support.brokers import redis_server
from tests.support.servers import ROOT, running_service, sqlite_file

ENDINGS = ("failure", "error", "skipped")


def pytest_configure() -> None:
    """This module is also the plugin of the run with tracking: it tracks each app that the tests make."""
    from lastbit.integrations.celery import Lastbit

    create = testing.TestApp

    def tracked(*arguments: object, **options: object) -> celery.Celery:
        app = create(*arguments, **options)
        Lastbit(app)
        return app

    testing.TestApp = tracked


def outcomes(folder: Path, options: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Each test's outcome."""
    (folder / "pytest.ini").write_text("[pytest]\npython_classes = test_*\n")  # as Celery's own
    words = "-q -c pytest.ini -p no:cacheprovider -p celery.contrib.pytest --timeout 120 --junitxml report.xml"
    command = [sys.executable, "-m", "pytest", *words.split(), *options, "t/integration/test_canvas.py"]
    subprocess.run(command, cwd=folder, env={**os.environ, **environment}, stdout=sys.stderr)
    endings_of = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        endings = [ending for ending in ENDINGS if case.find(ending) is not None]
        endings_of[f"{case.get('classname')}::{case.get('name')}"] = (endings or ["passed"])[0]
    return endings_of


def run(clone: Path, ref: str, options: Sequence[str]) -> dict[str, str]:
    """The outcomes with a Redis and a service of their own."""
    with (
        tempfile.TemporaryDirectory() as name,
        redis_server() as redis,
        sqlite_file() as database,
        running_service(database) as service,
    ):
        archive = subprocess.run(["git", "-C", clone, "archive", ref, "t"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "--extract", "--directory", name], input=archive, check=True)
        (Path(name) / "pytest_subtests.py").touch()  # which earlier tests import, and pytest now has
        environment = {
            "TEST_BROKER": redis.url(0),
            "TEST_BACKEND": redis.url(0),
            "REDIS_PORT": str(redis.port),
            "LASTBIT_URL": service.url,
            "PYTHONPATH": f"{ROOT}:{name}",
        }
        return outcomes(Path(name), options, environment)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare Celery's tests of its canvas with and without tracking.")
    parser.add_argument("clone", type=Path, help="a clone of Celery's repository")
    parser.add_argument("--ref", default=f"v{celery.__version__}", help="by default the tag of the installed version")
    parser.add_argument("-k", help="as for pytest")
    arguments = parser.parse_args()
    options = [] if arguments.k is None else ["-k", arguments.k]
    plain = run(arguments.clone, arguments.ref, options)
    with_tracking = run(arguments.clone, arguments.ref, ["-p", __spec__.name, *options])
    other = sorted(test for test in plain.keys() | with_tracking.keys() if plain.get(test) != with_tracking.get(test))
    for test in other:
        print(f"{test}: {plain.get(test)} without tracking, {with_tracking.get(test)} with it")
    counts = ", ".join(f"{list(plain.values()).count(kind)} {kind}" for kind in ("passed", *ENDINGS))
    print(f"Celery {celery.__version__}: {len(plain)} tests, without tracking {counts}; {len(other)} differ with it")
    raise SystemExit(bool(other) or "passed" not in plain.values())


if __name__ == "__main__":
    main()
