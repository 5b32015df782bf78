"""Webhooks over HTTP: created, listed, tested, delivered by the embedded service, redelivered, deleted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook

from core.webhooks.addresses import NOT_PUBLIC
from tests.http.test_batches import code
from tests.support.receivers import Receiver, raw, receiving, status
from tests.support.servers import ROOT, ServiceProcess, running_service, sqlite_file


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A service that may send to this machine and retries almost at once."""
    settings = {
        "LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true",
        "LASTBIT_DISPATCHER_EVERY": "0.05",
        "LASTBIT_WEBHOOKS_TRIES": "3",
        "LASTBIT_WEBHOOKS_FIRST_DELAY": "0.01",
        "LASTBIT_WEBHOOKS_LONGEST_DELAY": "0.01",
        "LASTBIT_WEBHOOKS_TIMEOUT": "1",
    }
    with (
        sqlite_file() as url,
        running_service(url, **settings) as running,
        httpx.Client(base_url=running.url, timeout=30) as client,
    ):
        yield client


@pytest.fixture
def webhook(http: httpx.Client, receiver: Receiver) -> Iterator[dict[str, Any]]:
    """A webhook for the type `card.charged`."""
    webhook = http.post("/v1/webhooks", json={"url": receiver.url, "types": ["card.charged"]})
    assert webhook.status_code == 201, webhook.text
    receiver.secrets.append(webhook.json()["secret"])
    yield webhook.json()
    http.delete(f"/v1/webhooks/{webhook.json()['id']}")


def append(http: httpx.Client, id: str, **event: Any) -> int:
    events = {"events": [{"id": id, "type": "card.charged", **event}]}
    position: int = http.post("/v1/events", json=events).json()["events"][0]["position"]
    return position


def wait_for_state(http: httpx.Client, webhook: int, event: str, state: str) -> dict[str, Any]:
    """The delivery of the event, once it has that state; each poll is a round trip."""
    for _ in range(3000):
        for entry in http.get(f"/v1/webhooks/{webhook}/deliveries").json()["deliveries"]:
            if (entry["event"], entry["state"]) == (event, state):
                result: dict[str, Any] = entry
                return result
    raise AssertionError(f"{event} did not become {state}")


def test_a_secret_is_shown_once(http: httpx.Client, receiver: Receiver) -> None:
    """In the answer that creates the webhook, and in no other."""
    webhook = http.post("/v1/webhooks", json={"url": receiver.url, "label": "ö"})
    body = webhook.json()
    assert re.fullmatch(r"whsec_[A-Za-z0-9+/]{43}=", body["secret"])
    assert webhook.headers["location"] == f"/v1/webhooks/{body['id']}"
    assert webhook.headers["cache-control"] == "no-store"
    assert (body["types"], body["label"], body["state"]) == (None, "ö", "active")
    answer = http.get(f"/v1/webhooks/{body['id']}")
    assert answer.json() == {name: value for name, value in body.items() if name != "secret"}
    assert answer.json() in http.get("/v1/webhooks").json()["webhooks"]
    http.post(f"/v1/webhooks/{body['id']}/test")
    for path in (f"/{body['id']}", "", f"/{body['id']}/deliveries", f"/{body['id']}/nothing"):
        assert body["secret"][6:] not in http.get(f"/v1/webhooks{path}").text
    assert http.delete(f"/v1/webhooks/{body['id']}").status_code == 204
    assert code(http.delete(f"/v1/webhooks/{body['id']}")) == (404, "webhook_not_found")


def test_an_event_arrives_signed(http: httpx.Client, receiver: Receiver, webhook: dict[str, Any]) -> None:
    """Its id is the webhook-id, its body is the specification's envelope around the feed's event."""
    position = append(http, "order:1", key="ö", data={"cents": 100})
    (request,) = receiver.wait_for(1)
    assert request.valid
    assert request.id == "order:1"
    event = http.get("/v1/events", params={"after": position - 1, "limit": 1}).json()["events"][0]
    assert request.json == {"type": "card.charged", "timestamp": event["at"], "data": event}
    assert request.headers["content-type"] == "application/json"
    delivery = wait_for_state(http, webhook["id"], "order:1", "delivered")
    assert (delivery["webhook"], delivery["position"], delivery["attempts"]) == (webhook["id"], position, 1)
    assert delivery["next_attempt_at"] is None
    (attempt,) = delivery["log"]
    assert (attempt["status"], attempt["error"]) == (204, None)
    forgery = request.body.replace(b"100", b"999")
    with pytest.raises(Exception, match="signature"):
        Webhook(webhook["secret"]).verify(forgery, request.headers)


def test_a_batch_lists_its_deliveries(http: httpx.Client, receiver: Receiver) -> None:
    """For the batch's own events, newest first."""
    webhook = http.post("/v1/webhooks", json={"url": receiver.url, "types": ["batch.completed"]}).json()
    batch = http.post("/v1/batches", json={"sealed": True}).json()["id"]
    receiver.wait_for(1)
    wait_for_state(http, webhook["id"], f"batch:{batch}:completed", "delivered")
    (delivery,) = http.get(f"/v1/batches/{batch}/deliveries").json()["deliveries"]
    assert (delivery["webhook"], delivery["batch"], delivery["type"]) == (webhook["id"], batch, "batch.completed")
    assert code(http.get("/v1/batches/999999/deliveries")) == (404, "batch_not_found")
    http.delete(f"/v1/webhooks/{webhook['id']}")


def test_a_receiver_that_recovers_gets_the_event(
    http: httpx.Client, receiver: Receiver, webhook: dict[str, Any]
) -> None:
    """Each try has the same id and its own signature, and is in the log."""
    receiver.replies(status(500), raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"), status(200))
    append(http, "order:2")
    delivery = wait_for_state(http, webhook["id"], "order:2", "delivered")
    assert [(entry["status"], entry["error"]) for entry in delivery["log"]] == [
        (500, None),
        (200, "the connection was closed in the middle of the response"),
        (200, None),
    ]
    assert [(request.id, request.valid) for request in receiver.got] == [("order:2", True)] * 3


def test_a_dead_delivery_can_be_redelivered(http: httpx.Client, receiver: Receiver, webhook: dict[str, Any]) -> None:
    """After its last try only a redelivery sends it again: a single one, or all dead ones."""
    receiver.reply = status(307, Location="http://127.0.0.1:1/")
    position = append(http, "order:3")
    path = f"/v1/webhooks/{webhook['id']}"
    dead = wait_for_state(http, webhook["id"], "order:3", "dead")
    assert {entry["error"] for entry in dead["log"]} == {"a redirect, which is not followed"}
    assert len(dead["log"]) == 3
    assert http.get(f"{path}/deliveries?state=dead").json()["deliveries"] == [dead]
    assert http.get(f"{path}/deliveries?state=delivered").json()["deliveries"] == []
    receiver.reply = status(200)
    for count, body in enumerate(({}, {"position": position}, {"event": "order:3"}), 4):
        assert http.post(f"{path}/redeliver", json=body).json() == {"redelivered": 1}
        receiver.wait_for(count)
        while len(wait_for_state(http, webhook["id"], "order:3", "delivered")["log"]) < count:
            pass
    assert http.post(f"{path}/redeliver").json() == {"redelivered": 0}
    assert {delivery.id for delivery in receiver.got} == {"order:3"}


def test_a_slow_receiver_is_given_up_on(http: httpx.Client, receiver: Receiver, webhook: dict[str, Any]) -> None:
    """After the timeout, with a readable error."""
    finish = threading.Event()
    receiver.replies(lambda *_: finish.wait(30), status(200))  # type: ignore[arg-type, return-value]
    append(http, "order:4")
    delivery = wait_for_state(http, webhook["id"], "order:4", "delivered")
    finish.set()
    assert delivery["log"][0]["error"] == "no complete response within 1 s"


def test_a_410_disables_the_webhook(http: httpx.Client, receiver: Receiver, webhook: dict[str, Any]) -> None:
    """The webhook's state shows it, and a redelivery is refused."""
    receiver.reply = status(410)
    append(http, "order:5")
    wait_for_state(http, webhook["id"], "order:5", "dead")
    assert http.get(f"/v1/webhooks/{webhook['id']}").json()["state"] == "disabled"
    refusal = http.post(f"/v1/webhooks/{webhook['id']}/redeliver", json={"event": "order:5"})
    assert code(refusal) == (409, "webhook_disabled")


def test_a_test_is_sent_at_once_and_leaves_no_trace(
    http: httpx.Client, receiver: Receiver, webhook: dict[str, Any]
) -> None:
    """Signed, and answered with the receiver's response, good or bad."""
    before = http.get("/v1/events", params={"limit": 1000}).json()["next"]
    answer = http.post(f"/v1/webhooks/{webhook['id']}/test").json()
    (delivery,) = receiver.got
    assert delivery.valid
    assert (delivery.id, delivery.json["type"]) == (answer["event"], "webhook.test")
    assert delivery.json["data"]["data"] == {"webhook": webhook["id"]}
    assert (answer["delivered"], answer["status"], answer["error"]) == (True, 204, None)
    receiver.reply = status(500)
    answer = http.post(f"/v1/webhooks/{webhook['id']}/test").json()
    assert (answer["delivered"], answer["status"]) == (False, 500)
    assert http.get("/v1/events", params={"limit": 1000}).json()["next"] == before
    assert http.get(f"/v1/webhooks/{webhook['id']}/deliveries").json()["deliveries"] == []
    assert code(http.post("/v1/webhooks/999999/test")) == (404, "webhook_not_found")


def test_pages_go_back_in_time(http: httpx.Client, webhook: dict[str, Any]) -> None:
    """For webhooks and for deliveries; a cursor of another list is refused."""
    for number in range(5):
        append(http, f"page:{number}")
    wait_for_state(http, webhook["id"], "page:4", "delivered")
    path, listed, cursor = f"/v1/webhooks/{webhook['id']}/deliveries", [], None
    while True:
        params = {"limit": 2, **({"cursor": cursor} if cursor else {})}
        page = http.get(path, params=params).json()
        listed += [entry["event"] for entry in page["deliveries"]]
        if (cursor := page["next"]) is None:
            break
    assert listed == [f"page:{number}" for number in range(4, -1, -1)]
    cursor = http.get(path, params={"limit": 2}).json()["next"]
    other = http.post("/v1/webhooks", json={"url": webhook["url"]}).json()["id"]
    assert code(http.get("/v1/webhooks", params={"cursor": cursor})) == (422, "invalid_request")
    first = http.get("/v1/webhooks", params={"limit": 1}).json()
    assert [entry["id"] for entry in first["webhooks"]] == [other]
    second_page = http.get("/v1/webhooks", params={"limit": 1, "cursor": first["next"]}).json()
    assert [entry["id"] for entry in second_page["webhooks"]] == [webhook["id"]]
    http.delete(f"/v1/webhooks/{other}")


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "body.url"),
        ({"url": 7}, "body.url"),
        ({"url": ""}, "body.url"),
        ({"url": "ftp://example.com/"}, "body.url"),
        ({"url": "http://user:pw@example.com/"}, "body.url"),
        ({"url": "http://127.1/"}, "body.url"),
        ({"url": "http://example.com/" + "x" * 2048}, "body.url"),
        ({"url": "http://127.0.0.1/", "types": []}, "body.types"),
        ({"url": "http://127.0.0.1/", "types": ["a b"]}, "body.types[0]"),
        ({"url": "http://127.0.0.1/", "types": "a"}, "body.types"),
        ({"url": "http://127.0.0.1/", "label": "x" * 256}, "body.label"),
        ({"url": "http://127.0.0.1/", "secret": "mine"}, "body.secret"),
    ],
)
def test_a_bad_webhook_is_refused(http: httpx.Client, body: dict[str, Any], place: str) -> None:
    """With the location of the error, and nothing is created."""
    before = http.get("/v1/webhooks").json()
    refusal = http.post("/v1/webhooks", json=body)
    assert code(refusal) == (422, "invalid_request")
    assert refusal.json()["errors"][0]["place"] == place
    assert http.get("/v1/webhooks").json() == before


def test_a_bad_redelivery_is_refused(http: httpx.Client, webhook: dict[str, Any]) -> None:
    """Both a position and an id, neither of them, or an event without a delivery."""
    path = f"/v1/webhooks/{webhook['id']}/redeliver"
    for body in (
        *({"position": 1, "event": "x"}, {"position": 0}, {"position": "1"}, {"event": ""}, {"event": "a b"}),
        *({"position": 10**6}, {"event": "none"}, {"all": True}),
    ):
        assert code(http.post(path, json=body)) == (422, "invalid_request")
    assert code(http.post("/v1/webhooks/999999/redeliver")) == (404, "webhook_not_found")
    assert code(http.get(f"/v1/webhooks/{webhook['id']}/deliveries?state=late")) == (422, "invalid_request")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "169.254.169.254", "[::ffff:10.0.0.1]"])
def test_by_default_private_addresses_are_refused(sqlite_http: httpx.Client, host: str) -> None:
    """The error doesn't contain the resolved address. It names the setting that allows it."""
    refusal = sqlite_http.post("/v1/webhooks", json={"url": f"http://{host}:8000/"})
    assert code(refusal) == (422, "invalid_request")
    assert refusal.json()["detail"] == f"body.url: the host is {NOT_PUBLIC}"
    assert "LASTBIT_WEBHOOKS_ALLOW_PRIVATE=true in the service's environment" in refusal.json()["detail"]


def test_no_log_contains_a_secret() -> None:
    """At the lowest level, with successful and failed deliveries; a delivery under way at SIGTERM is recorded first."""
    environment = {
        **os.environ,
        "LASTBIT_LOG_LEVEL": "debug",
        "LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true",
        "LASTBIT_DISPATCHER_EVERY": "0.05",
    }
    with sqlite_file() as url, receiving() as receiver:
        service = ServiceProcess(url)
        command = [sys.executable, "-m", "api", "--port", str(service.port), "--database-url", url]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        service.process = process
        service.wait_until_ready()
        with httpx.Client(base_url=service.url, timeout=30) as client:
            secret = client.post("/v1/webhooks", json={"url": receiver.url}).json()["secret"]
            receiver.replies(status(200), status(500))
            append(client, "one")
            append(client, "two")
            receiver.wait_for(2)
        process.terminate()
        output = process.communicate(timeout=60)[0].decode()
    log_lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    deliveries = [line for line in log_lines if line["event"] == "delivery"]
    assert {line["webhook_id"] for line in deliveries} == {"one", "two"}
    assert {200, 500} <= {line["status"] for line in deliveries}
    assert secret[6:] not in output


def test_a_callback_arrives_signed_and_is_found_by_its_batch(http: httpx.Client, receiver: Receiver) -> None:
    """Its secret is in the answer of the open and in its replay alone."""
    body = {"items": 1, "sealed": True, "callback": {"url": receiver.url}}
    first, again = (http.post("/v1/batches", json=body, headers={"Idempotency-Key": "called"}) for _ in range(2))
    batch, callback = first.json()["id"], first.json()["callback"]
    assert again.json()["callback"] == callback
    assert again.headers["idempotency-replayed"] == "true"
    assert {answer.headers["cache-control"] for answer in (first, again)} == {"no-store"}
    receiver.secrets.append(callback["secret"])
    http.post("/v1/acks", json={"items": [f"{batch}:0:0"]})
    wait_for_state(http, callback["id"], f"batch:{batch}:completed", "delivered")
    wait_for_state(http, callback["id"], f"batch:{batch}:succeeded", "delivered")
    assert {post.id for post in receiver.wait_for(2)} == {f"batch:{batch}:completed", f"batch:{batch}:succeeded"}
    assert all(post.valid for post in receiver.got)
    document = http.get(f"/v1/batches/{batch}/callback").json()["callback"]
    assert document == http.get(f"/v1/webhooks/{callback['id']}").json()
    assert (document["batch"], document["types"], "secret" in document) == (batch, callback["types"], False)
    assert callback["id"] not in {entry["id"] for entry in http.get("/v1/webhooks").json()["webhooks"]}
    assert http.post(f"/v1/webhooks/{callback['id']}/test", json={}).json()["delivered"]
    http.delete(f"/v1/batches/{batch}")
    assert code(http.get(f"/v1/batches/{batch}/callback")) == (404, "batch_not_found")
    assert code(http.get(f"/v1/webhooks/{callback['id']}")) == (404, "webhook_not_found")
