"""The version of the release, which many files name:

    python -m scripts.version              # print it, if all agree
    python -m scripts.version v1.0.0       # and fail unless this is its tag
    python -m scripts.version --set 1.0.1  # write it to all of them

The contract has a version of its own (`api.openapi.VERSION`), and so has the schema.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.constraints import ROOT

PLACES = (
    ("pyproject.toml", r'^version = "([^"]+)"'),
    ("pyproject.toml", r'"lastbit-server==([^"]+)"'),
    ("lastbit/__init__.py", r'^__version__: Final = "([^"]+)"'),
    ("Dockerfile", r'image\.version="([^"]+)"'),
    ("deploy/helm/lastbit/Chart.yaml", r"^version: (\S+)"),
    ("deploy/helm/lastbit/Chart.yaml", r'^appVersion: "([^"]+)"'),
    ("deploy/kubernetes/deployment.yaml", r"image: lastbit:(\S+)"),
    ("deploy/kubernetes/dispatcher.yaml", r"image: lastbit:(\S+)"),
    ("deploy/kubernetes/janitor.yaml", r"image: lastbit:(\S+)"),
    ("deploy/kubernetes/migration.yaml", r"image: lastbit:(\S+)"),
    ("docs/deploy.md", r"image\.tag=(\S+)"),
    ("clients/typescript/package.json", r'^  "version": "([^"]+)"'),
    ("clients/typescript/package-lock.json", r'"name": "lastbit",\n +"version": "([^"]+)"'),
    ("clients/typescript/README.md", r"\blastbit-(\d\S*)\.tgz"),
)
"""Files, and what is around the version in them; group 1 is the version itself."""


def found(root: Path) -> Iterator[tuple[str, str]]:
    """Each file with each version that it names. Raises `SystemExit` for a file that names none."""
    for path, pattern in PLACES:
        versions = re.findall(pattern, (root / path).read_text(), re.MULTILINE)
        if not versions:
            raise SystemExit(f"{path} has nothing like {pattern}: correct it, or scripts/version.py")
        for version in versions:
            yield path, version


def write(root: Path, version: str) -> None:
    for path, pattern in PLACES:

        def replaced(match: re.Match[str]) -> str:
            start, end = (place - match.start() for place in match.span(1))
            return match[0][:start] + version + match[0][end:]

        file = root / path
        file.write_text(re.sub(pattern, replaced, file.read_text(), flags=re.MULTILINE))


def main(root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.version", description="The version of the release.")
    parser.add_argument("tag", nargs="?", help="fail unless this is the tag of the version, such as v1.0.0")
    parser.add_argument("--set", metavar="VERSION", dest="new", help="write this version, such as 1.0.1, to all files")
    arguments = parser.parse_args()
    if arguments.new:
        if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", arguments.new):
            parser.error(f"{arguments.new!r} is no version such as 1.0.1 or 1.1.0rc1")
        write(root, arguments.new)
    places = list(found(root))
    versions = {version for _, version in places}
    if len(versions) > 1:
        raise SystemExit(
            "\n".join(["these files disagree about the version:", *(f"{v}  {path}" for path, v in places)])
        )
    (version,) = versions
    if arguments.tag and arguments.tag != f"v{version}":
        raise SystemExit(f"the tag of version {version} is v{version}, not {arguments.tag}")
    print(version)  # noqa: T201


if __name__ == "__main__":
    main()
