"""The database's answer to a COMMIT is lost: each call has the result, the rows, the events and the follow-ups that it
would have had if the answer had arrived.

The connection breaks after the server has executed the COMMIT. `test_crashes` loses the process with the answer, and
the explorer loses answers between the steps of other transactions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed, writes
from core.acks import commit
from core.acks.call import Call, Unit
from core.batches import batch as batches
from core.batches import descendants
from core.batches.batch import Opening
from core.batches.lifecycle import State, Verb
from core.batches.search import Filter
from core.batches.tolerance import OnExceeded
from core.batches.writing import Extend
from core.bits.cache import BitfieldCache
from core.commits.combiner import Inline
from core.commits.operation import Operation
from core.service import Service
from core.service.batches import opening_of
from core.service.writes import KINDS
from core.storage import commit_marks, statements, tables
from core.storage.database import Database
from core.storage.dialects import mariadb, postgresql
from lastbit.ids import ItemId
from tests.conftest import Server
from tests.guarantees.drivers import journaled
from tests.guarantees.models.service import Model, Request, assert_equal
from tests.guarantees.programs.dying import Written
from tests.guarantees.test_crashes import JOURNALED, OF_CHILDREN, SCENARIOS, Ground
from tests.mutants import mutant
from tests.support import templates
from tests.support.proxies import Cut, proxied


@dataclass
class Losses:
    """Which COMMIT's answer is lost, counted from `arm`."""

    place: int | None = None
    passed: int = 0
    lost: int = 0

    def arm(self, place: int) -> None:
        self.place, self.passed, self.lost = place, 0, 0

    def disarm(self) -> None:
        self.place = None

    def is_next(self) -> bool:
        if self.place is None:
            return False
        self.passed += 1
        is_due = self.passed == self.place + 1
        self.lost += is_due
        return is_due


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Losses:
    losses = Losses()
    on_mariadb, on_postgresql = mariadb._Connection.commit, postgresql._Connection.commit

    def commit_on_mariadb(connection: Any) -> None:
        on_mariadb(connection)
        if losses.is_next():
            connection._force_close()
            raise pymysql.OperationalError(2013, "Lost connection to server during query")

    def commit_on_postgresql(connection: Any) -> None:
        on_postgresql(connection)
        if losses.is_next():
            connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(mariadb._Connection, "commit", commit_on_mariadb)
    monkeypatch.setattr(postgresql._Connection, "commit", commit_on_postgresql)
    return losses


def _lose_everywhere(database: Database, losses: Losses, scenario: Callable[[Ground], Request]) -> None:
    """Lose each COMMIT's answer in turn. The answer and everything that can be read match the model, which knows of no
    losses, and whoever waits for the feed was woken for its last event."""
    place = 0
    while True:
        ground = Ground(Service(database, combiner=Inline, sender=Written(Path(os.devnull))), Model())
        request = scenario(ground)
        before, woken = ground.service.feed.head(), [0]
        ground.service.feed.on_append(woken.append)
        losses.arm(place)
        ground.do(request)
        losses.disarm()
        head = ground.service.feed.head()
        assert max(woken) == head or head == before
        descendants.sweep(database)  # as each round of the dispatcher does
        assert_equal(ground.service, ground.model)
        if not losses.lost:
            break
        place += 1
    assert place >= 1


@mutant(
    "a-lost-answer-forgets-who-waits-for-the-feed",
    "core.storage.database:Database._transaction",
    "raise _Faulted(errors.Fault.OUTAGE, trouble.cause) from trouble.cause",
    "raise _Faulted(errors.Fault.OUTAGE, trouble.cause) from trouble.cause\ndone = done[0], None, []",
)
@pytest.mark.parametrize("scenario", [*SCENARIOS, *OF_CHILDREN], ids=lambda scenario: scenario.__name__)
def test_a_lost_answer_changes_nothing(
    server_database: Database, losses: Losses, scenario: Callable[[Ground], Request]
) -> None:
    _lose_everywhere(server_database, losses, scenario)


@pytest.mark.parametrize("scenario", JOURNALED, ids=lambda scenario: scenario.__name__)
def test_a_lost_answer_changes_nothing_for_a_journaled_batch(
    server_database: Database, losses: Losses, scenario: Callable[[Ground], Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    journaled.everything(monkeypatch)
    _lose_everywhere(server_database, losses, scenario)


@mutant(
    "a-connection-lost-with-its-commit-is-taken-for-a-refused-statement",
    "core.storage.faults:is_before_commit",
    'isinstance(error, DBAPIError) and not error.connection_invalidated and error.statement not in (None, "COMMIT")',
    'isinstance(error, DBAPIError) and error.statement not in (None, "COMMIT")',
)
@mutant(
    "writes-of-the-last-packet-are-not-marked",
    "core.storage.statements:commit",
    "tx.info[HAS_WRITTEN] or pipeline.will_write()",
    "tx.info[HAS_WRITTEN]",
)
@pytest.mark.parametrize("cut", ["before", "amid", "after"])
def test_a_connection_that_is_cut_at_the_last_packet_changes_nothing(server: Server, server_url: str, cut: Cut) -> None:
    """By the network: an ack that ends a child, and an extend without a key."""
    address = sa.make_url(server_url)
    with Database(server_url) as direct:
        templates.migrate(direct)
        service = Service(direct, combiner=Inline)
        root = service.batches.open(Opening(items=1, sealed=True)).batch.id
        child = service.batches.open(Opening(items=1, parent=ItemId(root, 0, 0))).batch.id
    for work in ("extend", "seal", "ack"):
        with proxied(server.port) as proxy, Database(_behind(address, proxy.port)) as database:
            service = Service(database, combiner=Inline)
            service.check_ready()
            proxy.every, proxy.most, proxy.cut = 1, 1, cut
            if work == "extend":
                assert service.batches.extend(child, 1).start == 1
            elif work == "seal":
                assert service.batches.seal(child).batch.items == 2
            else:
                answer = service.acks.ack(Call.of(Verb.ACK, [(child, 0, 0), (child, 0, 1)])).result()
                assert (answer.applied, answer.repeated, answer.completed[child].newly) == (2, 0, True)
                assert service.batches.get(root).complete
            assert proxy.cuts == 1
            service.stop()


def _behind(address: sa.URL, port: int) -> str:
    return address.set(port=port).render_as_string(hide_password=False)


def _units(*calls: Call) -> list[Unit]:
    return [unit for call in calls for unit in call.units.values()]


def test_calls_that_were_merged_have_the_outcomes_of_the_flush_that_was_committed(
    server_database: Database, losses: Losses
) -> None:
    """Failures that cancel their batch, beside acks and skips of the same batch, and an ack of a child: none is told
    that its batch was cancelled before, and each count is that of the first run."""
    service = Service(server_database, combiner=Inline)
    opening = Opening(items=5, sealed=True, tolerated_failures=0, on_exceeded=OnExceeded.CANCEL)
    root = service.batches.open(Opening(items=1, sealed=True)).batch.id
    child = service.batches.open(Opening(items=1, sealed=True, parent=ItemId(root, 0, 0))).batch.id
    batch = service.batches.open(opening).batch.id
    units = _units(
        Call.of(Verb.ACK, [(batch, 0, 0)]),
        Call.of(Verb.FAIL, [(batch, 0, 1)], reason="broken"),
        Call.of(Verb.ACK, [(batch, 0, 2), (batch, 0, 2), (batch, 0, 0)]),
        Call.of(Verb.ACK, [(child, 0, 0)]),
        Call.of(Verb.SKIP, [(batch, 0, 2), (batch, 0, 3)], reason="not needed"),
    )
    losses.arm(0)
    flushed = commit.commit(server_database, units, BitfieldCache())
    assert losses.lost == 1
    assert [(outcome.applied, outcome.repeated, outcome.rejected) for outcome in flushed.outcomes] == [
        *((1, 0, []), (1, 0, []), (1, 1, []), (1, 0, []), (1, 1, []))
    ]
    assert service.batches.get(batch).state is State.CANCELLED
    assert flushed.owing == [child]


@mutant(
    "a-lost-answer-runs-the-work-again",
    "core.storage.database:Database._transaction",
    "not self._was_committed(mark)",
    "True",
)
def test_writes_without_a_key_are_done_once_and_answered(server_database: Database, losses: Losses) -> None:
    """An extend or open without a key could not recognize its own effect."""
    service = Service(server_database, combiner=Inline)
    batch = service.batches.open(Opening()).batch.id
    operations: list[Operation] = [
        Extend(batch=batch, count=1),
        Extend(batch=batch, count=2, idempotency_key="k"),
        opening_of(Opening(items=5)),
        feed.Append(events=[feed.NewEvent("a", "x")]),
    ]
    losses.arm(0)
    plain, keyed, opened, appended = (outcome.value for outcome in writes.commit(server_database, operations, KINDS))
    assert losses.lost == 1
    assert [(plain.start, plain.replayed), (keyed.start, keyed.replayed)] == [(0, False), (1, False)]
    assert (opened.batch.items, opened.replayed) == (5, False)
    assert not appended[0].repeated
    assert service.batches.get(batch).items == 3
    assert len(service.batches.page(Filter()).batches) == 2


def _insert(tx: Connection) -> None:
    tx.execute(sa.insert(tables.extends).values(batch_id=1, idempotency_key=os.urandom(8).hex(), start=0, count=1))


def _rows(database: Database) -> int:
    with database.engine.connect() as connection:
        return int(connection.scalar(sa.select(sa.func.count()).select_from(tables.extends)) or 0)


def _is_committed(connection: Connection, mark: commit_marks.Mark) -> bool:
    with connection.begin():
        return commit_marks.settle(connection, mark)


@mutant(
    "a-transaction-that-was-taken-for-lost-may-still-commit",
    "core.storage.commit_marks:settle",
    'f"CASE WHEN commit_marks.mark < {mark.number} THEN {barred} ELSE commit_marks.mark END"',
    'f"CASE WHEN commit_marks.mark < {mark.number} THEN commit_marks.mark ELSE commit_marks.mark END"',
    (
        "_upsert(dialects.of(tx), mark.writer, barred, keep_or_bar)",
        "_upsert(dialects.of(tx), mark.writer, 0, keep_or_bar)",
    ),
)
@mutant(
    "a-barred-mark-is-written",
    "core.storage.commit_marks:statement",
    'f"CASE WHEN commit_marks.mark < {number} THEN {number} END"',
    'f"CASE WHEN commit_marks.mark < {number} THEN {number} ELSE {number} END"',
)
def test_a_transaction_that_is_still_in_progress_is_barred(server_database: Database) -> None:
    """It fails at its mark, so it can't be committed after its work has run again."""
    database = server_database
    with database.engine.connect() as late, database.engine.connect() as other:
        late.begin()
        mark = commit_marks.new(late)
        _insert(late)
        assert not _is_committed(other, mark)
        with pytest.raises(sa.exc.IntegrityError):
            statements.run(late, commit_marks.statement(late, mark))
        late.rollback()
        assert _rows(database) == 0
        assert not _is_committed(other, mark)


def test_a_committed_transaction_stays_committed_however_often_it_is_asked_for(server_database: Database) -> None:
    with server_database.engine.connect() as writer, server_database.engine.connect() as other:
        marks = []
        for _ in range(2):
            writer.begin()
            marks.append(commit_marks.new(writer))
            _insert(writer)
            statements.run(writer, commit_marks.statement(writer, marks[-1]))
            writer.commit()
            for _ in range(2):
                assert _is_committed(other, marks[-1])
        assert marks[0].writer == marks[1].writer


@mutant("a-connection-stays-one-writer", "core.storage.commit_marks:new", "last.number >= 2 * MOST", "False")
def test_a_row_has_a_bounded_number_of_versions(
    server_database: Database, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot keeps them all. Connections become other writers, and answers are lost before and after."""
    monkeypatch.setattr(commit_marks, "MOST", 3)
    for place in range(8):
        losses.arm(0)
        server_database.write(_insert)
        assert (losses.lost, _rows(server_database)) == (1, place + 1)
        losses.disarm()
        server_database.write(lambda tx: tx.execute(sa.update(tables.extends).values(start=7)))
    for _ in range(4):
        server_database.write(lambda tx: tx.execute(sa.update(tables.extends).values(start=9)))
    with server_database.engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.max(tables.commit_marks.c.mark))) == 6


@mutant(
    "a-transaction-without-writes-is-marked",
    "core.storage.statements:commit",
    "tx.info[HAS_WRITTEN] or pipeline.will_write()",
    "True",
)
def test_a_transaction_without_writes_leaves_no_mark(server_database: Database) -> None:
    """Repeated acks and idle polls stay as cheap as reads."""
    service = Service(server_database, combiner=Inline)
    batch = service.batches.open(Opening(items=2)).batch.id
    service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])).result()
    marks = "SELECT SUM(mark) FROM commit_marks"
    before = server_database.read(lambda tx: tx.exec_driver_sql(marks).scalar())
    service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])).result()
    server_database.write(lambda tx: batches.get(tx, batch))
    assert server_database.read(lambda tx: tx.exec_driver_sql(marks).scalar()) == before
    server_database.write(_insert)
    assert server_database.read(lambda tx: tx.exec_driver_sql(marks).scalar()) > before


def test_an_outcome_that_the_database_can_not_tell_is_a_503(
    server_database: Database, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is not run again: its callers repeat it with their keys."""
    runs: list[None] = []

    def insert(tx: Connection) -> None:
        runs.append(None)
        _insert(tx)

    def unreachable(tx: Connection, mark: commit_marks.Mark) -> NoReturn:
        tx.invalidate()
        raise sa.exc.OperationalError("SELECT", {}, pymysql.OperationalError(2013, "Lost connection"))

    monkeypatch.setattr(commit_marks, "settle", unreachable)
    losses.arm(0)
    with pytest.raises(errors.OutcomeUnknown):
        server_database.write(insert)
    assert (len(runs), _rows(server_database)) == (1, 1)


@mutant(
    "marks-are-kept-for-ever",
    "core.storage.commit_marks:forget",
    "tables.clock(tx) - KEEP",
    "tables.clock(tx) - 9 * KEEP",
)
def test_marks_of_closed_connections_are_removed(server_database: Database) -> None:
    for _ in range(3):
        server_database.write(_insert)
    columns = tables.commit_marks.c
    with server_database.engine.begin() as tx:
        long_ago = tables.clock(tx) - 2 * commit_marks.KEEP
        tx.execute(sa.insert(tables.commit_marks).values(writer=1, mark=8, marked_at=long_ago))
    assert server_database.write_in_chunks(commit_marks.forget) == 1
    with server_database.engine.connect() as connection:
        assert 1 not in connection.scalars(sa.select(columns.writer)).all()


@contextlib.contextmanager
def _dead_payer(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process dies after its commit, before it pays."""
    with monkeypatch.context() as patches:
        patches.setattr(service.acks._payer, "pay", _die)
        with pytest.raises(_Died):
            yield


class _Died(Exception):
    pass


def _die(*_: object) -> NoReturn:
    raise _Died


@mutant(
    "a-retry-does-not-pay-what-its-first-request-left-owing",
    "core.acks.flush:flush",
    "owing |= {batch for batch, look in state.seen.items() if look.owes}",
    "pass",
)
@pytest.mark.parametrize("key", [None, "delivery-7"])
@pytest.mark.parametrize("verb", list(Verb))
def test_a_clients_retry_pays_what_its_first_request_left_owing(
    database: Database, monkeypatch: pytest.MonkeyPatch, key: str | None, verb: Verb
) -> None:
    """No sweep runs here. The batch has completed, or was cancelled by its failures."""
    service = Service(database, combiner=Inline)
    root = service.batches.open(Opening(items=1, sealed=True)).batch.id
    opening = Opening(
        items=2, sealed=True, parent=ItemId(root, 0, 0), tolerated_failures=0, on_exceeded=OnExceeded.CANCEL
    )
    child = service.batches.open(opening).batch.id
    service.acks.ack(Call.of(Verb.ACK, [(child, 0, 0)])).result()
    with _dead_payer(service, monkeypatch):
        service.acks.ack(Call.of(verb, [(child, 0, 1)], idempotency_key=key)).result()
    assert service.batches.get(root).state is State.SEALED
    answer = service.acks.ack(Call.of(verb, [(child, 0, 1)], idempotency_key=key)).result()
    assert (answer.applied, answer.repeated, answer.rejected) == (0, 1, [])
    service.acks.stop()  # it ends the payments: only the call that ended the batch waits for them
    state = service.batches.get(root)
    assert (state.complete, state.failed) == (True, int(verb is Verb.FAIL))


@mutant(
    "an-item-that-was-resolved-before-its-batch-ended-is-rejected",
    "core.acks.ended:outcome",
    "index < group_size and settled[number][index]",
    "False",
)
@mutant(
    "an-ack-of-a-failed-item-of-an-ended-batch-is-a-repeat",
    "core.acks.ended:_settled",
    "verb is Verb.ACK",
    "False",
)
@mutant(
    "a-skip-of-a-failed-item-of-an-ended-batch-is-a-repeat",
    "core.acks.ended:_settled",
    "verb is Verb.FAIL or group.failed is None",
    "True",
)
@mutant("the-journal-of-an-ended-batch-is-not-read", "core.acks.ended:judge", "None if look.journal_next else ()", "()")
@pytest.mark.parametrize("is_journaled", [False, True])
def test_items_that_were_resolved_before_their_batch_ended_are_repeats(
    database: Database, monkeypatch: pytest.MonkeyPatch, is_journaled: bool
) -> None:
    """By id and by mask; what is pending, or would be redriven, is rejected."""
    if is_journaled:
        journaled.everything(monkeypatch)
    service = Service(database, combiner=Inline)
    batch = service.batches.open(Opening(items=200, group_size=64)).batch.id
    service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 1), (batch, 1, 1)])).result()
    service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 2)])).result()
    service.acks.ack(Call.of(Verb.SKIP, [(batch, 0, 4)])).result()
    service.batches.cancel(batch)
    items = [(batch, 0, 1), (batch, 0, 2), (batch, 0, 3), (batch, 0, 4), (batch, 0, 99), (batch, 2, 0), (batch, 9, 0)]
    for verb, repeated in ((Verb.ACK, 1), (Verb.SKIP, 2), (Verb.FAIL, 3)):
        by_id = service.acks.ack(Call.of(verb, items)).result()
        assert (by_id.applied, by_id.repeated, len(by_id.rejected)) == (0, repeated, len(items) - repeated)
        assert {rejection.reason for rejection in by_id.rejected} == {"cancelled"}
        masks = [(batch, 0, b"\xff"), (batch, 1, b"\x02"), (batch, 2, b"\x01")]
        by_mask = service.acks.ack(Call.of(verb, masks=masks)).result()
        assert (by_mask.applied, by_mask.repeated) == (0, repeated + 1)
        assert [(rejection.group, rejection.count) for rejection in by_mask.rejected] == [
            *(((batch, 0), 8 - repeated), ((batch, 2), 1))
        ]
    assert service.batches.verify(batch).ok


@mutant(
    "a-seal-does-not-recognize-its-own-cancellation",
    "core.batches.writing:BatchWrites._seal",
    "batch.state is State.CANCELLED and batch.completed_by == fingerprint",
    "False",
)
def test_a_repeated_seal_finds_that_it_cancelled_its_batch(database: Database) -> None:
    service = Service(database, combiner=Inline)
    opening = Opening(items=4, tolerated_failure_percentage=10, on_exceeded=OnExceeded.CANCEL)
    batch = service.batches.open(opening).batch.id
    service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 0)])).result()
    first, repeat = (service.batches.seal(batch, "seal-1") for _ in range(2))
    assert first == repeat
    assert first.batch.state is State.CANCELLED
    for other in (None, "seal-2"):
        with pytest.raises(errors.BatchCancelled):
            service.batches.seal(batch, other)
