"""When LASTBIT_MUTANT names a mutant, the code is broken before the tests import it (see
`tests.mutants`)."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py

from lastbit import Client, tokens
from lastbit.tokens import Role
from tests import mutants
from tests.integrations import drivers
from tests.support.brokers import RedisServer
from tests.support.servers import running_service, sqlite_file

mutants.from_environment()

TOKEN = tokens.new()
MARKS = {"rabbitmq": [pytest.mark.xdist_group("rabbitmq")]}
ADAPTERS = [
    pytest.param(module.name, marks=MARKS.get(module.name, [])) for module in pkgutil.iter_modules(drivers.__path__)
]


@pytest.fixture(params=ADAPTERS)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> drivers.Driver:
    """Each adapter, with short pauses."""
    for module in ("_resolver", "taskiq"):
        monkeypatch.setattr(f"lastbit.integrations.{module}.PAUSE", 0.05)
    made: drivers.Driver = importlib.import_module(f"tests.integrations.drivers.{request.param}").Driver(request)
    return made


@pytest.fixture
def producer(service_url: str) -> Iterator[drivers.Link]:
    with drivers.Link(service_url) as link:
        yield link


@pytest.fixture
def link(service_url: str) -> Iterator[drivers.Link]:
    """The worker's."""
    with drivers.Link(service_url) as link:
        yield link


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
