"""Adapters that are given a `lastbit.embedded.Lastbit` for a client, while no request is sent to the service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lastbit import Client, Completed
from lastbit.embedded import Lastbit
from lastbit.integrations import Failed
from tests.integrations.drivers import Driver, EmbeddedLink


@pytest.fixture
def link(service_url: str, service_database: str) -> Iterator[EmbeddedLink]:
    """On the database of a service, which shows what the adapters have done."""
    with Lastbit(service_database) as lastbit:
        yield EmbeddedLink(lastbit)


def test_each_adapter_takes_one_for_a_client(driver: Driver, link: EmbeddedLink, client: Client) -> None:
    """Producer and worker; also for a redrive."""
    bodies = ["returns", "fails", "returns too"]
    completed: list[Completed] = []
    fails = True

    def handle(body: str) -> None:
        if body == "fails" and fails:
            raise Failed("no such picture")

    batch = client.batch(driver.send(link, bodies).id)
    driver.work(link, handle, lambda: batch.refresh().complete, completed.append)
    assert (batch.info.acked, batch.info.failed) == (2, 1)
    fails = False
    redrives = client.redrives(after=batch.redrive().position - 1, batch=batch.id)
    assert driver.resend(link, next(redrives), bodies) == 1
    driver.work(link, handle, lambda: batch.refresh().acked == 3, completed.append)
    assert batch.info.succeeded
    assert driver.left() == 0
    assert {completion.batch for completion in completed} == ({batch.id} if driver.reports else set())
