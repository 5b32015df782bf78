"""The batch routes: the answer of each, and that repeating a request has the effect of doing it once."""

from __future__ import annotations

import re
import threading
import time
import uuid
from typing import Any

import httpx
import pytest

from core import programs
from tests.mutants import mutant


def open_batch(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/batches", json=body)
    assert response.status_code == 201, response.text
    return response.json()


def ack(http: httpx.Client, *ids: str) -> dict[str, Any]:
    response = http.post("/v1/acks", json={"items": list(ids)})
    assert response.status_code == 200, response.text
    return response.json()


def code(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    return response.status_code, response.json()["code"]


FIELDS = [
    *("id", "key", "labels", "state", "group_size", "items", "acked", "failed", "skipped", "pending"),
    *("complete", "succeeded"),
    *(
        "parent",
        "seal_at",
        "expires_in",
        "deadline",
        "tolerated_failures",
        "tolerated_failure_percentage",
        "on_exceeded",
        "exceeded",
    ),
    *("created_at", "updated_at", "sealed_at", "ended_at", "ended_by", "reason", "traceparent", "tracestate"),
]


def test_an_open_returns_the_batch_and_its_issued_numbers(http: httpx.Client) -> None:
    """The defaults are the contract's, and times are RFC 3339 in UTC with Z."""
    response = http.post("/v1/batches", json={"items": 3, "labels": {"team": "search"}, "expires_in": 60})
    batch = response.json()
    assert response.headers["location"] == f"/v1/batches/{batch['id']}"
    assert list(batch) == [*FIELDS, "start", "count", "newly", "callback"]
    assert batch["callback"] is None
    assert batch["group_size"] == 8192
    assert (batch["state"], batch["items"], batch["pending"]) == ("open", 3, 3)
    assert (batch["start"], batch["count"], batch["newly"]) == (0, 3, False)
    assert (batch["key"], batch["labels"], batch["expires_in"]) == (None, {"team": "search"}, 60)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", batch["created_at"])
    assert batch["created_at"] == batch["updated_at"]
    assert batch["sealed_at"] is batch["ended_at"] is batch["parent"] is None


def test_an_open_without_a_body_uses_the_defaults(http: httpx.Client) -> None:
    """A POST without a body is `{}`."""
    response = http.post("/v1/batches")
    assert response.status_code == 201
    assert response.json()["items"] == 0


def test_a_completed_child_acks_its_item_in_the_parent(http: httpx.Client) -> None:
    """Before the call that ended it is answered; at any depth."""
    root = open_batch(http, items=1, sealed=True)["id"]
    middle = open_batch(http, items=1, sealed=True, parent=f"{root}:0:0")
    assert middle["parent"] == f"{root}:0:0"
    child = open_batch(http, items=2, sealed=True, parent=f"{middle['id']}:0:0")["id"]
    assert [entry["batch"] for entry in ack(http, f"{child}:0:0", f"{child}:0:1")["completed"]] == [child]
    assert http.get(f"/v1/batches/{root}").json()["succeeded"]


def test_a_parent_item_that_can_have_no_child_is_refused(http: httpx.Client) -> None:
    """If the item is unknown, not issued, resolved or taken, the place is the body's parent. If the parent has ended,
    the error names its state."""
    parent = open_batch(http, items=3)["id"]
    ack(http, f"{parent}:0:0")
    open_batch(http, parent=f"{parent}:0:1")
    for item in (f"{parent + 999}:0:0", f"{parent}:0:3", f"{parent}:0:8192", f"{parent}:0:0", f"{parent}:0:1"):
        response = http.post("/v1/batches", json={"parent": item})
        assert code(response) == (422, "invalid_request")
        assert response.json()["errors"][0]["place"] == "body.parent"
    http.post(f"/v1/batches/{parent}/cancel")
    assert code(http.post("/v1/batches", json={"parent": f"{parent}:0:2"})) == (409, "batch_cancelled")


def test_an_empty_batch_completes_when_it_is_sealed(http: httpx.Client) -> None:
    """By a seal, or by an open that seals at once."""
    batch = open_batch(http)
    sealed = http.post(f"/v1/batches/{batch['id']}/seal").json()
    assert list(sealed) == [*FIELDS, "newly", "newly_succeeded"]
    assert (sealed["state"], sealed["complete"], sealed["succeeded"]) == ("complete", True, True)
    assert (sealed["newly"], sealed["newly_succeeded"]) == (True, True)
    second = http.post(f"/v1/batches/{batch['id']}/seal").json()
    assert (second["newly"], second["newly_succeeded"], second["ended_at"]) == (False, False, sealed["ended_at"])
    at_once = open_batch(http, sealed=True)
    assert (at_once["state"], at_once["newly"]) == ("complete", True)


def test_a_retried_seal_with_its_key_gets_newly_again(http: httpx.Client) -> None:
    """A retry with another key doesn't get it."""
    batch = open_batch(http)["id"]
    first = http.post(f"/v1/batches/{batch}/seal", headers={"Idempotency-Key": "mine"}).json()
    second = http.post(f"/v1/batches/{batch}/seal", headers={"Idempotency-Key": "mine"}).json()
    other = http.post(f"/v1/batches/{batch}/seal", headers={"Idempotency-Key": "other"}).json()
    assert [entry["newly"] for entry in (first, second, other)] == [True, True, False]


def test_an_open_is_replayed_with_its_key(http: httpx.Client) -> None:
    """The batch in its present state, the original numbers, and a header that marks the replay, whatever happened in
    between."""
    key = {"Idempotency-Key": f"open-{uuid.uuid4()}"}
    body = {"key": "nightly", "items": 2}
    first = http.post("/v1/batches", json=body, headers=key)
    assert "idempotency-replayed" not in first.headers
    batch = first.json()["id"]
    http.post(f"/v1/batches/{batch}/items", json={"count": 5})
    http.post(f"/v1/batches/{batch}/cancel")
    second = http.post("/v1/batches", json={**body, "group_size": 8192, "labels": {}, "sealed": False}, headers=key)
    assert second.status_code == 201
    assert second.headers["idempotency-replayed"] == "true"
    replay = second.json()
    assert (replay["id"], replay["start"], replay["count"]) == (batch, 0, 2)
    assert (replay["state"], replay["items"]) == ("cancelled", 7)
    assert code(http.post("/v1/batches", json={"key": "other"}, headers=key)) == (422, "idempotency_key_reused")


def test_a_replayed_open_that_completed_gets_newly_again(http: httpx.Client) -> None:
    """Its answer may have been lost."""
    key = {"Idempotency-Key": f"open-{uuid.uuid4()}"}
    answers = [http.post("/v1/batches", json={"sealed": True}, headers=key).json() for _ in range(2)]
    assert [answer["newly"] for answer in answers] == [True, True]


def test_the_key_of_a_deleted_batch_is_free(http: httpx.Client) -> None:
    """An open's key lives as long as its batch."""
    key = {"Idempotency-Key": f"open-{uuid.uuid4()}"}
    first = http.post("/v1/batches", json={}, headers=key).json()["id"]
    assert http.delete(f"/v1/batches/{first}").status_code == 204
    second = http.post("/v1/batches", json={"items": 1}, headers=key)
    assert second.status_code == 201
    assert second.json()["id"] > first


def test_an_extend_issues_consecutive_numbers(http: httpx.Client) -> None:
    """A billion items are one small answer, and zero items are legal."""
    batch = open_batch(http, group_size=64)["id"]
    response = http.post(f"/v1/batches/{batch}/items", json={"count": 100})
    assert response.status_code == 201
    assert response.json() == {"batch": batch, "group_size": 64, "start": 0, "count": 100, "items": 100}
    empty = http.post(f"/v1/batches/{batch}/items", json={"count": 0}).json()
    assert (empty["start"], empty["count"], empty["items"]) == (100, 0, 100)
    large = http.post(f"/v1/batches/{batch}/items", json={"count": 10**9}).json()
    assert (large["start"], large["items"]) == (100, 10**9 + 100)


def test_an_extend_is_replayed_with_its_key(http: httpx.Client) -> None:
    """Also if the batch was sealed since: the key is looked up before the state is checked."""
    batch = open_batch(http)["id"]
    path, key = f"/v1/batches/{batch}/items", {"Idempotency-Key": "chunk-1"}
    first = http.post(path, json={"count": 3}, headers=key).json()
    http.post(path, json={"count": 4})
    http.post(f"/v1/batches/{batch}/seal")
    second = http.post(path, json={"count": 3}, headers=key)
    assert (second.status_code, second.headers["idempotency-replayed"]) == (201, "true")
    assert second.json() == {**first, "items": 7}
    assert code(http.post(path, json={"count": 4}, headers=key)) == (422, "idempotency_key_reused")
    assert code(http.post(path, json={"count": 3})) == (409, "batch_sealed")
    other = open_batch(http)["id"]
    other_response = http.post(f"/v1/batches/{other}/items", json={"count": 9}, headers=key)
    assert (other_response.status_code, other_response.json()["start"]) == (201, 0)


def test_an_extend_with_another_digest_is_refused(http: httpx.Client) -> None:
    """If both calls have one. Nothing is issued, and the error says what differs."""
    batch = open_batch(http)["id"]
    path, key = f"/v1/batches/{batch}/items", {"Idempotency-Key": "chunk-1"}
    first = http.post(path, json={"count": 3, "digest": "a"}, headers=key).json()
    for body in ({"count": 3, "digest": "a"}, {"count": 3}, {"count": 3, "digest": None}):
        again = http.post(path, json=body, headers=key)
        assert (again.status_code, again.json()) == (201, first)
    http.post(f"/v1/batches/{batch}/seal")
    refused = http.post(path, json={"count": 3, "digest": "A"}, headers=key)
    assert code(refused) == (422, "idempotency_key_reused")
    assert f"it extended batch {batch} with another digest" in refused.json()["detail"]
    assert http.get(f"/v1/batches/{batch}").json()["items"] == 3


def test_a_pending_item_extends_its_sealed_batch(http: httpx.Client) -> None:
    """The answer is that of every extend, and its repeat has the same numbers though the item was acked since."""
    batch = open_batch(http, items=2, sealed=True)["id"]
    body, key = {"count": 3, "by": f"{batch}:0:1"}, {"Idempotency-Key": "links"}
    answers = []
    for _ in range(2):
        answers.append(http.post(f"/v1/batches/{batch}/items", json=body, headers=key))
        ack(http, f"{batch}:0:1")
    extension, repeat = answers
    assert extension.json() == {"batch": batch, "group_size": 8192, "start": 2, "count": 3, "items": 5}
    assert (repeat.status_code, repeat.json()) == (201, extension.json())
    assert [answer.headers.get("idempotency-replayed") for answer in answers] == [None, "true"]
    assert http.get(f"/v1/batches/{batch}").json()["state"] == "sealed"
    assert code(http.post(f"/v1/batches/{batch}/items", json=body)) == (409, "item_resolved")
    assert code(http.post(f"/v1/batches/{batch}/items", json={"count": 1})) == (409, "batch_sealed")
    for item in (f"{batch}:0:5", f"{batch + 999}:0:0", f"0{batch}:0:0", "links"):
        refused = http.post(f"/v1/batches/{batch}/items", json={"count": 1, "by": item})
        assert code(refused) == (422, "invalid_request")
        assert refused.json()["errors"][0]["place"] == "body.by"
    assert http.get(f"/v1/batches/{batch}").json()["items"] == 5


def test_a_batch_seals_itself_with_its_last_item(http: httpx.Client) -> None:
    """An extend beyond it issues nothing, and says why."""
    batch = open_batch(http, items=2, seal_at=5)
    assert (batch["state"], batch["seal_at"]) == ("open", 5)
    refused = http.post(f"/v1/batches/{batch['id']}/items", json={"count": 4})
    assert code(refused) == (409, "batch_sealed")
    assert "sealed at 5 items and has 2" in refused.json()["detail"]
    explained = http.get(f"/v1/batches/{batch['id']}/explain").json()["reasons"][0]
    assert explained["text"].startswith("The batch seals itself at 5 items: 3 more items to issue; ")
    assert (explained["code"], explained["seal_at"], explained["missing"]) == ("not_sealed", 5, 3)
    assert http.post(f"/v1/batches/{batch['id']}/items", json={"count": 3}).status_code == 201
    assert http.get(f"/v1/batches/{batch['id']}").json()["state"] == "sealed"
    assert open_batch(http, items=2, seal_at=2)["state"] == "sealed"
    assert open_batch(http, seal_at=0)["newly"]


@mutant(
    "extend-compares-with-a-chunk-that-has-no-digest",
    "core.batches.writing:_extended",
    "None not in (digest, before_digest) and digest != before_digest",
    "digest != before_digest",
)
def test_an_extend_without_a_digest_leaves_its_repeats_free(http: httpx.Client) -> None:
    """The call may have come from a client or through a process of an earlier release."""
    batch = open_batch(http)["id"]
    path, key = f"/v1/batches/{batch}/items", {"Idempotency-Key": "chunk-1"}
    first = http.post(path, json={"count": 3}, headers=key).json()
    for digest in ("a", "b"):
        assert http.post(path, json={"count": 3, "digest": digest}, headers=key).json() == first


@pytest.mark.parametrize("digest", ["", "a" * 65, "a b", "ä", 7])
def test_a_digest_is_short_visible_ascii(http: httpx.Client, digest: Any) -> None:
    batch = open_batch(http)["id"]
    response = http.post(
        f"/v1/batches/{batch}/items", json={"count": 3, "digest": digest}, headers={"Idempotency-Key": "chunk-1"}
    )
    assert code(response) == (422, "invalid_request")
    assert response.json()["errors"][0]["place"] == "body.digest"


def test_a_digest_needs_a_key(http: httpx.Client) -> None:
    """Without one, no repeat would be compared with it."""
    batch = open_batch(http)["id"]
    response = http.post(f"/v1/batches/{batch}/items", json={"count": 3, "digest": "a"})
    assert code(response) == (422, "invalid_request")
    assert response.json()["errors"][0]["place"] == "body.digest"


def test_a_batch_holds_at_most_a_trillion_items(http: httpx.Client) -> None:
    """A call that would exceed it changes nothing."""
    batch = open_batch(http, items=10**12 - 1)["id"]
    response = http.post(f"/v1/batches/{batch}/items", json={"count": 2})
    assert code(response) == (422, "invalid_request")
    assert response.json()["errors"][0]["place"] == "body.count"
    assert http.post(f"/v1/batches/{batch}/items", json={"count": 1}).json()["items"] == 10**12


@pytest.mark.parametrize("end", ["complete", "cancelled"])
def test_an_ended_batch_refuses_with_its_own_code(http: httpx.Client, end: str) -> None:
    """A verb that an ended batch can't accept is a 409 that names the end."""
    batch = open_batch(http, items=1)["id"]
    http.post(f"/v1/batches/{batch}/{'seal' if end == 'complete' else 'cancel'}")
    ack(http, f"{batch}:0:0")
    assert http.get(f"/v1/batches/{batch}").json()["state"] == end
    assert code(http.post(f"/v1/batches/{batch}/items", json={"count": 1})) == (409, f"batch_{end}")
    if end == "complete":
        assert code(http.post(f"/v1/batches/{batch}/cancel")) == (409, "batch_complete")
    else:
        assert code(http.post(f"/v1/batches/{batch}/seal")) == (409, "batch_cancelled")


def test_a_cancelled_batch_stays_as_a_tombstone(http: httpx.Client) -> None:
    """A second cancel is a 200; its bits stay; its items are rejected by id."""
    batch = open_batch(http, items=2)["id"]
    ack(http, f"{batch}:0:0")
    first = http.post(f"/v1/batches/{batch}/cancel").json()
    assert (first["state"], first["acked"], first["pending"]) == ("cancelled", 1, 1)
    assert http.post(f"/v1/batches/{batch}/cancel").json() == first
    assert ack(http, f"{batch}:0:1")["rejected"] == [{"item": f"{batch}:0:1", "reason": "cancelled"}]
    pending = http.get(f"/v1/batches/{batch}/pending").json()
    assert [(entry["start"], entry["end"]) for entry in pending["ranges"]] == [(1, 2)]
    assert http.get(f"/v1/batches/{batch}/verify").json()["ok"]


def test_a_cancel_has_a_reason_and_ends_the_batches_below(http: httpx.Client) -> None:
    """Both are optional. The reason has at most 4,000 characters; it is in the batch, its event and explanation, and
    in those of the batches below, which name the batch that was cancelled."""
    reason = "the wrong catalog: \0 \U0001f4d6" + 3978 * "ä"
    batch = open_batch(http, items=2)["id"]
    child = open_batch(http, items=1, parent=f"{batch}:0:1")["id"]
    for body in ({"reason": reason + "!"}, {"reason": 7}, {"children": 1}, {"children": None}, {"cause": "x"}):
        assert code(http.post(f"/v1/batches/{batch}/cancel", json=body)) == (422, "invalid_request")
    answer = http.post(f"/v1/batches/{batch}/cancel", json={"reason": reason, "children": True}).json()
    assert (answer["state"], answer["reason"], answer["ended_by"]) == ("cancelled", reason, None)
    assert http.post(f"/v1/batches/{batch}/cancel", json={"reason": None}).json() == answer
    for id, ancestor in ((batch, None), (child, batch)):
        found = http.get(f"/v1/batches/{id}").json()
        assert (found["state"], found["reason"], found["ended_by"]) == ("cancelled", reason, ancestor)
        (event,) = http.get("/v1/events", params={"batch": id, "type": "batch.cancelled"}).json()["events"]
        assert (event["data"]["reason"], event["data"].get("ended_by")) == (reason, ancestor)
        ended = http.get(f"/v1/batches/{id}/explain").json()["reasons"][0]
        assert (ended["code"], ended["reason"], ended["ended_by"]) == ("ended", reason, ancestor)
    assert http.get("/v1/batches", params={"parent": batch}).json()["batches"] == [
        http.get(f"/v1/batches/{child}").json()
    ]


def test_a_reopened_batch_takes_acks_again(http: httpx.Client) -> None:
    """It is as it was before; a repeat under its key changes nothing, and one without a key is refused."""
    batch = open_batch(http, items=2)["id"]
    path, key = f"/v1/batches/{batch}/reopen", {"Idempotency-Key": "reopen-1"}
    assert code(http.post(path)) == (409, "batch_live")
    http.post(f"/v1/batches/{batch}/cancel", json={"reason": "a mistake"})
    for body in ({"deadline": 7}, {"deadline": "2020-01-01T00:00:00Z"}, {"reason": "x" * 4001}, {"children": True}):
        assert code(http.post(path, json=body)) == (422, "invalid_request")
    body = {"deadline": "2099-01-01T00:00:00Z", "reason": "the disk is back"}
    answer = http.post(path, json=body, headers=key)
    reopened = answer.json()
    assert list(reopened) == FIELDS
    assert (reopened["state"], reopened["reason"], reopened["ended_at"]) == ("open", None, None)
    assert reopened["deadline"] == body["deadline"]
    assert "idempotency-replayed" not in answer.headers
    repeat = http.post(path, json=body, headers=key)
    assert (repeat.json(), repeat.headers["idempotency-replayed"]) == (reopened, "true")
    assert code(http.post(path, json={}, headers=key)) == (422, "idempotency_key_reused")
    (event,) = http.get("/v1/events", params={"batch": batch, "type": "batch.reopened"}).json()["events"]
    assert (event["data"]["state"], event["data"]["reason"]) == ("open", "the disk is back")
    assert ack(http, f"{batch}:0:0")["applied"] == 1
    http.post(f"/v1/batches/{batch}/seal")
    ack(http, f"{batch}:0:1")
    assert code(http.post(path)) == (409, "batch_complete")


def test_a_deleted_batch_is_unknown(http: httpx.Client) -> None:
    """For every verb, and for acks."""
    batch = open_batch(http, items=1)["id"]
    assert http.delete(f"/v1/batches/{batch}").status_code == 204
    assert code(http.delete(f"/v1/batches/{batch}")) == (404, "batch_not_found")
    for path in ("", "/pending", "/failed", "/verify", "/watermark", "?wait=1"):
        assert code(http.get(f"/v1/batches/{batch}{path}")) == (404, "batch_not_found")
    assert code(http.post(f"/v1/batches/{batch}/seal")) == (404, "batch_not_found")
    assert code(http.post(f"/v1/batches/{batch}/cancel")) == (404, "batch_not_found")
    assert code(http.post(f"/v1/batches/{batch}/items", json={"count": 1})) == (404, "batch_not_found")
    assert ack(http, f"{batch}:0:0")["rejected"] == [{"item": f"{batch}:0:0", "reason": "unknown_batch"}]


def pages(http: httpx.Client, path: str, field: str, **query: Any) -> list[list[dict[str, Any]]]:
    result = []
    while True:
        page = http.get(path, params=query).json()
        result.append(page[field])
        if page["next"] is None:
            return result
        query["cursor"] = page["next"]


def flat(result: list[list[Any]]) -> list[Any]:
    return [entry for page in result for entry in page]


def test_batches_are_listed_newest_first_in_pages(http: httpx.Client) -> None:
    """Filtered by key (compared by bytes), state and labels; several labels must all match."""
    key = f"list-{uuid.uuid4()}"
    ids = [
        open_batch(http, key=key, labels={"parity": str(n % 2), "team": "a" if n < 4 else "b"}, sealed=n == 6)["id"]
        for n in range(7)
    ]
    open_batch(http, key=key.upper())
    open_batch(http, key=key + " ")

    def listed(**query: Any) -> list[list[int]]:
        return [[b["id"] for b in page] for page in pages(http, "/v1/batches", "batches", key=key, **query)]

    newest = ids[::-1]
    assert listed(limit=3) == [newest[:3], newest[3:6], newest[6:]]
    assert listed(limit=7) == [newest]
    assert flat(listed(state="complete")) == [ids[6]]
    assert flat(listed(state="open")) == newest[1:]
    assert flat(listed(label=["parity:0"])) == [ids[6], ids[4], ids[2], ids[0]]
    assert flat(listed(label=["parity:0", "team:a"])) == [ids[2], ids[0]]
    assert flat(listed(label="team:c")) == []


def test_pending_and_failed_are_ranges_in_pages(http: httpx.Client) -> None:
    """Half-open ranges of numbers, with the ids of both ends, merged across groups, with the failures' reasons."""
    batch = open_batch(http, group_size=64, items=200)["id"]

    def ids(*numbers: int) -> list[str]:
        return [f"{batch}:{n // 64}:{n % 64}" for n in numbers]

    ack(http, *ids(0, 1, 10, 150))
    http.post("/v1/failures", json={"items": ids(20, 21), "reason": "no such page"})
    http.post("/v1/failures", json={"items": ids(22, 199)})
    result = pages(http, f"/v1/batches/{batch}/pending", "ranges", limit=2)
    assert [[(entry["start"], entry["end"]) for entry in page] for page in result] == [
        [(2, 10), (11, 20)],
        [(23, 150), (151, 199)],
    ]
    assert result[1][0]["first"] == f"{batch}:0:23"
    assert result[1][0]["last"] == f"{batch}:2:21"
    failed = flat(pages(http, f"/v1/batches/{batch}/failed", "ranges", limit=1))
    assert [(entry["start"], entry["end"]) for entry in failed] == [(20, 23), (199, 200)]
    assert failed[0]["reasons"] == dict.fromkeys(ids(20, 21), "no such page")
    assert failed[1]["reasons"] == {}


def test_the_watermark_is_the_smallest_pending_number(http: httpx.Client) -> None:
    """It skips items resolved out of order, and its item is null if none is pending."""
    batch = open_batch(http, group_size=64, items=130)["id"]

    def mark() -> tuple[int, str | None]:
        answer = http.get(f"/v1/batches/{batch}/watermark").json()
        return answer["watermark"], answer["item"]

    assert mark() == (0, f"{batch}:0:0")
    ack(http, *(f"{batch}:1:{n}" for n in range(64)))
    assert mark() == (0, f"{batch}:0:0")
    ack(http, *(f"{batch}:0:{n}" for n in range(64)))
    assert mark() == (128, f"{batch}:2:0")
    ack(http, f"{batch}:2:1")
    assert mark() == (128, f"{batch}:2:0")
    http.post("/v1/failures", json={"items": [f"{batch}:2:0"]})
    assert mark() == (130, None)


def test_a_long_poll_ends_with_the_batch(http: httpx.Client) -> None:
    """The ack that completes the batch wakes it, long before its time-out."""
    batch = open_batch(http, items=1, sealed=True)["id"]
    answers: list[dict[str, Any]] = []

    def wait() -> None:
        answers.append(httpx.get(f"{str(http.base_url).rstrip('/')}/v1/batches/{batch}?wait=60", timeout=70).json())

    waiters = [threading.Thread(target=wait) for _ in range(5)]
    for waiter in waiters:
        waiter.start()
    ack(http, f"{batch}:0:0")
    for waiter in waiters:
        waiter.join(30)
    now = http.get(f"/v1/batches/{batch}").json()
    assert now["state"] == "complete"
    assert answers == [now] * 5


def test_a_long_poll_answers_at_the_end_of_its_time(http: httpx.Client) -> None:
    """With the batch in its state then; an ended batch is answered at once."""
    batch = open_batch(http, items=1)["id"]
    start = time.monotonic()
    assert http.get(f"/v1/batches/{batch}?wait=0.2").json()["state"] == "open"
    assert time.monotonic() - start >= 0.2
    http.post(f"/v1/batches/{batch}/cancel")
    start = time.monotonic()
    assert http.get(f"/v1/batches/{batch}?wait=60").json()["state"] == "cancelled"
    assert time.monotonic() - start < 30


def test_the_probes_and_pages_answer(http: httpx.Client) -> None:
    """Live, ready, measured, and documented without external resources."""
    assert http.get("/healthz").json() == {"status": "ok", "version": programs.version()}
    assert http.get("/readyz").json() == {"status": "ready"}
    assert "# TYPE lastbit_acks_total counter" in http.get("/metrics").text
    page = http.get("/docs").text
    assert "swagger-ui" in page
    assert "//" not in re.sub(r"http://www\.w3\.org", "", "".join(re.findall(r'(?:src|href)="([^"]*)"', page)))
    for asset in re.findall(r'(?:src|href)="(/docs/assets/[^"]*)"', page):
        assert http.get(asset).status_code == 200
    # A Swagger UI before version 5 shows an OpenAPI 3.1 document as an error.
    assert http.get("/openapi.json").json()["openapi"].startswith("3.1")
    assert "OAS31" in http.get("/docs/assets/swagger-ui-bundle.js").text


def test_a_batch_is_explained(http: httpx.Client) -> None:
    """With codes for programs and sentences for people; also once it has ended."""
    batch = open_batch(http, items=3, expires_in=3600)["id"]
    http.post("/v1/acks", json={"items": [f"{batch}:0:0"]})
    result = http.get(f"/v1/batches/{batch}/explain").json()
    assert (result["batch"], result["state"], result["done"]) == (batch, "open", False)
    assert [reason["code"] for reason in result["reasons"]] == ["not_sealed", "pending"]
    not_sealed, pending = result["reasons"]
    assert not_sealed["expires_at"].endswith("Z")
    assert pending["ranges"] == [{"first": f"{batch}:0:1", "last": f"{batch}:0:2", "count": 2}]
    assert pending["text"].startswith(f"2 of 3 items are pending: {batch}:0:1 to {batch}:0:2")
    http.post(f"/v1/batches/{batch}/seal")
    http.post("/v1/acks", json={"items": [f"{batch}:0:1", f"{batch}:0:2"]})
    result = http.get(f"/v1/batches/{batch}/explain").json()
    assert (result["done"], [reason["code"] for reason in result["reasons"]]) == (True, ["complete"])
    assert code(http.get("/v1/batches/999999/explain")) == (404, "batch_not_found")
    assert code(http.get("/v1/batches/07/explain")) == (422, "invalid_request")


def test_a_tree_is_summed(http: httpx.Client) -> None:
    parent = open_batch(http, items=3, sealed=True)["id"]
    child = open_batch(http, items=4, parent=f"{parent}:0:2")["id"]
    ack(http, f"{parent}:0:0", f"{child}:0:1")
    http.post("/v1/failures", json={"items": [f"{child}:0:2"]}).raise_for_status()
    assert http.get(f"/v1/batches/{parent}/progress").json() == {
        "batch": parent,
        "items": 6,
        "acked": 2,
        "failed": 1,
        "skipped": 0,
        "pending": 3,
        "batches": {"open": 1, "sealed": 1, "complete": 0, "expired": 0, "cancelled": 0},
        "truncated": False,
    }
    assert code(http.get("/v1/batches/999999/progress")) == (404, "batch_not_found")


def test_the_history_of_a_batch_ends_with_its_counts(http: httpx.Client) -> None:
    batch = open_batch(http, items=3)
    history = http.get(f"/v1/batches/{batch['id']}/history").json()
    assert history["points"][0] == {"at": batch["created_at"], "resolved": 0, "failed": 0}
    ack(http, f"{batch['id']}:0:0", f"{batch['id']}:0:1")
    ended = http.post(f"/v1/batches/{batch['id']}/cancel").json()
    history = http.get(f"/v1/batches/{batch['id']}/history").json()
    assert history["batch"] == batch["id"]
    assert history["points"][-1] == {"at": ended["ended_at"], "resolved": 2, "failed": 0}
    assert code(http.get("/v1/batches/999999/history")) == (404, "batch_not_found")


def test_a_repair_of_an_undamaged_batch_changes_nothing(http: httpx.Client) -> None:
    """HTTP can't damage a batch, so damaged batches are tested in tests/guarantees."""
    batch = open_batch(http, items=3)["id"]
    ack(http, f"{batch}:0:0")
    before = http.get(f"/v1/batches/{batch}").json()
    counts = {"state": "open", "acked": 1, "failed": 0, "skipped": 0, "pending": 2}
    for body, dry_run in (({}, False), ({"dry_run": True}, True)):
        response = http.post(f"/v1/batches/{batch}/repair", json=body)
        assert response.status_code == 200
        result = {"needed": False, "faults": [], "groups": 0, "before": counts, "after": counts}
        assert response.json() == {"dry_run": dry_run, **result, "newly": False, "newly_succeeded": False}
    assert http.get(f"/v1/batches/{batch}").json() == before
    for bad_body in ({"dry_run": 1}, {"dry": True}):
        assert code(http.post(f"/v1/batches/{batch}/repair", json=bad_body)) == (422, "invalid_request")
    assert code(http.post("/v1/batches/999999/repair")) == (404, "batch_not_found")
