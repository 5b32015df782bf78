"""What the command line says and keeps when a command ends with an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lastbit import Client
from tests.sdk.test_cli import Lastbit
from tests.support.servers import ROOT

UNAVAILABLE = (503, {}, {"code": "unavailable", "detail": "the database is down", "status": 503})


@pytest.fixture
def lastbit(service_url: str) -> Lastbit:
    return Lastbit(service_url)


def process(url: str, *arguments: str | bytes, environment: Mapping[str, str] | None = None) -> list[Any]:
    """The keyword arguments and the command of a `lastbit` whose streams or encoding matter."""
    variables = {**os.environ, "LASTBIT_URL": url, "NO_PROXY": "*", **(environment or {})}
    variables.pop("LASTBIT_TOKEN", None)
    return [[sys.executable, "-m", "lastbit", *arguments], {"env": variables, "cwd": ROOT}]


# Acks that stop in the middle


def test_an_ack_that_stops_in_the_middle_shows_what_it_did(lastbit: Lastbit) -> None:
    """Also that it completed a batch: no later call says so."""
    with Client(lastbit.url) as client:
        small, large = client.open(items=1, sealed=True), client.open(items=10_000)
    result = lastbit("ack", small.ids[0], "-", stdin="7:0")
    assert result.returncode == 2
    assert result.stdout == f"1 acked\nbatch {small.id} is complete: this call completed it\n"
    assert "The first 1 ids were sent; sending them again is safe.\n" in result.stderr
    result = lastbit("fail", stdin="\n".join([*large.ids, "7:0"]))
    assert (result.returncode, result.stdout) == (2, "10,000 failed\n")
    result = lastbit("ack", "7:0:0", "7:0")
    assert (result.returncode, result.stdout) == (2, "")


def test_an_ack_whose_input_breaks_shows_what_it_did(lastbit: Lastbit, tmp_path: Path) -> None:
    """Standard input that can't be read; with --json the error has the partial result."""
    for as_json in (False, True):
        with Client(lastbit.url) as client:
            batch = client.open(items=1, sealed=True)
        command, options = process(lastbit.url, "ack", batch.ids[0], "-", *(["--json"] if as_json else []))
        with (tmp_path / "written").open("w") as written:
            result = subprocess.run(command, stdin=written, capture_output=True, text=True, timeout=60, **options)
        assert result.returncode == 1
        assert "standard input or output failed: Bad file descriptor" in result.stderr
        if as_json:
            assert json.loads(result.stderr)["partial"]["completed"][0]["batch"] == batch.id
        else:
            assert f"1 acked\nbatch {batch.id} is complete: this call completed it\n" == result.stdout


def test_an_interrupted_ack_shows_what_it_did(lastbit: Lastbit) -> None:
    """With the exit code of Ctrl-C."""
    with Client(lastbit.url) as client:
        batch = client.open(items=1, sealed=True)
        command, options = process(lastbit.url, "ack", batch.ids[0], "-")
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, text=True, **streams, **options) as reading:
            assert batch.wait(timeout=30).complete  # so the command reads on
            reading.send_signal(signal.SIGINT)
            stdout, stderr = reading.communicate(timeout=30)
    assert reading.returncode == 130
    assert stdout == f"1 acked\nbatch {batch.id} is complete: this call completed it\n"
    assert stderr == "The first 1 ids were sent; sending them again is safe.\n"


def test_a_closed_standard_input_is_refused_before_anything_is_sent(lastbit: Lastbit) -> None:
    """The ids on the command line are not acked first."""
    with Client(lastbit.url) as client:
        batch = client.open(items=1)
        command, options = process(lastbit.url, "ack", batch.ids[0], "-")
        shell = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
        result = subprocess.run(shell, capture_output=True, text=True, timeout=60, **options)
        assert result.returncode == 2
        assert "standard input is closed" in result.stderr
        assert batch.refresh().acked == 0
