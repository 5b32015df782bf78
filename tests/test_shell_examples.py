"""The commands in the `sh` blocks of pages run, in their order; tests/test_http_examples.py has the pages on HTTP."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from lastbit import Client
from tests.support.receivers import receiving
from tests.support.servers import ROOT, running_service

PAGES: Final = (
    "docs/tour.md",
    *(
        f"docs/{name}.md"
        for name in ("access", "cli", "consumer-groups", "database", "events", "jobs", "runbook", "webhooks")
    ),
)
"""The slow tests run all pages but the first."""
PROGRAMS: Final = {"lastbit": "lastbit", "lastbit-server": "lastbit_server"}
LEFT_OUT: Final = (
    r"lastbit-server *(#.*)?",  # the service runs already
    r"lastbit-server dispatcher *(#.*)?",  # until SIGTERM
    r"(curl|lastbit\b[^|]*) (--follow|watch|-N)\b.*",  # until Ctrl-C
    r"lastbit login\b.*",  # asks, and stores what was typed in the user's folder
    r"lastbit list --profile prod",  # a profile that is not there
    r"lastbit-server check\b.*",  # reports that the tests' file is in memory; tests/storage/test_checks.py runs it
)

pytestmark = pytest.mark.skipif(
    any(shutil.which(program) is None for program in ("curl", "jq")) and "CI" not in os.environ,
    reason="curl or jq is not installed",
)


def commands(page: Path) -> list[str]:
    """The commands of our programs and of curl, each with its continuation lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [
        line
        for line in lines
        if line.split(" ")[0] in (*PROGRAMS, "curl") and not any(re.fullmatch(pattern, line) for pattern in LEFT_OUT)
    ]


@pytest.mark.parametrize("page", [PAGES[0], *(pytest.param(page, marks=pytest.mark.nightly) for page in PAGES[1:])])
def test_the_commands_of_a_page_succeed(page: str, sqlite_url: str, tmp_path: Path) -> None:
    """On a service with the batches 1 to 8, the last ones called catalog-42 and catalog-44 for docs/runbook.md."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, module in PROGRAMS.items():
        (bin_folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (bin_folder / name).chmod(0o755)
    with receiving() as receiver, running_service(sqlite_url, LASTBIT_WEBHOOKS_ALLOW_PRIVATE="true") as service:
        with Client(service.url) as client:
            for number in range(1, 7):
                client.open(key=f"job-{number}", items=1)
            ids = client.open(key="catalog-42", items=500, sealed=True).ids
            client.fail(ids[499], reason="no picture")
            client.fail(client.open(key="catalog-44", items=3, sealed=True).ids[:1], reason="no picture")
        lines = commands(ROOT / page)
        assert lines
        script = "\n".join(lines).replace("http://127.0.0.1:8000", service.url)
        result = subprocess.run(
            ["bash", "-eux", "-o", "pipefail", "-c", script.replace("https://example.com/hooks", receiver.url)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{bin_folder}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "LASTBIT_URL": service.url,
                "LASTBIT_DATABASE_URL": sqlite_url,
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert result.returncode == 0, result.stderr
    assert "urn:lastbit:problem" not in result.stdout
