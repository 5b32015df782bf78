"""`examples.django_shop` as its user runs it: parcels are sent twice, and a worker is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from redis import Redis

from tests.integrations import workers
from tests.support.brokers import RedisServer
from tests.support.postgresql import PostgreSQL
from tests.support.servers import ROOT

PARCELS = [f"parcel-{number}" for number in range(60)]
WORKER = ["celery", "-A", "examples.django_shop.tasks", "worker", "--loglevel", "INFO", "--concurrency", "2"]


def django_admin(folder: Path, *words: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "django", *words], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_each_parcel_is_charged_once(
    kind: str, request: pytest.FixtureRequest, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "examples.django_shop.settings")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::UserWarning")  # run by root, as in a container
    redis_url = redis.url(7 if kind == "sqlite" else 8)
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    url = f"sqlite:///{tmp_path}/shop.db"
    if kind == "postgresql":
        server: PostgreSQL = request.getfixturevalue("postgresql")
        url = server.new_database()
        monkeypatch.setenv("DATABASE_URL", url)
    django_admin(tmp_path, "migrate")
    django_admin(tmp_path, "makemigrations", "--check")
    assert django_admin(tmp_path, "place_order", *PARCELS) == "order 1"
    assert django_admin(tmp_path, "send_parcels", "1") == f"{len(PARCELS)} sent, 0 charged"
    with workers.running(*WORKER, prints="succeeded in", folder=tmp_path):
        pass  # it is killed, with the messages that it has fetched
    django_admin(tmp_path, "send_parcels", "1")
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))

    def charges() -> list[str]:
        with engine.connect() as tx:
            return sorted(tx.scalars(sa.text("SELECT parcel FROM django_shop_charge")))

    with Redis.from_url(redis_url) as queue, workers.running(*WORKER, prints=" ready.", folder=tmp_path):
        workers.wait_until(lambda: len(charges()) >= len(PARCELS), "all are charged")
        workers.wait_until(lambda: queue.llen("celery") == 0, "the repeats are handled")
    assert django_admin(tmp_path, "send_parcels", "1") == f"0 sent, {len(PARCELS)} charged"
    assert charges() == sorted(PARCELS)
    engine.dispose()
