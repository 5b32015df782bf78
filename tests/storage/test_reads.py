"""Reads that share a statement: each sees what was committed before it was asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from core import errors
from core.batches.batch import Opening
from core.service import Service
from core.service.reads import BatchRead, ReadService
from core.storage.database import Database

UNSEEN = 10**9


class Reader:
    """A `ReadService` whose statements stop after they have read, until `go_on` is set."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.statements: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
        self.go_on = threading.Event()
        self.results: queue.SimpleQueue[BatchRead] = queue.SimpleQueue()
        read = database.read

        def read_and_wait(work: Callable[..., Any], ids: set[int]) -> Any:
            states = read(work, ids)
            self.statements.put(ids)
            assert self.go_on.wait(60)
            return states

        monkeypatch.setattr(database, "read", read_and_wait)
        self.service = ReadService(database, **options)

    def look(self, batch: int) -> BatchRead:
        look = BatchRead(batch, None)
        self.service.submit(look, self._deliver)
        return look

    def _deliver(self, reads: Sequence[BatchRead]) -> None:
        for look in reads:
            self.results.put(look)


def test_a_read_is_not_answered_by_a_statement_that_began_before_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Service(database)
    batch = writer.batches.open(Opening()).batch.id
    reader = Reader(database, monkeypatch)
    first = reader.look(batch)
    assert reader.statements.get(timeout=60) == {batch}
    writer.batches.extend(batch, 5)
    second, third = reader.look(batch), reader.look(UNSEEN)
    reader.go_on.set()
    reader.service.stop()
    assert {reader.results.get(timeout=60) for _ in range(3)} == {first, second, third}
    assert reader.statements.get(timeout=60) == {batch, UNSEEN}
    assert first.state is not None
    assert second.state is not None
    assert (first.state.items, second.state.items) == (0, 5)
    assert isinstance(third.error, errors.BatchNotFound)


def test_reads_beyond_the_bound_are_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(database, monkeypatch, max_waiting=2)
    reader.look(UNSEEN)
    reader.statements.get(timeout=60)
    reader.look(UNSEEN)
    reader.look(UNSEEN)
    with pytest.raises(errors.Overloaded, match="too many requests are waiting"):
        reader.look(UNSEEN)
    reader.go_on.set()
    reader.service.stop()
    with pytest.raises(errors.Unavailable, match="stopping"):
        reader.look(UNSEEN)


def test_a_failed_statement_fails_the_reads_that_share_it(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread goes on: the next read is served."""
    batch = Service(database).batches.open(Opening()).batch.id
    service, results, read = ReadService(database), queue.SimpleQueue[BatchRead](), database.read
    is_broken = True

    def read_or_fail(work: Callable[..., Any], ids: set[int]) -> Any:
        if is_broken:
            raise errors.Unavailable("gone")
        return read(work, ids)

    monkeypatch.setattr(database, "read", read_or_fail)
    reads = [BatchRead(batch, None), BatchRead(batch, None)]
    service.submit(reads[0], lambda finished: [results.put(look) for look in finished] and None)
    assert isinstance(results.get(timeout=60).error, errors.Unavailable)
    is_broken = False
    service.submit(reads[1], lambda finished: [results.put(look) for look in finished] and None)
    state = results.get(timeout=60).state
    assert state is not None
    assert state.id == batch
    service.stop()
