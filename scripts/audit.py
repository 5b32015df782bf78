"""Check every package in constraints/ for known vulnerabilities: with the package index first, then with OSV.

Exit status 0: all packages were checked and none has a known vulnerability. 1: at least one has. 2: not all packages
could be checked, so there is no result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from scripts.constraints import APART, FOLDER, SETS

SERVICES = ("pypi", "osv")
NOTHING_FOUND, FOUND, NOT_CHECKED = 0, 1, 2


def ask(service: str) -> list[dict[str, Any]] | None:
    """The service's entry for each package; None if it is unreachable."""
    entries: dict[tuple[str, str | None], dict[str, Any]] = {}
    # pip-audit refuses files that lock different versions of a package.
    for names in ([name for name in SETS if name not in APART], *([name] for name in APART)):
        answer = _ask(service, names)
        if answer is None:
            return None
        entries |= {(package["name"], package.get("version")): package for package in answer}
    return list(entries.values())


def _ask(service: str, names: Iterable[str]) -> list[dict[str, Any]] | None:
    files = [word for name in names for word in ("-r", str(FOLDER / f"{name}.txt"))]
    options = ["--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json"]
    audit = subprocess.run(
        [sys.executable, "-m", "pip_audit", *options, "--vulnerability-service", service, *files],
        capture_output=True,
        text=True,
    )
    try:
        dependencies: list[dict[str, Any]] = json.loads(audit.stdout)["dependencies"]
    except ValueError:
        print(f"{service}: {(audit.stderr.strip().splitlines() or ['no answer'])[-1]}", file=sys.stderr)  # noqa: T201
        return None
    return dependencies


def verdict(dependencies: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """The exit status, and the lines to print."""
    # pip-audit silently skips a package that the service doesn't know, so it would count as safe.
    skips = sorted(package["name"] for package in dependencies if "skip_reason" in package)
    advisories = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, "
        f"mended in {', '.join(vulnerability['fix_versions']) or 'no release'}"
        for package in dependencies
        for vulnerability in package.get("vulns", ())
    ]
    if skips or not dependencies:
        names = f": {', '.join(skips)}" if len(skips) < 10 else ""
        advisories.append(f"could not check {len(skips)} of {len(dependencies)} packages{names}")
        return (FOUND if len(advisories) > 1 else NOT_CHECKED), advisories
    if advisories:
        return FOUND, advisories
    return NOTHING_FOUND, [f"{len(dependencies)} packages, no vulnerability is known"]


def main() -> int:
    for service in SERVICES:
        dependencies = ask(service)
        if dependencies is not None:
            status, text = verdict(dependencies)
            print("\n".join(f"{service}: {line}" for line in text))  # noqa: T201
            if status != NOT_CHECKED:
                return status
    print("No service is reachable, so no package was checked.")  # noqa: T201
    return NOT_CHECKED


if __name__ == "__main__":
    sys.exit(main())
