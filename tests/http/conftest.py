"""A real service on SQLite, and each night on each kind of database, shared by the tests of a module; each test opens
its own batches.

When LASTBIT_MUTANT names a mutant, the code is broken before the tests import it (see `tests.mutants`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from core.storage.database import Database
from tests import mutants
from tests.conftest import KINDS_OF_CONTRACT
from tests.support import templates
from tests.support.servers import running_service, sqlite_file

mutants.from_environment()


@pytest.fixture(scope="module", params=KINDS_OF_CONTRACT)
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    with contextlib.ExitStack() as stack:
        if request.param == "sqlite":
            url = stack.enter_context(sqlite_file())
        else:
            url = request.getfixturevalue(request.param).new_database()
            with Database(url) as database:
                templates.migrate(database)
        running = stack.enter_context(running_service(url))
        yield stack.enter_context(httpx.Client(base_url=running.url, timeout=70))


@pytest.fixture(scope="module")
def sqlite_http() -> Iterator[httpx.Client]:
    """A service on SQLite, for tests to which the kind of database makes no difference."""
    with (
        sqlite_file() as url,
        running_service(url) as running,
        httpx.Client(base_url=running.url, timeout=70) as client,
    ):
        yield client
