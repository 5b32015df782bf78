from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from lastbit import Client
from lastbit.integrations import sqs
from tests.support.aws import TestQueue

Consume = Callable[..., None]


class FailuresLost(httpx.HTTPTransport):
    """The network loses requests that store failures, and no others."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/failures":
            raise httpx.ConnectError("lost")
        return super().handle_request(request)


@pytest.fixture
def lastbit(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client:
        yield client


@pytest.fixture
def consume(lastbit: Client) -> Consume:
    """Consumes a queue until it is empty."""

    def run(queue: TestQueue, handle: Callable[[Any], object], **options: Any) -> None:
        options = {"wait_seconds": 0, "until_empty": True, "lastbit": lastbit, **options}
        sqs.consume(queue.client, queue.url, handle, **options)

    return run
