"""Finding failures by a text, over all batches."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from lastbit import tokens
from lastbit.tokens import Role
from tests.http.test_batches import ack, code, open_batch
from tests.mutants import mutant
from tests.support.servers import running_service, sqlite_file


@pytest.fixture
def name() -> str:
    """The beginning of the keys of this test's batches."""
    return f"{uuid.uuid4()}/"


def fail(http: httpx.Client, batch: int, reason: str | None, *numbers: int) -> None:
    items = [f"{batch}:0:{number}" for number in numbers]
    http.post("/v1/failures", json={"items": items, "reason": reason}).raise_for_status()


def found(http: httpx.Client, limit: int = 2, **query: Any) -> list[tuple[str, str]]:
    """Item and reason of each failure, of all pages."""
    failures: list[tuple[str, str]] = []
    cursor: dict[str, str] = {}
    while True:
        response = http.get("/v1/failures", params={**query, **cursor, "limit": limit})
        assert response.status_code == 200, response.text
        page = response.json()
        assert len(page["failures"]) <= limit
        failures += [(failure["item"], failure["reason"]) for failure in page["failures"]]
        if page["next"] is None:
            return failures
        cursor = {"cursor": page["next"]}


def test_failures_are_found_by_a_text(http: httpx.Client, name: str) -> None:
    """In all batches of the filter, the newest batch first; in either case; with the wildcards of no database."""
    old, quiet, new = (open_batch(http, key=f"{name}{n}", items=9, labels={"n": str(n)})["id"] for n in range(3))
    fail(http, old, "The disk is full: 100%", 8, 1)
    fail(http, new, "no picture", 0)
    fail(http, new, "disk_full", 2, 3, 4)
    fail(http, new, "the Disk is full", 5)
    fail(http, new, None, 6)
    ack(http, f"{new}:0:3")
    ack(http, *(f"{quiet}:0:{number}" for number in range(9)))
    disk = [f"{new}:0:2", f"{new}:0:4", f"{new}:0:5", f"{old}:0:1", f"{old}:0:8"]
    for limit in (1, 2, 100):
        assert [item for item, _ in found(http, limit, key_prefix=name, text="DISK")] == disk
    assert [item for item, _ in found(http, key_prefix=name, text="full: 100%")] == disk[3:]
    assert found(http, key_prefix=name, text="disk_f") == [(f"{new}:0:2", "disk_full"), (f"{new}:0:4", "disk_full")]
    assert found(http, key_prefix=name, text="d%k") == []
    assert len(found(http, key_prefix=name)) == 6
    assert [item for item, _ in found(http, label="n:0", key_prefix=name)] == disk[3:]
    assert found(http, key_prefix=name, state="complete") == []
    assert [batch["id"] for batch in _batches(http, key_prefix=name, failed="true")] == [new, old]
    assert http.get("/v1/batches/counts", params={"key_prefix": name, "failed": "true"}).json()["total"] == 2
    failure = http.get("/v1/failures", params={"key_prefix": name, "text": "no pic"}).json()["failures"][0]
    failed_at = failure.pop("failed_at")
    assert failed_at.endswith("Z")
    assert failure == {"item": f"{new}:0:0", "batch": new, "key": f"{name}2", "reason": "no picture"}


def test_letters_beyond_ascii_are_found_as_they_were_given(http: httpx.Client, name: str) -> None:
    batch = open_batch(http, key=name, items=1)["id"]
    fail(http, batch, "ÜBERLAUF der Straße, İ", 0)
    for text in ("ÜBERLAUF", "STRAße", "İ", "der "):
        assert len(found(http, key=name, text=text)) == 1, text


def _batches(http: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    batches: list[dict[str, Any]] = http.get("/v1/batches", params=query).json()["batches"]
    return batches


@pytest.mark.parametrize(
    "query", [{"text": ""}, {"text": "x" * 4001}, {"cursor": "x"}, {"txt": "x"}, {"limit": 0}, {"failed": "perhaps"}]
)
def test_a_wrong_search_is_refused(sqlite_http: httpx.Client, query: dict[str, Any]) -> None:
    assert code(sqlite_http.get("/v1/failures", params=query)) == (422, "invalid_request")


def test_a_cursor_goes_on_though_its_batch_is_gone(http: httpx.Client, name: str) -> None:
    """Deleted, or no longer failed."""
    old, new = (open_batch(http, key=name, items=3)["id"] for _ in range(2))
    for batch in (old, new):
        fail(http, batch, "slow", 0, 1, 2)
    first = http.get("/v1/failures", params={"key": name, "limit": 2}).json()
    http.delete(f"/v1/batches/{new}").raise_for_status()
    rest = http.get("/v1/failures", params={"key": name, "cursor": first["next"]}).json()
    assert ([failure["batch"] for failure in rest["failures"]], rest["next"]) == ([old] * 3, None)


@mutant(
    "failures-of-all-tenants-are-found",
    "core.batches.failure_search:page",
    "replace(conditions, failed=True)",
    "replace(conditions, failed=True, prefix=None)",
)
def test_tenants_find_their_own_failures_alone() -> None:
    secrets = {prefix: tokens.new() for prefix in ("shop-1", "shop-2", None)}
    lines = "\n".join(
        tokens.known(secret, str(prefix), [Role.ADMIN], prefix=prefix).line() for prefix, secret in secrets.items()
    )
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS=lines) as service:

        def caller(prefix: str | None) -> httpx.Client:
            headers = {"Authorization": f"Bearer {secrets[prefix]}"}
            return httpx.Client(base_url=service.url, headers=headers)

        with caller("shop-1") as first_shop, caller("shop-2") as second_shop, caller(None) as admin:
            own_batch = open_batch(first_shop, key="shop-1/a", items=1)["id"]
            fail(first_shop, own_batch, "secret 1", 0)
            other_batch = open_batch(second_shop, key="shop-2/a", items=1)["id"]
            fail(second_shop, other_batch, "secret 2", 0)
            assert found(first_shop, text="secret") == [(f"{own_batch}:0:0", "secret 1")]
            assert found(second_shop, text="secret") == [(f"{other_batch}:0:0", "secret 2")]
            assert len(found(admin, text="secret")) == 2
        producer = tokens.new()
    line = tokens.known(producer, "producer", [Role.PRODUCE]).line()
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS=line) as service:
        answer = httpx.get(f"{service.url}/v1/failures", headers={"Authorization": f"Bearer {producer}"})
        assert code(answer) == (403, "forbidden")


@mutant(
    "a-batch-in-another-state-is-deleted",
    "core.batches.purge:condemn",
    "state not in (None, batch.state)",
    "False",
)
def test_a_batch_is_deleted_only_in_the_state_that_the_call_names(http: httpx.Client, name: str) -> None:
    """A batch that is an item of another one is cancelled first, and then removed."""
    parent = open_batch(http, items=2)["id"]
    batch = open_batch(http, key=name, items=1, parent=f"{parent}:0:0")["id"]
    for state in ("sealed", "complete", "expired", "cancelled"):
        assert code(http.delete(f"/v1/batches/{batch}", params={"state": state})) == (409, "state_conflict")
    assert http.get(f"/v1/batches/{batch}").json()["state"] == "open"
    assert http.delete(f"/v1/batches/{batch}", params={"state": "open"}).status_code == 204
    assert code(http.get(f"/v1/batches/{batch}")) == (404, "batch_not_found")
    assert code(http.delete(f"/v1/batches/{parent}", params={"state": "gone"})) == (422, "invalid_request")
