"""More failures than are examined one by one, and more ranges than an event has. The limits are lowered here."""

from __future__ import annotations

import pytest

from core.acks.call import Call
from core.batches import failures, ranges, redrive
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.batches.redrive import Span, Wish
from core.service import Service

SIZE = 64
GROUPS = 20
ITEMS = SIZE * GROUPS


def fail(service: Service, batch: int, numbers: range, reason: str | None) -> None:
    items = [(batch, *divmod(number, SIZE)) for number in numbers]
    service.acks.ack(Call.of(Verb.FAIL, items, reason=reason)).result()


@pytest.fixture
def batch(service: Service) -> int:
    """Each item failed: a quarter "even", a quarter "odd", and half of them without a reason."""
    batch = service.batches.open(Opening(items=ITEMS, group_size=SIZE)).batch.id
    fail(service, batch, range(0, ITEMS, 4), "even")
    fail(service, batch, range(1, ITEMS, 4), "odd")
    fail(service, batch, range(2, ITEMS, 4), None)
    fail(service, batch, range(3, ITEMS, 4), None)
    return batch


def test_a_sample_has_the_proportions_of_all(service: Service, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MOST", 100)
    monkeypatch.setattr(failures, "SAMPLE", 100)
    monkeypatch.setattr(failures, "GROUPS", 5)
    _, summary = service.batches.failures(batch, 0, 100)
    assert not summary.exact
    assert [row.reason for row in summary.reasons] == [None, "even", "odd"]
    counts = [row.count for row in summary.reasons]
    assert summary.examined == sum(counts)
    # The first 20 reasons of each of 5 groups, and what lies between them.
    assert counts[1:] == [50, 50]
    assert 90 <= counts[0] <= 100
    assert summary.reasons[1].numbers == [0, 4, 8, 12, 16]
    assert summary.reasons[0].numbers == [2, 3, 6, 7, 10]


def test_few_failures_in_many_groups_are_all_examined(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MOST", 100)
    batch = service.batches.open(Opening(items=ITEMS, group_size=SIZE)).batch.id
    fail(service, batch, range(0, ITEMS, SIZE), "first of its group")
    _, summary = service.batches.failures(batch, 0, 100)
    assert (summary.exact, summary.examined) == (True, GROUPS)
    assert [(row.reason, row.count) for row in summary.reasons] == [("first of its group", GROUPS)]


def test_long_reasons_are_sampled_too(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few they are: what is read at once is limited."""
    monkeypatch.setattr(failures.limits, "BYTES", 1000)
    monkeypatch.setattr(failures, "EXAMINED", 1000)
    batch = service.batches.open(Opening(items=ITEMS, group_size=SIZE)).batch.id
    for number in range(0, ITEMS, SIZE):
        fail(service, batch, range(number, number + 1), f"{number} {'x' * 200}")
    _, summary = service.batches.failures(batch, 0, 100)
    assert not summary.exact
    assert summary.examined == GROUPS
    assert summary.next == len(summary.reasons) < GROUPS  # a page is limited as well
    _, rest = service.batches.failures(batch, summary.next, 100)
    assert rest.reasons[0].reason != summary.reasons[0].reason


@pytest.mark.parametrize("step", [7, 10_000])
def test_an_event_has_the_first_ranges(
    service: Service, batch: int, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """And the number of all failed items."""
    monkeypatch.setattr(redrive, "RANGES", 3)
    monkeypatch.setattr(redrive, "STEP", step)
    answer = service.batches.redrive(batch, Wish(reason="odd"))
    assert (answer.count, answer.more) == (ITEMS // 4, True)
    assert answer.ranges == [Span(1, 2), Span(5, 6), Span(9, 10)]
    monkeypatch.setattr(redrive, "SCAN", 20)
    answer = service.batches.redrive(batch, Wish(reason="odd"))
    assert (answer.count, answer.more, answer.ranges[0]) == (ITEMS // 4, True, Span(1, 2))
    answer = service.batches.redrive(batch, Wish())
    assert (answer.count, answer.more, answer.ranges) == (ITEMS, False, [Span(0, ITEMS)])


@pytest.mark.parametrize("wish", [Wish(), Wish(reason="late")])
def test_failures_behind_many_groups_are_found(service: Service, monkeypatch: pytest.MonkeyPatch, wish: Wish) -> None:
    """A page of ranges reads a limited number of groups, and may be empty."""
    monkeypatch.setattr(ranges, "SCAN", 3)
    batch = service.batches.open(Opening(items=ITEMS, group_size=SIZE)).batch.id
    items = [(batch, group, 0) for group in range(GROUPS)]
    service.acks.ack(Call.of(Verb.ACK, items)).result()
    fail(service, batch, range(ITEMS - 2, ITEMS), "late")
    answer = service.batches.redrive(batch, wish)
    assert (answer.count, answer.more, answer.ranges) == (2, False, [Span(ITEMS - 2, ITEMS)])
