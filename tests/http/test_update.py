"""PATCH of a batch: its tolerance, deadline and labels."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.http.test_batches import code, open_batch
from tests.mutants import mutant

DEADLINE = "2099-05-04T17:30:00Z"


def update(http: httpx.Client, batch: int, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return http.patch(f"/v1/batches/{batch}", json=body, headers=headers)


def fail(http: httpx.Client, batch: int, *numbers: int) -> None:
    http.post("/v1/failures", json={"items": [f"{batch}:0:{n}" for n in numbers]}).raise_for_status()


def events(http: httpx.Client, batch: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = http.get("/v1/events", params={"batch": batch}).json()["events"]
    return events


def types(http: httpx.Client, batch: int) -> list[str]:
    return [event["type"].removeprefix("batch.") for event in events(http, batch)]


def test_what_the_patch_names_is_changed_and_null_removes(http: httpx.Client) -> None:
    batch = open_batch(http, items=9, labels={"team": "search", "trial": "1"}, tolerated_failures=3)["id"]
    patches: list[dict[str, Any]] = [
        {"deadline": DEADLINE},
        {"labels": {"trial": None, "absent": None, "tür": "ö"}},
        {"tolerated_failures": None, "tolerated_failure_percentage": 20, "on_exceeded": "cancel"},
        {"on_exceeded": None},
        {"labels": None, "deadline": None},
    ]
    expected = dict(http.get(f"/v1/batches/{batch}").json())
    for patch, changes in zip(
        patches,
        [
            patches[0],
            {"labels": {"team": "search", "tür": "ö"}},
            patches[2],
            {"on_exceeded": "continue"},
            {"labels": {}, "deadline": None},
        ],
        strict=True,
    ):
        answer = update(http, batch, **patch)
        assert answer.status_code == 200, answer.text
        expected |= changes | {"updated_at": answer.json()["updated_at"]}
        assert answer.json() == http.get(f"/v1/batches/{batch}").json() == expected
        event = events(http, batch)[-1]
        assert event["type"] == "batch.updated"
        assert event["data"]["patch"].keys() == patch.keys()
    assert types(http, batch) == ["opened", *["updated"] * 5]


LARGEST = {**{str(n): "ö" * 510 for n in range(15)}, "last": "x" * 932}
"""Labels that take 16 KiB as JSON."""


@mutant("labels-may-grow-by-updates", "core.batches.labels:merged", "excess(labels_after)", "None")
def test_labels_are_limited_in_bytes(http: httpx.Client) -> None:
    """At the open and after an update, as UTF-8."""
    assert len(json.dumps(LARGEST, ensure_ascii=False).encode()) == 2**14
    refusal = http.post("/v1/batches", json={"labels": LARGEST | {"last": "x" * 933}})
    fault = "body.labels: expected at most 16,384 bytes of JSON, got 16,385"
    assert (code(refusal), refusal.json()["detail"]) == ((422, "invalid_request"), fault)
    batch = open_batch(http, labels=LARGEST)["id"]
    refusal = update(http, batch, labels={"last": "x" * 933})
    assert (code(refusal), refusal.json()["detail"]) == ((422, "invalid_request"), fault)
    labels_after = {name * 2: value for name, value in LARGEST.items()} | {"lastlast": "x" * 908}
    replacement: dict[str, str | None] = {**dict.fromkeys(LARGEST), **labels_after}
    assert update(http, batch, labels=replacement).json()["labels"] == labels_after
    absent = {str(n) * 255: None for n in range(10, 90)}
    assert code(update(http, batch, labels=absent)) == (422, "invalid_request")


@mutant("an-update-stores-all-labels-again", "core.batches.update:update", "batch.labels.get(name) != value", "True")
def test_the_event_of_an_update_has_only_the_labels_that_changed(http: httpx.Client) -> None:
    """Or a change of one short label would add all of them to the feed."""
    batch = open_batch(http, labels={"a": "1", "b": "2", "c": "3", "d": "4"})["id"]
    update(http, batch, labels={"a": "1", "b": "5", "c": None, "e": "6"})
    data = events(http, batch)[-1]["data"]
    assert data["labels"] == {"b": "5", "e": "6"}
    assert data["patch"] == {"labels": {"a": "1", "b": "5", "c": None, "e": "6"}}


def test_labels_are_found_as_they_are_now(http: httpx.Client) -> None:
    batch = open_batch(http, labels={"team": "before"})["id"]
    update(http, batch, labels={"team": "after"})
    for label, expected in (("team:before", []), ("team:after", [batch])):
        assert [row["id"] for row in http.get("/v1/batches", params={"label": label}).json()["batches"]] == expected


@pytest.mark.parametrize("limit", [{"tolerated_failures": 1}, {"tolerated_failure_percentage": 49}])
def test_a_lowered_tolerance_that_failures_pass_exceeds_the_batch(http: httpx.Client, limit: dict[str, int]) -> None:
    batch = open_batch(http, items=4, sealed=True, tolerated_failures=2)["id"]
    fail(http, batch, 0, 1)
    assert not http.get(f"/v1/batches/{batch}").json()["exceeded"]
    answer = update(http, batch, **limit).json()
    assert (answer["state"], answer["exceeded"], answer["ended_at"]) == ("sealed", True, None)
    assert types(http, batch)[2:] == ["updated", "failures_exceeded"]
    # It stays true, and its event is not repeated.
    assert update(http, batch, tolerated_failures=2, tolerated_failure_percentage=50).json()["exceeded"] is True
    assert update(http, batch, tolerated_failures=1).json()["exceeded"] is True
    assert types(http, batch)[2:] == ["updated", "failures_exceeded", "updated", "updated"]


def test_failures_as_many_as_tolerated_do_not_exceed(http: httpx.Client) -> None:
    batch = open_batch(http, items=4, sealed=True)["id"]
    fail(http, batch, 0, 1)
    for limit in ({"tolerated_failures": 2, "on_exceeded": "cancel"}, {"tolerated_failure_percentage": 50}):
        answer = update(http, batch, **limit).json()
        assert (answer["state"], answer["exceeded"]) == ("sealed", False)


def test_a_percentage_of_an_open_batch_is_judged_by_its_seal(http: httpx.Client) -> None:
    batch = open_batch(http, items=4)["id"]
    fail(http, batch, 0, 1)
    patch = {"tolerated_failure_percentage": 49, "on_exceeded": "cancel"}
    assert update(http, batch, **patch).json()["state"] == "open"
    assert http.post(f"/v1/batches/{batch}/seal").json()["state"] == "cancelled"


def test_a_lowered_tolerance_may_cancel_the_batch(http: httpx.Client) -> None:
    """Also if it was exceeded before. Its parent's item fails before the response."""
    parent = open_batch(http, items=1, sealed=True)["id"]
    batch = open_batch(http, items=4, sealed=True, parent=f"{parent}:0:0", tolerated_failures=1)["id"]
    fail(http, batch, 0, 1)
    answer = update(http, batch, on_exceeded="cancel").json()
    assert (answer["state"], answer["exceeded"]) == ("cancelled", True)
    assert answer["ended_at"] == answer["updated_at"]
    assert types(http, batch)[2:] == ["failures_exceeded", "updated", "cancelled"]
    assert http.get(f"/v1/batches/{parent}").json()["failed"] == 1


def test_a_raised_tolerance_lets_the_batch_succeed(http: httpx.Client) -> None:
    batch = open_batch(http, items=2, sealed=True, tolerated_failures=0)["id"]
    fail(http, batch, 0)
    update(http, batch, tolerated_failures=1)
    answer = http.post("/v1/acks", json={"items": [f"{batch}:0:1"]}).json()
    assert answer["completed"][0]["newly_succeeded"] is True
    batch_state = http.get(f"/v1/batches/{batch}").json()
    assert (batch_state["succeeded"], batch_state["exceeded"]) == (True, True)


@mutant(
    "a-repeated-update-is-refused-as-the-batch-has-ended",
    "core.batches.update:update",
    "request.event(tx) is not None",
    "batch.state in (State.OPEN, State.SEALED) and request.event(tx) is not None",
)
def test_a_key_updates_once(http: httpx.Client) -> None:
    """However many requests there are at once, whatever happened since, and although the batch has ended."""
    batch = open_batch(http, items=1, sealed=True)["id"]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: update(http, batch, "k", labels={"a": "1"}), range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert sorted(answer.headers.get("Idempotency-Replayed", "") for answer in answers) == ["", *["true"] * 3]
    update(http, batch, labels={"a": "2"})
    assert update(http, batch, "k", labels={"a": "1"}).json()["labels"] == {"a": "2"}
    assert code(update(http, batch, "k", labels={"a": "3"})) == (422, "idempotency_key_reused")
    assert types(http, batch).count("updated") == 2
    http.post(f"/v1/batches/{batch}/cancel").raise_for_status()
    assert update(http, batch, "k", labels={"a": "1"}).json()["state"] == "cancelled"
    assert code(update(http, batch, "another", labels={"a": "1"})) == (409, "batch_cancelled")


def test_only_a_live_batch_is_updated(http: httpx.Client) -> None:
    complete = open_batch(http, sealed=True)["id"]
    assert code(update(http, complete, labels={})) == (409, "batch_complete")
    assert types(http, complete) == ["opened", "sealed", "completed", "succeeded"]
    assert code(update(http, 999_999, labels={})) == (404, "batch_not_found")


@pytest.mark.parametrize(
    ("place", "patch"),
    [
        ("body", {}),
        ("body.tolerated_failure_percentage", {"tolerated_failure_percentage": 101}),
        ("body.tolerated_failures", {"tolerated_failures": -1}),
        ("body.tolerated_failures", {"tolerated_failures": "1"}),
        ("body.on_exceeded", {"on_exceeded": "pause"}),
        ("body.on_exceeded", {"on_exceeded": "cancel"}),
        ("body.deadline", {"deadline": "2020-01-01T00:00:00Z"}),
        ("body.deadline", {"deadline": "2099-01-01T00:00:00"}),
        ("body.labels", {"labels": {f"new-{n}": "" for n in range(64)}}),
        ("body.expires_in", {"expires_in": 5}),
        ("body.items", {"items": 5, "labels": {}}),
    ],
)
def test_bad_patches_are_named_and_change_nothing(http: httpx.Client, place: str, patch: dict[str, Any]) -> None:
    batch = open_batch(http, items=3, labels={"old": ""})["id"]
    before = http.get(f"/v1/batches/{batch}").json()
    answer = update(http, batch, **patch)
    assert code(answer) == (422, "invalid_request")
    assert [error["place"] for error in answer.json()["errors"]] == [place]
    assert http.get(f"/v1/batches/{batch}").json() == before
    assert types(http, batch) == ["opened"]


def test_64_labels_are_replaced_by_64_others(http: httpx.Client) -> None:
    batch = open_batch(http, labels={f"old-{n}": "" for n in range(64)})["id"]
    patch = {f"old-{n}": None for n in range(64)} | {f"new-{n}": "" for n in range(64)}
    assert len(update(http, batch, labels=patch).json()["labels"]) == 64


def test_a_deadline_is_changed_and_removed(http: httpx.Client) -> None:
    batch = open_batch(http, items=3, deadline=DEADLINE)["id"]
    assert (
        update(http, batch, deadline="2098-01-01T00:00:00.5+01:00").json()["deadline"] == "2097-12-31T23:00:00.500000Z"
    )
    assert update(http, batch, deadline=None).json()["deadline"] is None


@pytest.mark.parametrize(
    ("content_type", "status"),
    [("application/merge-patch+json", 200), ("application/json; charset=utf-8", 200), ("text/plain", 415)],
)
def test_a_merge_patch_has_its_own_media_type(http: httpx.Client, content_type: str, status: int) -> None:
    batch = open_batch(http)["id"]
    patch = b'{"labels": {"team": "search"}}'
    headers = {"Content-Type": content_type}
    assert http.patch(f"/v1/batches/{batch}", content=patch, headers=headers).status_code == status
