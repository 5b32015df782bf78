"""Bad input gets a problem with a stable code that names its location, and changes nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from api.limits import sizes
from tests.http.test_batches import code, open_batch
from tests.mutants import mutant
from tests.support.servers import ROOT

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def http(sqlite_http: httpx.Client) -> httpx.Client:
    return sqlite_http


@pytest.mark.parametrize(
    "item",
    [
        *("7:0", "07:0:1", "7:0:-1", "7:0:1:2", "7:0:+1", "7:0:1 ", " 7:0:1", "7:0:1\n", "", "::", "7:0:", "7::1"),
        *("٧:0:1", "7:0:１", "7:0:1.0", "7:0:1e3", "0x7:0:1", "7:0:1_0", "7;0;1"),
        *(f"7:0:{10**30}", f"{2**53}:0:0", f"7:{2**53}:0", f"7:0:{2**53}", f"7:0:{'9' * 5000}", "\x00:0:0"),
    ],
)
def test_a_malformed_id_is_named(http: httpx.Client, item: str) -> None:
    """Exactly three decimal integers below 2^53, without leading zeros."""
    for route in ("acks", "failures"):
        response = http.post(f"/v1/{route}", json={"items": ["1:0:0", item]})
        assert code(response) == (422, "invalid_request")
        assert response.json()["errors"][0]["place"] == "body.items[1]"


@pytest.mark.parametrize(
    ("query", "places"),
    [
        ("batches?state=open&state=sealed", ["query.state"]),
        ("batches?key=a&limit=5&key=a&label=a:1&label=b:2&limit=6", ["query.key", "query.limit"]),
        ("batches?key=&key=", ["query.key"]),
        ("events?after=0&%61fter=0", ["query.after"]),
        ("batches?label=a:1&label=b:2&key=a", []),
        ("events?after=0&type=a&type=b", []),
        ("batches?stat=open", ["query.stat"]),
        ("batches?nobody=1&state=open&nobody=2&%6Bind=3", ["query.nobody", "query.kind"]),
        ("webhooks?=", ["query."]),
        ("processes?limit=1", ["query.limit"]),
    ],
)
def test_a_parameter_that_does_not_exist_or_comes_twice_is_named(
    http: httpx.Client, query: str, places: list[str]
) -> None:
    """A misspelled filter would select everything. Of two values one would be ignored, unless both have a meaning."""
    response = http.get(f"/v1/{query}")
    assert [entry["place"] for entry in response.json().get("errors", [])] == places
    assert response.status_code == (422 if places else 200)


def test_the_error_of_a_parameter_that_does_not_exist_has_those_that_do(http: httpx.Client) -> None:
    detail = http.get("/v1/batches/1/pending?page=2").json()["detail"]
    assert detail == "query.page: no such parameter; expected one of cursor, limit"
    detail = http.post("/v1/acks?wait=1", json={"items": []}).json()["detail"]
    assert detail == "query.wait: no such parameter; this call has none"
    assert http.get("/healthz?from=probe").status_code == 200


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"group_size": 0}, "body.group_size"),
        ({"group_size": 63}, "body.group_size"),
        ({"group_size": 100}, "body.group_size"),
        ({"group_size": 32776}, "body.group_size"),
        ({"group_size": "64"}, "body.group_size"),
        ({"group_size": 64.0}, "body.group_size"),
        ({"group_size": None}, "body.group_size"),
        ({"items": -1}, "body.items"),
        ({"items": 10**12 + 1}, "body.items"),
        ({"items": 10**30}, "body.items"),
        ({"items": True}, "body.items"),
        ({"items": 1.5}, "body.items"),
        ({"items": "1"}, "body.items"),
        ({"sealed": 1}, "body.sealed"),
        ({"sealed": "true"}, "body.sealed"),
        ({"key": 7}, "body.key"),
        ({"key": "k" * 256}, "body.key"),
        ({"key": "\ud800"}, "body.key"),
        ({"parent": 7}, "body.parent"),
        ({"parent": "7"}, "body.parent"),
        ({"parent": "7:0:01"}, "body.parent"),
        ({"labels": {"team": 7}}, "body.labels.team"),
        ({"labels": {"team": None}}, "body.labels.team"),
        ({"labels": ["team"]}, "body.labels"),
        ({"labels": {"a:b": "c"}}, "body.labels.a:b"),
        ({"labels": {"": "c"}}, "body.labels."),
        ({"labels": {"\ud800": "c"}}, "body.labels.\ufffd\ufffd\ufffd"),
        ({"\ud800": 1}, "body"),
        ({"labels": {str(n): "" for n in range(65)}}, "body.labels"),
        ({"labels": {str(n): "x" * 1024 for n in range(16)}}, "body.labels"),
        ({"labels": {str(n): "\U0001f600" * 1024 for n in range(4)}}, "body.labels"),
        ({"expires_in": 0}, "body.expires_in"),
        ({"expires_in": -5}, "body.expires_in"),
        ({"expires_in": 2**52}, "body.expires_in"),
        ({"deadline": "2020-01-01T00:00:00Z"}, "body.deadline"),
        ({"deadline": "2999-01-01T00:00:00"}, "body.deadline"),
        ({"deadline": "2999-01-01"}, "body.deadline"),
        ({"deadline": "2999-02-30T00:00:00Z"}, "body.deadline"),
        ({"deadline": "9999-12-31T23:59:59-01:00"}, "body.deadline"),
        ({"deadline": 32503680000}, "body.deadline"),
        ({"deadline": True}, "body.deadline"),
        ({"tolerated_failures": -1}, "body.tolerated_failures"),
        ({"tolerated_failures": 1.0}, "body.tolerated_failures"),
        ({"tolerated_failures": 10**12 + 1}, "body.tolerated_failures"),
        ({"tolerated_failure_percentage": 101}, "body.tolerated_failure_percentage"),
        ({"tolerated_failure_percentage": -1}, "body.tolerated_failure_percentage"),
        ({"tolerated_failure_percentage": 2.5}, "body.tolerated_failure_percentage"),
        ({"tolerated_failure_percentage": 2, "on_exceeded": "stop"}, "body.on_exceeded"),
        ({"on_exceeded": "cancel"}, "body.on_exceeded"),
        ({"on_exceeded": "continue", "tolerated_failures": None}, "body.on_exceeded"),
        ({"items": 5, "seal_at": 4}, "body.seal_at"),
        ({"items": 5, "sealed": True, "seal_at": 5}, "body.seal_at"),
        ({"seal_at": -1}, "body.seal_at"),
        ({"seal_at": 10**12 + 1}, "body.seal_at"),
        ({"seal_at": "5"}, "body.seal_at"),
        ({"callback": "https://example.com"}, "body.callback"),
        ({"callback": {}}, "body.callback.url"),
        ({"callback": {"url": "ftp://example.com"}}, "body.callback.url"),
        ({"callback": {"url": "https://user@example.com"}}, "body.callback.url"),
        ({"callback": {"url": "http://169.254.169.254/latest"}}, "body.callback.url"),
        ({"callback": {"url": "http://127.0.0.1/"}}, "body.callback.url"),
        ({"callback": {"url": "https://192.0.2.1/", "types": []}}, "body.callback.types"),
        ({"callback": {"url": "https://192.0.2.1/", "types": ["paid"]}}, "body.callback.types"),
        ({"callback": {"url": "https://192.0.2.1/", "label": "mine"}}, "body.callback.label"),
        ({"parent": "1:0:0"}, "body.parent"),
        ({"colour": "red"}, "body.colour"),
    ],
)
def test_a_bad_open_is_refused(http: httpx.Client, body: dict[str, Any], place: str) -> None:
    """Types are strict, bounds are the contract's, unknown fields are refused."""
    before = http.get("/v1/batches?limit=1").json()["batches"]
    response = http.post("/v1/batches", content=json.dumps(body), headers=JSON)
    assert code(response) == (422, "invalid_request")
    error = response.json()["errors"][0]
    assert error["place"] == place
    assert not error["expected"][0].isupper(), "the problem goes on after the place"
    assert http.get("/v1/batches?limit=1").json()["batches"] == before


@pytest.mark.parametrize("count", [-1, 1.0, "1", True, None, 10**12 + 1, 10**30, [1]])
def test_a_bad_count_is_refused(http: httpx.Client, count: object) -> None:
    """And the batch keeps its size."""
    batch = open_batch(http, items=1)["id"]
    for body in ({"count": count}, {}, {"count": 1, "start": 0}):
        assert code(http.post(f"/v1/batches/{batch}/items", json=body)) == (422, "invalid_request")
    assert http.get(f"/v1/batches/{batch}").json()["items"] == 1


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "body"),
        ({"items": None}, "body.items"),
        ({"items": "1:0:0"}, "body.items"),
        ({"items": [7]}, "body.items[0]"),
        ({"groups": [{"batch": 1, "group": 0}]}, "body.groups[0].bits"),
        ({"groups": [{"batch": "1", "group": 0, "bits": ""}]}, "body.groups[0].batch"),
        ({"groups": [{"batch": True, "group": 0, "bits": ""}]}, "body.groups[0].batch"),
        ({"groups": [{"batch": 1.5, "group": 0, "bits": ""}]}, "body.groups[0].batch"),
        ({"groups": [{"batch": -1, "group": 0, "bits": ""}]}, "body.groups[0].batch"),
        ({"groups": [{"batch": 1, "group": 2**53, "bits": ""}]}, "body.groups[0].group"),
        ({"groups": [{"batch": 1, "group": 0, "bits": "?"}]}, "body.groups[0].bits"),
        ({"groups": [{"batch": 1, "group": 0, "bits": "AQ"}]}, "body.groups[0].bits"),
        ({"groups": [{"batch": 1, "group": 0, "bits": "AQ==AQ=="}]}, "body.groups[0].bits"),
        ({"groups": [{"batch": 1, "group": 0, "bits": "\u00e9"}]}, "body.groups[0].bits"),
        ({"groups": [{"batch": 1, "group": 0, "bits": 1}]}, "body.groups[0].bits"),
        ({"groups": [{"batch": 1, "group": 0, "bits": "", "size": 1}]}, "body.groups[0].size"),
        ({"items": [], "colour": 1}, "body.colour"),
        ([], "body"),
        (7, "body"),
    ],
)
def test_a_bad_ack_is_refused(http: httpx.Client, body: object, place: str) -> None:
    """With the location of the error."""
    response = http.post("/v1/acks", json=body)
    assert code(response) == (422, "invalid_request")
    assert response.json()["errors"][0]["place"] == place


@pytest.mark.parametrize("bits", ["AQ", "AQ=\n=", 1, None])
def test_bits_that_are_not_base64_are_refused_with_what_was_expected(http: httpx.Client, bits: object) -> None:
    detail = http.post("/v1/acks", json={"groups": [{"batch": 1, "group": 0, "bits": bits}]}).json()["detail"]
    assert detail == "body.groups[0].bits: expected base64 text, with its padding and without line breaks"


def test_an_unknown_field_of_an_ack_is_refused_with_those_that_exist(http: httpx.Client) -> None:
    """`ids` is what many try first."""
    for route, names in (("acks", "groups, items"), ("failures", "groups, items, reason")):
        for field in ("ids", "bytes"):
            response = http.post(f"/v1/{route}", json={field: ["1:0:0"]})
            assert response.json()["detail"] == f"body.{field}: no such field here; expected one of {names}"


@pytest.mark.parametrize(
    ("method", "path", "body", "problem"),
    [
        ("POST", "batches", {"labels": {"a:b": "c"}}, "body.labels.a:b: expected a name without a colon"),
        ("POST", "batches", {"labels": ["a"]}, "body.labels: expected an object"),
        ("POST", "batches", {"labels": {str(n): "" for n in range(65)}}, "body.labels: expected at most 64 entries"),
        ("POST", "batches", {"group_size": "64"}, "body.group_size: expected an integer"),
        *(
            ("POST", "batches", {"group_size": size}, "body.group_size: expected a multiple of 8 from 64 to 32,768")
            for size in (0, 65, 32776)
        ),
        ("POST", "batches", {"items": 10**13}, "body.items: expected at most 1,000,000,000,000"),
        ("POST", "batches", {"sealed": 1}, "body.sealed: expected true or false"),
        ("POST", "batches", {"key": 7}, "body.key: expected a string"),
        ("POST", "batches", {"key": "k" * 256}, "body.key: expected at most 255 characters"),
        ("POST", "batches", {"callback": "https://a.b"}, "body.callback: expected an object"),
        ("POST", "batches", 7, "body: expected an object"),
        ("POST", "events", {"events": 7}, "body.events: expected an array"),
        ("POST", "events", {"events": [{"id": "a b", "type": "a"}]}, "body.events[0].id: expected 1 to 255 visible"),
        ("GET", "batches?state=shut", None, "query.state: expected 'open', 'sealed', 'complete', 'expired' or"),
        ("GET", "batches/9007199254740992", None, "path.id: expected an integer below 2^53"),
        ("GET", "batches/99999999999999999999", None, "path.id: expected an integer below 2^53"),
        ("GET", "batches/+7", None, "path.id: expected a decimal integer without leading zeros"),
        ("GET", "batches/1?wait=99", None, "query.wait: expected at most 60"),
        ("GET", "consumer-groups/a%20b", None, "path.group: expected a letter, digit or underscore, then up to 254"),
        ("PUT", "consumer-groups/a", {"partitions": 1, "ttl": "x"}, "body.ttl: expected a number"),
        ("GET", "tallies/a%20b", None, "path.tally: expected a letter or digit, then up to 254 letters, digits,"),
        ("GET", "processes/a%20b", None, "path.process: expected a letter or digit, then up to 199 letters, digits,"),
        ("POST", "acks", {"items": "1:0:0"}, "body.items: expected an array"),
        ("POST", "acks", {"groups": [{"batch": -1}]}, "body.groups[0].batch: expected at least 0"),
        ("POST", "acks", {"groups": [{"batch": 2**53}]}, "body.groups[0].batch: expected an integer below 2^53"),
        ("POST", "acks", {"groups": [{"batch": 1}]}, "body.groups[0].group: this field is required"),
        ("POST", "failures", {"reason": 7}, "body.reason: expected a string or null"),
        ("POST", "batches", {"itms": 3}, "body.itms: no such field here; expected one of callback, deadline, expires_"),
        ("POST", "batches", {"callback": {"url": "https://a.b", "x": 1}}, "body.callback.x: no such field here; expec"),
        ("POST", "events", {"events": [{"id": "a", "type": "b", "x": 1}]}, "body.events[0].x: no such field here; exp"),
        ("POST", "batches/1/seal", {"x": 1}, "body.x: no such field here"),
        ("POST", "failures", {"reason": "x" * 4001}, "body.reason: expected at most 4,000 characters"),
    ],
)
def test_what_was_expected_is_said_in_words(
    http: httpx.Client, method: str, path: str, body: object, problem: str
) -> None:
    """The same in all routes, without regular expressions and the types of Python."""
    detail = http.request(method, f"/v1/{path}", json=body).json()["detail"]
    assert detail.startswith(problem)
    assert "^" not in detail.replace("2^53", "")


def test_the_fields_that_exist_are_named_for_the_first_unknown_ones_alone(http: httpx.Client) -> None:
    """A body may have many. A large body is read only up to the first one."""
    entries = [{"id": f"e{number}", "type": "paid", "colour": "red"} for number in range(70)]
    errors = http.post("/v1/events", json={"events": entries}).json()["errors"]
    assert len(errors) == 70
    assert errors[0]["expected"] == "no such field here; expected one of data, id, key, type"
    assert errors[69]["expected"] == "no such field here"
    large = http.post("/v1/events", json={"events": entries * 10}).json()["errors"]
    assert [error["place"] for error in large] == ["body.events[0].colour"]


def test_an_idempotency_key_is_described_by_every_route(http: httpx.Client) -> None:
    for path, body in (("batches", {}), ("acks", {"items": []})):
        response = http.post(f"/v1/{path}", json=body, headers={"idempotency-key": "two words"})
        expected = "header Idempotency-Key: expected 1 to 255 visible ASCII characters without blanks"
        assert response.json()["detail"] == expected


def test_every_pattern_that_is_checked_has_words() -> None:
    """A pattern that only describes a check in code is passed as part of a schema."""
    checked = re.compile(r"(?<!\w)pattern=(?!expectations\.|_LABEL_NAME\b)")
    for file in (ROOT / "api").rglob("*.py"):
        assert not checked.search(file.read_text()), f"{file}: use expectations.worded"


def test_a_bad_reason_is_refused(http: httpx.Client) -> None:
    """Too long, not a text, or given with an ack."""
    for body in ({"items": [], "reason": "x" * 4001}, {"items": [], "reason": 7}):
        assert code(http.post("/v1/failures", json=body)) == (422, "invalid_request")
    assert code(http.post("/v1/acks", json={"items": [], "reason": "why"})) == (422, "invalid_request")


ROUTES = ["/v1/batches", "/v1/acks", "/v1/failures", "/v1/batches/{id}/items", "/v1/batches/{id}/seal"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"nope",
        b"{'a': 1}",
        b"\xff\xfe",
        b'"\xff"',
        b"[" * 50_000,
        b"1" * 5000,
        b'{"items": 01}',
        b"\x00",
        b"NaN",
    ],
)
def test_a_body_that_does_not_parse_is_refused(http: httpx.Client, route: str, content: bytes) -> None:
    """Broken, too deep, not UTF-8: a 422 like any other."""
    batch = open_batch(http)["id"]
    response = http.post(route.format(id=batch), content=content, headers=JSON)
    assert code(response) == (422, "invalid_request")
    assert response.json()["errors"][0]["place"].startswith("body")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_another_content_type_is_refused(http: httpx.Client, route: str, content_type: str) -> None:
    """415; application/json with parameters is accepted."""
    path = route.format(id=open_batch(http)["id"])
    response = http.post(path, content=b'{"items": []}', headers={"Content-Type": content_type})
    assert code(response) == (415, "unsupported_media_type")
    json_response = http.post(path, content=b"{}", headers={"Content-Type": "Application/JSON; charset=utf-8"})
    assert json_response.status_code != 415


@pytest.mark.parametrize(
    "origin",
    [
        *("http://[::1", "http://[", "http://a]b", "http://[v1.x]", "null", "", "//", "http://", "http://a:x"),
        *("http://\xe9", "ftp://{host}", "{host}", "http://{host}/", "http://x@{host}", "http://{host}:1"),
        "https://elsewhere.example",
    ],
)
@pytest.mark.parametrize("path", ["/v1/batches", "/v1/events", "/v1/tallies/t/apply", "/v1/acks", "/v1/failures"])
def test_any_foreign_origin_is_refused(http: httpx.Client, path: str, origin: str) -> None:
    """Also a malformed one. A request with a token doesn't come from a browser."""
    host = http.base_url.netloc.decode()
    content: dict[str, Any] = {"items": []} if path in ("/v1/acks", "/v1/failures") else {"json": "of any kind"}
    headers = {"Origin": origin.format(host=host).encode("latin-1")}
    for _ in range(2):
        refusal = http.post(path, json=content, headers=headers)
        assert code(refusal) == (403, "forbidden")
        assert "another site" in refusal.json()["detail"]
    for extra in ({"Origin": f"http://{host}"}, {"Origin": f"HTTP://{host}"}, {**headers, "Authorization": "Bearer x"}):
        assert http.post(path, json=content, headers=extra).status_code in (200, 422)
    assert code(http.post(path, json=content, headers={"Sec-Fetch-Site": "cross-site"})) == (403, "forbidden")


def test_another_sites_page_cannot_end_a_batch(http: httpx.Client) -> None:
    """A browser names the origin of a request. Even from the service's own origin, a POST without a body must be
    declared as JSON, which no page may do for another site."""
    batch = open_batch(http, items=1)["id"]
    foreign_headers = {"Origin": "https://elsewhere.example"}
    for path in (f"/v1/batches/{batch}/cancel", f"/v1/batches/{batch}/seal", "/v1/batches"):
        assert code(http.post(path, headers=foreign_headers)) == (403, "forbidden")
        assert code(http.post(path, headers={**foreign_headers, **JSON})) == (403, "forbidden")
        assert code(http.post(path, headers={"Origin": str(http.base_url)})) == (415, "unsupported_media_type")
        preflight = http.options(path, headers={**foreign_headers, "Access-Control-Request-Method": "POST"})
        assert "access-control-allow-origin" not in preflight.headers
    assert http.get(f"/v1/batches/{batch}").json()["state"] == "open"
    assert http.post(f"/v1/batches/{batch}/seal", headers={**JSON, "Origin": str(http.base_url)}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "problem"),
    [
        ("POST", "/session", {f"field{n}": 1 for n in range(3000)}, "body.field0: no such field here; expected one of"),
        ("POST", "/v1/batches", {f"field{n}": 1 for n in range(10_000)}, "body.field0: no such field here; expected"),
        ("POST", "/v1/batches", {f"field{n}": 1 for n in range(100)}, "body: expected only key, labels, "),
        ("POST", "/v1/batches", {"labels": {f":{n}": 1 for n in range(10_000)}}, "body.labels: expected at most 64 "),
        ("PATCH", "/v1/batches/1", {"labels": {f":{n}": 1 for n in range(10_000)}}, "body.labels: expected at most "),
    ],
    ids=["unknown to strangers", "unknown", "some unknown", "labels", "changed labels"],
)
def test_an_error_is_short_however_much_is_wrong(
    http: httpx.Client, method: str, path: str, body: object, problem: str
) -> None:
    """A description of each wrong field took a gigabyte, and no other request was answered meanwhile."""
    response = http.request(method, path, json=body)
    assert response.status_code == 422
    assert response.json()["detail"].startswith(problem)
    assert len(response.content) < 4096


def test_strangers_may_not_send_large_bodies(http: httpx.Client) -> None:
    """They would take the memory that other requests wait for."""
    big = b'{"token": "' + b"x" * 70_000 + b'"}'
    assert code(http.post("/session", content=big, headers=JSON)) == (413, "too_large")


@pytest.mark.parametrize("route", ["/v1/batches", "/v1/acks", "/v1/failures"])
def test_a_body_over_the_limit_is_refused(http: httpx.Client, route: str) -> None:
    """8 MiB, declared or streamed."""
    big = b'{"items": ["' + b"7" * (8 * 1024 * 1024) + b'"]}'
    assert code(http.post(route, content=big, headers=JSON)) == (413, "too_large")
    chunks = (big[start : start + 65536] for start in range(0, len(big), 65536))
    assert code(http.post(route, content=chunks, headers=JSON)) == (413, "too_large")


def test_too_many_ids_or_groups_are_refused(http: httpx.Client) -> None:
    """10,001 ids; 4,097 groups."""
    batch = open_batch(http, items=1)["id"]
    assert code(http.post("/v1/acks", json={"items": [f"{batch}:0:0"] * 10_001})) == (413, "too_large")
    groups = [{"batch": batch, "group": 0, "bits": "AQ=="}] * 4097
    assert code(http.post("/v1/acks", json={"groups": groups})) == (413, "too_large")
    assert http.get(f"/v1/batches/{batch}").json()["acked"] == 0


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=1001", "limit=-1", "limit=x", "limit=1.0", "limit=01", "limit=", "state=deleting"),
        *("state=OPEN", "label=team", "label=:x", "key=" + "k" * 256, "cursor=x", "cursor=%F0%9F%98%80", "cursor="),
    ],
)
def test_a_bad_list_query_is_refused(http: httpx.Client, query: str) -> None:
    """Page limits are 1 to 1,000; a label is name:value; a cursor must come from the service."""
    response = http.get(f"/v1/batches?{query}")
    assert code(response) == (422, "invalid_request")
    assert response.json()["errors"][0]["place"].startswith(f"query.{query.partition('=')[0]}")


def test_a_cursor_of_another_list_is_refused(http: httpx.Client) -> None:
    """Each list accepts only its own cursors."""
    first, second = open_batch(http, items=200, group_size=64)["id"], open_batch(http, items=200)["id"]
    http.post("/v1/acks", json={"items": [f"{first}:0:5", f"{first}:0:7"]})
    cursor = http.get(f"/v1/batches/{first}/pending?limit=1").json()["next"]
    assert http.get(f"/v1/batches/{first}/pending", params={"cursor": cursor}).status_code == 200
    for path in (f"/v1/batches/{second}/pending", f"/v1/batches/{first}/failed", "/v1/batches"):
        assert code(http.get(path, params={"cursor": cursor})) == (422, "invalid_request")


@pytest.mark.parametrize("wait", ["-1", "60.1", "1e9", "x", "nan", "inf", "", "1_0", "%201", "%2B1", "01"])
def test_a_bad_wait_is_refused(http: httpx.Client, wait: str) -> None:
    """0 to 60 seconds."""
    batch = open_batch(http)["id"]
    assert code(http.get(f"/v1/batches/{batch}?wait={wait}")) == (422, "invalid_request")


@pytest.mark.parametrize("batch", ["x", "07", "-1", "1.0", "+1", "1_0", str(2**53), "9" * 40, "%D9%A7"])
def test_a_malformed_batch_id_is_refused(http: httpx.Client, batch: str) -> None:
    """In every path that has one."""
    for path in ("", "/pending", "/failed", "/verify", "/watermark"):
        assert code(http.get(f"/v1/batches/{batch}{path}")) == (422, "invalid_request")
    assert code(http.post(f"/v1/batches/{batch}/seal")) == (422, "invalid_request")


@pytest.mark.parametrize("key", ["", "two words", "k" * 256, "caf\u00e9", "a\tb"])
def test_a_bad_idempotency_key_is_refused(http: httpx.Client, key: str) -> None:
    """1 to 255 visible ASCII characters."""
    batch = open_batch(http, items=1)["id"]
    headers = {"Idempotency-Key": key.encode("utf-8")}
    for path, body in (
        ("/v1/batches", {}),
        (f"/v1/batches/{batch}/items", {"count": 1}),
        (f"/v1/batches/{batch}/seal", {}),
        ("/v1/acks", {"items": [f"{batch}:0:0"]}),
    ):
        response = http.post(path, json=body, headers=headers)
        assert code(response) == (422, "invalid_request")
        assert response.json()["errors"][0]["place"] == "header Idempotency-Key"
    now = http.get(f"/v1/batches/{batch}").json()
    assert (now["state"], now["items"], now["acked"]) == ("open", 1, 0)


def test_a_missing_path_and_a_wrong_method_are_different_errors(http: httpx.Client) -> None:
    """404 `not_found` with the path, as it was sent; 405 `method_not_allowed` with the allowed methods."""
    for path in ("/nope", "/v1", "/v1/batches/", "/v1/batches/1/nope", "/v1/acks/", "/v1/%0A%FF"):
        response = http.get(f"{path}?a=b")
        assert code(response) == (404, "not_found")
        assert response.json()["detail"] == f"there is no path {path}; the API's documentation is at /docs"
    assert http.get(f"/{'x' * 1000}").json()["detail"].startswith(f"there is no path /{'x' * 199}…; ")
    for method, path, methods in (
        ("GET", "/v1/acks", "POST"),
        ("DELETE", "/v1/failures", "GET, POST"),
        ("PUT", "/v1/batches", "POST"),
        ("POST", "/v1/batches/1/pending", "GET"),
        ("PUT", "/v1/batches/1", "GET"),
        ("PATCH", "/v1/batches/counts", "GET"),
        ("DELETE", "/v1/batches/counts", "GET"),  # not a batch whose id is invalid
        ("POST", "/docs/assets/swagger-ui.css", "GET"),
    ):
        response = http.request(method, path)
        assert code(response) == (405, "method_not_allowed")
        assert methods in response.headers["allow"]
        assert response.json()["detail"] == f"this path takes {response.headers['allow']}"


@mutant(
    "any-query-is-parsed", "api.server.queries:check_names", "scope['query_string'].count(b'&') >= PARAMETERS", "False"
)
@mutant(
    "any-path-is-decoded",
    "api.server.connection:WatchedProtocol.on_headers_complete",
    "len(self.url) > PATH and len(self.url.partition(b'?')[0]) > PATH",
    "False",
)
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/healthz?" + "a=b&" * 15_000, (422, "invalid_request")),
        ("/v1/batches?" + "a=b&" * 15_000, (422, "invalid_request")),
        ("/v1/batches/" + "%2f" * 20_000, (413, "too_large")),
        ("/nowhere/" + "a" * 60_000, (413, "too_large")),
        ("/healthz?" + "a=b&" * 499 + "a=b", (200, None)),
        ("/v1/tallies/" + "a" * 255 + "/" + "%F0%9F%98%80" * 255, (200, None)),
    ],
)
def test_a_long_target_is_refused_before_it_costs_anything(
    http: httpx.Client, target: str, expected: tuple[int, str | None]
) -> None:
    """A stranger's query of 60 KB took twelve milliseconds. What a route can use is served."""
    response = http.get(httpx.URL(http.base_url.join(target)))
    assert (response.status_code, response.json().get("code")) == expected


@mutant(
    "any-number-of-headers-is-read",
    "api.server.connection:WatchedProtocol.on_headers_complete",
    "len(self.headers) > HEADERS",
    "False",
)
def test_a_head_of_too_many_headers_is_refused(http: httpx.Client) -> None:
    headers = {f"x-{number}": "y" for number in range(sizes.HEADERS - 10)}
    assert http.get("/healthz", headers=headers).status_code == 200
    headers |= {f"z-{number}": "y" for number in range(11)}
    assert code(http.get("/healthz", headers=headers)) == (413, "too_large")
