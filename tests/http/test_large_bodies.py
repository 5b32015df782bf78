"""Large bodies: refused ones cost next to nothing, and good ones mean what small ones mean."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from api.limits import sizes
from api.problems import Problem
from api.routes import consumer_groups, events, failures, free_json, models, processes
from api.routes.fields import Body
from api.server import bodies
from api.server.shapes import LargeBodies
from tests.http.test_bad_input import JSON
from tests.http.test_batches import code
from tests.mutants import mutant

EVENTS = LargeBodies(events.NewEvents)


def filled(beginning: str, unit: str, end: str, size: int = sizes.BODY - 1024) -> bytes:
    return f"{beginning}{unit * ((size - len(beginning) - len(end)) // len(unit))}{end}".encode()


def many_fields(beginning: str, end: str) -> bytes:
    fields = ",".join(f'"k{number}":1' for number in range(500_000))
    return f"{beginning}{fields}{end}".encode()


@mutant(
    "a-large-body-is-parsed-before-its-shape-is-checked",
    "api.server.shapes:LargeBodies.validated",
    "value = self._plain(bodies.decoded(self._decoder, content))",
    "value = bodies.parsed(content)",
)
@pytest.mark.parametrize(
    ("model", "content", "place"),
    [
        (models.OpenBody, many_fields("{", "}"), "body.k0"),
        (models.OpenBody, many_fields('{"callback":{', "}}"), "body.callback.k0"),
        (models.OpenBody, filled('{"key":[', "[],", "1]}"), "body.key"),
        (models.PatchBody, many_fields("{", "}"), "body.k0"),
        (models.ExtendBody, filled('{"count":[', "[],", "1]}"), "body.count"),
        (failures.RedriveBody, filled('{"items":[', "1,", "1]}"), "body.items[0]"),
        (events.NewEvents, filled('{"events":[', "{},", "{}]}"), "body.events[0].id"),
        (events.NewEvents, filled('{"events":[{"id":"a","type":"b","data":[', "[],", "1]}]}"), "body.events[0].data"),
        (consumer_groups.PositionsBody, filled('{"worker":"w","positions":[', "{},", "{}]}"), "body.positions[0]"),
        (processes.HandleBody, many_fields('{"event":{', "}}"), "body.event.k0"),
    ],
)
def test_refusing_a_large_body_costs_a_fraction_of_parsing_it(model: type[Body], content: bytes, place: str) -> None:
    """Parsing 8 MiB of small values took the event loop a second, whatever the request was worth."""
    parsing = time.thread_time()
    json.loads(content)
    refusing = time.thread_time()
    with pytest.raises(Problem) as refusal:
        LargeBodies(model).validated(content)
    end = time.thread_time()
    assert refusal.value.places[0].place.startswith(place)
    assert len(refusal.value.places) == 1
    assert end - refusing < (refusing - parsing) / 2


def values() -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    )


def nearly(names: list[str]) -> st.SearchStrategy[Any]:
    """Objects with most of these fields."""
    good = {
        "id": "e1",
        "type": "paid",
        "key": "k",
        "worker": "w",
        "group": "g",
        "version": 1,
        "count": 3,
        "partition": 0,
        "epoch": 1,
    }
    fields = {name: st.just(good[name]) | values() if name in good else values() for name in names}
    return st.fixed_dictionaries({}, optional=fields)


def bodies_of(model: type[Body]) -> st.SearchStrategy[Any]:
    if model is events.NewEvents:
        return st.fixed_dictionaries(
            {"events": st.lists(nearly(["id", "type", "key", "data"]), max_size=3) | values()},
            optional={"fence": nearly(["group", "partition", "worker", "epoch"]) | values()},
        )
    return nearly(list(model.model_fields))


MODELS = (events.NewEvents, models.OpenBody, models.PatchBody, models.ExtendBody, failures.RedriveBody)


@given(st.data())
def test_a_large_body_means_what_a_small_one_means(data: st.DataObject) -> None:
    """What one path accepts, the other accepts, as the same values."""
    model = data.draw(st.sampled_from(MODELS))
    content = json.dumps(data.draw(bodies_of(model))).encode()
    try:
        small = model.model_validate(bodies.parsed(content))
    except ValidationError:
        small = None
    try:
        large = LargeBodies(model).validated(content)
    except Problem:
        large = None
    assert large == small


@pytest.mark.parametrize("text", ["\u00e9" * 30_000, "/" * 60_000, "a" * 65_000])
@pytest.mark.parametrize("escape", [json.dumps, lambda value: json.dumps(value, ensure_ascii=False, indent=9)])
def test_the_size_of_data_is_that_of_its_shortest_text(text: str, escape: Any) -> None:
    """Neither blanks nor escapes count, of which a client may send many."""
    encoded = escape([text]).replace("/", r"\/")
    content = f'{{"events":[{{"id":"a","type":"b","data":{encoded}}}]}}'.encode()
    large: Any = EVENTS.validated(content)
    assert large.events[0].data == free_json.text([text], free_json.MAX_DATA)


def test_a_large_call_is_served_as_a_small_one(http: httpx.Client) -> None:
    """Through a thread. Its faults after the shape are named with their places."""

    def entries(data: str) -> Iterator[dict[str, str]]:
        return ({"id": f"{data[:1]}{number}", "type": "paid", "data": data} for number in range(1000))

    appended = http.post("/v1/events", json={"events": list(entries("x" * 1000))})
    assert (appended.status_code, len(appended.json()["events"])) == (200, 1000)
    wrong = [*entries("y"), {"id": "", "type": "paid"}][1:]
    refused = http.post("/v1/events", json={"events": wrong})
    assert refused.json()["detail"].startswith("body.events[999].id: expected 1 to 255 visible ASCII")


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/batches", models.OpenBody.LIMIT),
        ("/v1/batches/1/items", sizes.BODY_OF_NUMBERS),
        ("/v1/batches/1/redrive", failures.RedriveBody.LIMIT),
        ("/v1/events", sizes.BODY),
    ],
)
def test_a_route_reads_no_more_than_it_can_use(http: httpx.Client, path: str, limit: int) -> None:
    blanks = http.post(path, content=b" " * limit + b"1", headers=JSON)
    assert code(blanks) == (413, "too_large")
    assert blanks.json()["detail"] == f"body: expected at most {limit:,} bytes"


@pytest.mark.parametrize("value", ["[" * 50_000 + "]" * 50_000, "1" * 6000])
def test_json_that_no_parser_takes_is_refused_in_a_large_body_too(value: str) -> None:
    with pytest.raises(Problem, match="body: expected JSON"):
        LargeBodies(models.PatchBody).validated(f'{{"labels":{value}}}'.encode())
