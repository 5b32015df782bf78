"""Webhooks through the client and the command line, with a real service and a real receiver."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook as Verifier

from lastbit import (
    AsyncClient,
    Callback,
    Client,
    IdempotencyKeyReused,
    InvalidArgument,
    InvalidRequest,
    Retry,
    ServiceUnreachable,
    WebhookNotFound,
)
from lastbit.cli.faults import explained
from lastbit.webhooks import Webhook
from tests.support.receivers import Receiver, status
from tests.support.servers import run_module, running_service, sqlite_file


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = {
        "LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true",
        "LASTBIT_DISPATCHER_EVERY": "0.05",
        "LASTBIT_WEBHOOKS_TRIES": "1",
    }
    with sqlite_file() as database, running_service(database, **settings) as running:
        yield running.url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


def append(url: str, id: str) -> int:
    receipt = httpx.post(f"{url}/v1/events", json={"events": [{"id": id, "type": "card.charged"}]}).json()
    position: int = receipt["events"][0]["position"]
    return position


def settle(client: Client, webhook: int) -> list[Any]:
    while any(client.webhooks.deliveries(webhook, state="pending")):
        pass
    return list(client.webhooks.deliveries(webhook, page_size=2))


def test_a_webhook_from_its_creation_to_its_end(url: str, client: Client, receiver: Receiver) -> None:
    """Created, tested, delivered, dead, redelivered, deleted."""
    new_webhook = client.webhooks.create(receiver.url, types=["card.charged"], label="books")
    receiver.secrets.append(new_webhook.secret)
    assert new_webhook.secret not in repr(new_webhook)
    webhook = client.webhooks.get(new_webhook.id)
    assert webhook == Webhook(**{field.name: getattr(new_webhook, field.name) for field in fields(Webhook)})
    assert webhook in list(client.webhooks.list(page_size=1))
    outcome = client.webhooks.test(webhook.id)
    assert (outcome.delivered, outcome.status) == (True, 204)
    append(url, "one")
    receiver.wait_for(2)
    receiver.reply = status(500)
    append(url, "two")
    position = append(url, "three")
    receiver.wait_for(4)
    deliveries = settle(client, webhook.id)
    assert [(delivery.event, delivery.state, delivery.log[0].status) for delivery in deliveries] == [
        *(("three", "dead", 500), ("two", "dead", 500), ("one", "delivered", 204)),
    ]
    receiver.reply = status(200)
    assert client.webhooks.redeliver(webhook.id, position=position) == 1
    assert client.webhooks.redeliver(webhook.id, event="one") == 1
    receiver.wait_for(6)
    assert [delivery.state for delivery in settle(client, webhook.id)] == ["delivered", "dead", "delivered"]
    assert client.webhooks.redeliver(webhook.id) == 1
    receiver.wait_for(7)
    assert all(request.valid for request in receiver.got)
    client.webhooks.delete(webhook.id)
    with pytest.raises(WebhookNotFound):
        client.webhooks.get(webhook.id)


def test_a_secret_is_rotated(client: Client, receiver: Receiver) -> None:
    """The receiver accepts messages with either secret, and a repeat returns the same one."""
    created = client.webhooks.create(receiver.url)
    assert created.overlap_until is None
    rotated = client.webhooks.rotate_secret(created.id, overlap=timedelta(hours=1), idempotency_key="may")
    assert rotated.secret not in {created.secret, *repr(rotated).split("'")}
    assert rotated.overlap_until is not None
    assert client.webhooks.rotate_secret(created.id, overlap=3600, idempotency_key="may") == rotated
    assert client.webhooks.get(created.id).overlap_until == rotated.overlap_until
    receiver.secrets[:] = [created.secret]
    assert client.webhooks.test(created.id).delivered
    receiver.secrets[:] = [rotated.secret]
    assert client.webhooks.test(created.id).delivered
    assert [request.valid for request in receiver.got] == [True, True]
    assert client.webhooks.rotate_secret(created.id, overlap=0).overlap_until is None
    assert client.webhooks.test(created.id).delivered
    assert not receiver.got[-1].valid
    client.webhooks.rotate_secret(created.id, idempotency_key="june")
    with pytest.raises(IdempotencyKeyReused):
        client.webhooks.rotate_secret(created.id, overlap=7, idempotency_key="june")
    with pytest.raises(InvalidRequest, match="overlap_seconds"):
        client.webhooks.rotate_secret(created.id, overlap=timedelta(days=8))
    with pytest.raises(WebhookNotFound):
        client.webhooks.rotate_secret(10**6)
    client.webhooks.delete(created.id)


def test_the_async_client_does_the_same(url: str, receiver: Receiver) -> None:
    """With await."""

    async def run() -> None:
        async with AsyncClient(url) as client:
            webhook = await client.webhooks.create(receiver.url)
            assert (await client.webhooks.get(webhook.id)).types is None
            assert webhook.id in [item.id async for item in client.webhooks.list()]
            assert (await client.webhooks.test(webhook.id)).delivered
            assert [item async for item in client.webhooks.deliveries(webhook.id)] == []
            assert await client.webhooks.redeliver(webhook.id) == 0
            assert (await client.webhooks.rotate_secret(webhook.id)).secret != webhook.secret
            await client.webhooks.delete(webhook.id)

    asyncio.run(run())


def test_invalid_arguments_are_refused(client: Client) -> None:
    """By the client if it can detect it, otherwise by the service."""
    with pytest.raises(InvalidArgument, match="list of names"):
        client.webhooks.create("http://127.0.0.1/", types="card.charged")
    with pytest.raises(InvalidArgument, match="webhook id"):
        client.webhooks.get("7")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="https"):
        client.webhooks.create("ftp://127.0.0.1/")


def test_creating_a_webhook_is_not_retried(scripted_service: Any) -> None:
    """A retry could create a second webhook, whose secret nobody received and which would never stop. The error doesn't
    invite to one."""
    scripted_service.replies(None)
    client = Client(scripted_service.url, retry=Retry(attempts=5, deadline=30))
    with pytest.raises(ServiceUnreachable, match="check that before you send it again") as error_info:
        client.webhooks.create("http://127.0.0.1/")
    assert not error_info.value.repeatable
    assert "check that before you send it again" in explained(error_info.value)
    assert len(scripted_service.seen) == 1


def test_the_command_line(url: str, receiver: Receiver) -> None:
    """As text and as JSON; a failed test is exit code 3."""

    def lastbit(*arguments: str, code: int = 0) -> str:
        environment = {**os.environ, "LASTBIT_URL": url, "COLUMNS": "120", "NO_PROXY": "*"}
        result = run_module("lastbit", "webhooks", *arguments, environment=environment)
        assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr
        return result.stdout

    text = lastbit("create", receiver.url, "--type", "card.charged", "--label", "[red]books")
    secret = text.split("secret ")[1].split()[0]
    Verifier(secret)
    webhook = text.split("webhook ")[1].split()[0]
    assert "[red]books" in text
    text = lastbit("list")
    assert receiver.url in text
    assert secret not in text
    assert json.loads(lastbit("list", "--json"))["webhooks"][0]["types"] == ["card.charged"]
    text = lastbit("rotate-secret", webhook, "--overlap", "2h")
    assert text.split("secret ")[1].split()[0] != secret
    assert "Earlier secrets sign until" in text
    assert json.loads(lastbit("rotate-secret", webhook, "--overlap", "0", "--json"))["overlap_until"] is None
    assert "delivered: 204" in lastbit("test", webhook)
    receiver.reply = status(500)
    assert json.loads(lastbit("test", webhook, "--json", code=3))["status"] == 500
    append(url, "cli:1")
    receiver.wait_for(3)
    with Client(url) as client:
        settle(client, int(webhook))
    assert "dead, 1 attempt, last 500" in lastbit("deliveries", webhook, "--state", "dead")
    assert json.loads(lastbit("deliveries", webhook, "--json"))["deliveries"][0]["event"] == "cli:1"
    assert "1 due again" in lastbit("redeliver", webhook, "--event", "cli:1")
    assert json.loads(lastbit("redeliver", webhook, "--position", "999999", "--json", code=2) or "null") is None
    lastbit("redeliver", webhook, "--event", "cli:1", "--position", "1", code=2)
    assert json.loads(lastbit("create", receiver.url, "--json"))["secret"].startswith("whsec_")
    assert "deleted" in lastbit("delete", webhook)
    lastbit("delete", webhook, code=1)
    lastbit("delete", "x", code=2)


def test_a_batch_is_opened_with_a_callback(client: Client, url: str, receiver: Receiver) -> None:
    """By a URL, or by a `Callback` with types; by both clients and the command line. The handle has the secret."""
    batch = client.open(items=1, sealed=True, callback=receiver.url)
    assert batch.callback is not None
    assert batch.callback.secret not in repr(batch.info)
    receiver.secrets.append(batch.callback.secret)
    client.ack(batch.ids)
    assert {post.id for post in receiver.wait_for(2)} == {f"batch:{batch.id}:completed", f"batch:{batch.id}:succeeded"}
    assert all(post.valid for post in receiver.got)
    assert client.webhooks.get(batch.callback.id).batch == batch.id
    assert client.open().callback is None

    async def open_with(types: str | tuple[str, ...]) -> tuple[str, ...]:
        async with AsyncClient(url) as other:
            output = await other.open(callback=Callback(receiver.url, types))
            assert output.callback is not None
            return output.callback.types

    assert asyncio.run(open_with("batch.failures_exceeded")) == ("batch.failures_exceeded",)
    assert asyncio.run(open_with(("batch.sealed", "batch.repaired"))) == ("batch.repaired", "batch.sealed")
    command = ("open", "--url", url, "--callback", receiver.url, "--callback-type", "batch.sealed")
    output = json.loads(run_module("lastbit", "--json", *command).stdout)
    assert output["callback"]["types"] == ["batch.sealed"]
    text = run_module("lastbit", *command).stdout
    assert "secret whsec_" in text
    assert run_module("lastbit", "open", "--url", url, "--callback-type", "batch.sealed").returncode == 2
