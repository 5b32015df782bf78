from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from lastbit import Client
from tests.integrations.celery.workers import Place
from tests.support.aws import Moto
from tests.support.servers import running_service, sqlite_file


@pytest.fixture(scope="session")
def celery_service() -> Iterator[str]:
    """The URL of a service for all tests of the adapter."""
    with sqlite_file() as database, running_service(database) as service:
        yield service.url


@pytest.fixture(scope="session")
def broker_url(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """The URL of the broker of this name. RabbitMQ takes ten seconds to start, so its tests are slow ones."""

    def url(name: str) -> str:
        if name == "sqs":
            return cast(Moto, request.getfixturevalue("moto")).url.replace("http://", "sqs://test:test@")
        server = request.getfixturevalue(name)
        return server.url(3) if name == "redis" else server.url

    return url


@pytest.fixture(scope="session")
def new_place(request: pytest.FixtureRequest, celery_service: str, broker_url: Callable[[str], str]) -> Any:
    """Makes a queue on the broker of this name."""
    redis = request.getfixturevalue("redis")

    def make(broker: str = "redis", *, service_url: str = celery_service, **arguments: Any) -> Place:
        return Place(broker_url(broker), redis.url(3), service_url, **arguments)

    return make


@pytest.fixture
def client(celery_service: str) -> Iterator[Client]:
    with Client(celery_service) as client:
        yield client
