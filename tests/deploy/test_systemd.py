"""The unit files: systemd accepts them, they are confined, and their commands exist."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from core.settings import Settings
from tests.conftest import need
from tests.support.servers import ROOT, run_module

FOLDER = ROOT / "deploy/systemd"
UNITS = sorted(path for path in FOLDER.iterdir() if path.suffix in (".service", ".timer"))
SERVICES = [path for path in UNITS if path.suffix == ".service"]
PROGRAM = "/opt/lastbit/bin/lastbit-server"
EXPOSURE = 20
"""In tenths, of the ten that `systemd-analyze security` gives to a unit without any protection."""


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The unit files, for an existing program: systemd checks its path."""
    need("systemd", shutil.which("systemd-analyze") is not None)
    folder = tmp_path_factory.mktemp("units")
    for path in UNITS:
        (folder / path.name).write_text(path.read_text().replace(PROGRAM, "/bin/true"))
    return [folder / path.name for path in UNITS]


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True)


def test_systemd_accepts_every_unit(units: list[Path], tmp_path: Path) -> None:
    process = analyze("verify", "--man=no", *units)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    misspelt = tmp_path / "misspelt.service"
    misspelt.write_text(units[0].read_text().replace("ProtectHome=", "ProtectHouse="))
    assert "Unknown key 'ProtectHouse'" in analyze("verify", "--man=no", misspelt).stderr


def test_every_service_is_confined(units: list[Path]) -> None:
    for unit in units:
        if unit.suffix == ".service":
            process = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", unit)
            assert process.returncode == 0, process.stdout[-300:]


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.stem)
def test_the_command_of_a_unit_exists_with_its_options(path: Path) -> None:
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("ExecStart=")]
    program, *words = shlex.split(line.removeprefix("ExecStart="))
    assert program == PROGRAM
    process = run_module("lastbit_server", *words, "--help")
    assert process.returncode == 0
    for word in words:
        assert word in process.stdout or not word.startswith("--")


@pytest.mark.parametrize("name", ["lastbit.env", "migrate.env"])
def test_the_example_settings_are_settings(name: str) -> None:
    lines = [line.removeprefix("# ") for line in (FOLDER / name).read_text().splitlines()]
    names = {line.partition("=")[0] for line in lines if line.startswith("LASTBIT_")}
    assert names <= {f"LASTBIT_{field.upper()}" for field in Settings.model_fields}
    assert "LASTBIT_DATABASE_URL" in names


def test_the_timer_starts_the_janitor() -> None:
    assert (FOLDER / "lastbit-janitor.timer").with_suffix(".service") in SERVICES
    process = analyze("calendar", "hourly")
    assert process.returncode == 0
