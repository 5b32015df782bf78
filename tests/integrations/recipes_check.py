"""Each recipe of docs/recipes.md runs as it is printed: two products are rendered, and one fails with its reason.

The queues' own packages are in an environment apart, `.venv-recipes`. `make test-recipes` installs it and runs these
tests; pytest doesn't find them by itself.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastbit import Client
from tests.conftest import need
from tests.support.brokers import redis_server
from tests.support.servers import ROOT, free_port, running_service, sqlite_file

PROGRAMS = ROOT / ".venv-recipes/bin"
PAGE = (ROOT / "docs/recipes.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", PAGE, re.MULTILINE))
QUIET = {
    "DAGSTER_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Nothing is reported to anybody."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a reader has: a service, a Redis, and the queues' programs on the path."""
    need("the packages of `make test-recipes`", PROGRAMS.exists())
    home = tmp_path_factory.mktemp("home")
    with sqlite_file() as url, running_service(url) as service, redis_server() as broker:
        yield {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "LASTBIT"))},
            **QUIET,
            "HOME": str(home),
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            "LASTBIT_URL": service.url,
            "REDIS_URL": broker.url(),
            "DJANGO_DATABASE": str(home / "django.db"),
        }


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """Debian's PostgreSQL. It refuses to run as root."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    need("postgresql", bool(programs))
    folder = Path(tempfile.mkdtemp(prefix="lastbit-postgresql-"))
    port = free_port()
    prefix: list[str] = []
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
        prefix = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    data, program = folder / "data", programs[-1]
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder}"

    def control(*words: str) -> None:
        subprocess.run([*prefix, program / "pg_ctl", "-D", data, "-s", *words], cwd=folder, check=True, timeout=60)

    subprocess.run(
        [*prefix, program / "initdb", "-D", data, "-A", "trust", "-U", "postgres"],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    control("-o", options, "-l", str(folder / "log"), "-w", "start")
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        control("-m", "immediate", "stop")
        shutil.rmtree(folder)


def test_no_recipe_is_left_out() -> None:
    """The sections are those that the tests know."""
    assert [*KEYS] == [*SECTIONS]


KEYS = {
    "Huey": "huey",
    "arq": "arq",
    "Procrastinate": "procrastinate",
    "Django-Q2": "django-q",
    "Dagster": "dagster",
    "Prefect": "prefect",
    "Ray": "ray",
    "Dask": "dask",
    "A shell": "shell",
}
"""The key of each recipe's batch."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", KEYS)
def test_a_recipe_runs_as_it_is_printed(
    name: str, environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its batch completes: two items are acked, and one has failed with the exception as reason."""
    section = SECTIONS[name]
    variables = dict(environment)
    if "POSTGRES_URL" in section:
        variables["POSTGRES_URL"] = request.getfixturevalue("postgresql")
    for program in re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        (file,) = re.findall(r"^`(\w+\.py)`", section, re.MULTILINE)
        (tmp_path / file).write_text(program)
    (commands,) = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    output = tmp_path / "output"
    with output.open("w") as sink, Client(environment["LASTBIT_URL"]) as client:
        shell = subprocess.Popen(
            ["bash", "-euc", commands + "\nwait"],
            cwd=tmp_path,
            env=variables,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            batch = wait_for(client, KEYS[name], shell)
        except TimeoutError:
            pytest.fail(output.read_text()[-4000:])
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
        handle = client.batch(batch)
        reasons = [reason for part in handle.failed() for reason in part.reasons.values()]
        info = handle.refresh()
        assert (info.acked, info.failed, info.pending) == (2, 1, 0)
        assert len(reasons) == 1
        assert "no picture of broken lamp" in reasons[0]
        assert handle.verify().ok


def wait_for(client: Client, key: str, shell: subprocess.Popen[bytes]) -> int:
    """The batch with this key, once it is complete. The recipe's program opens it at some time."""
    position = 0
    for _ in range(120):
        page = client.events(after=position, wait=1)
        position = page.next
        for event in page.events:
            if event.type == "batch.completed" and event.key == key:
                return int(event.batch or 0)
        if shell.poll():
            break
    raise TimeoutError
