"""Finding batches: by the beginning of the key, the time of the open, the outcome and the parent; and counts."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from tests.http.test_batches import ack, code, open_batch
from tests.mutants import mutant


@pytest.fixture
def name() -> str:
    """The beginning of the keys of this test's batches."""
    return f"{uuid.uuid4()}/"


def found(http: httpx.Client, **query: Any) -> list[int]:
    """The ids of all pages, which are newest first, and in agreement with the counts."""
    ids: list[int] = []
    cursor: dict[str, str] = {}
    while True:
        response = http.get("/v1/batches", params={**query, **cursor, "limit": 2})
        assert response.status_code == 200, response.text
        ids += [batch["id"] for batch in response.json()["batches"]]
        if response.json()["next"] is None:
            break
        cursor = {"cursor": response.json()["next"]}
    assert ids == sorted(ids, reverse=True)
    if "state" not in query:
        counts = http.get("/v1/batches/counts", params=query).json()
        assert counts["total"] == sum(counts["states"].values()) == len(ids)
        assert counts["exact"]
    return ids


def test_batches_are_found_by_the_beginning_of_the_key(http: httpx.Client, name: str) -> None:
    """By bytes: no wildcards, and case matters. It combines with all other filters."""
    keys = ["Ab", "ab", "a%", "a_c", "abc"]
    ids = {key: open_batch(http, key=name + key, labels={"n": key})["id"] for key in keys}
    for start in ("a", "ab", "a%", "a_", "A", "abcd"):
        expected = [ids[key] for key in reversed(keys) if key.startswith(start)]
        assert found(http, key_prefix=name + start) == expected
    assert found(http, key_prefix=name, label="n:ab") == [ids["ab"]]
    assert found(http, key_prefix=name, key=f"{name}ab") == [ids["ab"]]


def test_labels_are_compared_whole_and_by_bytes(http: httpx.Client, name: str) -> None:
    """Whatever characters they have: a part of a label, or one that looks like it in JSON, doesn't match."""
    labels = [
        {"team": "search"},
        {"team": "Search"},
        {"team": "search2"},
        {"xteam": "search"},
        {"a": '"team": "search"'},
        {"team": 'search"'},
        {"team": "search\\"},
        {"team": "sé%_"},
        {"team": "search", "b": ", "},
        {"b": ", ", "team": "search"},
        {'x"team': "search"},
        {'{"team': "search"},
        {' "team': "search"},
        {"a": '{"', "team": "search2"},
    ]
    ids = [open_batch(http, key=name, labels=pairs)["id"] for pairs in labels]
    for pairs in labels:
        expected = [id for id, other in zip(ids, labels, strict=True) if pairs.items() <= other.items()]
        assert found(http, key=name, label=[f"{k}:{v}" for k, v in pairs.items()]) == expected[::-1]


def test_batches_are_found_by_the_time_of_their_open(http: httpx.Client, name: str) -> None:
    """From `opened_after` on, and before `opened_before`, to the microsecond; with any offset."""
    batches = [open_batch(http, key=f"{name}{n}") for n in range(3)]
    ids = [batch["id"] for batch in batches]
    middle = batches[1]["created_at"]
    assert found(http, key_prefix=name, opened_after=middle) == ids[:0:-1]
    assert found(http, key_prefix=name, opened_before=middle) == ids[:1]
    assert found(http, key_prefix=name, opened_after=middle, opened_before=batches[2]["created_at"]) == ids[1:2]
    assert found(http, key_prefix=name, opened_before=middle.replace("Z", "+00:00")) == ids[:1]
    assert found(http, key_prefix=name, opened_before=middle.replace("Z", "-01:00")) == ids[::-1]


def test_batches_are_found_by_their_outcome(http: httpx.Client, name: str) -> None:
    """Only complete ones have an outcome, and a redrive changes it."""
    good, bad, _, cancelled = (open_batch(http, key=f"{name}{n}", items=1, sealed=True)["id"] for n in range(4))
    ack(http, f"{good}:0:0")
    for batch in (bad, cancelled):
        http.post("/v1/failures", json={"items": [f"{batch}:0:0"]})
    assert found(http, key_prefix=name, outcome="failed") == [cancelled, bad]
    assert found(http, key_prefix=name, outcome="succeeded") == [good]
    ack(http, f"{bad}:0:0")
    assert found(http, key_prefix=name, outcome="succeeded", state="complete") == [bad, good]
    assert found(http, key_prefix=name, outcome="failed") == [cancelled]


@pytest.mark.parametrize(
    ("tolerance", "items", "failed"),
    [
        ({}, 10, 1),
        ({"tolerated_failures": 2}, 10, 2),
        ({"tolerated_failures": 2}, 10, 3),
        ({"tolerated_failures": 0}, 10, 0),
        ({"tolerated_failure_percentage": 20}, 10, 2),
        ({"tolerated_failure_percentage": 20}, 10, 3),
        ({"tolerated_failures": 9, "tolerated_failure_percentage": 10}, 10, 2),
        ({"tolerated_failures": 1, "tolerated_failure_percentage": 90}, 10, 2),
    ],
)
def test_the_outcome_agrees_with_the_tolerance(
    http: httpx.Client, name: str, tolerance: dict[str, int], items: int, failed: int
) -> None:
    """The search decides by SQL what the batch's own fields say."""
    batch = open_batch(http, key=name, items=items, sealed=True, **tolerance)["id"]
    ids = [f"{batch}:0:{n}" for n in range(items)]
    http.post("/v1/failures", json={"items": ids[:failed]})
    live = http.get(f"/v1/batches/{batch}").json()
    assert (found(http, key=name, outcome="exceeded") == [batch]) is live["exceeded"]
    assert found(http, key=name, outcome="succeeded") == found(http, key=name, outcome="failed") == []
    ack(http, *ids[failed:])
    complete = http.get(f"/v1/batches/{batch}").json()
    assert (found(http, key=name, outcome="succeeded") == [batch]) is complete["succeeded"]
    assert (found(http, key=name, outcome="failed") == [batch]) is not complete["succeeded"]
    assert (found(http, key=name, outcome="exceeded") == [batch]) is complete["exceeded"]


def test_children_are_found_by_their_parent(http: httpx.Client, name: str) -> None:
    """All children of a batch, or the one of an item. An index beyond the group size is no alias."""
    parent = open_batch(http, items=200, group_size=64)["id"]
    ids = [open_batch(http, key=name, parent=f"{parent}:{place}")["id"] for place in ("0:3", "1:3", "2:0")]
    assert found(http, parent=parent) == ids[::-1]
    assert found(http, parent=f"{parent}:1:3") == [ids[1]]
    assert found(http, parent=f"{parent}:0:67") == found(http, parent=f"{parent}:0:0") == []


def test_the_child_of_an_item_with_a_large_number_is_found(http: httpx.Client, name: str) -> None:
    """Groups and numbers need more than 32 bits. Items that no batch can have are nobody's parent."""
    parent = open_batch(http, items=10**12, group_size=64)["id"]
    child = open_batch(http, key=name, parent=f"{parent}:15624999999:63")["id"]
    assert found(http, parent=f"{parent}:15624999999:63") == [child]
    wide_parent = open_batch(http, items=10**12, group_size=32768)["id"]
    open_batch(http, parent=f"{wide_parent}:0:3")
    for item in ("15625000000:0", "0:3000000000", "9007199254740991:0", "9007199254740991:9007199254740991"):
        assert found(http, parent=f"{parent}:{item}") == found(http, parent=f"{wide_parent}:{item}") == []


def test_counts_are_by_state(http: httpx.Client, name: str) -> None:
    """Under the filters of the list; a state without batches is 0."""
    batches = [open_batch(http, key=f"{name}{n}", items=1, sealed=n > 0)["id"] for n in range(4)]
    ack(http, f"{batches[2]}:0:0")
    http.post(f"/v1/batches/{batches[3]}/cancel")
    expected = {"open": 1, "sealed": 1, "complete": 1, "expired": 0, "cancelled": 1}
    counts = http.get("/v1/batches/counts", params={"key_prefix": name}).json()
    assert counts == {"states": expected, "total": 4, "exact": True}
    http.delete(f"/v1/batches/{batches[0]}")
    assert http.get("/v1/batches/counts", params={"key_prefix": name}).json()["states"]["open"] == 0
    everything = http.get("/v1/batches/counts").json()
    assert everything["exact"]
    assert everything["states"]["cancelled"] >= 1


@pytest.mark.parametrize(
    ("query", "place"),
    [
        ("key=catalog&key_prefix=catalogue", "query.key_prefix"),
        ("outcome=failed&state=open", "query.outcome"),
        ("opened_after=2026-05-04T00:00:00Z&opened_before=2026-05-04T00:00:00Z", "query.opened_before"),
        ("opened_after=2026-05-04", "query.opened_after"),
        ("opened_after=1700000000", "query.opened_after"),
        ("opened_before=2026-13-04T00:00:00Z", "query.opened_before"),
        ("outcome=won", "query.outcome"),
        ("parent=7:0", "query.parent"),
        ("parent=07", "query.parent"),
        ("label=a:1&label=a:2", "query.label"),
        ("&".join(f"label=a{number}:1" for number in range(65)), "query.label"),
        ("key_prefix=a&key_prefix=b", "query.key_prefix"),
    ],
)
def test_contradictory_and_malformed_filters_are_named(sqlite_http: httpx.Client, query: str, place: str) -> None:
    """By the list and by the counts, which have no state."""
    for path in ("/v1/batches", "/v1/batches/counts"):
        if "counts" in path and "state=" in query:
            continue
        response = sqlite_http.get(f"{path}?{query}")
        assert code(response) == (422, "invalid_request")
        assert response.json()["errors"][0]["place"] == place


@mutant(
    "a-batch-that-changed-is-listed-as-unchanged",
    "core.batches.search:Filter.examined",
    "_table.updated_at <= tables.clock(tx) - timedelta(seconds=self.unchanged_for)",
    "sa.true()",
)
@mutant(
    "an-ended-batch-is-listed-as-unchanged",
    "core.batches.search:Filter.states",
    "_table.state.in_(sorted(LIVE))",
    "_table.state != State.DELETING",
)
def test_batches_without_a_change_are_found(http: httpx.Client, name: str) -> None:
    """Live ones alone. It combines with other filters, but not with a state that doesn't change any more."""
    batches = [open_batch(http, key=f"{name}{n}", items=2, sealed=n == 1)["id"] for n in range(3)]
    http.post(f"/v1/batches/{batches[2]}/cancel").raise_for_status()
    assert found(http, key_prefix=name, unchanged_for=0) == [batches[1], batches[0]]
    assert found(http, key_prefix=name, unchanged_for=0, state="sealed") == [batches[1]]
    assert found(http, key_prefix=name, unchanged_for=60) == []
    for query in ({"state": "complete"}, {"outcome": "failed"}):
        response = http.get("/v1/batches", params={**query, "unchanged_for": 60})
        assert (code(response), response.json()["errors"][0]["place"]) == (
            (422, "invalid_request"),
            "query.unchanged_for",
        )
    for wrong in ("-1", "1.5", "9" * 30):
        assert code(http.get("/v1/batches", params={"unchanged_for": wrong})) == (422, "invalid_request")


def test_a_list_has_histories_if_they_are_wanted(http: httpx.Client, name: str) -> None:
    batch = open_batch(http, key=name, items=2)["id"]
    ack(http, f"{batch}:0:1")
    (plain,) = http.get("/v1/batches", params={"key": name}).json()["batches"]
    assert "history" not in plain
    (batch_document,) = http.get("/v1/batches", params={"key": name, "history": "true"}).json()["batches"]
    points = batch_document.pop("history")
    assert batch_document == plain
    assert [(point["resolved"], point["failed"]) for point in points[:2]] == [(0, 0), (1, 0)]
    assert points[0]["at"] == plain["created_at"]
