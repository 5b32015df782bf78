"""Pages end before they become large, and a client that follows them misses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import feed
from core.acks.call import Call
from core.batches import ranges
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.batches.search import Filter
from core.commits.combiner import Inline
from core.processes import outbox
from core.processes.instances import Instance
from core.service import Service
from core.storage import limits, tables
from core.storage.database import Database

PAGE_BYTES = 100_000
"""The bytes of a page in these tests."""


@pytest.fixture
def service(database: Database, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(limits, "BYTES", PAGE_BYTES)
    return Service(database, combiner=Inline)


def test_a_page_ends_at_its_bytes_its_rows_or_the_end() -> None:
    """One row is always included; rows that were read beyond the limit aren't lost: the next page starts there."""
    for sizes, limit, count, is_cut in (
        ([], 5, [], False),
        ([1, 1], 5, [1, 1], False),
        ([1, 1, 1], 2, [1, 1], True),
        ([500, 1], 5, [500], True),
        ([60, 40, 1], 5, [60, 40], True),
        ([60, 41], 5, [60], True),
    ):
        assert limits.within(sizes, lambda size: size, limit, 100) == (count, is_cut)


@pytest.mark.parametrize("size", [1, 30, 1000])
def test_rows_are_read_in_steps_that_fit(size: int) -> None:
    """Each once, in order; no step after the first reads more than a page's bytes, unless it is one row."""
    steps: list[int] = []

    def read(last: tuple[int, int] | None, count: int) -> list[tuple[int, int]]:
        steps.append(count)
        first = 0 if last is None else last[0] + 1
        return [(number, size) for number in range(first, min(first + count, 300))]

    rows = list(limits.stepwise(read, lambda row: row[1], 1000, first=10, most=100))
    assert [number for number, _ in rows] == list(range(300))
    assert all(step * size <= max(100, size) for step in steps[1:])
    assert len(steps) <= (8 if size == 1 else 302)
    for limit in (1, 10, 11, 75, 300):
        del steps[:]
        assert len(list(limits.stepwise(read, lambda row: row[1], limit, first=10, most=100))) == limit
        assert sum(steps) == limit, "rows beyond the limit were read"


def all_rows(read: Callable[[Any], tuple[list[Any], Any]], size: Callable[[Any], int]) -> list[Any]:
    """All rows, page by page; each page is bounded."""
    pages: list[Any] = []
    start, count = None, 0
    while True:
        rows, start = read(start)
        assert sum(map(size, rows)) <= PAGE_BYTES or len(rows) == 1
        pages += rows
        count += 1
        if start is None:
            assert count > 2
            return pages


def test_large_events_are_split_into_more_pages(service: Service) -> None:
    """With any filter; even an event larger than a page."""
    sizes = [60_000, 30_000, 10, 10, 60_000, 150_000, 10, *[2] * 300, 90_000]
    service.feed.append([feed.NewEvent(f"e{n}", "mine", None, json.dumps("x" * size)) for n, size in enumerate(sizes)])

    def read(start: int | None) -> tuple[list[feed.Event], int | None]:
        page = service.feed.read(start or 0, 1000, types=["mine"])
        return page.events, page.next if page.next < page.last else None

    assert [event.id for event in all_rows(read, feed.size)] == [f"e{n}" for n in range(len(sizes))]


def test_large_labels_are_split_into_more_pages(service: Service) -> None:
    """With and without a filter by label."""
    batches = [
        service.batches.open(Opening(None, {"team": "a", "text": "x" * size}, 64, 0, False)).batch.id
        for size in (60_000, 60_000, 10, 10, 150_000, 10, 90_000)
    ]
    for labels in ({}, {"team": "a"}):

        def read(start: int | None, labels: dict[str, str] = labels) -> tuple[list[Any], int | None]:
            page = service.batches.page(Filter(labels=labels), before=start, limit=1000)
            return page.batches, page.before

        assert [batch.id for batch in all_rows(read, lambda batch: len(batch.labels["text"]))] == batches[::-1]


def test_long_reasons_are_split_into_more_pages(service: Service) -> None:
    """A range is split where its reasons become too large."""
    batch = service.batches.open(Opening(None, {}, 64, 100, True)).batch.id
    for index in range(100):
        call = Call.of(Verb.FAIL, [(batch, index // 64, index % 64)], reason=f"{index:04} {'x' * 3990}")
        assert service.acks.ack(call).result().applied == 1

    def read(start: int | None) -> tuple[list[ranges.Range], int | None]:
        _, page = service.batches.ranges(batch, "failed", start or 0, 1000)
        return page.ranges, page.next

    pages = all_rows(read, lambda page: sum(map(len, page.reasons.values())))
    assert [number for page in pages for number in range(page.start, page.end)] == list(range(100))
    assert {number: int(reason[:4]) for page in pages for number, reason in page.reasons.items()} == {
        number: number for number in range(100)
    }


def test_large_states_and_commands_are_split_into_more_pages(service: Service) -> None:
    """Of instances and of their commands."""
    service.processes.define("p", partitions=1)
    sizes = (60_000, 60_000, 10, 10, 150_000, 10, 90_000)

    def fill(tx: Connection) -> None:
        now = tables.utc_now()
        for number, size in enumerate(sizes):
            text = json.dumps("x" * size)
            values = {"name": "p", "instance": f"i{number}", "state": text, "version": 1, "status": "running"}
            tx.execute(sa.insert(tables.processes).values(**values, created_at=now, updated_at=now))
            [position] = feed.append(tx, [feed.NewEvent(f"command:{number}", "command.t")])
            command = {"command_id": str(number), "position": position, "step": "s", "type": "t", "data": text}
            tx.execute(sa.insert(tables.outbox).values(**command, name="p", instance=f"i{number}", created_at=now))

    service.database.write(fill)

    def instances(start: str | None) -> tuple[list[Instance], str | None]:
        page, is_cut = service.processes.page("p", None, start, 1000)
        return page, page[-1].instance if is_cut else None

    instances_ = all_rows(instances, lambda instance: len(instance.state or ""))
    assert [instance.instance for instance in instances_] == [f"i{number}" for number in range(len(sizes))]

    def commands(start: int | None) -> tuple[list[outbox.Command], int | None]:
        page = service.processes.commands(start or 0, 1000)
        return page.commands, page.next if page.next < page.last else None

    issued = all_rows(commands, lambda command: len(command.data or ""))
    assert [command.instance for command in issued] == [f"i{number}" for number in range(len(sizes))]
