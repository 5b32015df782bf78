"""More acks than can be committed: accepted acks are durable, the others are refused, and nothing piles up."""

from __future__ import annotations

import contextlib
import json
import select
import socket

import httpx
import pytest

from bench import load
from core.storage import schema
from core.storage.database import Database
from lastbit import Client
from tests.support.proxies import proxied
from tests.support.servers import MariaDB, running_service

CROWD = 300
MAX_WAITING = 200
"""Acks that may wait; those above are refused at once."""

pytestmark = [pytest.mark.mariadb, pytest.mark.timeout(300)]


Answer = tuple[int, dict[str, str], dict[str, object]]
"""Status, headers and body."""


def answer(connection: socket.socket) -> Answer:
    """The next answer on the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, content = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    while len(content) < int(headers["content-length"]):
        content += connection.recv(65536)
    return int(lines[0].split()[1]), headers, json.loads(content)


def test_every_call_of_a_crowd_is_answered_or_refused_with_retry_after(mariadb: MariaDB, mariadb_url: str) -> None:
    """The database stands still while all calls arrive. Calls above the bound are refused meanwhile; when it runs
    again, the queue may be shortened. An item is acked if its call got a 200 and pending if it got a 503; then all
    refused calls are sent again."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with proxied(mariadb.port) as proxy, contextlib.ExitStack() as stack:
        url = mariadb_url.replace(f":{mariadb.port}/", f":{proxy.port}/")
        running = stack.enter_context(
            running_service(url, LASTBIT_SHED_AFTER="0.0001", LASTBIT_MAX_WAITING_ACKS=str(MAX_WAITING))
        )
        client = stack.enter_context(httpx.Client(base_url=running.url, timeout=60))
        batch = client.post("/v1/batches", json={"items": CROWD + 1, "sealed": True}).json()["id"]
        client.post("/v1/acks", json={"items": [f"{batch}:0:{CROWD}"]})
        crowd = [stack.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(CROWD)]
        proxy.fall_silent()
        try:
            for number, entry in enumerate(crowd):
                entry.settimeout(60)
                entry.sendall(load.encoded("/v1/acks", {"items": [f"{batch}:0:{number}"]}))
            early_answers: list[socket.socket] = []
            while len(early_answers) < CROWD - MAX_WAITING:
                early_answers, _, _ = select.select(crowd, [], [], 60)
        finally:
            proxy.speak()
        answers = [answer(entry) for entry in crowd]
        assert {status for status, _, _ in answers} == {200, 503}
        for status, headers, content in answers:
            if status == 503:
                assert (content["code"], headers["retry-after"]) == ("unavailable", "1")
                assert headers["content-type"] == "application/problem+json"
                assert headers["x-request-id"]
        refused_numbers = {number for number, (status, _, _) in enumerate(answers) if status == 503}
        # Waiting calls may be refused too, if there are more than can be committed soon.
        assert len(refused_numbers) >= CROWD - MAX_WAITING
        ranges = client.get(f"/v1/batches/{batch}/pending", params={"limit": 1000}).json()["ranges"]
        assert {number for entry in ranges for number in range(entry["start"], entry["end"])} == refused_numbers
        with Client(running.url) as sdk, sdk.acker() as acker:
            second = [acker.ack(f"{batch}:0:{number}") for number in refused_numbers]
            replies = [future.result(60) for future in second]
        assert replies[-1] is not None
        verification = client.get(f"/v1/batches/{batch}/verify").json()
        assert (verification["ok"], verification["acked"], verification["pending"]) == (True, CROWD + 1, 0)
        counted = client.get("/metrics").text
        assert f'lastbit_refused_total{{cause="acks"}} {len(refused_numbers)}.0' in counted
