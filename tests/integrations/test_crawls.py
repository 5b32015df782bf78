"""Crawls whose producer and workers are killed at random, with each adapter: 10,000 pages, of which nobody knows in
advance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import killable
from tests.integrations.queues import QUEUES
from tests.support.servers import running_service, sqlite_file

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

IN_GROUPS = {
    name: pytest.param(name, marks=pytest.mark.xdist_group("rabbitmq")) if name in ("celery", "rabbitmq") else name
    for name in QUEUES
}


def check_exact(real_queue: tuple[str, str, str], role: str, folder: Path) -> None:
    with sqlite_file() as url, running_service(url) as service:
        killable.check_exact(*real_queue, service.url, folder, role=role, pause=3.0)


@pytest.mark.parametrize(
    "real_queue", [IN_GROUPS[name] for name in QUEUES if name not in ("kafka", "rabbitmq")], indirect=True
)
def test_handlers_that_add_to_their_batch_complete_it_exactly(real_queue: tuple[str, str, str], tmp_path: Path) -> None:
    """Never early: every page was handled. Those of Kafka and RabbitMQ are in `test_killed`."""
    check_exact(real_queue, "crawl", tmp_path)


@pytest.mark.parametrize("real_queue", IN_GROUPS.values(), indirect=True)
def test_handlers_that_open_batches_complete_the_first_one_exactly(
    real_queue: tuple[str, str, str], tmp_path: Path
) -> None:
    """Each level of pages in batches under the items of the level above: never early, as every page was handled."""
    check_exact(real_queue, "nest", tmp_path)
