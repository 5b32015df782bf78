"""Pending and failed ranges and the watermark compared with plain sets, through real rows on each kind of database."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from core import errors
from core.acks import completion
from core.acks.call import Call
from core.batches import ranges
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.commits.combiner import Inline
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from tests.mutants import mutant
from tests.support.plans import executions

SIZE = 64
ITEMS = 5 * SIZE + 10
runs_of_numbers = st.tuples(st.integers(0, ITEMS - 1), st.integers(1, 2 * SIZE)).map(
    lambda run: set(range(run[0], min(run[0] + run[1], ITEMS)))
)


def as_ids(batch: int, numbers: set[int]) -> list[tuple[int, int, int]]:
    return [(batch, n // SIZE, n % SIZE) for n in sorted(numbers)]


def as_runs(numbers: set[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n:
            runs[-1] = (runs[-1][0], n + 1)
        else:
            runs.append((n, n + 1))
    return runs


def read(service: Service, batch: int, kind: ranges.Kind, limit: int) -> list[ranges.Range]:
    result: list[ranges.Range] = []
    start = 0
    while True:
        _, page = service.batches.ranges(batch, kind, start, limit)
        assert len(page.ranges) <= limit
        result += page.ranges
        if page.next is None:
            return result
        assert page.next > start
        start = page.next


@settings(max_examples=25)
@given(
    steps=st.lists(st.tuples(st.sampled_from([Verb.ACK, Verb.FAIL]), runs_of_numbers), max_size=6),
    limit=st.integers(1, 4),
)
def test_ranges_and_watermark_match_plain_sets(
    service: Service, steps: list[tuple[Verb, set[int]]], limit: int
) -> None:
    """For any acks and failures in any order, and for any page size."""
    batch = service.batches.open(Opening(group_size=SIZE, items=ITEMS)).batch.id
    acked: set[int] = set()
    failed: set[int] = set()
    for position, (verb, numbers) in enumerate(steps):
        reason = f"step {position}" if verb is Verb.FAIL else None
        service.acks.ack(Call.of(verb, as_ids(batch, numbers), reason=reason)).result()
        if verb is Verb.ACK:
            acked, failed = acked | numbers, failed - numbers
        else:
            failed |= numbers - acked
    pending = set(range(ITEMS)) - acked - failed
    assert [(r.start, r.end) for r in read(service, batch, "pending", limit)] == as_runs(pending)
    result = read(service, batch, "failed", limit)
    assert [(r.start, r.end) for r in result] == as_runs(failed)
    assert {n for r in result for n in r.reasons} == failed
    assert service.batches.watermark(batch)[1] == min(pending, default=ITEMS)
    assert service.batches.verify(batch).ok


def test_a_page_reads_a_bounded_number_of_rows(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page may be empty without being the last; following `next` finds everything."""
    monkeypatch.setattr(ranges, "SCAN", 2)
    monkeypatch.setattr(ranges, "STEP", 2)
    batch = service.batches.open(Opening(group_size=SIZE, items=ITEMS)).batch.id
    # The first group stays without a row, so that the full-prefix hint stays at 0.
    numbers = set(range(SIZE, 5 * SIZE)) | {ITEMS - 1}
    service.acks.ack(Call.of(Verb.ACK, as_ids(batch, numbers))).result()
    assert service.batches.ranges(batch, "pending", SIZE, 100)[1].next is not None
    assert [(r.start, r.end) for r in read(service, batch, "pending", 100)] == [(0, SIZE), (5 * SIZE, ITEMS - 1)]


def test_a_page_has_a_bounded_number_of_reasons(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range with more of them is split, and continues on the next page."""
    monkeypatch.setattr(ranges, "REASONS", 7)
    batch = service.batches.open(Opening(group_size=SIZE, items=ITEMS)).batch.id
    service.acks.ack(Call.of(Verb.FAIL, as_ids(batch, set(range(20))), reason="gone")).result()
    first = service.batches.ranges(batch, "failed", 0, 100)[1]
    assert [(r.start, r.end, len(r.reasons)) for r in first.ranges] == [(0, 7, 7)]
    result = read(service, batch, "failed", 100)
    assert sorted(n for r in result for n in r.reasons) == list(range(20))


def test_the_full_prefix_catches_up_with_groups_that_were_filled_out_of_order(service: Service) -> None:
    """The watermark's scan starts at the hint, so it must not stay behind permanently."""
    batch = service.batches.open(Opening(group_size=SIZE, items=ITEMS)).batch.id
    for group in (4, 2, 3, 1, 0):
        service.acks.ack(Call.of(Verb.ACK, [(batch, group, i) for i in range(SIZE)])).result()
    assert service.batches.get(batch).full_prefix == 5
    assert service.batches.watermark(batch)[1] == 5 * SIZE


@mutant(
    "the-full-prefix-stays-behind-masks",
    "core.acks.completion:_full_prefixes",
    "PREFIX_STEP + 2 * count",
    "PREFIX_STEP",
)
def test_the_full_prefix_keeps_up_with_masks_and_catches_up_with_earlier_ones(service: Service) -> None:
    """A transaction fills 512 groups."""
    early_groups, late_groups = range(2048), range(2048, 2560)
    batch = service.batches.open(Opening(group_size=SIZE, items=late_groups.stop * SIZE)).batch.id
    full = b"\xff" * (SIZE // 8)
    for part in (late_groups, early_groups):
        service.acks.ack(Call.of(Verb.ACK, masks=[(batch, group, full) for group in part])).result()
    assert service.batches.get(batch).full_prefix == late_groups.stop


@mutant(
    "the-full-prefix-passes-a-hole", "core.acks.completion:_full_prefixes", "count == CATCH_UP", "count >= CATCH_UP - 1"
)
def test_a_full_prefix_that_is_far_behind_catches_up_in_slices(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an item that was acked much later than others."""
    full, hole, most = b"\xff" * (SIZE // 8), 300, completion.PREFIX_STEP + 2
    batch = service.batches.open(Opening(group_size=SIZE, items=400 * SIZE)).batch.id
    early = [(batch, group, full) for group in range(1, 400) if group != hole]
    service.acks.ack(Call.of(Verb.ACK, masks=early)).result()
    for group, counted, prefix in ((0, hole, most), (hole, 100, 2 * most + 100)):
        monkeypatch.setattr(completion, "CATCH_UP", counted)
        service.acks.ack(Call.of(Verb.ACK, masks=[(batch, group, full)])).result()
        assert service.batches.get(batch).full_prefix == prefix


@mutant("a-slice-with-a-hole-is-full", "core.batches.ranges:_after_full_slices", "count == step", "count >= step - 1")
@mutant(
    "the-watermark-is-read-group-by-group", "core.batches.ranges:_after_full_slices", "step >= SLICE", "step < SLICE"
)
@pytest.mark.parametrize("kind", ["an item", "a row"])
def test_a_watermark_far_from_the_hint_is_found_by_counting(
    service: Service, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Wherever the first pending item is, or the first group without a row, before others that are full."""
    monkeypatch.setattr(ranges, "MANY", 8)
    monkeypatch.setattr(ranges, "SLICE", 16)
    monkeypatch.setattr(ranges, "LARGEST_SLICE", 64)
    full, groups, columns = b"\xff" * (SIZE // 8), 600, tables.item_groups.c
    batch = service.batches.open(Opening(group_size=SIZE, items=groups * SIZE)).batch.id
    service.acks.ack(Call.of(Verb.ACK, masks=[(batch, group, full) for group in range(groups - 1)])).result()
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.batches).values(full_prefix=0))
    for hole in (0, 3, 4, 11, 12, 13, 27, 28, 29, 44, 75, 76, 139, 140, 203, 204, 219, 220, 555, 598, 599):
        here = (columns.batch_id == batch) & (columns.group_no == hole)
        with service.database.engine.begin() as tx:
            row = tx.execute(sa.select(tables.item_groups).where(here)).mappings().first()
            tx.execute(sa.delete(tables.item_groups).where(here))
            if kind == "an item":
                bits = bytes([0b11111110, *full[1:]])
                changed = {"batch_id": batch, "group_no": hole, "resolved": bits, "resolved_count": SIZE - 1}
                tx.execute(sa.insert(tables.item_groups).values(failed_count=0, **changed))
        with executions(service.database) as executed:
            assert service.batches.watermark(batch)[1] == hole * SIZE
        assert len(executed) < 40, hole
        with service.database.engine.begin() as tx:
            tx.execute(sa.delete(tables.item_groups).where(here))
            if row is not None:
                tx.execute(sa.insert(tables.item_groups).values(**row))


@mutant(
    "the-journal-is-forgotten-after-a-count",
    "core.batches.ranges:_pieces",
    "itertools.islice(_touched(recent, rows, start), limit)",
    "itertools.islice(_touched(first_recent, rows, start), limit)",
)
def test_groups_that_only_the_journal_fills_are_passed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a slice, and after one that is full."""
    monkeypatch.setattr(ranges, "MANY", 4)
    monkeypatch.setattr(ranges, "SLICE", 8)
    size, late = 2048, [(20, 5), (45, 7), (46, 0)]
    batch = service.batches.open(Opening(group_size=size, items=60 * size)).batch.id
    masks = []
    for group in range(60):
        bits = bytearray(b"\xff" * (size // 8))
        for _, index in [entry for entry in [*late, (55, 9)] if entry[0] == group]:
            bits[index // 8] ^= 1 << index % 8
        masks.append((batch, group, bytes(bits)))
    service.acks.ack(Call.of(Verb.ACK, masks=masks)).result()
    service.acks._bitfields.journal([batch])
    for group, index in late:
        service.acks.ack(Call.of(Verb.ACK, [(batch, group, index)])).result()
    assert service.batches.get(batch).journal_next
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.batches).values(full_prefix=0))
    assert service.batches.watermark(batch)[1] == 55 * size + 9


@mutant("reasons-outlive-a-redrive", "core.acks.apply:Reasons.forget", "self.removed.append((batch, number))", "pass")
def test_a_reason_is_removed_when_its_item_is_acked(service: Service) -> None:
    """Even if both come in one flush; the first reason that was given is kept."""
    batch = service.batches.open(Opening(group_size=SIZE, items=10)).batch.id
    service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 1), (batch, 0, 2)], reason="first")).result()
    service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 2), (batch, 0, 3)], reason="second")).result()
    service.acks.ack(Call.of(Verb.ACK, masks=[(batch, 0, b"\x02")])).result()
    assert [r.reasons for r in read(service, batch, "failed", 10)] == [{2: "first", 3: "second"}]
    with service.database.engine.connect() as connection:
        assert connection.execute(sa.text("SELECT COUNT(*) FROM failures")).scalar() == 2


@mutant(
    "pending-is-read-in-no-snapshot",
    "core.service.batches:BatchService.ranges",
    "self._database.snapshot(read)",
    "self._database.read(read)",
)
@mutant(
    "the-watermark-is-read-in-no-snapshot",
    "core.service.reads:ReadService._watermarks",
    "self._database.snapshot(read)",
    "self._database.read(read)",
)
@pytest.mark.parametrize(("kind", "statement"), [("pending", 1), ("watermark", 1), ("watermark", 2)])
def test_a_batch_deleted_while_it_is_read_is_read_completely(service: Service, kind: str, statement: int) -> None:
    """Its groups are deleted before the reader's first or second statement that reads groups. Nothing of a complete
    batch is pending; the next reader does not find the batch."""
    items = 70 * SIZE + 10  # the full-prefix hint is behind, and the last group is not full
    batch = service.batches.open(Opening(group_size=SIZE, items=items, sealed=True)).batch.id
    for part in (range(SIZE, items), range(SIZE)):
        service.acks.ack(Call.of(Verb.ACK, as_ids(batch, set(part)))).result()
    assert service.batches.get(batch).succeeded
    texts: list[str] = []

    def delete(*arguments: object) -> None:
        if "item_groups" in str(arguments[2]):
            texts.append(str(arguments[2]))
            if len(texts) != statement:
                return
            with Database(service.database.url.render_as_string(hide_password=False)) as other:
                Service(other, combiner=Inline).batches.delete(batch)

    sa.event.listen(service.database.engine, "before_cursor_execute", delete)
    if kind == "pending":
        assert service.batches.ranges(batch, "pending", 0, 9)[1].ranges == []
    else:
        assert service.batches.watermark(batch)[1] == items
    for read_again in (
        service.batches.watermark,
        service.webhooks.deliveries_of_batch,
        lambda id: service.batches.ranges(id, "pending", 0, 9),
    ):
        with pytest.raises(errors.BatchNotFound):
            read_again(batch)
