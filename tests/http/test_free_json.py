"""A client's own JSON (states, data) is either refused on arrival, or can be returned for as long as it is stored."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from api.limits.sizes import DEPTH
from tests.http.test_batches import code
from tests.mutants import mutant
from tests.support.servers import running_service, sqlite_file

JSON = {"Content-Type": "application/json"}
PROCESS = "/v1/processes/deep"
GROUP = "/v1/consumer-groups/process.deep"


def nested(levels: int) -> str:
    """Alternately nested arrays and objects."""
    text = "1"
    for level in range(levels):
        text = f"[{text}]" if level % 2 else f'{{"a":{text}}}'
    return text


class Worker:
    """The only worker of the process `deep`."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        assert http.put(PROCESS, json={"partitions": 1}).status_code == 201
        [self.held] = http.post(f"{GROUP}/sync", json={"worker": "w", "session": "s"}).json()["assigned"]
        self.events = 0

    def handle(self, version: int = 0, **outcome: str) -> httpx.Response:
        """Handle a new event; the outcome's values are JSON as text."""
        self.events += 1
        id = f"deep-{self.events}"
        appended_event = self.http.post("/v1/events", json={"events": [{"id": id, "type": "t"}]}).json()["events"][0]
        head = {
            "event": {"id": id, "position": appended_event["position"]},
            "fence": {"worker": "w", "epoch": self.held["epoch"]},
            "version": version,
        }
        rest = "".join(f',"{name}":{text}' for name, text in outcome.items())
        return self.http.post(f"{PROCESS}/i/handle", content=f"{json.dumps(head)[:-1]}{rest}}}", headers=JSON)


@pytest.fixture
def database() -> Iterator[str]:
    with sqlite_file() as url:
        yield url


@pytest.fixture
def worker(database: str) -> Iterator[Worker]:
    with running_service(database) as running, httpx.Client(base_url=running.url, timeout=30) as http:
        yield Worker(http)


def outcome(place: str, text: str) -> dict[str, str]:
    """The arguments that carry `text` at the place."""
    return {
        "state": {"state": text},
        "commands": {"commands": f'[{{"type": "go", "data": {text}}}]'},
        "timers": {"timers": f'[{{"timer": "t", "after": 3600, "data": {text}}}]'},
    }[place]


PLACES = {"state": "body.state", "commands": "body.commands[0].data", "timers": "body.timers[0].data"}


@mutant("json-of-any-depth-is-stored", "api.routes.free_json:text", "_is_deeper(value, DEPTH)", "False")
@pytest.mark.parametrize("place", PLACES)
def test_json_nested_too_deeply_is_refused_and_accepted_json_is_returned(worker: Worker, place: str) -> None:
    """Other parsers have other limits: pydantic's serializer fails at 255 levels, Python's near 1,000."""
    for levels in (DEPTH + 1, 256, 900):
        refusal = worker.handle(**outcome(place, nested(levels)))
        assert code(refusal) == (422, "invalid_request"), (levels, refusal.text)
        [error] = refusal.json()["errors"]
        assert (error["place"], "100 levels" in error["expected"]) == (PLACES[place], True)
    assert worker.http.get(f"{PROCESS}/i").status_code == 404
    answer = worker.handle(**outcome(place, nested(DEPTH)))
    assert answer.status_code == 200, answer.text
    value, document = json.loads(nested(DEPTH)), worker.http.get(f"{PROCESS}/i").json()
    if place == "state":
        assert value == answer.json()["instance"]["state"] == document["state"]
        assert [entry["state"] for entry in worker.http.get(PROCESS).json()["instances"]] == [value]
    elif place == "commands":
        [event] = worker.http.get("/v1/events", params={"type": "command.go"}).json()["events"]
        [command] = worker.http.get("/v1/commands").json()["commands"]
        assert value == document["commands"][0]["data"] == command["data"] == event["data"]["data"]
    else:
        assert document["timers"][0]["data"] == value


def test_an_events_data_has_the_same_limit(worker: Worker) -> None:
    """The error names its location among the call's events."""
    for levels, status in ((DEPTH, 200), (DEPTH + 1, 422), (256, 422), (900, 422)):
        content = f'{{"events": [{{"id": "e{levels}", "type": "t", "data": {nested(levels)}}}]}}'
        answer = worker.http.post("/v1/events", content=content, headers=JSON)
        assert answer.status_code == status, (levels, answer.text)
        if status == 422:
            assert answer.json()["errors"][0]["place"] == "body.events[0].data"
    [event] = worker.http.get("/v1/events", params={"type": "t"}).json()["events"]
    assert event["data"] == json.loads(nested(DEPTH))


def test_brackets_in_texts_do_not_count_as_levels(worker: Worker) -> None:
    """Neither are arrays next to each other."""
    for version, state in enumerate(("[{" * 5000, [[]] * 5000)):
        assert worker.handle(version, state=json.dumps(state)).status_code == 200
        assert worker.http.get(f"{PROCESS}/i").json()["state"] == state


@mutant(
    "stored-json-is-parsed-to-be-returned",
    "api.routes.free_json:stored",
    'msgspec.Raw(text or "null")',
    'json.loads(text or "null")',
)
def test_stored_rows_with_deeper_json_are_returned(worker: Worker, database: str) -> None:
    """An earlier release stored them, and each page with such a row failed."""
    deep = nested(5000)
    answer = worker.handle(state="1", **outcome("commands", "1"), **outcome("timers", "1"))
    assert answer.status_code == 200, answer.text
    with sqlite3.connect(database.partition("///")[2]) as rows:
        for table, column in (("processes", "state"), ("outbox", "data"), ("timers", "data"), ("feed", "data")):
            assert rows.execute(f"UPDATE {table} SET {column} = ?", [deep]).rowcount
    for path, count in ((f"{PROCESS}/i", 3), (PROCESS, 1), ("/v1/commands", 1), ("/v1/events", 2)):
        document = worker.http.get(path)
        assert (document.status_code, document.text.count(deep)) == (200, count), path
    changed = worker.handle(version=1, state='"smaller"')
    assert (changed.status_code, changed.json()["instance"]["state"]) == (200, "smaller")


NOT_PORTABLE = {
    "half of a surrogate pair": r'"\ud800"',
    "the other half": r'"\udc00 and more"',
    "no number": "NaN",
    "no end": "-Infinity",
    "a float beyond all": "1e999",
    "an integer beyond all floats": "1" + "0" * 400,
    "an integer that Python does not read": "9" * 5000,
}


@mutant("an-integer-beyond-all-floats-is-stored", "api.routes.free_json:text", "_LONG.search(content)", "False")
@pytest.mark.parametrize("text", NOT_PORTABLE.values(), ids=NOT_PORTABLE.keys())
def test_json_that_some_parsers_refuse_is_not_stored(worker: Worker, text: str) -> None:
    """Nested or not, in every place."""
    for bad_json in (text, f'{{"a": [{text}]}}'):
        for place in PLACES:
            refusal = worker.handle(**outcome(place, bad_json))
            assert code(refusal) == (422, "invalid_request"), refusal.text
        content = f'{{"events": [{{"id": "x", "type": "x", "data": {bad_json}}}]}}'
        assert code(worker.http.post("/v1/events", content=content, headers=JSON)) == (422, "invalid_request")
    assert worker.http.get(f"{PROCESS}/i").status_code == 404


def test_numbers_are_returned_as_they_came(worker: Worker) -> None:
    """A client's own integers may be larger than the contract's, and digits in a text are not a number."""
    state = {"large": 2**200, "negative": -(2**64), "digits": "1" * 400, "float": 1.5e300}
    worker.handle(state=json.dumps(state))
    assert worker.http.get(f"{PROCESS}/i").json()["state"] == state


Deform = Callable[[bytes], bytes]
DEFORMED: dict[str, Deform] = {
    "byte order mark": lambda body: b"\xef\xbb\xbf" + body,
    "UTF-16": lambda body: body.decode().encode("utf-16"),
    "NaN": lambda body: body[:-1] + b', "x": NaN}',
    "half a pair": lambda body: body[:-1] + rb', "x": "\ud800"}',
    "too deep": lambda body: body[:-1] + b', "x": ' + b"[" * 50_000 + b"}",
    "deep": lambda body: body[:-1] + b', "x": ' + b"[" * 990 + b"]" * 990 + b"}",
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/acks": {"items": []},
    "/v1/failures": {"items": []},
    "/v1/batches": {},
    "/v1/events": {"events": []},
    "/v1/tallies/t/apply": {"entries": []},
    "/v1/webhooks": {"url": "https://example.com/"},
    "/session": {"token": "t"},
}


@pytest.mark.parametrize("path", BODIES)
def test_all_routes_accept_the_same_json(worker: Worker, path: str) -> None:
    """Whichever decoder they use."""
    body = json.dumps(BODIES[path]).encode()
    for name, deform in DEFORMED.items():
        refusal = worker.http.post(path, content=deform(body), headers=JSON)
        assert code(refusal) == (422, "invalid_request"), (name, refusal.text)
        assert refusal.json()["errors"][0]["place"].startswith("body"), name
