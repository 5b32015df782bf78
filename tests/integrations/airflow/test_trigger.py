"""The trigger by itself: it survives its triggerer, and costs little."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib import import_module
from typing import Any

from lastbit import Client
from lastbit.integrations.airflow import LastbitBatchTrigger, clients
from tests.integrations.airflow.conftest import ROOT, Service

TRIGGERER = """
import asyncio, json, sys
from importlib import import_module
path, arguments = json.loads(sys.argv[1])
module, _, name = path.rpartition(".")
async def fire():
    async for event in getattr(import_module(module), name)(**arguments).run():
        return event.payload
print(json.dumps(asyncio.run(fire())))
"""


def triggerer(serialized: Any) -> subprocess.Popen[str]:
    """A process that runs a trigger from what Airflow stores of it, as each triggerer does."""
    command = [sys.executable, "-c", TRIGGERER, json.dumps(serialized)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_killed_triggerer_loses_nothing(client: Client, service: Service) -> None:
    """The batch ends between two triggerers: the first one is killed while it waits, the second one reports the end."""
    batch = client.open(key="orphan", items=2, sealed=True)
    serialized = LastbitBatchTrigger(batch_key="orphan").serialize()
    service.forget_answers()
    first = triggerer(serialized)
    service.wait_for_answers("/v1/batches", 1)
    first.kill()
    first.communicate(timeout=60)
    client.ack(batch.ids)
    output, _ = triggerer(serialized).communicate(timeout=60)
    assert json.loads(output.splitlines()[-1])["batch"]["acked"] == 2


def test_its_arguments_are_its_whole_state() -> None:
    """A trigger made from them has the same ones."""
    path, arguments = LastbitBatchTrigger(None, "key", "2026-11-25T00:00:00+00:00", "other", 0.5).serialize()
    module, _, name = path.rpartition(".")
    assert getattr(import_module(module), name)(**arguments).serialize() == (path, arguments)


def test_many_triggers_share_few_clients(client: Client, service: Service) -> None:
    """150 triggers wait for one batch with two clients. All of them fire, and then no client is left."""
    batch = client.open(items=1, sealed=True)
    number = clients.USERS + 50

    async def fire() -> dict[str, Any]:
        async for event in LastbitBatchTrigger(batch.id).run():
            payload: dict[str, Any] = event.payload
        return payload

    async def wait_for_all() -> list[dict[str, Any]]:
        tasks = [asyncio.create_task(fire()) for _ in range(number)]
        await asyncio.to_thread(service.wait_for_answers, f"/v1/batches/{batch.id}", number)
        assert [shared.users for shared in clients._open] == [clients.USERS, 50]
        await asyncio.to_thread(client.ack, batch.ids)
        return await asyncio.gather(*tasks)

    service.forget_answers()
    payloads = asyncio.run(wait_for_all())
    assert [payload["batch"]["acked"] for payload in payloads] == [1] * number
    assert clients._open == []


def test_a_cancelled_trigger_closes_its_connection(client: Client, service: Service) -> None:
    """As after `Mark success` in Airflow."""
    batch = client.open(items=1)

    async def cancel() -> None:
        task = asyncio.create_task(anext(LastbitBatchTrigger(batch.id).run()))
        await asyncio.to_thread(service.wait_for_answers, f"/v1/batches/{batch.id}", 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert clients._open == []

    service.forget_answers()
    asyncio.run(cancel())


def test_an_error_that_does_not_pass_ends_the_trigger(service: Service) -> None:
    """A batch that was deleted: the task fails with the service's answer."""

    async def fire() -> Any:
        return (await anext(LastbitBatchTrigger(10**9).run())).payload

    assert "404 batch_not_found" in asyncio.run(fire())["error"]
