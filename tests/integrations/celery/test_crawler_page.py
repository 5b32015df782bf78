"""docs/crawler.md: the crawl completes when every page is fetched, and with a worker that is killed in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis as redis_py

from lastbit import Client
from tests.integrations import workers
from tests.support.brokers import RabbitMQ, RedisServer
from tests.support.servers import ROOT
from tests.test_docs import blocks

PAGE = ROOT / "docs/crawler.md"
WORKER = ["celery", "-A", "crawl", "worker", "--loglevel", "INFO"]
PAGES = 300


@pytest.mark.timeout(300)
@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.xdist_group("rabbitmq"))])
def test_the_crawl_ends_when_each_page_is_fetched(
    broker: str,
    request: pytest.FixtureRequest,
    redis: RedisServer,
    celery_service: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With RabbitMQ, which delivers the messages of a dead worker at once, a worker is killed when a third is done."""
    monkeypatch.setenv("LASTBIT_URL", celery_service)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::UserWarning")  # run by root, as in a container
    store = redis_py.Redis.from_url(redis.url(6))
    store.flushdb()
    tasks, start = blocks(PAGE, "python")
    tasks = tasks.replace("redis://127.0.0.1:6379", redis.url(6))
    if broker == "rabbitmq":
        node: RabbitMQ = request.getfixturevalue("rabbitmq")
        tasks = tasks.replace("broker=REDIS", f"broker={node.url!r}")
    (tmp_path / "crawl.py").write_text(tasks)
    (tmp_path / "start.py").write_text(start)
    assert "\n" + " ".join(WORKER) + "\n" in PAGE.read_text()
    with (
        subprocess.Popen(
            [sys.executable, "start.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
            stdout=subprocess.PIPE,
            text=True,
        ) as producer,
        Client(celery_service) as client,
    ):
        if broker == "rabbitmq":
            with workers.running(*WORKER, prints=" ready.", folder=tmp_path) as killed:
                workers.wait_until(lambda: fetched(store) > PAGES // 3, "a third of the pages is fetched")
                killed.kill()
            assert fetched(store) < PAGES
        with workers.running(*WORKER, prints=" ready.", folder=tmp_path):
            output, _ = producer.communicate(timeout=120)
        assert output == blocks(PAGE, "text")[0]
        batch = next(client.batches(key="crawl"))  # the newest
        assert client.batch(batch.id).verify().ok


def fetched(store: redis_py.Redis) -> int:
    """The number of pages that the tasks have stored."""
    return sum(int(store.scard(key)) for key in store.keys("pages-*"))
