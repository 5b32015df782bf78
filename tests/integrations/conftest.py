"""When LASTBIT_MUTANT names a mutant, the code is broken before the tests import it (see
`tests.mutants`)."""

from __future__ import annotations

import importlib
import pkgutil
import uuid
from collections.abc import Iterator
from typing import Any

import confluent_kafka
import pika
import pytest
import redis as redis_py

from lastbit import Client, tokens
from lastbit.tokens import Role
from tests import mutants
from tests.integrations import drivers
from tests.support.aws import Moto
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
    driver: drivers.Driver = importlib.import_module(f"tests.integrations.drivers.{request.param}").Driver(request)
    return driver


@pytest.fixture
def real_queue(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, str]]:
    """A new queue of the adapter with this name, as `queues.QUEUES` has it: that name, the broker's address, and the
    queue's name."""
    adapter, name = request.param, str(uuid.uuid4())
    if adapter in ("aws_lambda", "sqs"):
        moto: Moto = request.getfixturevalue("moto")
        yield adapter, moto.url, moto.queue(visibility=5).url
    elif adapter == "kafka":
        owner = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
        brokers = owner.list_topics(timeout=30).brokers.values()
        yield adapter, ",".join(f"{broker.host}:{broker.port}" for broker in brokers), name
        owner.flush(0)  # the cluster lives as long as its owner
    elif adapter in ("celery", "rabbitmq"):
        url = request.getfixturevalue("rabbitmq").url
        if adapter == "rabbitmq":
            with pika.BlockingConnection(pika.URLParameters(url)) as connection:
                connection.channel().queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
        yield adapter, url, name
    else:
        yield adapter, request.getfixturevalue("redis").url(0), name


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
