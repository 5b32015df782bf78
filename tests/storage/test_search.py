"""Searching among more batches than a page or a count examines. The limits are lowered for these tests."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from core.batches import batch as batches
from core.batches import search
from core.batches.batch import Opening
from core.batches.lifecycle import State
from core.batches.search import Filter, Outcome
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.mutants import mutant
from tests.support import plans

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def ids(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Twelve batches, in four teams; every third is empty and sealed."""
    monkeypatch.setattr(search, "SCAN", 5)
    monkeypatch.setattr(search, "FEW", 3)
    monkeypatch.setattr(search, "MOST", 4)
    return [
        service.batches.open(Opening(f"t{n % 4}/{n}", {"team": str(n % 4)}, sealed=n % 3 == 0)).batch.id
        for n in range(12)
    ]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (Filter(labels={"team": "3"}), [11, 7, 3]),
        (Filter(labels={"team": "3"}, state=State.OPEN), [11, 7]),
        (Filter(outcome=Outcome.SUCCEEDED), [9, 6, 3, 0]),
        (Filter(outcome=Outcome.FAILED), []),
        (Filter(key_prefix="t"), [*range(11, -1, -1)]),
        (Filter(key_prefix="t1/"), [9, 5, 1]),
        (Filter(key_prefix="t1/1"), [1]),
        (Filter(key_prefix="t", prefix="t2/"), [10, 6, 2]),
        (Filter(prefix="t", labels={"team": "0"}), [8, 4, 0]),
    ],
)
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_pages_that_examine_few_rows_find_every_batch_once(
    service: Service, ids: list[int], chosen: Filter, expected: list[int], limit: int
) -> None:
    """With few or many batches that have the prefix; pages may be short or empty, but don't end the list early."""
    assert _all_pages(service, chosen, limit) == [ids[n] for n in expected]


@mutant(
    "labels-of-earlier-releases-are-not-found",
    "core.batches.search:_has_label",
    "(False, True)",
    "(False,)",
)
def test_labels_of_earlier_releases_are_found(service: Service, database: Database) -> None:
    """They had stored other characters than ASCII as escapes, which take three times the space."""
    labels = {"tür": "ö\U0001f600", 'a"': "b"}
    old, new = (service.batches.open(Opening(labels=labels)).batch.id for _ in range(2))
    row = sa.select(tables.batches.c.labels).where(tables.batches.c.id == new)
    assert database.read(lambda tx: tx.scalar(row)) == json.dumps(labels, ensure_ascii=False)
    database.write(lambda tx: batches.update(tx, old, labels=json.dumps(labels)))
    assert service.batches.get(old).labels == labels
    for name, value in labels.items():
        assert _all_pages(service, Filter(labels={name: value}), 100) == [new, old]
    assert _all_pages(service, Filter(labels={"tür": "ö"}), 100) == []


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"opened_before": NOON}, [11, 7, 6, 5, 4, 3, 2, 1, 0]),
        ({"opened_after": NOON}, [10, 9, 8]),
        ({"opened_before": NOON, "labels": {"team": "3"}}, [11, 7, 3]),
        ({"opened_before": NOON, "key_prefix": "t", "outcome": Outcome.SUCCEEDED}, [6, 3, 0]),
        ({"opened_after": NOON - timedelta(hours=2), "opened_before": NOON, "key_prefix": "t"}, [11, 7, 6]),
        ({"opened_after": NOON - timedelta(hours=1), "key_prefix": "t2/"}, [10]),
        ({"opened_before": NOON - timedelta(days=1)}, []),
        ({"opened_after": NOON + timedelta(days=1)}, []),
    ],
)
@pytest.mark.parametrize(("most", "few"), [(4, 3), (100, 3), (100, 100)])
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_a_period_is_found_though_the_clock_went_back(
    service: Service,
    database: Database,
    ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
    conditions: dict[str, Any],
    expected: list[int],
    most: int,
    few: int,
    limit: int,
) -> None:
    """One batch was opened each hour until four o'clock, but the last one seemingly at ten."""
    monkeypatch.setattr(search, "MOST", most)
    monkeypatch.setattr(search, "FEW", few)
    with database.connection() as tx:
        for n, batch in enumerate(ids):
            opened = NOON + timedelta(hours=n - 8) if n < 11 else NOON - timedelta(hours=1.5)
            tx.execute(sa.update(tables.batches).values(created_at=opened).where(tables.batches.c.id == batch))
        tx.commit()
    assert _all_pages(service, Filter(**conditions), limit) == [ids[n] for n in expected]
    if most > len(ids):
        counts = service.batches.counts(Filter(**conditions))
        assert (counts.exact, sum(counts.by_state.values())) == (True, len(expected))


@mutant("a-page-ends-where-the-lookup-ended", "core.batches.search:page", "span.batches <= most", "True")
@pytest.mark.parametrize("chosen", [Filter(key="same"), Filter(parent=1), Filter(key="same", parent=1)])
@pytest.mark.parametrize("narrower", [{}, {"state": State.OPEN}, {"labels": {"team": "1"}}])
@pytest.mark.parametrize(("most", "few"), [(4, 3), (100, 3), (100, 100)])
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_batches_with_a_key_or_a_parent_are_found_however_many_there_are(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    chosen: Filter,
    narrower: dict[str, Any],
    most: int,
    few: int,
    limit: int,
) -> None:
    """Eight of twenty-four; every third of all is sealed, every second is of the team."""
    monkeypatch.setattr(search, "SCAN", 5)
    monkeypatch.setattr(search, "FEW", few)
    monkeypatch.setattr(search, "MOST", most)
    parent = service.batches.open(Opening(items=100)).batch.id
    assert parent == 1
    expected = []
    for n in range(24):
        is_child = 4 <= n < 11 or n == 20
        options: dict[str, Any] = {"key": "same", "parent": ItemId(parent, 0, n)} if is_child else {"key": f"same{n}"}
        batch = service.batches.open(Opening(labels={"team": str(n % 2)}, sealed=n % 3 == 0, **options)).batch.id
        is_open, is_of_team = n % 3 != 0, n % 2 == 1
        if is_child and (is_open or "state" not in narrower) and (is_of_team or "labels" not in narrower):
            expected.append(batch)
    assert _all_pages(service, replace(chosen, **narrower), limit) == expected[::-1]


@mutant(
    "a-few-batches-are-looked-for-along-all-ids",
    "core.batches.search:page",
    "tables.without_index(_table.id) if are_few else _table.id",
    "_table.id",
)
def test_the_children_of_an_old_batch_are_found_without_reading_newer_batches(service: Service) -> None:
    """Also those with its children's key. One of them is new, all the others are as old as the batch."""
    database = service.database
    parent = service.batches.open(Opening(items=300)).batch.id
    child = service.batches.open(Opening("old", parent=ItemId(parent, 0, 0))).batch.id
    names = [column.name for column in tables.batches.c if column.name != "id"]
    with database.engine.begin() as tx:
        row = tx.execute(sa.select(tables.batches).where(tables.batches.c.id == child)).one()._mapping
        copies = [{name: row[name] for name in names} | {"parent_number": number} for number in range(1, 299)]
        tx.execute(sa.insert(tables.batches), copies)
    stranger = service.batches.open(Opening()).batch.id
    columns = [sa.null() if name == "parent_number" else tables.batches.c[name] for name in names]
    for _ in range(12):
        with database.engine.begin() as tx:
            others = sa.select(*columns).where(tables.batches.c.id >= stranger)
            tx.execute(sa.insert(tables.batches).from_select(names, others))
    service.batches.open(Opening("old", parent=ItemId(parent, 0, 299)))
    if not database.is_embedded:  # the service doesn't analyze SQLite's tables
        plans.analyze(database, "batches")
    # SQLite gives the index of a constraint a name of its own.
    by_parent = "(parent_batch=?)" if database.is_embedded else "batches_parent"
    for chosen, index in ((Filter(parent=parent), by_parent), (Filter(key="old"), "batches_key_state")):
        with plans.executions(database) as executions:
            assert service.batches.page(replace(chosen, labels={"team": "none"})).batches == []
        plans.finds_nothing_by(database, index, *executions[-1], most_rows=310)


def _all_pages(service: Service, chosen: Filter, limit: int) -> list[int]:
    ids_found: list[int] = []
    before: int | None = None
    for _ in range(20):
        page = service.batches.page(chosen, before=before, limit=limit)
        assert len(page.batches) <= limit
        ids_found += [batch.id for batch in page.batches]
        if page.before is None:
            return ids_found
        assert before is None or page.before < before
        before = page.before
    raise AssertionError(f"the list has no end: {ids_found}")


def test_counts_of_many_batches_are_not_exact(service: Service, ids: list[int]) -> None:
    """Without a selective filter the latest batches are counted, otherwise the first ones found."""
    counts = service.batches.counts(Filter())
    assert (counts.exact, counts.by_state[State.OPEN], counts.by_state[State.COMPLETE]) == (False, 3, 1)
    assert not service.batches.counts(Filter(labels={"team": "0"})).exact
    some = service.batches.counts(Filter(key_prefix="t"))
    assert (some.exact, sum(some.by_state.values())) == (False, 5)
    few = service.batches.counts(Filter(key_prefix="t1/"))
    assert (few.exact, few.by_state[State.OPEN], few.by_state[State.COMPLETE]) == (True, 2, 1)
    labelled = service.batches.counts(Filter(key_prefix="t1/", labels={"team": "2"}))
    assert (labelled.exact, sum(labelled.by_state.values())) == (True, 0)


@pytest.mark.parametrize(
    "chosen", [Filter(), Filter(state=State.OPEN), Filter(labels={"team": "0"})], ids=["all", "a state", "a label"]
)
def test_counts_examine_no_more_batches_than_they_say(
    server_database: Database, monkeypatch: pytest.MonkeyPatch, chosen: Filter
) -> None:
    """Of many, those that were opened last. The index of states has all."""
    monkeypatch.setattr(search, "MOST", 1000)
    row = {"group_size": 64, "items": 0, "acked": 0, "failed": 0, "full_prefix": 0, "open_count": 0, "labels": "{}"}
    times = dict.fromkeys(["created_at", "updated_at", "seen_updated_at"], NOON)
    states = itertools.cycle([State.OPEN, State.SEALED, State.COMPLETE])
    rows = [row | times | {"batch_key": "many", "state": next(states)} for _ in range(5000)]
    server_database.write(lambda tx: tx.execute(sa.insert(tables.batches), rows) and None)
    plans.analyze(server_database, "batches")
    with plans.executions(server_database) as executions:
        assert not server_database.read(search.counts, chosen).exact
    with server_database.engine.connect() as tx:
        assert sum(plans.rows_read(tx, text, values) for text, values in executions) < 1100
