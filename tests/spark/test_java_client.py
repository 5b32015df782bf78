"""Java's own HTTP client, as a job on the JVM would use it: it offers HTTP/2 with each unencrypted request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lastbit import Client
from tests.spark.conftest import CONNECT

pytestmark = [
    pytest.mark.xdist_group("spark"),
    pytest.mark.skipif(CONNECT, reason="a client of Connect has no JVM"),
]


@pytest.mark.parametrize("chunked", [False, True])
def test_javas_http_client_can_ack(spark: Any, client: Client, chunked: bool) -> None:
    """Its requests have bodies with or without a length, and use one connection after the other."""
    batch = client.open(items=4, sealed=True)
    jvm = spark._jvm
    http = jvm.java.net.http
    java = http.HttpClient.newHttpClient()
    assert java.version().toString() == "HTTP_2"
    text = http.HttpResponse.BodyHandlers.ofString()

    def post(path: str, body: Any) -> tuple[int, Any]:
        content = http.HttpRequest.BodyPublishers.ofString(json.dumps(body))
        if chunked:
            content = http.HttpRequest.BodyPublishers.fromPublisher(content)
        request = http.HttpRequest.newBuilder(jvm.java.net.URI.create(client.url + path))
        answer = java.send(request.header("Content-Type", "application/json").POST(content).build(), text)
        return answer.statusCode(), json.loads(answer.body())

    for item in range(3):
        status, content_ = post("/v1/acks", {"items": [f"{batch.id}:0:{item}"]})
        assert (status, content_["applied"]) == (200, 1)
    status, content_ = post("/v1/failures", {"items": [f"{batch.id}:0:3"], "reason": "from Java"})
    assert (status, [completion["batch"] for completion in content_["completed"]]) == (200, [batch.id])
    status, content_ = post("/v1/batches", {"key": f"java-{chunked}", "items": 2})
    assert (status, content_["key"]) == (201, f"java-{chunked}")
