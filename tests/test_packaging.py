"""What is shipped: the wheel, the zip for Spark, and the image's and compose file's every path and command."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml

from lastbit import Client, Retry
from scripts import dist
from tests.support.dockerfile import copied, instructions, let_in, stages
from tests.support.servers import ROOT, free_port

SERVER = ("lastbit", "core", "senders", "migrations", "jobs", "api")
OUTSIDE_OF_THE_WHEEL = ("core", "senders", "api", "jobs", "migrations", "tests", "examples")
HTTPX_FREE = """
import lastbit
for name in set(lastbit.__all__) - {"Client", "AsyncClient"}:
    getattr(lastbit, name)
"""


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT.anchor,  # not the checkout, nor where a folder beside it could be imported
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheels as they would be published: of the SDK, and of the server."""
    folder = tmp_path_factory.mktemp("wheels")
    (folder / "lastbit-0.0.1-py3-none-any.whl").touch()
    built = dist.main(folder)
    assert set(folder.iterdir()) == set(built), "wheels of an earlier build get into the image"
    return built


@pytest.fixture(scope="module")
def wheel(wheels: list[Path]) -> Path:
    return wheels[0]


def installed(folder: Path, *wheels: Path) -> Path:
    """A new Python that has these wheels and nothing else."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", *wheels)
    )
    assert pip.returncode == 0, pip.stderr
    return python


def purelib(python: Path) -> Path:
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())


@pytest.fixture(scope="module")
def environment_of_its_own(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the SDK's wheel and nothing else."""
    python = installed(tmp_path_factory.mktemp("environment"), wheel)
    assert (purelib(python) / "lastbit").is_dir()
    return python


def test_the_wheel_ships_the_sdk_alone(wheel: Path) -> None:
    """lastbit/ with its type marker, nothing of the server, no tests."""
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert "lastbit/py.typed" in names
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"lastbit"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lastbit").rglob("*.py")}
    assert sources <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_without_httpx_until_a_client_is_named(environment_of_its_own: Path) -> None:
    """Ids, answers and errors need the standard library only; a Client says what is missing."""
    assert run(environment_of_its_own, "-c", HTTPX_FREE).stderr == ""
    missing = run(environment_of_its_own, "-c", "from lastbit import Client")
    assert missing.returncode == 1
    assert "httpx" in missing.stderr.splitlines()[-1]


@pytest.mark.parametrize("package", OUTSIDE_OF_THE_WHEEL)
def test_the_wheel_does_not_bring_the_server(environment_of_its_own: Path, package: str) -> None:
    """Nor anything else of the checkout."""
    assert "ModuleNotFoundError" in run(environment_of_its_own, "-c", f"import {package}").stderr


def test_the_installed_command_runs(environment_of_its_own: Path) -> None:
    """With its dependencies it answers; without them it says which extra to install."""
    command = environment_of_its_own.parent / "lastbit"
    with_dependencies = run(command, "--version", PYTHONPATH=sysconfig.get_path("purelib"))
    assert with_dependencies.stdout.startswith("lastbit"), with_dependencies.stderr
    alone = run(command, "--version")
    assert alone.returncode == 1
    assert "lastbit[cli]" in alone.stderr
    assert "Traceback" not in alone.stderr


def test_the_servers_wheel_ships_the_programs_below_one_package(wheels: list[Path]) -> None:
    """Each file of the programs that Git tracks, with pages and migrations; no tests, and no `api` at the top."""
    names = {name for name in zipfile.ZipFile(wheels[1]).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"lastbit_server"}
    for package in dist.PROGRAMS:
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
        assert {f"{dist.APP}/{file}" for file in files} <= names
    assert {f"{dist.APP}/api/page/index.html", f"{dist.APP}/migrations/script.py.mako"} <= names
    metadata = zipfile.ZipFile(wheels[1]).read("lastbit_server-0.1.0.dist-info/METADATA").decode()
    assert "Requires-Dist: lastbit[cli]==0.1.0" in metadata
    assert "Requires-Dist: sqlalchemy<3,>=2.0.30" in metadata


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_installed_server_runs_beside_packages_of_the_same_names(
    wheels: list[Path], tmp_path: Path, workers: str
) -> None:
    """Strangers' `api` and `core`, in site-packages and in the working directory, are neither imported nor replaced."""
    python = installed(tmp_path / "environment", *wheels)
    for folder in (tmp_path, purelib(python)):
        for package in ("api", "core"):
            (folder / package).mkdir()
            (folder / package / "__init__.py").write_text("raise SystemExit('a stranger was imported')")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        # What both wheels depend on. No path file in it is read, so the checkout's editable packages are not seen.
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "LASTBIT_DATABASE_URL": f"sqlite:///{tmp_path}/lastbit.db",
    }
    port = free_port()
    server = subprocess.Popen(
        [python.parent / "lastbit-server", "--port", str(port), "--workers", workers],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with Client(f"http://127.0.0.1:{port}", retry=Retry(attempts=500, cap=0.2)) as client:
            assert client.open(items=2).status().items == 2
        for words, output in (
            (["check"], "database"),
            (["janitor"], '"expired"'),
            (["openapi"], '"openapi": "3.1.0"'),
            (["migrate"], ""),
        ):
            done = subprocess.run(
                [python, "-m", "lastbit_server", *words],
                cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert done.returncode == 0, (words, done.stderr)
            assert output in done.stdout
    finally:
        server.terminate()
        log = server.communicate(timeout=60)[1]
    assert all(line.startswith("{") for line in log.splitlines()), log


def test_the_installed_server_names_its_own_commands(wheels: list[Path], tmp_path: Path) -> None:
    """Help and hints say what this user can type."""
    python = installed(tmp_path / "environment", *wheels)
    environment = {"PYTHONPATH": sysconfig.get_path("purelib")}
    file = tmp_path / "empty.db"
    file.touch()
    for words, text in (
        (["--help"], "`lastbit-server janitor`"),
        (["janitor", "--help"], "usage: lastbit-server janitor"),
        (["dispatcher", "--help"], "usage: lastbit-server dispatcher"),
        (["janitor", "--database-url", f"sqlite:///{file}"], "run `lastbit-server migrate`"),
        (["--version"], "lastbit-server 0.1.0"),
    ):
        done = run(python.parent / "lastbit-server", *words, **environment)
        assert text in " ".join((done.stdout + done.stderr).split()), (words, done.stdout, done.stderr)


def test_the_zip_for_spark_imports_with_the_standard_library_only(tmp_path: Path) -> None:
    """An executor has no site-packages of ours; each name but the clients is there."""
    archive = tmp_path / "lastbit.zip"
    built = subprocess.run(
        [sys.executable, "-m", "scripts.zip_sdk", str(archive)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert built.returncode == 0, built.stderr
    code = f"import sys; sys.path.insert(0, {str(archive)!r})\n{HTTPX_FREE}assert '.zip' in lastbit.__file__"
    imported = run(sys.executable, "-I", "-S", "-c", code)
    assert imported.returncode == 0, imported.stderr
    assert {name.split("/")[0] for name in zipfile.ZipFile(archive).namelist()} == {"lastbit"}


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return found


def test_every_path_of_the_dockerfile_exists_and_reaches_the_build() -> None:
    """Whatever is copied is there or a wheel of `make dist`, and .dockerignore lets it in, and nothing else."""
    assert sorted(copied()) == sorted(let_in()) == ["constraints/server.txt", "dist/*.whl"]
    assert (ROOT / "constraints/server.txt").exists()


def test_the_image_has_all_that_the_service_imports() -> None:
    """Each package of others that ours import stands in requirements/server.txt."""
    required = {
        re.split(r"[^A-Za-z0-9_.-]", line)[0].lower().replace("_", "-")
        for line in (ROOT / "requirements/server.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    distributions = packages_distributions()
    for package in ("core", "senders", "api", "migrations"):
        for path in (ROOT / package).rglob("*.py"):
            for module in imported_by(path):
                if module in sys.stdlib_module_names or module in SERVER:
                    continue
                names = {name.lower().replace("_", "-") for name in distributions[module]}
                # Starlette and anyio come with FastAPI and are its to choose.
                assert names & (required | {"starlette", "anyio"}), f"{path.name} imports {module}"


def imported_by(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def commands() -> Iterator[list[str]]:
    """Each command that a container of ours would run, as words."""
    for word, rest in instructions():
        if word in ("CMD", "HEALTHCHECK"):
            yield json.loads(rest[rest.index("[") :])
    for service in compose()["services"].values():
        if "command" in service:
            yield service["command"]


def test_every_command_that_a_container_runs_exists_and_takes_its_arguments() -> None:
    """Each is the service or one of its commands, and with --help it answers."""
    found: set[tuple[str, ...]] = set()
    for command in commands():
        if command[0] == "sh":
            found |= {tuple(match.split()) for match in re.findall(r"lastbit-server(?: [\w-]+)*", command[2])}
        elif command[0] == "lastbit-server":
            found.add(tuple(command))
        else:
            compile(command[2], "the health check", "exec")
    assert {words[1:] for words in found} == {(), ("migrate",), ("janitor",), ("dispatcher",)}
    for words in found:
        parsed = subprocess.run(
            [sys.executable, "-m", "lastbit_server", *words[1:], "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert parsed.returncode == 0, parsed.stderr
        assert all(word in parsed.stdout for word in words[1:])


def test_the_image_does_not_run_as_root_and_is_asked_for_its_health() -> None:
    """The health check asks a path that the service has, at the port that the image sets."""
    told = dict(instructions())
    assert told["USER"] == "10001"
    assert "/readyz" in told["HEALTHCHECK"]
    assert "LASTBIT_PORT=8000" in told["ENV"]
    assert told["EXPOSE"] == "8000"
    assert "/readyz" in yaml.safe_load((ROOT / "openapi.yaml").read_text())["paths"]


def test_the_image_says_what_it_is_and_how_it_is_stopped() -> None:
    """Its labels agree with pyproject.toml, its signal is the one that the service drains on, no shell is between."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = dict(stages()[-1].steps)
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', told["LABEL"]))
    assert labels["version"] == project["version"]
    assert labels["licenses"] == project["license"]
    assert set(labels) == {"title", "description", "version", "licenses"}
    assert told["STOPSIGNAL"] == "SIGTERM"
    assert told["CMD"].startswith("[")


def test_the_image_gets_packages_by_their_hashes_and_has_no_secret() -> None:
    """Packages of others by their hashes, and then our wheels from no index; both stages stand on one base that an
    argument can pin."""
    run = [rest for stage in stages() for word, rest in stage.steps if word == "RUN"]
    others, ours = [each for each in run if "install " in each and "pip " in each]
    assert "--require-hashes --only-binary :all:" in others
    assert "--no-index --no-deps" in ours
    assert not [each for each in run if re.search(r"apt|curl|wget", each)]
    assert {rest.split()[0] for word, rest in instructions() if word == "FROM"} == {"${BASE}"}
    assert not re.search(
        r"TOKEN|PASSWORD|SECRET|_KEY", " ".join(rest for word, rest in instructions() if word == "ENV")
    )
    assert not {word for word, _ in instructions()} & {"ADD", "ONBUILD"}


def test_the_health_check_passes_on_a_running_service_and_fails_without(service_url: str) -> None:
    """Run as the image would run it."""
    health = next(json.loads(rest[rest.index("[") :]) for word, rest in instructions() if word == "HEALTHCHECK")
    port = service_url.rpartition(":")[2]
    assert run(sys.executable, *health[1:], LASTBIT_PORT=port).returncode == 0
    assert run(sys.executable, *health[1:], LASTBIT_PORT="1").returncode != 0


def test_each_variable_of_the_image_and_the_compose_file_is_a_setting() -> None:
    """A misspelt one would be ignored in silence."""
    from core.settings import Settings

    known = {f"LASTBIT_{name.upper()}" for name in Settings.model_fields}
    named = set(re.findall(r"(LASTBIT_\w+)=", (ROOT / "Dockerfile").read_text()))
    for service in compose()["services"].values():
        named |= {name for name in service.get("environment", {}) if name.startswith("LASTBIT_")}
    assert named
    assert named <= known


def test_what_the_compose_file_runs_of_ours_can_do_no_more_than_it_needs() -> None:
    """Nothing to write but /tmp and its volume, no capability, no way to one."""
    services = compose()["services"]
    for service in services.values():
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add", "pid", "network_mode", "devices"} & set(service)
        if "build" in service:
            assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp"])
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_the_compose_file_migrates_before_it_serves() -> None:
    """The service and its jobs wait for the migration, the migration for the database."""
    services = compose()["services"]
    assert set(services) == {"database", "migrate", "api", "janitor", "dispatcher"}
    assert services["migrate"]["depends_on"]["database"]["condition"] == "service_healthy"
    for name in ("api", "janitor", "dispatcher"):
        assert services[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in compose()["volumes"]
        if "build" in service:
            assert (ROOT / service["build"] / "Dockerfile").exists()
