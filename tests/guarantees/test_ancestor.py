"""Defects of the ancestor, paradoxical-io/carlyle, that must not exist here; one test each, on each database."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, janitor, writes
from core.acks import flush
from core.acks.call import AckResult, Call, Unit
from core.batches import batch as batches
from core.batches import expiry
from core.batches.lifecycle import State, Verb
from core.batches.search import Filter
from core.batches.writing import Extend
from core.bits.cache import BitfieldCache
from core.commits.combiner import Inline
from core.service import Service
from core.service.writes import KINDS
from core.storage import schema, tables
from core.storage.database import Database
from tests.guarantees.models.service import LONG_AGO
from tests.mutants import mutant
from tests.support.servers import MariaDB

T = TypeVar("T")
GROUP = 64


def new(service: Service, items: int, *, sealed: bool = False, key: str | None = None) -> int:
    return service.batches.open(batches.Opening(key=key, group_size=GROUP, items=items, sealed=sealed)).batch.id


def ack(service: Service, *items: tuple[int, int, int]) -> AckResult:
    return service.acks.ack(Call.of(Verb.ACK, items)).result(60)


def meet(
    service: Service, first: Callable[[Connection], T], second: Callable[[], Any], table: str = "batches"
) -> tuple[T, Any]:
    """Hold `first` right before its commit until `second` has reached a lock on the table; then let both finish."""
    lock_held, second_waits = threading.Event(), threading.Event()

    def hold(tx: Connection) -> T:
        result = first(tx)
        lock_held.set()
        assert second_waits.wait(60)
        return result

    @sa.event.listens_for(service.database.engine, "before_cursor_execute")
    def arrives(connection: object, cursor: object, text: str, *_: object) -> None:
        if lock_held.is_set() and ("BEGIN IMMEDIATE" in text or (table in text and "FOR UPDATE" in text)):
            second_waits.set()

    with ThreadPoolExecutor(2) as pool:
        first_call = pool.submit(service.database.write, hold)
        assert lock_held.wait(60)
        other = pool.submit(second)
        return first_call.result(60), other.result(60)


def unit(batch: int, group: int, index: int) -> Unit:
    return Call.of(Verb.ACK, [(batch, group, index)]).units[batch]


def test_an_extend_that_races_the_close_is_part_of_what_is_closed(service: Service) -> None:
    """There, items could be added while the batch closed, and the close didn't wait for them."""
    batch = new(service, 1)
    ack(service, (batch, 0, 0))
    (extended,), sealed = meet(
        service,
        lambda tx: writes.flush(tx, [Extend(batch=batch, count=2)], KINDS),
        lambda: service.batches.seal(batch),
    )
    extension = extended.value
    assert (extension.start, extension.count) == (1, 2)
    assert (sealed.batch.items, sealed.newly, sealed.batch.state) == (3, False, State.SEALED)
    with pytest.raises(errors.BatchSealed):
        service.batches.extend(batch, 1)
    assert ack(service, (batch, 0, 1), (batch, 0, 2)).completed[batch].newly


@mutant(
    "a-batch-that-is-not-sealed-completes",
    "core.batches.settle:completes",
    "state is State.SEALED and resolved == items",
    "resolved == items",
)
def test_an_open_batch_is_not_complete_though_every_item_so_far_is_acked(service: Service) -> None:
    """There, a fast consumer could end a batch that its producer was still filling."""
    batch = new(service, 3)
    assert not ack(service, (batch, 0, 0), (batch, 0, 1), (batch, 0, 2)).completed
    assert service.batches.extend(batch, 1).start == 3
    assert not service.batches.seal(batch).newly
    assert ack(service, (batch, 0, 3)).completed[batch].newly


def test_of_two_racing_last_acks_exactly_one_completes_the_batch(service: Service) -> None:
    """There, both acks reported "complete" as if each had completed the batch."""
    batch = new(service, 2 * GROUP, sealed=True)
    ack(service, *((batch, group, index) for group in range(2) for index in range(1, GROUP)))
    (first,), second = meet(
        service,
        lambda tx: flush.flush(tx, [unit(batch, 0, 0)], BitfieldCache()).outcomes,
        lambda: ack(service, (batch, 1, 0)),
    )
    assert first.completed is None
    assert second.completed[batch].newly
    repeat = ack(service, (batch, 0, 0))
    assert (repeat.repeated, repeat.completed[batch].newly) == (1, False)


def test_the_same_last_ack_sent_twice_is_answered_twice_and_is_new_once(service: Service) -> None:
    """There, a redelivered last ack reported "complete" as new again."""
    batch = new(service, 1, sealed=True)
    (first,), second = meet(
        service,
        lambda tx: flush.flush(tx, [unit(batch, 0, 0)], BitfieldCache()).outcomes,
        lambda: ack(service, (batch, 0, 0)),
        table="item_groups",
    )
    assert first.completed is not None
    assert first.completed.newly
    assert (second.repeated, second.completed[batch].newly) == (1, False)


@mutant(
    "an-ack-trusts-its-id",
    "core.acks.apply:FlushState.issued",
    "size if remaining >= size else remaining if remaining > 0 else 0",
    "size",
)
def test_an_ack_does_not_trust_its_id(service: Service) -> None:
    """There, a group's batch was not checked and an unknown group was silently accepted."""
    large, small = new(service, 3 * GROUP), new(service, 5)
    expected = {
        (small, 2, 0): "unknown_item",  # a group that exists only in the other batch
        (small, 0, 5): "unknown_item",  # not issued
        (small, 0, GROUP): "unknown_item",  # not an alias for the next group's first item
        (large, 3, 0): "unknown_item",
        (large, 0, GROUP + 1): "unknown_item",
        (large + 1000, 0, 0): "unknown_batch",
        (0, 0, 0): "unknown_batch",
    }
    answer = ack(service, *expected, (small, 0, 1))
    assert {tuple(rejection.item): rejection.reason for rejection in answer.rejected if rejection.item} == expected
    assert (answer.applied, answer.repeated) == (1, 0)
    masks = [(small, 0, b"\xff"), (small, 7, b"\x01"), (large + 1000, 0, b"\x03")]
    answer = service.acks.ack(Call.of(Verb.ACK, (), masks)).result(60)
    assert {(rejection.reason, rejection.group, rejection.count) for rejection in answer.rejected} == {
        ("unknown_item", (small, 0), 3),
        ("unknown_item", (small, 7), 1),
        ("unknown_batch", (large + 1000, 0), 2),
    }
    assert (answer.applied, answer.repeated) == (4, 1)
    assert (service.batches.get(small).acked, service.batches.get(large).acked) == (5, 0)
    with service.database.engine.connect() as tx:
        columns = tables.item_groups.c
        assert tx.execute(sa.select(columns.batch_id, columns.group_no)).all() == [(small, 0)]


def time_passes(service: Service, *ids: int, days: int = LONG_AGO) -> None:
    columns = tables.batches.c
    with service.database.engine.begin() as tx:
        times = (columns.updated_at, columns.seen_updated_at, columns.ended_at)
        for id, *values in tx.execute(sa.select(columns.id, *times).where(columns.id.in_(ids))).all():
            shift = timedelta(days=days)
            shifted = {time: value - shift for time, value in zip(times, values, strict=True) if value is not None}
            tx.execute(sa.update(tables.batches).where(columns.id == id).values(shifted))


@mutant(
    "a-batch-that-is-being-acked-is-reaped",
    "core.acks.completion:_judge",
    'f"{dialect.greatest}(updated_at, {dialect.now})"',
    '"updated_at"',
)
def test_a_batch_that_is_being_acked_is_not_reaped(service: Service) -> None:
    """There, acks didn't touch the batch, and the reaper removed it while consumers were working on it."""
    acked, failed, repeating, silent = (new(service, 2, sealed=True) for _ in range(4))
    ack(service, (repeating, 0, 0))
    time_passes(service, acked, failed, repeating, silent)
    ack(service, (acked, 0, 0), (repeating, 0, 0))
    service.acks.ack(Call.of(Verb.FAIL, [(failed, 0, 0)])).result(60)
    report = janitor.run_once(service.database, expiry.Policy())
    assert sorted(report.expired_sealed) == sorted([repeating, silent])
    assert report.deleted == []
    assert {service.batches.get(batch).state for batch in (acked, failed)} == {State.SEALED}
    assert ack(service, (acked, 0, 1)).completed[acked].newly
    assert ack(service, (silent, 0, 0)).rejected[0].reason == "expired"


def test_a_batch_without_items_is_reaped_like_any_other(service: Service) -> None:
    """There, a batch that never got an item was never removed."""
    batch = new(service, 0)
    assert janitor.run_once(service.database, expiry.Policy()).expired_open == []
    time_passes(service, batch)
    assert janitor.run_once(service.database, expiry.Policy()).expired_open == [batch]
    assert service.batches.get(batch).state is State.EXPIRED
    time_passes(service, batch)
    assert janitor.run_once(service.database, expiry.Policy()).deleted == [batch]
    with pytest.raises(errors.BatchNotFound):
        service.batches.get(batch)


def test_adding_no_items_is_legal(service: Service) -> None:
    """There, adding 0 items failed, and each producer had to avoid it."""
    batch = new(service, 0)
    extension = service.batches.extend(batch, 0, "nothing")
    assert (extension.start, extension.count, extension.batch.items) == (0, 0, 0)
    service.batches.extend(batch, 5)
    assert (service.batches.extend(batch, 0).start, service.batches.extend(batch, 0, "nothing").start) == (5, 0)
    assert service.batches.get(batch).items == 5
    empty = new(service, 0)
    assert service.batches.seal(empty).newly


@mutant("a-retried-add-issues-new-ids", "core.batches.writing:_extended", "before is not None", "False")
def test_a_retried_add_issues_the_same_items_and_the_batch_ends(service: Service) -> None:
    """There, a retried add issued new ids, which no producer had and no consumer acked."""
    batch = new(service, 3)
    first = service.batches.extend(batch, 4, "chunk-1")
    service.batches.extend(batch, 2, "chunk-2")
    for state in (State.OPEN, State.SEALED, State.COMPLETE):
        repeat = service.batches.extend(batch, 4, "chunk-1")
        assert (repeat.start, repeat.count, repeat.replayed) == (first.start, 4, True)
        assert (repeat.batch.items, repeat.batch.state) == (9, state)
        with pytest.raises(errors.IdempotencyKeyReused):
            service.batches.extend(batch, 5, "chunk-1")
        if state is State.OPEN:
            service.batches.seal(batch)
        elif state is State.SEALED:
            assert ack(service, *((batch, 0, index) for index in range(9))).completed[batch].newly


def test_ids_of_deleted_batches_never_come_back(service: Service) -> None:
    """A late ack of a deleted batch is always unknown; it never reaches a newer batch with the same id."""
    ids = [new(service, 1) for _ in range(3)]
    for batch in ids:
        service.batches.delete(batch)
    service.stop()
    new_service = Service(Database(service.database.url.render_as_string(hide_password=False)), combiner=Inline)
    assert new(new_service, 1) > max(ids)
    assert {rejection.reason for rejection in ack(new_service, *((batch, 0, 0) for batch in ids)).rejected} == {
        "unknown_batch"
    }
    new_service.stop()


@pytest.mark.mariadb
def test_ids_of_deleted_batches_do_not_come_back_after_the_server_was_killed(
    mariadb: MariaDB, mariadb_url: str
) -> None:
    """The server's counter survives the server: the next id is new though no row has the last one."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
        before = Service(database, combiner=Inline)
        last = [new(before, 1) for _ in range(3)][-1]
        for batch in range(last - 2, last + 1):
            before.batches.delete(batch)
    mariadb.stop(signal.SIGKILL)
    mariadb.start()
    after = Service(Database(mariadb_url), combiner=Inline)
    assert new(after, 1) > last
    after.stop()


SPELLINGS = ["Job-A", "job-a", "job-a ", "job-á", "job-a\t"]


@mutant(
    "a-batch-key-is-compared-as-the-server-likes",
    "core.batches.search:Filter.keys",
    "column == self.key",
    "sa.func.lower(sa.func.trim(column)) == self.key.lower().strip()",
)
def test_batch_keys_that_differ_in_case_or_blanks_are_different(service: Service) -> None:
    """MariaDB's default collations would treat all of them as equal."""
    ids = {key: new(service, 1, key=key) for key in SPELLINGS}
    for key, batch in ids.items():
        assert [batch_.id for batch_ in service.batches.page(Filter(key=key)).batches] == [batch]
        assert service.batches.get(batch).key == key
        assert ack(service, (batch, 0, 0)).completed == {}
        assert service.batches.seal(batch).batch.key == key
        assert ack(service, (batch, 0, 0)).completed[batch].key == key


def test_open_keys_that_differ_in_case_or_blanks_are_different(service: Service) -> None:
    """Two producers with similar keys get two batches."""
    keys = ["Job-A", "job-a", "job-a "]
    openings = [service.batches.open(batches.Opening(items=1), key) for key in keys]
    assert len({opening.batch.id for opening in openings}) == 3
    assert not any(opening.replayed for opening in openings)
    for key, before in zip(keys, openings, strict=True):
        repeat = service.batches.open(batches.Opening(items=1), key)
        assert (repeat.batch.id, repeat.replayed) == (before.batch.id, True)


def test_extend_keys_that_differ_in_case_or_blanks_are_different(service: Service) -> None:
    """Two chunks with similar keys are both issued, and a retry of each returns its own items."""
    batch = new(service, 0)
    keys = ["Chunk-1", "chunk-1", "chunk-1 "]
    assert [service.batches.extend(batch, 1, key).start for key in keys] == [0, 1, 2]
    assert [service.batches.extend(batch, 1, key).start for key in keys] == [0, 1, 2]
    assert service.batches.get(batch).items == 3
