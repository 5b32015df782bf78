"""The two ack routes: what is applied, repeated, rejected and completed, item by item and by mask."""

from __future__ import annotations

import base64
import uuid
from typing import Any

import httpx

from tests.http.test_batches import code, open_batch


def send(http: httpx.Client, verb: str = "acks", *, key: str | None = None, **body: Any) -> dict[str, Any]:
    headers = {"Idempotency-Key": key} if key else {}
    response = http.post(f"/v1/{verb}", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def bits(*indexes: int, size: int = 0) -> str:
    """A mask in the contract's bit order: bit i is bytes[i // 8] >> (i % 8) & 1."""
    field = bytearray(size or max(indexes, default=0) // 8 + 1)
    for index in indexes:
        field[index // 8] |= 1 << (index % 8)
    return base64.b64encode(bytes(field)).decode()


def in_order(rejected: list[dict[str, Any]]) -> list[list[tuple[str, Any]]]:
    """The entries in a fixed order, as the contract specifies none."""
    return sorted(sorted(entry.items()) for entry in rejected)


def test_an_item_counts_once_however_often_it_is_sent(http: httpx.Client) -> None:
    """In one call or in several: applied + repeated + rejected is the number of distinct items sent."""
    batch = open_batch(http, items=3)["id"]
    assert send(http, items=[f"{batch}:0:0"] * 5 + [f"{batch}:0:1"])["applied"] == 2
    second = send(http, items=[f"{batch}:0:0", f"{batch}:0:2", f"{batch}:0:2"])
    assert (second["applied"], second["repeated"], second["rejected"]) == (1, 1, [])


def test_an_id_that_is_also_in_a_mask_counts_as_the_masks_bit(http: httpx.Client) -> None:
    """Also if it is rejected: once, with the group."""
    batch = open_batch(http, items=3)["id"]
    answer = send(
        http,
        items=[f"{batch}:0:0", f"{batch}:0:5", f"{batch}:0:6"],
        groups=[{"batch": batch, "group": 0, "bits": bits(0, 1, 5)}, {"batch": batch, "group": 0, "bits": bits(1, 2)}],
    )
    assert (answer["applied"], answer["repeated"]) == (3, 0)
    assert in_order(answer["rejected"]) == in_order(
        [
            {"item": f"{batch}:0:6", "reason": "unknown_item"},
            {"group": f"{batch}:0", "reason": "unknown_item", "count": 1},
        ]
    )


def test_items_that_were_never_issued_are_rejected_and_block_nothing(http: httpx.Client) -> None:
    """An index beyond the group belongs to no item, not to one of the next group; an unknown batch is unknown."""
    batch = open_batch(http, group_size=64, items=100)["id"]
    anonymous = 2**52
    answer = send(
        http,
        items=[f"{batch}:0:64", f"{batch}:1:36", f"{batch}:9:0", f"{batch}:1:35", f"{anonymous}:0:0"],
        groups=[{"batch": anonymous, "group": 3, "bits": bits(0, 9)}],
    )
    assert answer["applied"] == 1
    assert in_order(answer["rejected"]) == in_order(
        [
            {"item": f"{batch}:0:64", "reason": "unknown_item"},
            {"item": f"{batch}:1:36", "reason": "unknown_item"},
            {"item": f"{batch}:9:0", "reason": "unknown_item"},
            {"item": f"{anonymous}:0:0", "reason": "unknown_batch"},
            {"group": f"{anonymous}:3", "reason": "unknown_batch", "count": 2},
        ]
    )
    assert http.get(f"/v1/batches/{batch}").json()["acked"] == 1


def test_one_call_acks_items_of_many_batches(http: httpx.Client) -> None:
    """And its answer names each batch that it completed or that was complete before."""
    ids = [open_batch(http, key=f"many-{n}", items=1, sealed=True)["id"] for n in range(5)]
    send(http, items=[f"{ids[0]}:0:0"])
    answer = send(http, items=[f"{batch}:0:0" for batch in ids])
    assert (answer["applied"], answer["repeated"]) == (4, 1)
    replies = {entry["batch"]: (entry["key"], entry["newly"], entry["succeeded"]) for entry in answer["completed"]}
    assert replies == {batch: (f"many-{n}", n > 0, True) for n, batch in enumerate(ids)}


def test_a_repeat_gets_the_completion(http: httpx.Client) -> None:
    """A consumer that died after its last ack learns that the batch is complete, without `newly`."""
    batch = open_batch(http, items=1, sealed=True)["id"]
    first = send(http, items=[f"{batch}:0:0"])["completed"][0]
    second = send(http, items=[f"{batch}:0:0"])["completed"][0]
    assert (first["newly"], first["newly_succeeded"]) == (True, True)
    assert (second["newly"], second["newly_succeeded"], second["succeeded"]) == (False, False, True)
    assert send(http, items=[f"{batch}:0:1"])["completed"] == []


def test_a_retried_ack_with_its_key_gets_newly_again(http: httpx.Client) -> None:
    """Its answer may have been lost. Another request doesn't get `newly`, whatever its key."""
    batch = open_batch(http, items=2, sealed=True)["id"]
    send(http, items=[f"{batch}:0:0"])
    key = str(uuid.uuid4())
    body = {"items": [f"{batch}:0:0", f"{batch}:0:1"]}
    for _ in range(3):
        replies = send(http, key=key, **body)["completed"][0]
        assert (replies["newly"], replies["newly_succeeded"]) == (True, True)
    assert not send(http, key=str(uuid.uuid4()), **body)["completed"][0]["newly"]
    assert not send(http, **body)["completed"][0]["newly"]
    assert not send(http, "failures", key=key, **body)["completed"][0]["newly"]


def test_ack_wins_over_fail(http: httpx.Client) -> None:
    """A failed item can be acked; a failure of an acked one is a repeat."""
    batch = open_batch(http, items=2)["id"]
    item = f"{batch}:0:0"
    assert send(http, "failures", items=[item])["applied"] == 1
    assert send(http, "failures", items=[item])["repeated"] == 1
    assert send(http, items=[item])["applied"] == 1
    assert send(http, "failures", items=[item])["repeated"] == 1
    batch_state = http.get(f"/v1/batches/{batch}").json()
    assert (batch_state["acked"], batch_state["failed"], batch_state["pending"]) == (1, 0, 1)


def test_a_skip_wins_over_a_failure_and_an_ack_over_a_skip(http: httpx.Client) -> None:
    """Ids and masks, with a reason; the skipped items are listed, and counted wherever others are."""
    batch = open_batch(http, items=6, sealed=True)["id"]
    ids = [f"{batch}:0:{index}" for index in range(6)]
    assert send(http, "failures", items=ids[:2], reason="gone")["applied"] == 2
    skips = send(http, "skips", items=[ids[0]], groups=[{"batch": batch, "group": 0, "bits": bits(1, 2)}], reason="no")
    assert (skips["applied"], skips["repeated"]) == (3, 0)
    assert send(http, "failures", items=ids[:3])["repeated"] == 3
    assert send(http, items=ids[2:])["completed"][0]["succeeded"]
    assert send(http, "skips", items=ids)["repeated"] == 6
    state = http.get(f"/v1/batches/{batch}").json()
    assert (state["acked"], state["failed"], state["skipped"], state["pending"]) == (4, 0, 2, 0)
    (span,) = http.get(f"/v1/batches/{batch}/skipped").json()["ranges"]
    assert (span["start"], span["end"], span["reasons"]) == (0, 2, {ids[0]: "no", ids[1]: "no"})
    assert http.get(f"/v1/batches/{batch}/groups/0").json()["bits"]["skipped"] == bits(0, 1)
    assert http.get(f"/v1/batches/{batch}/groups").json()["tiles"][0]["skipped"] == 2
    assert http.get(f"/v1/batches/{batch}/progress").json()["skipped"] == 2
    verification = http.get(f"/v1/batches/{batch}/verify").json()
    assert (verification["ok"], verification["counted"]["skipped"]) == (True, 2)
    event = http.get(f"/v1/events?batch={batch}&type=batch.succeeded").json()["events"][0]
    assert event["data"]["skipped"] == 2


def test_a_redriven_dead_letter_makes_the_batch_succeed(http: httpx.Client) -> None:
    """A batch that completes with failures hasn't succeeded; it succeeds once, when its last failed item is acked, and
    its end time stays."""
    batch = open_batch(http, items=3, sealed=True)["id"]
    send(http, items=[f"{batch}:0:0"])
    replies = send(http, "failures", groups=[{"batch": batch, "group": 0, "bits": bits(1, 2)}], reason="gone")
    assert replies["completed"][0] == {
        "batch": batch,
        "key": None,
        "newly": True,
        "succeeded": False,
        "newly_succeeded": False,
    }
    end_state = http.get(f"/v1/batches/{batch}").json()
    assert (end_state["complete"], end_state["succeeded"], end_state["failed"]) == (True, False, 2)
    half = send(http, items=[f"{batch}:0:1"])
    assert (half["applied"], half["completed"][0]["newly_succeeded"]) == (1, False)
    key = str(uuid.uuid4())
    for _ in range(2):
        last = send(http, key=key, items=[f"{batch}:0:2"])["completed"][0]
        assert (last["newly"], last["succeeded"], last["newly_succeeded"]) == (False, True, True)
    assert not send(http, items=[f"{batch}:0:2"])["completed"][0]["newly_succeeded"]
    now = http.get(f"/v1/batches/{batch}").json()
    assert (now["succeeded"], now["ended_at"]) == (True, end_state["ended_at"])
    assert http.get(f"/v1/batches/{batch}/failed").json() == {"ranges": [], "next": None}


def test_empty_lists_are_legal(http: httpx.Client) -> None:
    """They name no items."""
    empty_answer = {"applied": 0, "repeated": 0, "completed": [], "rejected": []}
    assert send(http, items=[]) == empty_answer
    assert send(http, groups=[]) == empty_answer
    assert send(http, "failures", items=[], groups=[], reason=None) == empty_answer
    batch = open_batch(http, items=1)["id"]
    assert send(http, groups=[{"batch": batch, "group": 0, "bits": ""}]) == empty_answer


def test_the_largest_calls_are_accepted(http: httpx.Client) -> None:
    """10,000 ids, and 4,096 groups in one call, which is more than one transaction locks."""
    batch = open_batch(http, group_size=64, items=4096 * 64, sealed=True)["id"]
    ids = [f"{batch}:{n // 64}:{n % 64}" for n in range(10_000)]
    assert send(http, items=ids)["applied"] == 10_000
    groups = [{"batch": batch, "group": group, "bits": bits(*range(64))} for group in range(4096)]
    answer = send(http, groups=groups)
    assert (answer["applied"], answer["repeated"]) == (4096 * 64 - 10_000, 10_000)
    assert [entry["newly"] for entry in answer["completed"]] == [True]
    assert http.get(f"/v1/batches/{batch}/verify").json()["ok"]


def test_a_malformed_item_rejects_the_whole_call(http: httpx.Client) -> None:
    """Nothing of a call is applied if any of its ids or masks is malformed, wherever it stands."""
    batch = open_batch(http, group_size=64, items=100)["id"]
    valid_item, long_mask = f"{batch}:0:0", base64.b64encode(bytes(9)).decode()
    for body, place in (
        ({"items": [valid_item, f"{batch}:0:01"]}, "body.items[1]"),
        ({"items": [valid_item], "groups": [{"batch": batch, "group": 1, "bits": long_mask}]}, "body.groups[0].bits"),
        ({"items": [valid_item], "groups": [{"batch": batch, "group": 1, "bits": "###="}]}, "body.groups[0].bits"),
        ({"items": [valid_item], "groups": [{"batch": batch, "group": 1, "bits": "AQAA="}]}, "body.groups[0].bits"),
        ({"items": [valid_item], "groups": [{"batch": batch, "group": 1, "bits": "AQAA===="}]}, "body.groups[0].bits"),
    ):
        response = http.post("/v1/acks", json=body)
        assert code(response) == (422, "invalid_request")
        assert response.json()["errors"][0]["place"] == place
    assert http.get(f"/v1/batches/{batch}").json()["acked"] == 0


def test_a_mask_of_an_unknown_batch_may_be_as_wide_as_the_largest_group(http: httpx.Client) -> None:
    """4,096 bytes, and no more."""

    def post(size: int) -> httpx.Response:
        body = {"groups": [{"batch": 2**52, "group": 0, "bits": base64.b64encode(b"\x01" * size).decode()}]}
        return http.post("/v1/acks", json=body)

    assert post(4096).json()["rejected"][0]["count"] == 4096
    assert code(post(4097)) == (422, "invalid_request")
