"""Everything that is shipped: the wheels, the zip for Spark, and each path and command of the image and the compose
file."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
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
from packaging.requirements import Requirement

import core.errors
import lastbit_server
from api.__main__ import GRACE
from lastbit import Client, Retry, __version__, _server
from scripts import dist
from tests import mutants
from tests.mutants import mutant
from tests.support.dockerfile import copied, instructions, let_in, stages
from tests.support.servers import ROOT, free_port
from tests.support.wheels import repack, with_dependencies
from tests.test_docs import blocks

mutants.from_environment()

SERVER = ("lastbit", "core", "senders", "migrations", "jobs", "api")
OUTSIDE_OF_THE_WHEEL = ("core", "senders", "api", "jobs", "migrations", "tests", "examples")
HTTPX_FREE = """
import lastbit
for name in set(lastbit.__all__) - {"Client", "AsyncClient"}:
    getattr(lastbit, name)
"""


def own_environment(**variables: str) -> dict[str, str]:
    """This process's environment without the path to the checkout, and with `variables`."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT.anchor,  # neither the checkout nor its parent, from which a folder could be imported
        env=own_environment(**environment),
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheels as published: of the SDK and of the server."""
    folder = tmp_path_factory.mktemp("wheels")
    (folder / "lastbit-0.0.1-py3-none-any.whl").touch()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("GITHUB_SERVER_URL", "https://git.example")
        monkeypatch.setenv("GITHUB_REPOSITORY", "team/lastbit")
        built_wheels = dist.main(folder)
    assert set(folder.iterdir()) == set(built_wheels), "wheels of an earlier build would get into the image"
    return built_wheels


@pytest.fixture(scope="module")
def wheel(wheels: list[Path]) -> Path:
    return wheels[0]


def install(folder: Path, *wheels: Path) -> Path:
    """A new Python with only these wheels."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    process = run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", *wheels)
    )
    assert process.returncode == 0, process.stderr
    return python


def purelib(python: Path) -> Path:
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())


@pytest.fixture(scope="module")
def sdk_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with only the SDK's wheel."""
    python = install(tmp_path_factory.mktemp("environment"), wheel)
    assert (purelib(python) / "lastbit").is_dir()
    return python


def test_the_wheel_ships_only_the_sdk(wheel: Path) -> None:
    """lastbit/ with its type marker, nothing of the server, no tests."""
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert "lastbit/py.typed" in names
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"lastbit"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lastbit").rglob("*.py")}
    assert sources <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_without_httpx_except_for_clients(sdk_python: Path) -> None:
    """Ids, answers and errors need only the standard library; a Client names the missing package."""
    assert run(sdk_python, "-c", HTTPX_FREE).stderr == ""
    missing = run(sdk_python, "-c", "from lastbit import Client")
    assert missing.returncode == 1
    assert "httpx" in missing.stderr.splitlines()[-1]


@pytest.mark.parametrize("package", OUTSIDE_OF_THE_WHEEL)
def test_the_wheel_does_not_bring_the_server(sdk_python: Path, package: str) -> None:
    """Nor any other part of the checkout."""
    assert "ModuleNotFoundError" in run(sdk_python, "-c", f"import {package}").stderr


def test_the_installed_command_runs(sdk_python: Path) -> None:
    """With its dependencies it works; without them it names the extra to install."""
    command = sdk_python.parent / "lastbit"
    with_dependencies = run(command, "--version", PYTHONPATH=sysconfig.get_path("purelib"))
    assert with_dependencies.stdout.startswith("lastbit"), with_dependencies.stderr
    without_dependencies = run(command, "--version")
    assert without_dependencies.returncode == 1
    assert "lastbit[cli]" in without_dependencies.stderr
    assert "Traceback" not in without_dependencies.stderr


def test_the_servers_wheel_ships_its_programs_in_one_package(wheels: list[Path]) -> None:
    """Each tracked file of the programs, with pages and migrations, as its subpackages; no tests."""
    names = {name for name in zipfile.ZipFile(wheels[1]).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"lastbit_server"}
    for package in dist.PROGRAMS:
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
        assert {f"lastbit_server/{file}" for file in files} <= names
    assert {"lastbit_server/api/page/index.html", "lastbit_server/migrations/script.py.mako"} <= names
    metadata = zipfile.ZipFile(wheels[1]).read(f"lastbit_server-{__version__}.dist-info/METADATA").decode()
    assert f"Requires-Dist: lastbit[cli]=={__version__}" in metadata
    assert "Requires-Dist: sqlalchemy<3,>=2.0.30" in metadata


def test_the_wheels_say_where_to_report(wheels: list[Path]) -> None:
    """In the repository whose workflow has built them."""
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        metadata = zipfile.ZipFile(wheel).read(f"{name}-{version}.dist-info/METADATA").decode()
        assert "Project-URL: Issues, https://git.example/team/lastbit/issues\n" in metadata
        assert (
            "Project-URL: Report a vulnerability, https://git.example/team/lastbit/security/advisories/new\n"
            in metadata
        )


def test_a_checkout_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its wheels name none."""
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert dist.urls() == ""


def test_the_extra_needs_the_service_of_the_same_version(wheel: Path) -> None:
    """They share modules without a promise to each other."""
    metadata = zipfile.ZipFile(wheel).read(f"lastbit-{__version__}.dist-info/METADATA").decode()
    assert f"Requires-Dist: lastbit-server=={__version__}; extra == 'embedded'" in metadata


def test_a_checkouts_programs_are_found_by_their_names() -> None:
    """There they are at the top level."""
    assert lastbit_server.program("core.errors") is core.errors
    assert _server.program("core.errors") is core.errors


@pytest.fixture(scope="module")
def server_python(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with both wheels."""
    return install(tmp_path_factory.mktemp("environment"), *wheels)


USERS = "\n".join(f"import {package}; assert {package}.OWNER == 'user'" for package in dist.PROGRAMS)
OURS = """
before = sys.path.copy()
from lastbit._server import program
with program("core.storage.database").Database(sys.argv[1]) as database:
    program("core.storage.schema").migrate(database)
    database.read(program("core.storage.schema").check)
import lastbit_server
for module in pkgutil.walk_packages(lastbit_server.__path__, "lastbit_server."):
    if module.name != "lastbit_server.migrations.env":  # Alembic runs it
        importlib.import_module(module.name)
assert program("api.app").__name__ == "lastbit_server.api.app"
assert sys.path == before
"""


@mutant(
    "the-wheel-imports-the-users-packages",
    "scripts.dist:wheel",
    'place == f"{PARENT}/{source}" and source.endswith(".py")',
    "False",
    case="user's",
)
@pytest.mark.parametrize(("earlier", "later"), [(USERS, OURS), (OURS, USERS)], ids=["user's", "ours"])
def test_a_users_process_has_our_programs_beside_packages_of_its_own(
    server_python: Path, tmp_path: Path, earlier: str, later: str
) -> None:
    """Packages called `core`, `api` and so on, as in many projects: whichever is imported first, each module of the
    wheel can be imported, none of them is a user's, and the schema can be migrated."""
    for package in dist.PROGRAMS:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("OWNER = 'user'")
    program = tmp_path / "program.py"
    program.write_text(f"import importlib, pkgutil, sys\n{earlier}\n{later}\n{USERS}")
    process = run(server_python, program, f"sqlite:///{tmp_path}/lastbit.db", PYTHONPATH=sysconfig.get_path("purelib"))
    assert process.returncode == 0, process.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_installed_server_runs_next_to_packages_with_the_same_names(
    wheels: list[Path], tmp_path: Path, workers: str
) -> None:
    """Packages called `api`, `core` and so on, in site-packages and in the working directory, are neither imported nor
    replaced."""
    python = install(tmp_path / "environment", *wheels)
    for folder in (tmp_path, purelib(python)):
        for package in dist.PROGRAMS:
            (folder / package).mkdir()
            (folder / package / "__init__.py").write_text("raise SystemExit('another package was imported')")
    environment = own_environment(
        # The dependencies of both wheels. No path file there is read, so the checkout's editable packages are
        # invisible.
        PYTHONPATH=sysconfig.get_path("purelib"),
        LASTBIT_DATABASE_URL=f"sqlite:///{tmp_path}/lastbit.db",
    )
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
            (["dispatcher", "--once"], ""),
            (["openapi"], '"openapi": "3.1.0"'),
            (["migrate"], ""),
        ):
            process = subprocess.run(
                [python, "-m", "lastbit_server", *words],
                cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert process.returncode == 0, (words, process.stderr)
            assert output in process.stdout
    finally:
        server.terminate()
        log = server.communicate(timeout=60)[1]
    assert all(line.startswith("{") for line in log.splitlines()), log


@pytest.mark.nightly
def test_the_installed_server_names_its_own_commands(wheels: list[Path], tmp_path: Path) -> None:
    """Help and hints name commands that this user can type."""
    python = install(tmp_path / "environment", *wheels)
    environment = {"PYTHONPATH": sysconfig.get_path("purelib")}
    file = tmp_path / "empty.db"
    file.touch()
    for words, text in (
        (["--help"], "lastbit-server janitor expires"),
        (["janitor", "--help"], "usage: lastbit-server janitor"),
        (["dispatcher", "--help"], "usage: lastbit-server dispatcher"),
        (["janitor", "--database-url", f"sqlite:///{file}"], "run `lastbit-server migrate`"),
        (["--version"], f"lastbit-server {__version__}"),
    ):
        process = run(python.parent / "lastbit-server", *words, **environment)
        assert text in " ".join((process.stdout + process.stderr).split()), (words, process.stdout, process.stderr)


@pytest.fixture(scope="module")
def index(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both wheels and those of all packages that they need."""
    folder = tmp_path_factory.mktemp("index")
    for path in wheels:
        shutil.copy(path, folder)
    lines = (ROOT / "requirements/server.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for distribution in with_dependencies([Requirement("lastbit[cli]"), *requirements]):
        if distribution.name != "lastbit":
            repack(distribution, folder)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_an_empty_environment_gets_both_commands_and_runs_the_readmes_lines(
    index: Path, tmp_path: Path, tool: str
) -> None:
    """With the commands that the pages print, from a folder instead of PyPI."""
    bin_folder = tmp_path / "environment" / "bin"
    installer: list[str | Path]
    if tool == "pip":
        venv.create(bin_folder.parent, with_pip=False)
        page, command = "README.md", "pip install"
        installer = [sys.executable, "-m", "pip", "--python", bin_folder / "python", "install"]
        environment = {}
    else:
        page, command = "docs/operations.md", "uv tool install"
        installer = [Path(sys.executable).with_name("uv"), "tool", "install"]
        environment = {
            "UV_NO_CONFIG": "1",
            "UV_OFFLINE": "1",
            "UV_PYTHON": sys.executable,
            "UV_CACHE_DIR": str(tmp_path / "cache"),
            "UV_TOOL_DIR": str(tmp_path / "tools"),
            "UV_TOOL_BIN_DIR": str(bin_folder),
        }
    (arguments,) = re.findall(
        rf"^{command} (?:--find-links \S+ )?(.*lastbit-server)\b", (ROOT / page).read_text(), re.MULTILINE
    )
    result = run(*installer, "--no-index", "--find-links", index, *arguments.split(), **environment)
    assert result.returncode == 0, result.stderr
    python = (bin_folder / "lastbit-server").resolve().with_name("python")
    ((program,), (output,)) = (blocks(ROOT / "README.md", language) for language in ("python", "text"))
    port = free_port()
    server = subprocess.Popen(
        [bin_folder / "lastbit-server", "--port", str(port)],
        cwd=tmp_path,
        env=own_environment(),
        stderr=subprocess.PIPE,
    )
    try:
        with Client(f"http://127.0.0.1:{port}", retry=Retry(attempts=500, cap=0.2)) as client:
            assert client.events().last == 0
        for words, printed in (
            ([python, "-c", program], output),
            ([bin_folder / "lastbit", "verify", "--all"], "1 batch, 3 items: ok\n"),
        ):
            result = run(*words, LASTBIT_URL=f"http://127.0.0.1:{port}")
            assert (result.returncode, result.stdout) == (0, printed), result.stderr
    finally:
        server.terminate()
        server.communicate(timeout=60)


@pytest.mark.nightly
def test_the_extra_brings_the_service_into_ones_own_process(index: Path, tmp_path: Path) -> None:
    """With all that it needs."""
    venv.create(tmp_path / "environment", with_pip=False)
    python = tmp_path / "environment/bin/python"
    installer = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--find-links", index]
    installed = run(*installer, "lastbit[embedded]")
    assert installed.returncode == 0, installed.stderr
    program, *_ = blocks(ROOT / "docs/exactly-once.md", "python")
    (output,) = blocks(ROOT / "docs/exactly-once.md", "text")
    (tmp_path / "shop.py").write_text(program)
    result = subprocess.run([python, "shop.py"], cwd=tmp_path, env=own_environment(), capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, output), result.stderr
    code = "from lastbit._server import program; print(program('core.service').Service.__module__)"
    assert run(python, "-c", code).stdout == "lastbit_server.core.service\n"


def test_the_zip_for_spark_imports_with_the_standard_library_only(tmp_path: Path) -> None:
    """An executor has none of our site-packages; each name except the clients can be imported."""
    archive = tmp_path / "lastbit.zip"
    process = subprocess.run(
        [sys.executable, "-m", "scripts.zip_sdk", str(archive)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    code = f"import sys; sys.path.insert(0, {str(archive)!r})\n{HTTPX_FREE}assert '.zip' in lastbit.__file__"
    imported = run(sys.executable, "-I", "-S", "-c", code)
    assert imported.returncode == 0, imported.stderr
    assert {name.split("/")[0] for name in zipfile.ZipFile(archive).namelist()} == {"lastbit"}


COMPOSE = ["compose.yaml", "compose.postgresql.yaml"]


def compose(file: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / file).read_text())
    return document


def test_every_path_of_the_dockerfile_exists_and_reaches_the_build() -> None:
    """Everything that is copied exists or is a wheel of `make dist`; .dockerignore lets in exactly that."""
    assert sorted(copied()) == sorted(let_in()) == ["constraints/server.txt", "dist/*.whl"]
    assert (ROOT / "constraints/server.txt").exists()


def test_the_image_has_all_that_the_service_imports() -> None:
    """requirements/server.txt has each foreign package that this project imports, except an optional one."""
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
                if (module, path.name) == ("opentelemetry", "traces.py"):
                    continue  # optional: http/test_traces.py runs it without the package
                names = {name.lower().replace("_", "-") for name in distributions[module]}
                # Starlette and anyio are dependencies of FastAPI, which chooses their versions.
                assert names & (required | {"starlette", "anyio"}), f"{path.name} imports {module}"


def imported_by(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.split(".")[0])
    return modules


def commands() -> Iterator[list[str]]:
    """Each command that one of our containers would run, as words."""
    for word, rest in instructions():
        if word in ("CMD", "HEALTHCHECK"):
            yield json.loads(rest[rest.index("[") :])
    for file in COMPOSE:
        for service in compose(file)["services"].values():
            if "command" in service and "build" in service:  # else it is a database's
                yield service["command"]


@pytest.mark.nightly
def test_every_command_that_a_container_runs_exists_and_takes_its_arguments() -> None:
    """Each is the service or one of its commands, and answers to --help."""
    commands_: set[tuple[str, ...]] = set()
    for command in commands():
        if command[0] == "sh":
            commands_ |= {tuple(match.split()) for match in re.findall(r"lastbit-server(?: [\w-]+)*", command[2])}
        elif command[0] == "lastbit-server":
            commands_.add(tuple(command))
        else:
            compile(command[2], "the health check", "exec")
    assert {words[1:] for words in commands_} == {(), ("migrate",), ("janitor",), ("dispatcher",)}
    for words in commands_:
        process = subprocess.run(
            [sys.executable, "-m", "lastbit_server", *words[1:], "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert process.returncode == 0, process.stderr
        assert all(word in process.stdout for word in words[1:])


def test_the_image_does_not_run_as_root_and_has_a_health_check() -> None:
    """The health check requests a path that the service has, at the port that the image sets."""
    steps = dict(instructions())
    assert steps["USER"] == "10001"
    assert "/readyz" in steps["HEALTHCHECK"]
    assert "LASTBIT_PORT=8000" in steps["ENV"]
    assert steps["EXPOSE"] == "8000"
    assert "/readyz" in yaml.safe_load((ROOT / "openapi.yaml").read_text())["paths"]


def test_the_image_has_labels_and_a_stop_signal() -> None:
    """Its labels agree with pyproject.toml, the service drains on its signal, and no shell is in between."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    steps = dict(stages()[-1].steps)
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', steps["LABEL"]))
    assert labels["version"] == project["version"]
    assert labels["licenses"] == f"{project['license']} AND LGPL-3.0-only"  # psycopg's
    assert set(labels) == {"title", "description", "version", "licenses"}
    assert steps["STOPSIGNAL"] == "SIGTERM"
    assert steps["CMD"].startswith("[")


def test_the_image_gets_packages_by_their_hashes_and_has_no_secret() -> None:
    """Foreign packages by their hashes, then our wheels without an index; both stages use one base that an argument can
    pin."""
    run = [rest for stage in stages() for word, rest in stage.steps if word == "RUN"]
    foreign, own = [command for command in run if "install " in command and "pip " in command]
    assert "--require-hashes --only-binary :all:" in foreign
    assert "--no-index --no-deps" in own
    assert not [command for command in run if re.search(r"apt|curl|wget", command)]
    assert {rest.split()[0] for word, rest in instructions() if word == "FROM"} == {"${BASE}"}
    assert not re.search(
        r"TOKEN|PASSWORD|SECRET|_KEY", " ".join(rest for word, rest in instructions() if word == "ENV")
    )
    assert not {word for word, _ in instructions()} & {"ADD", "ONBUILD"}


def test_the_health_check_passes_only_with_a_running_service(service_url: str) -> None:
    """Run as in the image."""
    health = next(json.loads(rest[rest.index("[") :]) for word, rest in instructions() if word == "HEALTHCHECK")
    port = service_url.rpartition(":")[2]
    assert run(sys.executable, *health[1:], LASTBIT_PORT=port).returncode == 0
    assert run(sys.executable, *health[1:], LASTBIT_PORT="1").returncode != 0


def test_each_variable_of_the_image_and_the_compose_file_is_a_setting() -> None:
    """A misspelt one would be ignored silently."""
    from core.settings import Settings

    settings = {f"LASTBIT_{name.upper()}" for name in Settings.model_fields}
    variables = set(re.findall(r"(LASTBIT_\w+)=", (ROOT / "Dockerfile").read_text()))
    for file in COMPOSE:
        for service in compose(file)["services"].values():
            variables |= {name for name in service.get("environment", {}) if name.startswith("LASTBIT_")}
    assert variables
    assert variables <= settings


@pytest.mark.parametrize("file", COMPOSE)
def test_our_containers_in_the_compose_file_have_minimal_permissions(file: str) -> None:
    """Only /tmp and the volume are writable; no capability, and no way to gain one."""
    services = compose(file)["services"]
    for service in services.values():
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add", "pid", "network_mode", "devices"} & set(service)
        if "build" in service:
            assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp"])
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_every_deployment_lets_the_service_finish_its_requests() -> None:
    """Docker kills a container ten seconds after SIGTERM unless it is told another time; the service may take GRACE."""
    times = {file: compose(file)["services"]["api"]["stop_grace_period"].removesuffix("s") for file in COMPOSE}
    patterns = {
        "Dockerfile": r"docker run .*\\\n.*--stop-timeout (\d+)",
        "docs/supply-chain.md": r"docker run .*\\\n.*--stop-timeout (\d+)",
        "deploy/systemd/lastbit.service": r"TimeoutStopSec=(\d+)",
        "deploy/kubernetes/deployment.yaml": r"terminationGracePeriodSeconds: (\d+)",
    }
    times |= {file: re.findall(pattern, (ROOT / file).read_text())[0] for file, pattern in patterns.items()}
    assert set(times.values()) == {"45"}
    assert GRACE < 45


@pytest.mark.parametrize("file", COMPOSE)
def test_the_compose_file_migrates_before_it_serves(file: str) -> None:
    """The service and its jobs wait for the migration, and the migration waits for the database."""
    services = compose(file)["services"]
    assert set(services) == {"database", "migrate", "api", "janitor", "dispatcher"}
    assert services["migrate"]["depends_on"]["database"]["condition"] == "service_healthy"
    for name in ("api", "janitor", "dispatcher"):
        assert services[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in compose(file)["volumes"]
        if "build" in service:
            assert (ROOT / service["build"] / "Dockerfile").exists()
