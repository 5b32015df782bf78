"""Run each adapter's tests with the newest version of its library, also one beyond the range of the adapter's extra.

Each library is installed without a constraint, with what it needs, in front of the packages of .venv; Airflow, which
conflicts with these, into an environment of its own. The exit status is 1 if a library can't be installed, or if tests
fail with it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.constraints import ROOT

FOLDER: Final = ROOT / ".venv-newest"
TESTS: Final = ROOT / "tests" / "integrations"
COMPANIONS: Final[Mapping[str, Sequence[str]]] = {
    "kafka": ("confluent-kafka", "kafka-python"),
    "taskiq": ("taskiq-redis",),
}
"""What the tests of an adapter need in a version that goes with its library. Kafka's has no extra: users choose one."""
PIP: Final = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-warn-conflicts", "--upgrade")
WIDTHS: Final = "{:<28}{:<18}{:<14}{}"


def adapters() -> dict[str, list[Requirement]]:
    """The adapters that have tests, each with its libraries as its extra requires them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines_of = {extra.replace("-", "_"): [Requirement(line) for line in lines] for extra, lines in extras.items()}
    libraries = {name: lines for name, lines in lines_of.items() if (TESTS / name).is_dir()}
    for name, companions in COMPANIONS.items():
        libraries.setdefault(name, []).extend(map(Requirement, companions))
    return dict(sorted(libraries.items()))


def known(library: Requirement) -> str:
    """Its range, as it is in pyproject.toml."""
    return ",".join(sorted(map(str, library.specifier), reverse=True)) or "any"


def install(folder: Path, adapter: str, libraries: Sequence[str]) -> tuple[Path, Path]:
    """Make a new environment with these libraries in `folder`. Returns its Python and the folder of its packages."""
    shutil.rmtree(folder, ignore_errors=True)
    is_apart = adapter == "airflow"
    environment = [sys.executable, "-m", "venv", *(() if is_apart else ("--without-pip",)), str(folder)]
    subprocess.run(environment, check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python3.*/site-packages")
    if is_apart:
        subprocess.run([python, *PIP, *libraries, "-r", ROOT / "requirements" / "airflow.txt"], check=True)
        subprocess.run([python, *PIP, "--no-build-isolation", "-e", ROOT], check=True)
        return python, site
    packages = folder / "packages"
    subprocess.run([sys.executable, *PIP, "--only-binary", ":all:", "--target", packages, *libraries], check=True)
    (site / "newest.pth").write_text("".join(f"{path}\n" for path in (ROOT, packages, sysconfig.get_path("purelib"))))
    return python, packages


def test(python: Path, adapter: str) -> tuple[bool, list[str]]:
    """Run the adapter's quick tests. Returns whether they passed, and the lines that say what broke."""
    folder = TESTS / adapter
    command: list[str | Path] = [
        python,
        "-m",
        "pytest",
        "-q",
        "--tb",
        "short",
        "-m",
        "not slow and not nightly",
        folder,
    ]
    if adapter == "airflow":
        command += ["--confcutdir", folder]
    environment = {**os.environ, "LASTBIT_SERVICE_PYTHON": sys.executable}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    (FOLDER / f"{adapter}.txt").write_text(result.stdout + result.stderr)
    failures = re.findall(r"^(?:FAILED|ERROR) .*", result.stdout, re.MULTILINE)
    return result.returncode == 0, failures or result.stdout.splitlines()[-1:]


def run(adapter: str, libraries: Sequence[Requirement]) -> bool:
    """Print what was tried for an adapter, and what broke. Returns whether nothing did."""
    try:
        python, packages = install(FOLDER / adapter, adapter, [entry.name for entry in libraries])
    except subprocess.CalledProcessError:
        print(WIDTHS.format(libraries[0].name, known(libraries[0]), "-", "can't be installed"))  # noqa: T201
        return False
    distributions = metadata.distributions(path=[str(packages)])
    versions = {canonicalize_name(entry.name): entry.version for entry in distributions}
    success, lines = test(python, adapter)
    for library in libraries:
        result = "passed" if success else "broke"
        version = versions[canonicalize_name(library.name)]
        print(WIDTHS.format(library.name, known(library), version, result))  # noqa: T201
    for line in () if success else lines:
        print(f"  {line}", flush=True)  # noqa: T201
    return success


def main() -> None:
    libraries = adapters()
    parser = argparse.ArgumentParser(description="Run the adapters' tests with the newest version of each library.")
    parser.add_argument("adapters", nargs="*", metavar="ADAPTER", help=f"{', '.join(libraries)}; by default all")
    names = parser.parse_args().adapters or list(libraries)
    if strangers := set(names) - set(libraries):
        parser.error(f"no adapter {', '.join(sorted(strangers))}: expected some of {', '.join(libraries)}")
    FOLDER.mkdir(exist_ok=True)
    print(WIDTHS.format("library", "known", "tried", "tests"), flush=True)  # noqa: T201
    results = [run(name, libraries[name]) for name in names]
    if not all(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
