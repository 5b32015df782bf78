"""A call's distinct items, by batch and group."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.commits.lanes import FLUSH_COST, UNIT_GROUPS

items = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2), st.integers(0, 20)), max_size=30)
masks = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2), st.binary(max_size=3)), max_size=5)


def set_bits(bits: bytes) -> set[int]:
    return {i for i in range(len(bits) * 8) if bits[i // 8] >> (i % 8) & 1}


@given(items, masks)
def test_a_call_holds_each_item_once(items: list[tuple[int, int, int]], masks: list[tuple[int, int, bytes]]) -> None:
    """Items in a mask count for the mask, the others as ids; together they are all items sent."""
    call = Call.of(Verb.ACK, items, masks)
    in_masks = {(b, g, i) for b, g, bits in masks for i in set_bits(bits)}
    found_masks = {(u.batch, g, i) for u in call.units.values() for g, m in u.masks.items() for i in m.search(1)}
    found_ids = [(unit.batch, g, i) for unit in call.units.values() for g, i in unit.ids()]
    assert found_masks == in_masks
    assert set(found_ids) == set(items) - in_masks
    assert len(found_ids) == len(set(found_ids))


@given(
    st.dictionaries(st.integers(0, 5), st.integers(1, 300), max_size=4),
    st.dictionaries(st.integers(0, 5), st.integers(1, 1024), max_size=4),
)
def test_a_unit_costs_the_sum_of_its_groups(ids: dict[int, int], widths: dict[int, int]) -> None:
    """As `take` counts them, which splits a unit by the cost of each group. Otherwise a flush could be too long, or a
    unit that fits could be split."""
    items = [(1, group, index) for group, count in ids.items() for index in range(count)]
    masks = [(1, group, b"\0" * (width - 1) + b"\x80") for group, width in widths.items()]
    for unit in Call.of(Verb.ACK, items, masks).units.values():
        unit.measure()
        assert unit.cost == max(1, sum(unit._cost_of(group) for group in unit.groups()))


@given(items, masks, st.randoms())
def test_a_fingerprint_names_verb_key_and_items(
    items: list[tuple[int, int, int]], masks: list[tuple[int, int, bytes]], random: object
) -> None:
    """Equal for the same items in another order, and different otherwise."""

    def fingerprint(verb: Verb = Verb.ACK, key: str | None = "k", extra: tuple[int, int, int] | None = None) -> bytes:
        item_list = [*items, *([extra] if extra else [])]
        random.shuffle(item_list)  # type: ignore[attr-defined]
        return Call.of(verb, item_list, masks, idempotency_key=key).fingerprint()

    assert fingerprint() == fingerprint()
    variants = [fingerprint(Verb.FAIL), fingerprint(key="l"), fingerprint(extra=(3, 0, 0)), fingerprint(key=None)]
    assert len({fingerprint(), *variants}) == 5
    assert fingerprint(key=None) != fingerprint(key=None)


def test_a_large_part_is_split_into_ascending_chunks() -> None:
    """A chunk has as many groups as one transaction locks, and fewer if each item has a reason."""
    wide = Call.of(Verb.ACK, [(1, group, 0) for group in range(UNIT_GROUPS * 2 + 1)])
    chunks = list(wide.unit(1).chunks())
    assert [len(chunk.groups()) for chunk in chunks] == [UNIT_GROUPS, UNIT_GROUPS, 1]
    assert [group for chunk in chunks for group in sorted(chunk.groups())] == list(range(UNIT_GROUPS * 2 + 1))


@pytest.mark.parametrize(("reason", "limit"), [("gone", FLUSH_COST), ("x" * 4000, FLUSH_COST // 9)])
def test_items_with_a_reason_are_split_by_rows_and_bytes(reason: str, limit: int) -> None:
    """Masks and lists of ids are split, and the pieces have each item once."""
    items = [(1, 6, index) for index in range(8192)]
    masks = [*((1, group, b"\xff" * 1024) for group in range(6)), (1, 7, b"\x01\x00\x80")]

    def call() -> Call:
        return Call.of(Verb.FAIL, items, masks, reason=reason, idempotency_key="k")

    divided_call = call()
    pieces: list[tuple[int, int]] = []
    for unit in divided_call.chunks():
        piece = [*unit.ids(), *((group, index) for group, mask in unit.masks.items() for index in mask.search(1))]
        assert 0 < len(piece) <= limit
        pieces += piece
    assert pieces == [(group, index) for group in range(7) for index in range(8192)] + [(7, 0), (7, 23)]
    assert divided_call.fingerprint() == call().fingerprint(), "splitting must not change the call"


def test_an_openings_fingerprint_depends_on_its_differences_from_the_defaults() -> None:
    """So that the same body has the same fingerprint in a release with more fields, and every field counts."""
    assert Opening().fingerprint() == hashlib.sha256(b"{}").digest()
    openings = [
        Opening(key="a"),
        Opening(key=""),
        Opening(labels={"a": "b"}),
        Opening(labels={"a": "b", "c": "d"}),
        Opening(group_size=64),
        Opening(items=1),
        Opening(sealed=True),
        Opening(expires_in=1),
    ]
    assert len({opening.fingerprint() for opening in [Opening(), *openings]}) == len(openings) + 1
    assert Opening(labels={"a": "b", "c": "d"}).fingerprint() == Opening(labels={"c": "d", "a": "b"}).fingerprint()
