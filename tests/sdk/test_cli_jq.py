"""`--jq` and `--web`: other programs that show what a command has found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastbit import Client
from tests.sdk.terminals import on_terminal
from tests.sdk.test_cli import Lastbit
from tests.support.servers import ROOT, run_module


@pytest.fixture
def lastbit(service_url: str) -> Lastbit:
    return Lastbit(service_url)


def test_a_document_passes_through_a_filter(lastbit: Lastbit) -> None:
    """Strings are printed bare. A stream of ids, and the events that are followed, too."""
    batch = lastbit.ok("open", "--key", "filtered", "--items", "3", "--jq", ".id").strip()
    assert lastbit.ok("--jq", '"\\(.key): \\(.pending)"', "status", batch) == "filtered: 3\n"
    assert lastbit.ok("pending", batch, "--ids", "--jq", ".ids[]") == f"{batch}:0:0\n{batch}:0:1\n{batch}:0:2\n"
    assert lastbit.ok("status", batch, "--jq", "-1") == "-1\n"
    followed = lastbit.ok("events", "--follow", "--after", "0", "--limit", "1", "--jq", ".type")
    assert followed == "batch.opened\n"


def test_a_wrong_filter_is_refused_before_anything_is_sent(lastbit: Lastbit) -> None:
    """One that doesn't fit the document is an error afterwards."""
    before = lastbit.ok("counts", "--jq", ".total")
    result = lastbit("open", "--jq", ".[")
    assert result.returncode == 2
    assert "Error: --jq: error: syntax error" in result.stderr
    assert lastbit.ok("counts", "--jq", ".total") == before
    result = lastbit("counts", "--jq", ".total.x")
    assert (result.returncode, result.stdout) == (1, "")
    assert "lastbit: jq ended with exit code 5; what the command did stays done" in result.stderr


def test_a_filter_needs_jq(lastbit: Lastbit, tmp_path: Path) -> None:
    environment = {**os.environ, "LASTBIT_URL": lastbit.url, "PATH": str(tmp_path)}
    result = run_module("lastbit", "list", "--jq", ".", environment=environment)
    assert result.returncode == 2
    assert "needs the program jq" in " ".join(result.stderr.split())


def test_a_filtered_text_cannot_control_the_terminal(lastbit: Lastbit) -> None:
    with Client(lastbit.url) as client:
        batch = client.open(key="fire \x1b[2J\nline")
    screen = on_terminal(lastbit.url, ["status", str(batch.id), "--jq", ".key"])
    assert (screen.code, screen.raw) == (0, "fire \\x1b[2J\r\nline\r\n")


def test_a_reader_of_a_filter_may_end(lastbit: Lastbit) -> None:
    command = f"{sys.executable} -m lastbit events --follow --after 0 --jq .type | head -1; exit ${{PIPESTATUS[0]}}"
    with Client(lastbit.url) as client:
        for number in range(20):
            client.open(key=f"read {number}")
    shown = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "LASTBIT_URL": lastbit.url},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (shown.returncode, shown.stdout, shown.stderr) == (141, "batch.opened\n", "")


@pytest.mark.parametrize("command", ["status", "explain"])
def test_a_batch_is_shown_in_the_browser(lastbit: Lastbit, tmp_path: Path, command: str) -> None:
    """With the password of its address, which is not printed. A batch that doesn't exist is an error first."""
    with Client(lastbit.url) as client:
        batch = str(client.open().id)
    browser = tmp_path / "browser"
    browser.write_text(f'#!{shutil.which("sh")}\necho "$1" > {tmp_path}/shown\n')
    browser.chmod(0o755)

    def run(*arguments: str, starts: str) -> Any:
        variables = {"LASTBIT_URL": url, "BROWSER": f"{starts} %s", "PATH": str(tmp_path), "NO_PROXY": "*"}
        return run_module("lastbit", command, *arguments, "--web", environment={**os.environ, **variables})

    scheme, _, host = lastbit.url.partition("//")
    url = f"{scheme}//me:secret@{host}"
    result = run(batch, starts=str(browser))
    assert (result.returncode, result.stdout) == (0, f"opening {scheme}//me:***@{host}/#/batches/{batch}\n")
    assert (tmp_path / "shown").read_text() == f"{url}/#/batches/{batch}\n"
    assert "there is no batch 999999" in run("999999", starts=str(browser)).stderr
    result = run(batch, starts=shutil.which("false") or "")
    assert result.returncode == 1
    assert f"the batch is at {scheme}//me:***@{host}/#/batches/{batch}" in result.stderr
