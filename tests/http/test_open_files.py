"""A system that allows a process few open files: the service says so, and doesn't start with hardly a connection."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from api.limits.connections import FEWEST, RESERVE
from tests.mutants import mutant
from tests.support.servers import ROOT, free_port, wait_until_it_prints

ENOUGH = RESERVE + FEWEST


@contextlib.contextmanager
def started(url: str, files: int, **settings: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A service that may open so many files, and its port."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.guarantees.programs.mutated_api", "--port", str(port), "--database-url", url],
        cwd=ROOT,
        env={**os.environ, **settings},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )
    try:
        yield process, port
    finally:
        process.kill()
        process.communicate()


@mutant("too-few-files-are-enough", "api.limits.connections:check_open_files", "allowed < needed", "False")
@pytest.mark.parametrize("files", [40, 64, 128, 256, ENOUGH - 1])
def test_with_too_few_files_a_sentence_says_what_is_needed(sqlite_url: str, files: int) -> None:
    with started(sqlite_url, files) as (process, _):
        _, printed = process.communicate(timeout=60)
        assert process.returncode == 1
        (sentence,) = printed.splitlines()
        assert f"may open only {files} files, but needs at least {ENOUGH}" in sentence
        assert "ulimit -n" in sentence
        assert "LimitNOFILE=" in sentence


@mutant(
    "fewer-connections-are-not-told", "api.limits.connections:check_open_files", "allowed < RESERVE + limit", "False"
)
def test_with_few_files_all_the_connections_that_are_left_are_served(sqlite_url: str) -> None:
    with started(sqlite_url, ENOUGH) as (process, port), contextlib.ExitStack() as stack:
        printed = wait_until_it_prints(process, "serving")
        (warning,) = [json.loads(line) for line in printed.splitlines() if "fewer_connections" in line]
        assert (warning["open_files"], warning["connections"]) == (ENOUGH, FEWEST)
        for _ in range(FEWEST - 1):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert httpx.post(f"http://127.0.0.1:{port}/v1/batches", json={"items": 1}, timeout=30).status_code == 201


def test_a_service_for_few_connections_needs_fewer_files(sqlite_url: str) -> None:
    with started(sqlite_url, RESERVE + 8, LASTBIT_MAX_CONNECTIONS="8") as (process, port):
        assert "fewer_connections" not in wait_until_it_prints(process, "serving")
        assert httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=30).status_code == 200
