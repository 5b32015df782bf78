"""The picture of a batch: tiles of counts, and one group's bits."""

from __future__ import annotations

import base64
import random
from typing import Any

import httpx
import pytest

from tests.http.test_batches import ack, code, open_batch


def bits_of(result: dict[str, Any], name: str) -> set[int]:
    """The indexes of a group's bitfield that are set."""
    field = base64.b64decode(result["bits"][name])
    assert len(field) == -(-result["issued"] // 8)
    return {index for index in range(8 * len(field)) if field[index // 8] >> (index % 8) & 1}


def test_tiles_and_bits_match_the_acked_failed_and_skipped_items(http: httpx.Client) -> None:
    """For random acks, failures and skips, any number of groups in a tile, and any start of the answer."""
    chance = random.Random(4)
    items, size = 64 * 37 + 5, 64
    batch = open_batch(http, items=items, group_size=size)["id"]
    numbers = chance.sample([number for number in range(items) if number // size % 5], 900)
    # Two groups are acked in order, so that one of them is full and needs no blob.
    failed, acked = set(numbers[:100]), set(numbers[150:]) | set(range(100))
    skipped = set(numbers[50:150])
    name = {number: f"{batch}:{number // size}:{number % size}" for number in range(items)}
    http.post("/v1/failures", json={"items": [name[number] for number in sorted(failed)]}).raise_for_status()
    http.post("/v1/skips", json={"items": [name[number] for number in sorted(skipped)]}).raise_for_status()
    ack(http, *(name[number] for number in sorted(acked)))
    skipped -= acked
    failed -= acked | skipped
    all_resolved = acked | failed | skipped
    for groups_per_tile, start in [(1, 0), (1, 7), (2, 0), (5, 0), (5, 3), (37, 0), (38, 1), (131_072, 0)]:
        result = http.get(f"/v1/batches/{batch}/groups", params={"per": groups_per_tile, "start": start}).json()
        assert (result["batch"], result["items"], result["group_size"]) == (batch, items, size)
        assert (result["groups"], result["next"]) == (38, None)
        expected = []
        for group in range(start, 38, groups_per_tile):
            wide = min(groups_per_tile, 38 - group)
            tile_range = range(group * size, min((group + wide) * size, items))
            kinds = {"resolved": all_resolved, "failed": failed, "skipped": skipped}
            counts = {kind: sum(number in tile_range for number in chosen) for kind, chosen in kinds.items()}
            expected.append({"group": group, "groups": wide, "issued": len(tile_range), **counts})
        assert result["tiles"] == expected
    for group in range(38):
        group_bits = http.get(f"/v1/batches/{batch}/groups/{group}").json()
        tile_range = range(group * size, min((group + 1) * size, items))
        assert (group_bits["batch"], group_bits["group"], group_bits["groups"], group_bits["issued"]) == (
            batch,
            group,
            1,
            len(tile_range),
        )
        for kind, chosen in (("resolved", all_resolved), ("failed", failed), ("skipped", skipped)):
            assert bits_of(group_bits, kind) == {n % size for n in chosen if n in tile_range}
            assert group_bits[kind] == len(bits_of(group_bits, kind))


def test_pages_of_tiles_follow_each_other(http: httpx.Client) -> None:
    """`next` is the start of the next answer, and each tile comes once."""
    batch = open_batch(http, items=64 * 10, group_size=64)["id"]
    collected: list[tuple[int, int]] = []
    start: int | None = 0
    while start is not None:
        params = {"start": start, "limit": 2, "per": 2}
        page = http.get(f"/v1/batches/{batch}/groups", params=params).json()
        collected += [(tile["group"], tile["groups"]) for tile in page["tiles"]]
        start = page["next"]
    assert collected == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 2)]


def test_the_picture_of_the_largest_batch_is_bounded(http: httpx.Client) -> None:
    """An answer covers at most 131,072 groups, in as few tiles as requested; the last group of 10^12 items can be read
    directly."""
    batch = open_batch(http, items=10**12)["id"]
    groups = -(-(10**12) // 8192)
    page = http.get(f"/v1/batches/{batch}/groups", params={"per": 32, "limit": 4096}).json()
    assert (len(page["tiles"]), page["next"], page["groups"]) == (4096, 131_072, groups)
    page = http.get(f"/v1/batches/{batch}/groups", params={"per": 1000, "limit": 4096}).json()
    assert (len(page["tiles"]), page["next"]) == (131, 131_000)
    last = http.get(f"/v1/batches/{batch}/groups", params={"start": groups - 1}).json()
    issued = 10**12 - (groups - 1) * 8192
    assert last["tiles"] == [
        {"group": groups - 1, "groups": 1, "issued": issued, "resolved": 0, "failed": 0, "skipped": 0}
    ]
    assert last["next"] is None


def test_a_batch_without_items_has_no_tiles(http: httpx.Client) -> None:
    """Neither has one beyond its end."""
    batch = open_batch(http)["id"]
    for start in (0, 5, 2**53 - 1):
        page = http.get(f"/v1/batches/{batch}/groups", params={"start": start}).json()
        assert (page["groups"], page["tiles"], page["next"]) == (0, [], None)


def test_a_group_that_was_not_issued_is_refused(http: httpx.Client) -> None:
    """With its own error, as for a missing batch."""
    batch = open_batch(http, items=65, group_size=64)["id"]
    assert http.get(f"/v1/batches/{batch}/groups/1").json()["issued"] == 1
    assert code(http.get(f"/v1/batches/{batch}/groups/2")) == (404, "group_not_found")
    assert code(http.get("/v1/batches/999999/groups/0")) == (404, "batch_not_found")
    assert code(http.get("/v1/batches/999999/groups")) == (404, "batch_not_found")


@pytest.mark.parametrize(
    "query", ["per=0", "per=131073", "limit=0", "limit=4097", "start=-1", "start=01", f"start={2**53}", "per=x"]
)
def test_numbers_out_of_bounds_are_named(sqlite_http: httpx.Client, query: str) -> None:
    """422 with the location, as everywhere."""
    batch = open_batch(sqlite_http, items=1)["id"]
    answer = sqlite_http.get(f"/v1/batches/{batch}/groups?{query}")
    assert code(answer) == (422, "invalid_request")
    assert answer.json()["errors"][0]["place"] == f"query.{query.split('=')[0]}"
