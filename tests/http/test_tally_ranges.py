"""Ranges over HTTP: each is applied once, from the position of its source on; the others are named."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.http.test_batches import code
from tests.http.test_tallies import LIMIT, counts, entry
from tests.mutants import mutant

KINESIS = "49590338271490256608559692538361571095921575989136588898"


def ranged(after: str | None, upto: str, totals: dict[str, int] | None = None, **source: Any) -> dict[str, Any]:
    return {
        "topic": "screws", "partition": 0, "after": after, "upto": upto,
        "totals": {"r1": 1} if totals is None else totals, **source,
    }  # fmt: skip


def post(http: httpx.Client, tally: str, *ranges: dict[str, Any], **fields: Any) -> httpx.Response:
    return http.post(f"/v1/tallies/{tally}/ranges", json={"ranges": ranges, **fields})


def results(http: httpx.Client, tally: str, *ranges: dict[str, Any]) -> list[str]:
    """The results, each as one word or two: its status, and the position if it has moved."""
    answer = post(http, tally, *ranges)
    assert answer.status_code == 200, answer.text
    for result in answer.json()["results"]:
        assert ("position" in result) == (result["status"] == "moved")
    return [" ".join(str(value) for value in result.values()) for result in answer.json()["results"]]


def value(http: httpx.Client, tally: str, key: str = "r1") -> int:
    total: int = http.get(f"/v1/tallies/{tally}/{key}").json()["value"]
    return total


def test_a_range_counts_once_from_its_sources_position_on(http: httpx.Client) -> None:
    assert results(http, "once", ranged(None, "5", {"r1": 3, "r2": 1})) == ["applied"]
    assert results(http, "once", ranged(None, "5", {"r1": 3, "r2": 1})) == ["repeated"]
    assert results(http, "once", ranged(None, "9", {"r1": 100})) == ["moved 5"]
    assert results(http, "once", ranged("5", "9", {"r1": -1})) == ["applied"]
    assert results(http, "once", ranged("5", "7", {"r1": 100})) == ["moved 9"]
    assert http.get("/v1/tallies/once/r1").json() == {
        "key": "r1",
        "value": 2,
        "sources": [
            {
                "topic": "screws", "partition": 0, "generation": 0, "offset": None, "child": None, "position": "9",
                "value": 2,
            }
        ],
    }  # fmt: skip
    assert results(http, "new", ranged("5", "9")) == ["moved None"]
    assert results(http, "new") == []
    assert http.get("/v1/tallies/new").json()["totals"] == []


@mutant(
    "a-range-that-was-applied-is-added-again",
    "core.tallies.ranges:RangesCall.effect",
    "chain.places[count:]",
    "chain.places",
)
@mutant(
    "a-moved-range-is-added",
    "core.tallies.ranges:RangesCall.effect",
    "position not in chain.points",
    "False",
    ("chain.points.index(position)", "0"),
)
def test_ranges_of_a_source_are_a_chain_that_may_begin_anywhere(http: httpx.Client) -> None:
    """Of a call that comes again, only what is above the position is added; the ranges of other sources are apart."""
    ranges = [ranged(None, "a"), ranged("a", "b", {"r1": 10}), ranged("b", "c", {"r1": 100})]
    assert results(http, "chain", *ranges[:2]) == ["applied", "applied"]
    assert results(http, "chain", *ranges, ranged(None, "x", partition=1)) == ["repeated", "repeated", *["applied"] * 2]
    assert results(http, "chain", ranged("x", "y", partition=1), ranged("f", "g")) == ["applied", "moved c"]
    assert value(http, "chain") == 113


def test_each_source_has_its_own_position(http: httpx.Client) -> None:
    """Topic, partition and generation; totals add all of them up, and entries of other sources."""
    sources = [ranged(None, "1"), ranged(None, "1", partition=1), ranged(None, "1", topic="bolts")]
    sources.append(ranged(None, "1", generation=1))
    assert results(http, "sources", *sources) == ["applied"] * 4
    assert counts(http, "sources", entry(1, 7, partition=9)) == (1, 0)
    assert value(http, "sources") == 11
    assert http.get("/v1/tallies/sources").json()["totals"] == [{"key": "r1", "value": 11}]


@pytest.mark.parametrize("position", [KINESIS, "0", " ", "Ö \u2028\x00", "x" * 128, "a'b\\"])
def test_a_position_is_any_text(http: httpx.Client, position: str) -> None:
    """Of 1 to 128 bytes, compared for equality."""
    tally = f"position-{len(position)}-{ord(position[0])}"
    assert results(http, tally, ranged(None, position)) == ["applied"]
    assert results(http, tally, ranged(None, position)) == ["repeated"]
    assert post(http, tally, ranged("-", "+")).json()["results"] == [{"status": "moved", "position": position}]
    assert results(http, tally, ranged(position, "!")) == ["applied"]


@mutant("an-entry-is-added-to-a-source-with-ranges", "core.tallies.entries:advance", "start == BY_RANGES", "False")
@mutant(
    "a-range-is-added-to-a-source-with-entries",
    "core.tallies.ranges:RangesCall._add",
    "guard != BY_RANGES",
    "False",
)
def test_a_source_has_entries_or_ranges(http: httpx.Client) -> None:
    """Otherwise a message could count once as an entry and once in a range."""
    assert counts(http, "either", entry(1, key="e")) == (1, 0)
    refusal = post(http, "either", ranged(None, "1", {"other": 1}, partition=1), ranged(None, "1", {"e": 1}))
    assert code(refusal) == (409, "source_conflict")
    assert refusal.json()["errors"][0]["place"] == "body.ranges[1]"
    assert results(http, "either", ranged(None, "1", {"other": 1}, partition=1)) == ["applied"]
    refusal = http.post("/v1/tallies/either/apply", json={"entries": [entry(1), entry(1, key="other", partition=1)]})
    assert code(refusal) == (409, "source_conflict")
    assert "entries or ranges, not both" in refusal.json()["detail"]
    assert value(http, "either") == 0
    assert value(http, "either", "other") == 1


@mutant(
    "what-a-range-adds-is-unlimited",
    "core.tallies.ranges:RangesCall._add",
    "check_sum(value, f'body.ranges[{place}].totals', key)",
    "pass",
)
def test_sums_and_totals_stay_within_the_limit(http: httpx.Client) -> None:
    """Nothing of the call is applied, its positions included."""
    assert results(http, "limit", ranged(None, "1", {"r1": LIMIT - 1})) == ["applied"]
    for ranges in (
        [ranged(None, "1", {"a": 1}, partition=1), ranged("1", "2")],
        [ranged(None, "1", partition=1)],
        [ranged(None, "1", {"a": LIMIT - 1}, partition=1), ranged("1", "2", {"a": 1})],
        [ranged("1", "2", {"r1": -2}), ranged("2", "3", {"r1": 3})],
    ):
        answer = post(http, "limit", *ranges)
        assert code(answer) == (422, "invalid_request")
        assert answer.json()["errors"][0]["place"] == f"body.ranges[{len(ranges) - 1}].totals"
    assert http.get("/v1/tallies/limit").json()["totals"] == [{"key": "r1", "value": LIMIT - 1}]
    assert results(http, "limit", ranged("1", "2", {"r1": -5}), ranged(None, "1", partition=1)) == ["applied"] * 2
    assert results(http, "limit", ranged("1", "2", {"r1": 4 - LIMIT}, partition=1)) == ["applied"]
    assert code(post(http, "limit", ranged("2", "3", {"r1": 6}))) == (422, "invalid_request")
    assert value(http, "limit") == -1


@mutant(
    "a-deletion-leaves-positions",
    "core.tallies.reads:remove_chunk",
    "tx.execute(sa.delete(tables.tally_sources).where(_sources.tally == tally))",
    "pass",
)
def test_a_deleted_tally_has_no_positions(http: httpx.Client) -> None:
    assert results(http, "gone", ranged(None, "1")) == ["applied"]
    assert results(http, "kept", ranged(None, "1")) == ["applied"]
    assert http.delete("/v1/tallies/gone").status_code == 204
    assert results(http, "gone", ranged(None, "2")) == ["applied"]
    assert results(http, "kept", ranged(None, "2")) == ["moved 1"]
    assert value(http, "gone") == 1


def test_ranges_under_a_stale_fence_are_not_applied(http: httpx.Client) -> None:
    http.put("/v1/consumer-groups/ranging", json={"partitions": 1})
    sync = http.post("/v1/consumer-groups/ranging/sync", json={"worker": "w", "session": "s"}).json()
    fence = {"group": "ranging", "partition": 0, "worker": "w", "epoch": sync["assigned"][0]["epoch"]}
    assert post(http, "fenced", ranged(None, "1"), fence=fence).json() == {"results": [{"status": "applied"}]}
    stale = post(http, "fenced", ranged("1", "2"), fence=fence | {"epoch": fence["epoch"] + 1})
    assert code(stale) == (409, "stale_epoch")
    assert code(post(http, "fenced", fence=fence | {"group": "no"})) == (404, "consumer_group_not_found")
    assert results(http, "fenced", ranged(None, "3")) == ["moved 1"]


@pytest.mark.parametrize(
    ("ranges", "place"),
    [
        ([ranged(None, "")], "body.ranges[0].upto"),
        ([ranged("", "1")], "body.ranges[0].after"),
        ([ranged(None, "x" * 129)], "body.ranges[0].upto"),
        ([ranged(None, "ö" * 65)], "body.ranges[0]"),
        ([ranged(None, "\ud800")], "body"),
        ([ranged(None, "1", {".": 1})], "body.ranges[0].totals"),
        ([ranged(None, "1", {"": 1})], "body.ranges[0].totals"),
        ([ranged(None, "1", {"k": LIMIT})], "body.ranges[0].totals[...]"),
        ([ranged(None, "1", {"k": 1.5})], "body.ranges[0].totals[...]"),
        ([ranged("1", "1")], "body.ranges[0].upto"),
        ([ranged(None, "1"), ranged("1", "2"), ranged("2", "1")], "body.ranges[2].upto"),
        ([ranged(None, "1"), ranged("2", "3")], "body.ranges[1].after"),
        ([{key: value for key, value in ranged(None, "1").items() if key != "after"}], "body.ranges[0]"),
        ([ranged(None, "1") | {"offset": 1}], "body.ranges[0]"),
    ],
)
def test_a_malformed_range_is_named_and_nothing_is_applied(
    http: httpx.Client, ranges: list[dict[str, Any]], place: str
) -> None:
    answer = http.post(
        "/v1/tallies/malformed/ranges",
        content=json.dumps({"ranges": [ranged(None, "1", partition=7), *ranges]}),
        headers={"content-type": "application/json"},
    )
    assert code(answer) == (422, "invalid_request")
    expected_place = place.replace("[2]", "[3]").replace("[1]", "[2]").replace("ranges[0]", "ranges[1]")
    assert answer.json()["errors"][0]["place"].startswith(expected_place), answer.text
    assert http.get("/v1/tallies/malformed").json()["totals"] == []


def test_a_call_has_at_most_ten_thousand_sums(http: httpx.Client) -> None:
    """A range without sums is like one with a single sum."""
    totals = {f"k{number}": 1 for number in range(9_999)}
    assert results(http, "full", ranged(None, "1", totals), ranged("1", "2", {})) == ["applied"] * 2
    refusal = post(http, "full", ranged(None, "1", totals), ranged("1", "2", {}), ranged("2", "3", {}))
    assert code(refusal) == (413, "too_large")
