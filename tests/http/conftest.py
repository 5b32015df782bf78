"""A real service on each kind of database, one for the tests of a module: they open batches of their own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from core import schema
from core.db import Database
from tests.servers import running_service, temporary_folder


@pytest.fixture(scope="module", params=["sqlite", "mariadb"])
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    if request.param == "sqlite":
        url = f"sqlite:///{temporary_folder('lastbit-http-') / 'lastbit.db'}"
    else:
        url = request.getfixturevalue("mariadb").new_database()
        with Database(url) as database:
            schema.migrate(database)
    with running_service(url) as running, httpx.Client(base_url=running.url, timeout=70) as client:
        yield client


@pytest.fixture(scope="module")
def sqlite_http() -> Iterator[httpx.Client]:
    """Where the kind of database makes no difference."""
    url = f"sqlite:///{temporary_folder('lastbit-http-') / 'lastbit.db'}"
    with running_service(url) as running, httpx.Client(base_url=running.url, timeout=70) as client:
        yield client
