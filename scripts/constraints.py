"""Write constraints/: the exact version of every installed package, and the hashes of its files.

A set is resolved for all systems and for Python 3.11 and later, and written without addresses. The sets build on one
another as requirements/*.txt do; each contains only what its base lacks. Existing versions are kept if they fit;
--upgrade takes the newest ones that fit.

Some packages conflict with the others: those of Airflow 3 and 2, the queues of the recipes, and PySpark 3.5. Each of
these sets shares no versions with the other sets, and is installed into an environment of its own.

oldest.txt has the lowest versions that the SDK and its extras allow, and what else must differ from the set `dev`
for them. They are installed in front of that set.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "constraints"
PYTHON = "3.11"
PYPROJECT = ("pyproject.toml",)
APART: dict[str, tuple[str, ...]] = {
    "airflow": ("airflow",),
    "airflow2": ("airflow",),
    "recipes": (),
    "spark35": ("cli", "spark"),
}
"""The sets whose packages conflict with those of the other sets, with their extras."""


def extras() -> list[str]:
    """The extras that the tests' own environment has: all but those of the sets in APART, and that of this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return sorted(project["optional-dependencies"].keys() - set().union(*APART.values(), ["embedded"]))


def _options(names: Iterable[str]) -> list[str]:
    return [word for name in names for word in ("--extra", name)]


@dataclass(frozen=True)
class Set:
    name: str
    sources: tuple[str, ...]
    base: str | None = None


SETS = {
    each.name: each
    for each in (
        Set("server", ("requirements/server.txt",)),
        Set("run", ("requirements/run.txt", *PYPROJECT, "--extra", "cli"), base="server"),
        Set("dev", ("requirements/dev.txt", *PYPROJECT, *_options(extras())), base="run"),
        Set("tools", ("requirements/tools.txt",)),
        Set("dist", ("requirements/dist.txt",)),
        Set("seekdb", ("requirements/seekdb.txt",)),
        Set("generators", ("requirements/generators.txt",)),
        *(Set(name, (f"requirements/{name}.txt", *PYPROJECT, *_options(extras))) for name, extras in APART.items()),
    )
}


OLDEST = Set("oldest", (*PYPROJECT, *_options(["cli", *(name for name in extras() if name not in ("otel", "redis"))])))
"""Without the extras whose lowest versions others of `dev` exclude: redis (Celery), and otel (OpenTelemetry's SDK)."""


@dataclass(frozen=True)
class Pin:
    """One package: `name==version`, perhaps with a marker, and the allowed hashes of its files."""

    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        (specifier,) = self.requirement.specifier
        return specifier.version

    def __str__(self) -> str:
        return " \\\n    ".join([str(self.requirement), *(f"--hash=sha256:{digest}" for digest in self.hashes)])


def parse(text: str) -> list[Pin]:
    """The pins of a file; ValueError for a line that is neither a pin, a comment nor the base's -r."""
    pins = []
    for line in text.replace("\\\n", " ").splitlines():
        if not line or line.startswith("#") or re.fullmatch(r"-r \w+\.txt", line):
            continue
        match = re.fullmatch(r"([\w.-]+==[\w.!+]+(?: ?; ?[^@:\\]+?)?)((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", line)
        if match is None:
            raise ValueError(f"not a package with an exact version and hashes: {line[:80]}")
        pins.append(Pin(Requirement(match[1]), tuple(re.findall(r"sha256:(\w+)", match[2]))))
    return pins


def read(name: str) -> list[Pin]:
    """All pins of a set, with those of the sets below it."""
    base = SETS[name].base
    return [*(read(base) if base else []), *parse((FOLDER / f"{name}.txt").read_text())]


def present(target: Set) -> list[Pin]:
    """The pins from which a set takes its versions: its own if it is apart, otherwise those of all sets that aren't."""
    names = [target.name] if target.name in APART else [name for name in SETS if name not in APART]
    paths = [FOLDER / f"{name}.txt" for name in names]
    return [pin for path in paths if path.exists() for pin in parse(path.read_text())]


def direct(target: Set) -> list[Requirement]:
    """The project's dependency and those of the set's extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [name for name in target.sources if name in project["optional-dependencies"]]
    extra_lines = [line for name in names for line in project["optional-dependencies"][name]]
    return [Requirement(line) for line in (*project["dependencies"], *extra_lines)]


def resolve(target: Set, preferences: Iterable[Pin], bounds: Iterable[Pin], resolution: str = "highest") -> list[Pin]:
    """All packages of a set. Versions in `bounds` are required; those in `preferences` are kept if they fit."""
    with tempfile.TemporaryDirectory() as folder:
        output, constraints = Path(folder) / "output.txt", Path(folder) / "held.txt"
        # uv prefers the versions in an existing output file.
        output.write_text("\n".join(str(pin.requirement) for pin in preferences))
        constraints.write_text("\n".join(str(pin.requirement) for pin in bounds))
        options = ["--universal", "--python-version", PYTHON, "--generate-hashes", "--no-header", "--no-annotate"]
        options += ["--resolution", resolution]
        files = ["--constraints", str(constraints), "--output-file", str(output), *target.sources]
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "pip", "compile", "--quiet", "--no-config", *options, *files], cwd=ROOT, check=True)
        return parse(output.read_text())


def render(target: Set, pins: Iterable[Pin], base_pins: Iterable[Pin]) -> str:
    """The text of a set's file: the pins that its base doesn't have identically."""
    base_lines = {str(pin) for pin in base_pins}
    lines = [f"# Written by `make constraints` from {target.sources[0]}; do not edit."]
    lines += [f"-r {target.base}.txt"] if target.base else []
    return "\n".join([*lines, *(text for text in map(str, pins) if text not in base_lines)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write constraints/ from requirements/ and pyproject.toml.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    upgrade = parser.parse_args().upgrade
    resolved: dict[str, list[Pin]] = {}
    for target in reversed(SETS.values()):  # the widest set first: the narrower ones take its versions
        wider_pins = [pin for wider in SETS.values() if wider.base == target.name for pin in resolved[wider.name]]
        resolved[target.name] = resolve(target, [] if upgrade else present(target), wider_pins)
    for target in SETS.values():
        text = render(target, resolved[target.name], resolved[target.base] if target.base else [])
        (FOLDER / f"{target.name}.txt").write_text(text)
    named = {canonicalize_name(requirement.name) for requirement in direct(OLDEST)}
    others = [pin for pin in resolved["dev"] if pin.name not in named]
    oldest = resolve(OLDEST, others, [], "lowest-direct")
    (FOLDER / "oldest.txt").write_text(render(OLDEST, oldest, resolved["dev"]))


if __name__ == "__main__":
    main()
