"""`examples.fastapi_shop` as its user runs it: parcels are sent twice, and a consumer is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.integrations.workers import wait_until
from tests.support.aws import CREDENTIALS, Moto
from tests.support.postgresql import PostgreSQL
from tests.support.servers import ROOT, free_port, wait_until_it_prints

PARCELS = [f"parcel-{number}" for number in range(60)]


@pytest.mark.nightly
def test_each_parcel_is_charged_once(postgresql: PostgreSQL, moto: Moto) -> None:
    url = postgresql.new_database().replace("postgresql:", "postgresql+psycopg:")
    environment = {**os.environ, **CREDENTIALS, "DATABASE_URL": url, "AWS_ENDPOINT_URL": moto.url}
    processes = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    engine = sa.create_engine(url)

    def charges() -> list[str]:
        with engine.connect() as tx:
            return sorted(tx.scalars(sa.text("SELECT parcel FROM charges")))

    port = str(free_port())
    orders = f"http://127.0.0.1:{port}/orders"
    queue = moto.client()
    try:
        wait_until_it_prints(start("uvicorn", "examples.fastapi_shop.api:app", "--port", port), "startup complete")
        assert httpx.post(orders, json=PARCELS, timeout=60).json() == {"order": 1, "sent": len(PARCELS)}
        assert httpx.post(f"{orders}/1/send", timeout=60).json()["sent"] == len(PARCELS)
        killed = start("examples.fastapi_shop.consumer")
        wait_until(charges, "a parcel is charged")
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
        httpx.post(f"{orders}/1/send", timeout=60)
        for _ in range(2):
            start("examples.fastapi_shop.consumer")
        wait_until(lambda: httpx.get(f"{orders}/1", timeout=60).json()["state"] == "complete", "the order is complete")
        queue_url = queue.get_queue_url(QueueName="lastbit-parcels")["QueueUrl"]
        wait_until(lambda: not waiting(queue, queue_url), "the repeats are handled")
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=60)
    assert charges() == sorted(PARCELS)
    engine.dispose()


def waiting(queue: Any, url: str) -> int:
    """Messages that no consumer has received yet."""
    names = ["ApproximateNumberOfMessages"]
    attributes = queue.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
    return int(attributes[names[0]])
