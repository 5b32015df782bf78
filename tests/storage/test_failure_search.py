"""Finding failures among more than a page examines. The limits are lowered for these tests."""

from __future__ import annotations

import itertools

import pytest

from core.acks.call import Call
from core.batches import failure_search, search
from core.batches.batch import Opening
from core.batches.failure_search import Place
from core.batches.lifecycle import Verb
from core.batches.search import Filter
from core.service import Service
from core.storage import limits
from lastbit.ids import ItemId
from tests.mutants import mutant


@pytest.fixture
def batches(service: Service) -> list[int]:
    """Nine batches: the number n has n failures, of which those with an even number are slow."""
    ids = []
    for count in range(9):
        batch = service.batches.open(Opening("b", {}, items=20)).batch.id
        for number in range(count):
            reason = "slow" if number % 2 == 0 else "lost"
            service.acks.ack(Call.of(Verb.FAIL, [ItemId(batch, 0, 2 * number)], reason=reason)).result()
        ids.append(batch)
    return ids


@mutant(
    "a-search-ends-at-its-bound",
    "core.batches.failure_search:page",
    "return FailurePage(failures, by_id, Place(part[0].id, end))",
    "return FailurePage(failures, by_id, None)",
)
@mutant(
    "a-search-begins-a-batch-again",
    "core.batches.failure_search:page",
    "budget, start = budget - count, 0",
    "budget = budget - count",
)
def test_pages_that_examine_few_failures_find_each_once(
    service: Service, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they end: at the limit, at a bound of failures, of batches or of bytes."""
    monkeypatch.setattr(failure_search, "LIST", 2)
    monkeypatch.setattr(search, "SCAN", 2)
    expected = [(batch, 2 * n) for count, batch in reversed(list(enumerate(batches))) for n in range(0, count, 2)]
    for failures_at_once, at_once, limit, size in itertools.product(
        (1, 3, 7, 100), (1, 2, 100), (1, 2, 100), (20, 10_000)
    ):
        monkeypatch.setattr(failure_search, "EXAMINED", failures_at_once)
        monkeypatch.setattr(failure_search, "BATCHES", at_once)
        monkeypatch.setattr(limits, "BYTES", size)
        places: list[tuple[int, int]] = []
        place: Place | None = None
        while True:
            page = service.batches.find_failures(Filter(), "LOW", place=place, limit=limit)
            assert len(page.failures) <= limit
            places += [(row.batch_id, row.number) for row in page.failures]
            if page.next is None:
                break
            assert place is None or (-page.next.batch, page.next.number) > (-place.batch, place.number)
            place = page.next
        assert places == expected, (failures_at_once, at_once, limit, size)
