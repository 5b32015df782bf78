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
    """What a service says of each package; None where it isn't reached."""
    files = [word for name in SETS for word in ("-r", str(FOLDER / f"{name}.txt"))]
    options = ["--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json"]
    asked = subprocess.run(
        [sys.executable, "-m", "pip_audit", *options, "--vulnerability-service", service, *files],
        capture_output=True,
        text=True,
    )
    try:
        dependencies: list[dict[str, Any]] = json.loads(asked.stdout)["dependencies"]
    except ValueError:
        print(f"{service}: {(asked.stderr.strip().splitlines() or ['no answer'])[-1]}", file=sys.stderr)  # noqa: T201
        return None
    return dependencies


def verdict(dependencies: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """The exit status, and what there is to say."""
    # A package that the service doesn't have is skipped by pip-audit in silence, and would count as safe.
    skipped = sorted(each["name"] for each in dependencies if "skip_reason" in each)
    found = [
        f"{each['name']} {each['version']}: {known['id']}, mended in {', '.join(known['fix_versions']) or 'no release'}"
        for each in dependencies
        for known in each.get("vulns", ())
    ]
    if skipped or not dependencies:
        named = f": {', '.join(skipped)}" if len(skipped) < 10 else ""
        found.append(f"could not ask about {len(skipped)} of {len(dependencies)} packages{named}")
        return (KNOWN if len(found) > 1 else COULD_NOT_ASK), found
    return (KNOWN, found) if found else (NOTHING_KNOWN, [f"{len(dependencies)} packages, no vulnerability is known"])


def main() -> int:
    for service in SERVICES:
        dependencies = ask(service)
        if dependencies is not None:
            status, said = verdict(dependencies)
            print("\n".join(f"{service}: {line}" for line in said))  # noqa: T201
            if status != COULD_NOT_ASK:
                return status
    print("No service could be asked: whether a vulnerability is known, nobody knows.")  # noqa: T201
    return COULD_NOT_ASK


if __name__ == "__main__":
    sys.exit(main())
