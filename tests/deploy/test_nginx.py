"""The nginx example, run: TLS, acks, long polls and the stream of events pass through it to a real service."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.conftest import need
from tests.support import nginx
from tests.support.servers import ServiceProcess, free_port, running_service, sqlite_file


@dataclass(frozen=True)
class Front:
    """nginx with the example's configuration, except for ports, certificate and addresses."""

    https: int
    http: int
    certificates: ssl.SSLContext
    service: ServiceProcess

    @property
    def url(self) -> str:
        return f"https://localhost:{self.https}"

    def client(self, timeout: float = 20) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self.certificates, timeout=timeout)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    need("nginx", nginx.PROGRAM is not None)
    folder = tmp_path_factory.mktemp("nginx")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", folder / "lastbit.key", "-out", folder / "lastbit.pem"),
        ],
        check=True,
        capture_output=True,
    )
    https, http = free_port(), free_port()
    with sqlite_file() as url, running_service(url) as service:
        replacements = {
            "server 127.0.0.1:8000;": f"server 127.0.0.1:{service.port};",
            "listen 80;": f"listen 127.0.0.1:{http};",
            "    listen [::]:80;\n": "",
            "listen 443 ssl http2;": f"listen 127.0.0.1:{https} ssl http2;",
            "    listen [::]:443 ssl http2;\n": "",
            "/etc/nginx/tls/lastbit.pem": f"{folder}/lastbit.pem",
            "/etc/nginx/tls/lastbit.key": f"{folder}/lastbit.key",
        }
        with nginx.running_nginx(folder, nginx.example("lastbit.conf", replacements), https):
            certificates = ssl.create_default_context(cafile=folder / "lastbit.pem")
            yield Front(https, http, certificates, service)


def append(client: httpx.Client, name: str) -> int:
    response = client.post("/v1/events", json={"events": [{"id": name, "type": "test"}]})
    return int(response.json()["events"][0]["position"])


def test_plain_http_is_sent_to_https(front: Front) -> None:
    response = httpx.get(f"http://127.0.0.1:{front.http}/docs?a=1", headers={"Host": "lastbit.example"})
    assert (response.status_code, response.headers["location"]) == (301, "https://lastbit.example/docs?a=1")


def test_acks_from_a_page_of_the_same_site_pass(front: Front) -> None:
    """The service compares Origin with Host, including the port."""
    with front.client() as client:
        batch = client.post("/v1/batches", json={"key": "acks", "items": 2, "sealed": True}).json()["id"]
        for index, origin in enumerate([front.url, "https://elsewhere.example"]):
            response = client.post("/v1/acks", json={"items": [f"{batch}:0:{index}"]}, headers={"Origin": origin})
            assert response.status_code == (200 if origin == front.url else 403), response.text
        assert response.headers["strict-transport-security"] == "max-age=31536000"


def test_bodies_up_to_the_limit_pass_and_larger_ones_get_the_service_s_own_answer(front: Front) -> None:
    """Not a page of nginx, and not a 502, after which clients would send the body again."""
    body, limit = b'{"items": ["1:0:0"]}', 8 * 2**20
    headers = {"Content-Type": "application/json"}
    with front.client() as client:
        assert client.post("/v1/acks", content=body.ljust(limit), headers=headers).status_code == 200
        answers = [
            httpx.post(f"{url}/v1/acks", content=body.ljust(limit + 1), headers=headers, verify=front.certificates)
            for url in (front.url, front.service.url)
        ]
    for answer in answers:
        assert answer.status_code == 413
        assert answer.headers["content-type"] == "application/problem+json"
    assert answers[0].json() == answers[1].json()


def test_a_long_poll_is_answered_when_its_event_comes(front: Front) -> None:
    with front.client(timeout=40) as client, ThreadPoolExecutor(1) as pool:
        start = append(client, "before-the-poll")

        def poll() -> tuple[list[str], float]:
            with front.client(timeout=40) as other:
                events = other.get(f"/v1/events?after={start}&wait=30").json()["events"]
                return [event["id"] for event in events], time.monotonic()

        waiting = pool.submit(poll)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        sent_at = time.monotonic()
        append(client, "for-the-poll")
        ids, received = waiting.result(timeout=20)
        assert ids == ["for-the-poll"]
        assert received - sent_at < 5


@pytest.mark.slow
def test_the_longest_poll_is_not_cut(front: Front) -> None:
    """By default nginx gives up on a silent server after 60 seconds, which is also the longest poll."""
    with front.client(timeout=90) as client:
        last = client.get("/v1/events").json()["last"]
        response = client.get(f"/v1/events?after={last}&wait=60")
    assert (response.status_code, response.json()["events"]) == (200, [])
    assert response.elapsed.total_seconds() > 59


def test_a_streams_event_arrives_at_once_and_the_stream_can_be_resumed(front: Front) -> None:
    with front.client() as client, front.client() as reader:
        start = append(client, "before-the-stream")
        with reader.stream("GET", f"/v1/events/stream?after={start}") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.iter_lines()
            for name in ("first", "second"):
                sent_at = time.monotonic()
                position = append(client, name)
                assert next_event(lines) == (position, name)
                assert time.monotonic() - sent_at < 5
        missed = append(client, "third")
        with reader.stream("GET", "/v1/events/stream", headers={"Last-Event-ID": str(position)}) as stream:
            assert next_event(stream.iter_lines()) == (missed, "third")


def next_event(lines: Iterator[str]) -> tuple[int, str]:
    """The next event of the stream. The stream sends a comment every 15 seconds, so the deadline is checked."""
    position, deadline = 0, time.monotonic() + 10
    for line in lines:
        assert time.monotonic() < deadline
        if line.startswith("id:"):
            position = int(line.removeprefix("id:"))
        if line.startswith("data:"):
            return position, json.loads(line.removeprefix("data:"))["id"]
    raise AssertionError("the stream ended")


def test_connections_to_the_service_are_kept(front: Front) -> None:
    """Each connection has its own port: many calls must use few."""
    with front.client() as client:
        for _ in range(30):
            assert client.get("/v1/batches").status_code == 200
    assert len(closed_connections(front.service.port)) < 10


def closed_connections(port: int) -> set[str]:
    """The remote ends of connections to a local port that exist or were closed in the last minute."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    here = f"0100007F:{port:04X}"
    return {row[1] if row[2] == here else row[2] for row in rows if here in (row[1], row[2])} - {"00000000:0000"}


def test_the_time_outs_of_nginx_and_of_the_service_fit() -> None:
    """nginx closes an idle connection first, and waits longer than any call."""
    from api.__main__ import KEEP_ALIVE

    text = (nginx.EXAMPLES / "lastbit.conf").read_text()
    (keep_alive,) = re.findall(r"keepalive_timeout (\d+)s;", text)
    assert int(keep_alive) < KEEP_ALIVE
    longest = 60
    assert {int(seconds) > longest for seconds in re.findall(r"proxy_read_timeout (\d+)s;", text)} == {True}
