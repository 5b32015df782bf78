"""The smallest complete path: open, extend, ack, seal over HTTP, on each kind of database."""

from __future__ import annotations

import httpx


def test_a_batch_goes_from_open_to_complete(api_url: str) -> None:
    """The call that brings the last item reports the batch complete, and no earlier one does."""
    with httpx.Client(base_url=api_url) as client:
        opening = client.post("/v1/batches", json={"key": "catalog-42", "group_size": 64}).json()
        batch = opening["id"]
        extension = client.post(f"/v1/batches/{batch}/items", json={"count": 100}).json()
        assert (extension["start"], extension["count"], extension["items"]) == (0, 100, 100)
        ids = [f"{batch}:{number // 64}:{number % 64}" for number in range(100)]
        answer = client.post("/v1/acks", json={"items": ids[:99]}).json()
        assert answer == {"applied": 99, "repeated": 0, "completed": [], "rejected": []}
        sealed = client.post(f"/v1/batches/{batch}/seal").json()
        assert (sealed["state"], sealed["pending"], sealed["newly"]) == ("sealed", 1, False)
        answer = client.post("/v1/acks", json={"items": ids[98:]}).json()
        assert (answer["applied"], answer["repeated"]) == (1, 1)
        assert answer["completed"] == [
            {"batch": batch, "key": "catalog-42", "newly": True, "succeeded": True, "newly_succeeded": True}
        ]
        assert client.get(f"/v1/batches/{batch}/verify").json()["ok"]
