"""Ask for known vulnerabilities of every package in constraints/: the package index first, then OSV.

Exit status 0: asked about each, none known. 1: at least one is known. 2: could not ask about each, so nothing is said.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from scripts.constraints import FOLDER, SETS

SERVICES = ("pypi", "osv")
NOTHING_KNOWN, KNOWN, COULD_NOT_ASK = 0, 1, 2


def ask(service: str) -> list[dict[str, Any]] | None:
    """The service's entry for each package; None if it is unreachable."""
    files = [word for name in SETS for word in ("-r", str(FOLDER / f"{name}.txt"))]
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
        advisories.append(f"could not ask about {len(skips)} of {len(dependencies)} packages{names}")
        return (KNOWN if len(advisories) > 1 else COULD_NOT_ASK), advisories
    if advisories:
        return KNOWN, advisories
    return NOTHING_KNOWN, [f"{len(dependencies)} packages, no vulnerability is known"]


def main() -> int:
    for service in SERVICES:
        dependencies = ask(service)
        if dependencies is not None:
            status, text = verdict(dependencies)
            print("\n".join(f"{service}: {line}" for line in text))  # noqa: T201
            if status != COULD_NOT_ASK:
                return status
    print("No service could be asked: whether a vulnerability is known, nobody knows.")  # noqa: T201
    return COULD_NOT_ASK


if __name__ == "__main__":
    sys.exit(main())
