"""When LASTBIT_MUTANT names a mutant, the code is broken before the tests import it (see
`tests.mutants`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py

from lastbit import Client, tokens
from lastbit.tokens import Role
from tests import mutants
from tests.support.brokers import RedisServer
from tests.support.servers import running_service, sqlite_file

mutants.from_environment()

TOKEN = tokens.new()


@pytest.fixture
def client(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client:
        yield client


@pytest.fixture
def store(redis: RedisServer) -> Iterator[Any]:
    """A connection to a Redis that is empty."""
    with redis_py.Redis.from_url(redis.url(0), decode_responses=True) as store:
        store.flushall()
        yield store


@pytest.fixture(scope="module")
def tokens_url() -> Iterator[str]:
    """The URL of a service that knows one token, and refuses all others for good."""
    line = tokens.known(TOKEN, "ci", list(Role)).line()
    with sqlite_file() as database, running_service(database, LASTBIT_TOKENS=line) as service:
        yield service.url
