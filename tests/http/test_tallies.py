"""Tallies over HTTP: applied once, read, listed, deleted; out-of-order entries are refused."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import sqlalchemy as sa

from core.storage import schema, tables
from core.storage.database import Database
from tests.http.test_batches import code
from tests.mutants import mutant
from tests.support.servers import running_service

LIMIT = 2**53


def entry(offset: int, delta: int = 1, key: str = "r1", **source: Any) -> dict[str, Any]:
    return {"key": key, "delta": delta, "source": {"topic": "screws", "partition": 0, "offset": offset, **source}}


def apply(http: httpx.Client, tally: str, *entries: dict[str, Any]) -> httpx.Response:
    return http.post(f"/v1/tallies/{tally}/apply", json={"entries": entries})


def counts(http: httpx.Client, tally: str, *entries: dict[str, Any]) -> tuple[int, int]:
    answer = apply(http, tally, *entries)
    assert answer.status_code == 200, answer.text
    return answer.json()["applied"], answer.json()["repeated"]


def test_an_entry_counts_once_however_often_it_comes(http: httpx.Client) -> None:
    """In the same call or in another one, next to new entries; a child is a separate message."""
    assert counts(http, "once", entry(5), entry(5), entry(6, 10)) == (2, 1)
    assert counts(http, "once", entry(5), entry(6, 10), entry(6, 100, child=1), entry(7, -3)) == (2, 2)
    assert counts(http, "once") == (0, 0)
    source = {"topic": "screws", "partition": 0, "generation": 0}
    assert http.get("/v1/tallies/once/r1").json() == {
        "key": "r1",
        "value": 108,
        "sources": [{**source, "offset": 7, "child": 0, "position": None, "value": 108}],
    }


def test_the_page_is_told_that_there_are_tallies(http: httpx.Client) -> None:
    """In this statement, the kinds of databases differ."""
    apply(http, "seen", entry(1))
    assert "tallies" in http.get("/session/sections").json()["sections"]


def test_each_source_has_its_own_guard(http: httpx.Client) -> None:
    """Topic, partition and generation; the value is the sum over all."""
    sources = [entry(9), entry(9, partition=1), entry(3, topic="bolts"), entry(0, generation=1)]
    assert counts(http, "sources", *sources) == (4, 0)
    assert counts(http, "sources", *reversed(sources)) == (0, 4)
    result = http.get("/v1/tallies/sources/r1").json()
    assert result["value"] == 4
    assert [(element["topic"], element["partition"], element["generation"]) for element in result["sources"]] == [
        *(("bolts", 0, 0), ("screws", 0, 0), ("screws", 0, 1), ("screws", 1, 0)),
    ]


def test_a_key_to_which_nothing_was_added_is_zero(http: httpx.Client) -> None:
    """Reading it early is no error."""
    assert http.get("/v1/tallies/nothing/r1").json() == {"key": "r1", "value": 0, "sources": []}
    assert http.get("/v1/tallies/nothing").json() == {"totals": [], "next": None}


@pytest.mark.parametrize(
    "key",
    [
        "a/b",
        "a/apply",
        "apply",
        " ",
        "Ö \u2028",
        "k" * 255,
        "%2F",
        "a?b#c",
        "\x00",
        "\U0010ffff",
        "a\nb",
        "\n",
        "c\r\n",
    ],
)
def test_a_key_is_any_text(http: httpx.Client, key: str) -> None:
    """Of 1 to 255 characters."""
    assert counts(http, "texts", entry(1, 7, key=key)) == (1, 0)
    path_part = "".join(f"%{byte:02X}" for byte in key.encode())
    assert http.get(f"/v1/tallies/texts/{path_part}").json()["value"] == 7
    assert http.get("/v1/tallies/texts", params={"prefix": key}).json()["totals"][0] == {"key": key, "value": 7}


def test_names_are_compared_by_their_bytes(http: httpx.Client) -> None:
    """`Job`, `job` and `job ` are three names."""
    for name in ("Job", "job", "job "):
        assert counts(http, "Bytes", entry(1, key=name), entry(1, key="k", topic=name)) == (2, 0)
    assert http.get("/v1/tallies/bytes/k").json()["value"] == 0


def test_totals_are_listed_by_prefix_in_pages(http: httpx.Client) -> None:
    """By the bytes of their keys; a cursor belongs to its list."""
    keys = ["a", "a/1", "a/2", "a\U0010ffff", "a\U0010ffff\U0010ffff", "b", "ä"]
    entries = [entry(offset, key=key, partition=p) for offset, key in enumerate(keys) for p in (0, 1)]
    assert counts(http, "pages", *entries) == (14, 0)

    def read(limit: int, **params: str) -> list[tuple[str, int]]:
        result, cursor = [], None
        while True:
            query = {"limit": limit, **params, **({"cursor": cursor} if cursor else {})}
            page = http.get("/v1/tallies/pages", params=query).json()
            assert len(page["totals"]) <= limit
            result += [(element["key"], element["value"]) for element in page["totals"]]
            cursor = page["next"]
            if cursor is None:
                return result

    for limit in (1, 2, 3, 1000):
        assert read(limit) == [(key, 2) for key in keys]
        assert read(limit, prefix="a") == [(key, 2) for key in keys[:5]]
        assert read(limit, prefix="a/") == [(key, 2) for key in keys[1:3]]
    cursor = http.get("/v1/tallies/pages", params={"limit": 1}).json()["next"]
    for path, params in (("pages", {"prefix": "a"}), ("other", {})):
        assert code(http.get(f"/v1/tallies/{path}", params={"cursor": cursor, **params})) == (422, "invalid_request")
    assert code(http.get("/v1/tallies/pages", params={"cursor": "x"})) == (422, "invalid_request")


def test_a_message_older_than_an_applied_one_is_refused(http: httpx.Client) -> None:
    """If the call shows that it was never added; nothing of the call is applied."""
    counts(http, "order", entry(2), entry(4))
    refusal = apply(http, "order", entry(1, key="other"), entry(7), entry(6))
    assert code(refusal) == (409, "out_of_order")
    assert refusal.json()["errors"][0]["place"] == "body.entries[2]"
    assert code(apply(http, "order", entry(7, child=1), entry(7))) == (409, "out_of_order")
    assert http.get("/v1/tallies/order/other").json()["value"] == 0
    # Known repeats may come in any order: below the guard, or within the same call.
    assert counts(http, "order", entry(2), entry(1), entry(6), entry(7), entry(6), entry(3), entry(7)) == (2, 5)


def test_a_message_with_two_deltas_for_a_key_is_refused(http: httpx.Client) -> None:
    """One of them would count as a repeat of the other."""
    refusal = apply(http, "deltas", entry(1), entry(1, 2))
    assert code(refusal) == (422, "invalid_request")
    assert refusal.json()["errors"][0]["place"] == "body.entries[1].delta"
    assert counts(http, "deltas", entry(1), entry(1, key="r2")) == (2, 0)


def test_a_sum_beyond_the_limit_is_refused_and_nothing_is_applied(http: httpx.Client) -> None:
    """Integers stay between -2^53 and 2^53."""
    assert counts(http, "limit", entry(1, LIMIT - 1), entry(1, 1 - LIMIT, key="r2")) == (2, 0)
    for key, delta in (("r1", 1), ("r2", -1)):
        refusal = apply(http, "limit", entry(1, key="other"), entry(2, delta, key=key))
        assert code(refusal) == (422, "invalid_request")
        assert refusal.json()["errors"][0]["place"] == "body.entries[1].delta"
    assert http.get("/v1/tallies/limit/other").json()["value"] == 0
    assert counts(http, "limit", entry(2, -1), entry(3, 1)) == (2, 0)
    assert http.get("/v1/tallies/limit/r1").json()["value"] == LIMIT - 1


@mutant("a-total-of-several-sources-leaves-the-range", "core.tallies.writes:_judge", "notable & others.keys()", "set()")
def test_a_total_beyond_the_limit_is_refused_and_nothing_is_applied(http: httpx.Client) -> None:
    """With several sources, in one call or in several; an entry that brings the total back is applied."""
    for sign, tally in ((1, "total"), (-1, "below")):
        assert counts(http, tally, entry(1, sign * (LIMIT - 1))) == (1, 0)
        for further_entry in (
            entry(1, sign, topic="bolts"),
            entry(1, sign * (LIMIT - 1), topic="bolts"),
            entry(2, sign),
        ):
            refusal = apply(http, tally, entry(1, key="other"), further_entry, entry(1, key="third"))
            assert code(refusal) == (422, "invalid_request")
            assert refusal.json()["errors"][0]["place"] == "body.entries[1].delta"
        assert counts(http, tally, entry(1, -2 * sign, topic="bolts"), entry(2, sign, topic="bolts")) == (2, 0)
        assert counts(http, tally, entry(1, sign, topic="nuts")) == (1, 0)
        assert code(apply(http, tally, entry(2, sign, topic="nuts"))) == (422, "invalid_request")
        [total] = http.get(f"/v1/tallies/{tally}").json()["totals"]
        assert total == {"key": "r1", "value": sign * (LIMIT - 1)}


@mutant(
    "a-source-that-returns-to-zero-is-not-checked",
    "core.tallies.limits:is_notable",
    "(before > 0) != (after > 0) or (before < 0) != (after < 0)",
    "(before < 0) != (after < 0)",
)
def test_a_source_that_returns_to_zero_brings_no_total_over_the_limit(http: httpx.Client) -> None:
    for sign, tally in ((1, "back"), (-1, "forth")):
        assert counts(http, tally, entry(1, -2 * sign, topic="bolts"), entry(1, sign * (LIMIT - 1))) == (2, 0)
        assert counts(http, tally, entry(1, sign, topic="nuts")) == (1, 0)
        assert code(apply(http, tally, entry(2, 2 * sign, topic="bolts"))) == (422, "invalid_request")
        assert counts(http, tally, entry(2, sign, topic="bolts")) == (1, 0)
        assert http.get(f"/v1/tallies/{tally}/r1").json()["value"] == sign * (LIMIT - 1)


@mutant(
    "small-sources-pass-the-limit-between-two-checks",
    "core.tallies.limits:Others.check",
    "abs(total) + room",
    "abs(total)",
)
def test_a_total_stays_within_the_limit_however_its_sources_grow(http: httpx.Client) -> None:
    """By small steps too, for which the total isn't read each time."""
    total, refusals = LIMIT - 400, 0
    assert counts(http, "grown", entry(1, total)) == (1, 0)
    for offset in range(60):
        for topic in ("bolts", "nuts", "washers"):
            answer = apply(http, "grown", entry(offset, 3, topic=topic))
            refusals += answer.status_code == 422
            total += 3 * (answer.status_code == 200)
    assert refusals
    assert LIMIT > total == http.get("/v1/tallies/grown/r1").json()["value"]


@pytest.mark.parametrize("kind", ["sqlite_url", "mariadb_url"])
def test_a_stored_total_beyond_the_limit_is_returned(kind: str, request: pytest.FixtureRequest) -> None:
    """An earlier release let it grow. It is exact, even where SQLite's own sum fails, and can only come back."""
    url = request.getfixturevalue(kind)
    names = ("tally", "tally_key", "topic", "partition_no", "generation", "high_offset", "high_child", "value")
    rows = [
        dict(zip(names, ("old", key, "screws", partition, 0, 1, 0, sign * (LIMIT - 1)), strict=True))
        for key, sign in (("r1", 1), ("r2", -1))
        for partition in range(1200)
    ]
    with Database(url) as database:
        schema.migrate(database)
        database.write(lambda tx: tx.execute(sa.insert(tables.tallies), rows))
    expected = 1200 * (LIMIT - 1)
    with running_service(url) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        totals = json.loads(http.get("/v1/tallies/old").content)["totals"]
        assert totals == [{"key": "r1", "value": expected}, {"key": "r2", "value": -expected}]
        assert http.get("/v1/tallies/old/r1").json()["value"] == expected
        assert code(apply(http, "old", entry(2, 1, partition=2000))) == (422, "invalid_request")
        assert code(apply(http, "old", entry(2, -1, partition=2000, key="r2"))) == (422, "invalid_request")
        assert counts(http, "old", entry(2, -5), entry(2, 7, key="r2")) == (2, 0)
        assert http.get("/v1/tallies/old/r2").json()["value"] == 7 - expected


@mutant("a-key-is-no-part-of-a-path", "core.tallies.entries:by_counter", "key in NO_NAMES", "False")
@pytest.mark.parametrize("key", [".", ".."])
def test_a_key_that_fits_no_url_is_refused(sqlite_http: httpx.Client, key: str) -> None:
    """Clients remove it from a path before they send it. With other characters around it, it is an ordinary key."""
    tally = f"dots{len(key)}"
    refusal = apply(sqlite_http, tally, entry(1), entry(1, key=key))
    assert code(refusal) == (422, "invalid_request")
    assert refusal.json()["errors"][0]["place"] == "body.entries[1].key"
    assert sqlite_http.get(f"/v1/tallies/{tally}").json()["totals"] == []
    for valid_key in (f"{key}x", f"a{key}", f"{key} ", f"{key}/{key}"):
        assert counts(sqlite_http, tally, entry(1, key=valid_key)) == (1, 0)
        assert sqlite_http.get(f"/v1/tallies/{tally}/{quote(valid_key, safe='')}").json()["value"] == 1


def test_a_deleted_tally_starts_over(http: httpx.Client) -> None:
    """With its guards; other tallies stay, and deleting a missing tally is no error."""
    counts(http, "gone", *(entry(offset, key=f"k{offset}") for offset in range(2500)))
    counts(http, "gone2", entry(1))
    for _ in range(2):
        assert http.delete("/v1/tallies/gone").status_code == 204
        assert http.get("/v1/tallies/gone").json()["totals"] == []
    assert http.get("/v1/tallies/gone2/r1").json()["value"] == 1
    assert counts(http, "gone", entry(1, key="k1")) == (1, 0)


def test_a_full_call_of_the_longest_names_is_applied(http: httpx.Client) -> None:
    """Each entry has its own source; as many as fit in 8 MiB."""
    tall = "\U0001f529" * 240
    entries = [entry(0, key=f"{number}{tall}", topic=f"{number}{tall}") for number in range(3500)]
    content = json.dumps({"entries": entries}, ensure_ascii=False).encode()
    assert len(content) < 8 * 2**20
    headers = {"Content-Type": "application/json"}
    for expected in ((3500, 0), (0, 3500)):
        answer = http.post("/v1/tallies/long/apply", content=content, headers=headers)
        assert (answer.json()["applied"], answer.json()["repeated"]) == expected


def test_entries_under_a_stale_fence_are_not_applied(http: httpx.Client) -> None:
    """409 `stale_epoch`, until the worker has received its new epoch."""
    http.put("/v1/consumer-groups/tallying", json={"partitions": 1})

    def sync(session: str) -> None:
        body = {"worker": "one", "session": session}
        assert http.post("/v1/consumer-groups/tallying/sync", json=body).status_code == 200

    def fenced(**fence: Any) -> httpx.Response:
        fence = {"group": "tallying", "partition": 0, "worker": "one", "epoch": 1, **fence}
        return http.post("/v1/tallies/fenced/apply", json={"entries": [entry(1)], "fence": fence})

    sync("first")
    assert fenced().json() == {"applied": 1, "repeated": 0}
    sync("second")
    for stale in ({}, {"worker": "two", "epoch": 2}, {"partition": 1}):
        assert code(fenced(**stale)) == (409, "stale_epoch")
    assert code(fenced(group="nowhere")) == (404, "consumer_group_not_found")
    assert fenced(epoch=2).json() == {"applied": 0, "repeated": 1}
    assert code(fenced(epoch="2")) == (422, "invalid_request")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"delta": 1.5}, "body.entries[1].delta"),
        ({"delta": "1"}, "body.entries[1].delta"),
        ({"delta": True}, "body.entries[1].delta"),
        ({"delta": LIMIT}, "body.entries[1].delta"),
        ({"delta": -LIMIT}, "body.entries[1].delta"),
        ({"key": ""}, "body.entries[1].key"),
        ({"key": "k" * 256}, "body.entries[1].key"),
        ({"key": 7}, "body.entries[1].key"),
        ({"source": None}, "body.entries[1].source"),
        ({"other": 1}, "body.entries[1]"),
        ({"source": {"topic": "", "partition": 0, "offset": 0}}, "body.entries[1].source.topic"),
        ({"source": {"topic": "t", "partition": -1, "offset": 0}}, "body.entries[1].source.partition"),
        ({"source": {"topic": "t", "partition": 0, "offset": -1}}, "body.entries[1].source.offset"),
        ({"source": {"topic": "t", "partition": 0, "offset": LIMIT}}, "body.entries[1].source.offset"),
        ({"source": {"topic": "t", "partition": 0}}, "body.entries[1].source"),
        ({"source": {"topic": "t", "partition": 0, "offset": 0, "child": None}}, "body.entries[1].source.child"),
        (
            {"source": {"topic": "t", "partition": 0, "offset": 0, "generation": -1}},
            "body.entries[1].source.generation",
        ),
    ],
)
def test_a_malformed_entry_is_named_and_nothing_is_applied(
    sqlite_http: httpx.Client, change: dict[str, Any], place: str
) -> None:
    """With its location."""
    refusal = apply(sqlite_http, "bad", entry(1), {**entry(2), **change})
    assert code(refusal) == (422, "invalid_request")
    assert refusal.json()["errors"][0]["place"].startswith(place)
    assert sqlite_http.get("/v1/tallies/bad/r1").json()["value"] == 0


def test_an_invalid_call_is_refused(sqlite_http: httpx.Client) -> None:
    """No entries, too many, another type, half of a surrogate pair, an invalid name."""
    post = sqlite_http.post
    assert code(post("/v1/tallies/t/apply")) == (422, "invalid_request")
    assert code(post("/v1/tallies/t/apply", json={"entries": {}})) == (422, "invalid_request")
    assert code(apply(sqlite_http, "t", *[entry(1)] * 10_001)) == (413, "too_large")
    assert counts(sqlite_http, "t", *[entry(1)] * 10_000) == (1, 9_999)
    headers = {"Content-Type": "application/json"}
    assert code(post("/v1/tallies/t/apply", content=b"{}", headers={"Content-Type": "text/plain"}))[0] == 415
    for body in (b'{"entries": [}', b'{"entries": [{"key": "\\ud800"}]}', b"\xff", b"[" * 100_000):
        assert code(post("/v1/tallies/t/apply", content=body, headers=headers)) == (422, "invalid_request")
    for name in ("a b", "-a", ".a", "a" * 256, "é"):
        assert code(apply(sqlite_http, name, entry(1))) == (422, "invalid_request")
        assert code(sqlite_http.get(f"/v1/tallies/{name}/k")) == (422, "invalid_request")
    assert code(sqlite_http.get("/v1/tallies/t/" + "k" * 256)) == (422, "invalid_request")
    assert code(sqlite_http.put("/v1/tallies/t/apply"))[0] == 405
