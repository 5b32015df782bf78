"""Build the two wheels in dist/: `lastbit`, the SDK and command line, and `lastbit-server`, the service and its jobs.

Both are built in a temporary folder from the files that Git tracks, so nothing else of a checkout gets into them. The
names in each wheel are compared with these files. In the wheel of the service, the programs are subpackages, so their
imports are rewritten (see `subpackages`). Timestamps are those of the last commit, so the same source gives the same
bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

from scripts.constraints import ROOT
from scripts.subpackages import rewritten

PROGRAMS = ("api", "core", "jobs", "migrations", "senders")
"""The packages of the service. Their names are too common for a user's site-packages, so they become subpackages."""
PARENT = "lastbit_server"


def main(target: Path) -> list[Path]:
    """Build both wheels in the folder `target`, and remove older ones: the image installs all wheels of `dist/`."""
    for old in target.glob("*.whl"):
        old.unlink()
    return [wheel(sdk(), target), wheel(server(), target)]


def wheel(layout: Mapping[str, str], target: Path) -> Path:
    """Build the wheel of the project with these files, in the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lastbit-dist-") as folder:
        stage = Path(folder)
        for place, source in layout.items():
            (stage / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, stage / place)
            if place == f"{PARENT}/{source}" and source.endswith(".py"):
                (stage / place).write_text(rewritten((ROOT / source).read_text(), PROGRAMS, PARENT))
        if layout["pyproject.toml"] != "pyproject.toml":
            fill_in(stage / "pyproject.toml")
        with (stage / "pyproject.toml").open("a") as pyproject:
            pyproject.write(urls())
        path = build(stage, target)
    compare(path, layout)
    return path


def sdk() -> dict[str, str]:
    """The files of the SDK's project, each with its source."""
    return {path: path for path in tracked("lastbit", "pyproject.toml", "README.md", "LICENSE")}


def server() -> dict[str, str]:
    """The files of the server's project, each with its source."""
    files = {path.removeprefix("packaging/server/"): path for path in tracked("packaging/server")}
    files |= {path: path for path in tracked("lastbit_server", "LICENSE")}
    return files | {f"{PARENT}/{path}": path for path in tracked(*PROGRAMS)}


def tracked(*paths: str) -> list[str]:
    """The files below these paths that Git tracks. Raises `SystemExit` for a path without any."""
    files = [path for path in git("ls-files", "-z", "--", *paths).split("\0") if path and (ROOT / path).exists()]
    missing = [path for path in paths if not any(file == path or file.startswith(f"{path}/") for file in files)]
    if missing:
        raise SystemExit(f"Git tracks no files in {', '.join(missing)}")
    return files


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S607


def fill_in(pyproject: Path) -> None:
    """Fill in the SDK's version, and the dependencies of requirements/server.txt."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    lines = (ROOT / "requirements/server.txt").read_text().splitlines()
    requirements = [str(Requirement(line)) for line in lines if line and not line.startswith("#")]
    listing = "".join(f"\n    {entry!r}," for entry in [f"lastbit[cli]=={version}", *requirements])
    text = pyproject.read_text()
    for placeholder, value in (
        ('version = "0"  # filled in', f'version = "{version}"'),
        ("dependencies = []  # filled in", f"dependencies = [{listing}\n]"),
    ):
        if text.count(placeholder) != 1:
            raise SystemExit(f"packaging/server/pyproject.toml must have one line {placeholder!r}")
        text = text.replace(placeholder, value)
    pyproject.write_text(text)


def urls() -> str:
    """The section of pyproject.toml with the project's addresses: of the repository whose workflow builds the wheels. A
    checkout doesn't know its address, and a wheel of a fork must not send reports elsewhere."""
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if not server or not repository:
        return ""
    pages = {
        "Source": "",
        "Documentation": "/tree/HEAD/docs",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
        "Issues": "/issues",
        "Report a vulnerability": "/security/advisories/new",
    }
    return "\n[project.urls]\n" + "".join(f'"{name}" = "{server}/{repository}{path}"\n' for name, path in pages.items())


def build(stage: Path, target: Path) -> Path:
    result = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", stage / "dist"],
        cwd=stage,
        env={**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").strip()},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    (wheel_path,) = (stage / "dist").glob("*.whl")
    return Path(shutil.copy(wheel_path, target))


def compare(built: Path, layout: Mapping[str, str]) -> None:
    """Raise `SystemExit` unless the wheel has exactly the packages of `layout`."""
    with zipfile.ZipFile(built) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {place for place in layout if "/" in place}
    if names != expected:
        missing, surplus = sorted(expected - names), sorted(names - expected)
        raise SystemExit(f"{built.name} lacks {missing} and has {surplus}, which do not belong to its project")


if __name__ == "__main__":
    for path in main(ROOT / "dist"):
        print(f"wrote dist/{path.name}")  # noqa: T201
