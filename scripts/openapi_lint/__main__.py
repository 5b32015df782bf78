"""Lint openapi.yaml, or another document, with Redocly's and Spectral's recommended rules. Any finding is an error.

The linters are installed below `.node/`, once for each version of package-lock.json. This needs Node 20 and npm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.node_packages import install

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = ROOT / ".node" / "openapi-lint"
ENVIRONMENT = {**os.environ, "REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"}


def run(*command: str) -> Any:
    """The JSON that a linter prints."""
    result = subprocess.run(
        [FOLDER / "node_modules" / ".bin" / command[0], *command[1:]],
        cwd=FOLDER,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    try:
        return json.loads(result.stdout)
    except ValueError:
        raise SystemExit(f"{command[0]} failed:\n{result.stdout}{result.stderr}") from None


def findings(document: Path) -> list[str]:
    """The findings of both linters."""
    redocly = run("redocly", "lint", str(document), "--config", str(HERE / "redocly.yaml"), "--format", "json")
    if redocly["totals"]["ignored"]:
        raise SystemExit("redocly ignores problems; expected no ignore file")
    spectral = run(
        "spectral", "lint", str(document), "--ruleset", str(HERE / "spectral.yaml"), "--format", "json", "--quiet"
    )
    return [
        f"redocly {problem['ruleId']} at {problem['location'][0].get('pointer', '')}: {problem['message']}"
        for problem in redocly["problems"]
    ] + [
        f"spectral {problem['code']} at {'/'.join(map(str, problem['path']))}: {problem['message']}"
        for problem in spectral
    ]


def main() -> None:
    document = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "openapi.yaml"
    install(HERE, FOLDER)
    all_findings = findings(document)
    for finding in all_findings:
        print(finding)  # noqa: T201
    if all_findings:
        raise SystemExit(1)
    print(f"{document.name}: redocly and spectral report nothing", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
