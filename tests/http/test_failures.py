"""Failures by reason, and their redrive."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.http.test_batches import ack, code, open_batch
from tests.mutants import mutant

SIZE = 64


def ids(batch: int, *numbers: int) -> list[str]:
    return [f"{batch}:{n // SIZE}:{n % SIZE}" for n in numbers]


def fail(http: httpx.Client, items: list[str], reason: str | None = None) -> None:
    http.post("/v1/failures", json={"items": items, "reason": reason}).raise_for_status()


@pytest.fixture
def batch(http: httpx.Client) -> int:
    """200 items, of which 2 to 4 and 70 failed with "slow", 5 with "Slow", 100 and 199 without a reason; 6 is acked
    after it failed."""
    batch: int = open_batch(http, group_size=SIZE, items=200)["id"]
    fail(http, ids(batch, 2, 3, 4, 6, 70), "slow")
    fail(http, ids(batch, 5), "Slow")
    fail(http, ids(batch, 100, 199))
    ack(http, *ids(batch, 6))
    return batch


def test_failures_are_counted_by_reason(http: httpx.Client, batch: int) -> None:
    """The most frequent first, with times and up to five items; in pages."""
    answer = http.get(f"/v1/batches/{batch}/failed/reasons").json()
    slow, without, other = answer["reasons"]
    assert (slow["reason"], slow["count"], slow["items"]) == ("slow", 4, ids(batch, 2, 3, 4, 70))
    assert slow["first_at"] <= slow["last_at"]
    assert without == {"reason": None, "count": 2, "first_at": None, "last_at": None, "items": ids(batch, 100, 199)}
    assert (other["reason"], other["count"], other["items"]) == ("Slow", 1, ids(batch, 5))
    assert (answer["failed"], answer["examined"], answer["exact"], answer["next"]) == (7, 7, True, None)
    page = http.get(f"/v1/batches/{batch}/failed/reasons", params={"limit": 2}).json()
    assert page["reasons"] == [slow, without]
    page = http.get(f"/v1/batches/{batch}/failed/reasons", params={"limit": 2, "cursor": page["next"]}).json()
    assert (page["reasons"], page["next"]) == ([other], None)


def test_a_batch_without_failures_has_no_reasons(http: httpx.Client) -> None:
    empty = open_batch(http, items=3)["id"]
    answer = http.get(f"/v1/batches/{empty}/failed/reasons").json()
    assert answer == {"reasons": [], "failed": 0, "examined": 0, "exact": True, "next": None}
    assert code(http.get("/v1/batches/999999/failed/reasons")) == (404, "batch_not_found")
    assert code(http.get(f"/v1/batches/{empty}/failed/reasons", params={"cursor": "x"})) == (422, "invalid_request")


def redrive(http: httpx.Client, batch: int, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return http.post(f"/v1/batches/{batch}/redrive", json=body, headers=headers)


def spans(document: dict[str, Any]) -> list[tuple[int, int]]:
    return [(span["start"], span["end"]) for span in document["ranges"]]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, [(2, 6), (70, 71), (100, 101), (199, 200)]),
        ({"reason": "slow"}, [(2, 5), (70, 71)]),
        ({"reason": "Slow", "note": "by hand"}, [(5, 6)]),
        ({"items": [199, 3, 3, 6, 0]}, [(3, 4), (199, 200)]),
        ({"items": [2, 5, 100], "reason": "slow"}, [(2, 3)]),
    ],
)
def test_a_redrive_names_failed_items(
    http: httpx.Client, batch: int, body: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    """Its event says the same. Nothing of the batch changes but the time of its last change."""
    if "items" in body:
        body = {**body, "items": ids(batch, *body["items"])}
    before = http.get(f"/v1/batches/{batch}").json()
    answer = redrive(http, batch, **body).json()
    assert spans(answer) == expected
    assert (answer["count"], answer["more"]) == (sum(end - start for start, end in expected), False)
    assert answer["ranges"][0]["first"] == ids(batch, expected[0][0])[0]
    assert answer["ranges"][-1]["last"] == ids(batch, expected[-1][1] - 1)[0]
    (event,) = http.get("/v1/events", params={"batch": batch, "type": "batch.redrive"}).json()["events"]
    assert event["position"] == answer["position"]
    assert spans(event["data"]) == expected
    facts = {name: event["data"][name] for name in ("count", "more", "reason", "note", "group_size")}
    assert facts == {
        "count": answer["count"],
        "more": False,
        "reason": body.get("reason"),
        "note": body.get("note"),
        "group_size": SIZE,
    }
    after = http.get(f"/v1/batches/{batch}").json()
    assert after == before | {"updated_at": after["updated_at"]}
    assert after["updated_at"] > before["updated_at"]


@mutant("held-items-are-sent-again", "core.batches.redrive:_held", "not batch.children or not spans", "True")
@mutant(
    "what-has-just-changed-is-sent-again",
    "core.batches.redrive:_append",
    "now - batch.updated_at < timedelta(seconds=wish.unchanged_for)",
    "False",
)
def test_pending_items_are_sent_again(http: httpx.Client) -> None:
    """Without those of nested batches, which are not lost; if that is asked for, only if nothing has changed lately.
    Nothing is failed by it."""
    batch = http.post("/v1/batches", json={"items": 9, "group_size": 64, "sealed": True}).json()["id"]
    child = http.post("/v1/batches", json={"items": 1, "parent": f"{batch}:0:5"}).json()["id"]
    http.post("/v1/acks", json={"items": [f"{batch}:0:{index}" for index in (0, 1, 7)]})
    assert code(redrive(http, batch, pending=True, unchanged_for=60)) == (409, "nothing_pending")
    for body in ({"reason": "x"}, {"items": [f"{batch}:0:2"]}):
        assert code(redrive(http, batch, pending=True, **body)) == (422, "invalid_request")
    assert code(redrive(http, batch, unchanged_for=60)) == (422, "invalid_request")
    answer = redrive(http, batch, pending=True, unchanged_for=0, note="the queue was purged").json()
    assert (answer["count"], answer["more"]) == (5, False)
    assert [(span["start"], span["end"]) for span in answer["ranges"]] == [(2, 5), (6, 7), (8, 9)]
    (event,) = http.get("/v1/events", params={"batch": batch, "type": "batch.redrive"}).json()["events"]
    assert (event["data"]["pending"], event["data"]["count"], event["data"]["reason"]) == (True, 5, None)
    found = http.get(f"/v1/batches/{batch}").json()
    assert (found["state"], found["failed"], found["pending"]) == ("sealed", 0, 6)
    http.post(f"/v1/batches/{child}/cancel")
    http.post("/v1/acks", json={"items": [f"{batch}:0:{index}" for index in (2, 3, 4, 6, 8)]})
    assert code(redrive(http, batch, pending=True)) == (409, "nothing_pending")


@mutant(
    "a-redrive-is-recognized-by-its-key-alone",
    "core.batches.once:Request.event",
    "row is not None and row.event_id != self.event_id",
    "False",
)
def test_a_key_redrives_once(http: httpx.Client, batch: int) -> None:
    """Also from two connections at once, and when nothing is failed any more. With another body it is refused."""
    key = str(uuid.uuid4())
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: redrive(http, batch, key, reason="slow"), range(4)))
    assert len({answer.text for answer in answers}) == 1
    assert sorted("Idempotency-Replayed" in answer.headers for answer in answers) == [False, True, True, True]
    ack(http, *ids(batch, 2, 3, 4, 5, 70, 100, 199))
    assert redrive(http, batch, key, reason="slow").text == answers[0].text
    assert code(redrive(http, batch, key)) == (422, "idempotency_key_reused")
    assert code(redrive(http, batch, "another", reason="slow")) == (409, "nothing_failed")
    assert len(http.get("/v1/events", params={"batch": batch, "type": "batch.redrive"}).json()["events"]) == 1


def test_without_a_key_each_request_is_a_redrive(http: httpx.Client, batch: int) -> None:
    assert redrive(http, batch).json()["position"] < redrive(http, batch).json()["position"]


def test_bad_redrives_are_named(http: httpx.Client, batch: int) -> None:
    other = open_batch(http, items=1)["id"]
    assert code(redrive(http, other)) == (409, "nothing_failed")
    assert code(redrive(http, batch, reason="slow ")) == (409, "nothing_failed")
    assert code(redrive(http, batch, items=ids(batch, 0, 1))) == (409, "nothing_failed")
    for items, place in (
        ([f"{batch}:0:3", f"{other}:0:0"], "body.items[1]"),
        ([f"{batch}:3:8"], "body.items[0]"),
        ([f"{batch}:0:64"], "body.items[0]"),
        (["seven"], "body.items[0]"),
        ([], "body.items"),
    ):
        answer = redrive(http, batch, items=items)
        assert code(answer) == (422, "invalid_request")
        assert answer.json()["errors"][0]["place"] == place
    http.post(f"/v1/batches/{batch}/cancel", json={}).raise_for_status()
    assert code(redrive(http, batch)) == (409, "batch_cancelled")
    assert code(redrive(http, 999999)) == (404, "batch_not_found")


def test_a_complete_batch_is_redriven_until_it_succeeds(http: httpx.Client) -> None:
    batch = open_batch(http, group_size=SIZE, items=2, sealed=True)["id"]
    fail(http, ids(batch, 0, 1), "slow")
    assert spans(redrive(http, batch).json()) == [(0, 2)]
    ack(http, *ids(batch, 0, 1))
    assert http.get(f"/v1/batches/{batch}").json()["succeeded"]
    assert code(redrive(http, batch)) == (409, "nothing_failed")
