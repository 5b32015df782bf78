"""A database whose disk is full, or whose commits hang, while it answers reads: an operator sees it although no client
writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import httpx
import pytest

from core.storage import checks, schema
from core.storage.database import Database
from tests.conftest import KINDS, running_server, server_kind
from tests.support.disks import SMALL_SERVER, full, small_disk
from tests.support.exposition import eventually, value
from tests.support.servers import running_service

pytestmark = [pytest.mark.mariadb, pytest.mark.timeout(300)]

TRIES: Final = 2400
"""Polls of 0.05 s: MariaDB may wait for a minute until it reports a full disk."""

LARGE: Final = {"labels": {"size": "x" * 1000}}
"""Not larger: MariaDB 10.11 aborts if it can't store a large value outside of its row."""


@pytest.fixture(params=KINDS)
def small_database(request: pytest.FixtureRequest) -> Iterator[tuple[str, contextlib.AbstractContextManager[None]]]:
    """The URL of a database, and the context within which its disk is full."""
    if request.param == "sqlite":
        with small_disk(32) as disk:
            yield f"sqlite:///{disk}/lastbit.db", full(disk)
        return
    with small_disk(128) as disk, running_server(folder=disk, options=SMALL_SERVER[server_kind()]) as server:
        yield server.new_database(), full(disk)


def test_a_full_disk_shows_while_reads_are_answered(
    small_database: tuple[str, contextlib.AbstractContextManager[None]],
) -> None:
    url, is_full = small_database
    with Database(url) as database:
        schema.migrate(database)
    with (
        Database(url) as database,
        running_service(url, LASTBIT_LOG_LEVEL="error") as running,
        httpx.Client(base_url=running.url, timeout=150) as client,
    ):

        def readiness() -> int:
            return client.get("/readyz").status_code

        def is_stalled() -> bool:
            return value(client, "lastbit_write_stall_seconds") > 0

        def is_broken() -> bool:
            return any(finding.verdict is checks.Verdict.BROKEN for finding in checks.check(database))

        assert (readiness(), is_stalled()) == (200, False)
        with is_full:
            # Until its space is used up, a server takes small changes.
            eventually(lambda: client.post("/v1/batches", json=LARGE).status_code, 503, TRIES)
            eventually(readiness, 503, TRIES)
            eventually(is_stalled, True, TRIES)
            eventually(is_broken, True, TRIES)
            assert client.get("/v1/batches").status_code == 200
        eventually(readiness, 200, TRIES)
        eventually(is_stalled, False, TRIES)
        eventually(is_broken, False, TRIES)
