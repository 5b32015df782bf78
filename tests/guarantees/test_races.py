"""Races on real MariaDB sessions, with the server's default settings: no completion is missing, doubled or early.

Each mutant breaks the code in a known way that must make its race fail.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors, janitor
from core.acks import flush
from core.acks.call import AckResult, Call, Rejected
from core.batches import batch as batches
from core.batches import expiry, purge
from core.batches.lifecycle import State, Verb
from core.commits.combiner import Inline
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.conftest import server_kind
from tests.guarantees.drivers.rounds import GROUP, ROUNDS, ack, completion_of, newly, prepare, race, recount
from tests.mutants import mutant

pytestmark = [pytest.mark.mariadb, pytest.mark.timeout(7200), pytest.mark.usefixtures("some_journaled")]


@pytest.fixture
def referee(server_database: Database) -> Service:
    """A service that takes no part in the races; tests use it between and after rounds."""
    return Service(server_database, combiner=Inline)


def verify_some(referee: Service, ids: list[int]) -> None:
    for batch in random.Random(1).sample(ids, 50):
        verification = referee.batches.verify(batch)
        assert verification.ok, verification.faults


@mutant(
    "completion-decided-on-a-plain-read",
    "core.acks.completion:_lock_and_read",
    'dialects.of(pipeline.tx).for_update("id")',
    '""',
)
@mutant(
    "batches-are-looked-at-with-the-groups",
    "core.acks.flush:_begin",
    "completion.ask(pipeline, batches if little else (), locking)",
    "completion.ask(pipeline, batches if little else ())",
)
def test_exactly_one_of_two_last_acks_in_different_groups_completes_the_batch(referee: Service) -> None:
    """Two sessions resolve the last two items of a batch, in two groups; exactly one of them gets `newly`."""
    # Groups with a row and groups without one are locked differently.
    shapes = [(2 * GROUP, {0: GROUP - 1, 1: GROUP - 1}), (GROUP + 1, {0: GROUP - 1})]
    ids = prepare(referee.database, ROUNDS, lambda number: shapes[number % 2])

    def check(number: int, first: AckResult, other: AckResult) -> None:
        batch = ids[number]
        assert [newly(first, batch), newly(other, batch)].count(True) == 1
        assert (first.applied, other.applied) == (1, 1)

    race(
        referee.database,
        ROUNDS,
        lambda service, number: ack(service, (ids[number], 0, GROUP - 1)),
        lambda service, number: ack(
            service,
            (ids[number], 1, shapes[number % 2][1].get(1, 0)),
            verb=Verb.FAIL if number % 3 == 0 else Verb.ACK,
        ),
        check=check,
    )
    rows = recount(referee.database)
    assert {rows[batch].state for batch in ids} == {State.COMPLETE}
    verify_some(referee, ids)


@mutant(
    "a-journaled-batch-is-not-locked",
    "core.acks.flush:_begin",
    "completion.ask(pipeline, batches if little else (), locking)",
    "completion.ask(pipeline, batches if little else (), '' if journal_states else locking)",
)
@mutant(
    "repeats-are-not-told",
    "core.acks.completion:write",
    "_look_again(pipeline.tx, repeat_rows, repeats) if repeats else {}",
    "{}",
)
@mutant("groups-are-not-locked", "core.acks.flush:_for_update", "dialects.of(tx).for_update(*key)", '""')
@mutant(
    "counts-move-by-the-items-sent",
    "core.acks.apply:_ack_few",
    "before is ItemState.PENDING",
    "before in (None, ItemState.PENDING)",
)
def test_a_last_item_delivered_twice_is_complete_for_both_workers_and_newly_for_one(referee: Service) -> None:
    """Two workers ack the same last item at once; both find the batch complete, and one of them completed it."""
    shapes = [(GROUP, {0: GROUP - 1}), (2 * GROUP, {0: GROUP, 1: GROUP - 1}), (1, {})]
    ids = prepare(referee.database, ROUNDS, lambda number: shapes[number % 3])

    def last(service: Service, number: int) -> AckResult:
        group, index = divmod(shapes[number % 3][0] - 1, GROUP)
        return ack(service, (ids[number], group, index))

    def check(number: int, first: AckResult, other: AckResult) -> None:
        first_completion, other_completion = completion_of(first, ids[number]), completion_of(other, ids[number])
        assert first_completion is not None
        assert other_completion is not None
        assert [first_completion.newly, other_completion.newly].count(True) == 1
        assert first_completion.succeeded
        assert other_completion.succeeded
        assert sorted([(first.applied, first.repeated), (other.applied, other.repeated)]) == [(0, 1), (1, 0)]
        if number % 20 == 0:
            repeat = completion_of(last(referee, number), ids[number])
            assert repeat is not None
            assert not repeat.newly

    race(referee.database, ROUNDS, last, last, check=check)
    rows = recount(referee.database)
    assert {rows[batch].state for batch in ids} == {State.COMPLETE}
    verify_some(referee, ids)


@mutant(
    "a-reason-that-another-transaction-inserted-first-is-an-error",
    "core.acks.flush:_write_reasons",
    "(batch, number // state.seen[batch].group_size) in state.missing",
    "(batch, number // state.seen[batch].group_size) in ()",
)
def test_an_item_that_fails_twice_at_once_has_one_of_the_reasons(referee: Service) -> None:
    """Its group has no row yet, so there is nothing to lock before the reasons. Another item of each call fails
    once."""
    rounds = ROUNDS // 4
    ids = prepare(referee.database, rounds, lambda number: (GROUP, {}))

    def check(number: int, first: AckResult, other: AckResult) -> None:
        assert sorted([(first.applied, first.repeated), (other.applied, other.repeated)]) == [(1, 1), (2, 0)]
        _, page = referee.batches.ranges(ids[number], "failed", 0, 10)
        (reasons,) = (part.reasons for part in page.ranges)
        assert (reasons[9], reasons[11]) == ("first", "other")
        assert reasons[10] in ("first", "other")

    race(
        referee.database,
        rounds,
        lambda service, number: ack(service, (ids[number], 0, 9), (ids[number], 0, 10), verb=Verb.FAIL, reason="first"),
        lambda service, number: ack(
            service, (ids[number], 0, 10), (ids[number], 0, 11), verb=Verb.FAIL, reason="other"
        ),
        check=check,
    )
    recount(referee.database)
    verify_some(referee, ids)


@mutant(
    "a-call-from-before-the-journal-goes-on",
    "core.acks.completion:_lock_and_read",
    "row.journal_next or row.children",
    "row.children",
)
def test_an_item_delivered_twice_counts_once_though_its_batch_becomes_journaled_meanwhile(referee: Service) -> None:
    """Two workers ack an item that isn't the last one; one may lock its group and the other the batch."""
    ids = prepare(referee.database, ROUNDS, lambda number: (GROUP, {0: 5} if number % 2 else {}))

    def check(number: int, first: AckResult, other: AckResult) -> None:
        for answer in (first, other):
            assert completion_of(answer, ids[number]) is None
        assert sorted([(first.applied, first.repeated), (other.applied, other.repeated)]) == [(0, 1), (1, 0)]

    def move(service: Service, number: int) -> AckResult:
        return ack(service, (ids[number], 0, 9))

    race(referee.database, ROUNDS, move, move, check=check)
    rows = recount(referee.database)
    assert {rows[batch].acked for batch in ids} == {1, 6}
    verify_some(referee, ids)


@mutant(
    "seal-decides-on-a-plain-read",
    "core.batches.writing:_look",
    "f\"{table} WHERE id IN ({','.join(map(str, part))}) ORDER BY id{dialect.for_update()}\"",
    "f\"{table} WHERE id IN ({','.join(map(str, part))}) ORDER BY id\"",
)
@mutant(
    "ack-judges-the-state-of-its-first-look",
    "core.acks.completion:_lock_and_read",
    'to_lock = ask(pipeline, unlocked, dialects.of(pipeline.tx).for_update("id"))',
    """
look = f"SELECT id, state FROM batches WHERE id IN ({','.join(map(str, unlocked)) or 0})"
looked = {id: State(state) for id, state in pipeline.tx.exec_driver_sql(look)}
to_lock = ask(pipeline, unlocked, dialects.of(pipeline.tx).for_update("id"))
""",
    (
        "newly_locked = rows(to_lock)",
        "newly_locked = {id: row._replace(state=looked[id]) for id, row in rows(to_lock).items()}",
    ),
)
def test_either_the_last_ack_or_the_seal_completes_the_batch(referee: Service) -> None:
    """The last item is acked while the batch is sealed; the batch is complete, and one of the two calls gets
    `newly`."""
    shapes = [(GROUP, {0: GROUP - 1}), (GROUP + 1, {0: GROUP}), (1, {})]
    ids = prepare(referee.database, ROUNDS, lambda number: shapes[number % 3], state=State.OPEN)

    def last(service: Service, number: int) -> AckResult:
        group, index = divmod(shapes[number % 3][0] - 1, GROUP)
        return ack(service, (ids[number], group, index))

    def check(number: int, acked: AckResult, sealed: batches.Sealed) -> None:
        assert [newly(acked, ids[number]), sealed.newly].count(True) == 1
        assert sealed.newly == sealed.batch.complete

    race(referee.database, ROUNDS, last, lambda service, number: service.batches.seal(ids[number]), check=check)
    rows = recount(referee.database)
    assert {rows[batch].state for batch in ids} == {State.COMPLETE}
    verify_some(referee, ids)


@mutant(
    "extend-decides-on-a-plain-read",
    "core.batches.writing:_look",
    "f\"{table} WHERE id IN ({','.join(map(str, part))}) ORDER BY id{dialect.for_update()}\"",
    "f\"{table} WHERE id IN ({','.join(map(str, part))}) ORDER BY id\"",
)
@mutant(
    "extend-judges-the-state-before-the-key",
    "core.batches.writing:_extended",
    "key, count, digest = operation.idempotency_key, operation.count, operation.digest",
    'judge("extend", batch.id, batch.state)\nkey, count, digest = operation.idempotency_key, '
    "operation.count, operation.digest",
)
def test_an_extend_gets_its_numbers_before_the_seal_or_not_at_all(referee: Service) -> None:
    """An extend races the seal: it is refused, or its items belong to the batch and complete it with their acks."""
    # Every other batch completes by its seal, if no extend came before.
    ids = prepare(referee.database, ROUNDS, lambda number: (10, {0: 10 - number % 2}), state=State.OPEN)
    wins = {"extend": 0, "seal": 0}
    followers: set[int] = set()

    def check(number: int, extension: Any, sealed: batches.Sealed) -> None:
        batch = ids[number]
        if isinstance(extension, batches.Extended):
            wins["extend"] += 1
            assert (extension.start, extension.count, extension.replayed) == (10, 3, False)
            assert sealed.batch.items == 13
            assert sealed.batch.state is State.SEALED
            assert not sealed.newly
            if wins["extend"] % 5 == 0:
                repeat = referee.batches.extend(batch, 3, "once")
                assert (repeat.start, repeat.count, repeat.replayed) == (10, 3, True)
                assert not newly(ack(referee, *((batch, 0, index) for index in range(9, 12))), batch)
                assert newly(ack(referee, (batch, 0, 12)), batch)
                followers.add(batch)
        else:
            wins["seal"] += 1
            assert isinstance(extension, errors.BatchSealed if number % 2 else errors.BatchComplete)
            assert sealed.batch.items == 10
            assert sealed.newly == (number % 2 == 0)
            if wins["seal"] % 5 == 0:
                with pytest.raises(errors.BatchEnded):
                    referee.batches.extend(batch, 3, "once")
                assert newly(ack(referee, (batch, 0, 9)), batch) == (number % 2 == 1)
                followers.add(batch)

    race(
        referee.database,
        ROUNDS,
        lambda service, number: service.batches.extend(ids[number], 3, "once"),
        lambda service, number: service.batches.seal(ids[number]),
        check=check,
    )
    rows = recount(referee.database)
    assert {rows[batch].state for batch in followers} == {State.COMPLETE}
    assert min(wins.values()) > ROUNDS // 50, f"the same call nearly always came first: {wins}"
    verify_some(referee, ids)


@mutant(
    "expiry-is-not-judged-again-under-the-lock",
    "core.batches.expiry:expire",
    "cause(batch, now, policy)",
    "Cause.DEADLINE",
)
@mutant(
    "expiry-does-not-lock",
    "core.batches.expiry:expire",
    "batches.lock(tx, batch_id)",
    "batches.get(tx, batch_id), tx.scalar(sa.select(tables.utc_now()))",
)
@mutant(
    "an-ack-does-not-touch-updated-at",
    "core.acks.completion:_judge",
    'f"{dialect.greatest}(updated_at, {dialect.now})"',
    '"updated_at"',
)
def test_an_ack_saves_an_idle_batch_from_expiry_or_is_rejected(referee: Service) -> None:
    """The janitor finds a batch idle that is being acked: either it expires and the ack is rejected, or neither."""
    database = referee.database
    now = datetime.now(UTC)
    policy = expiry.Policy(open_idle=timedelta(hours=1), sealed_idle=timedelta(hours=1))

    def columns(number: int) -> dict[str, Any]:
        # Every fourth batch is idle at once, so that it may expire right after its ack; but the ack must not be lost.
        return {"expires_in": 0} if number % 4 == 0 else {"updated_at": now - timedelta(hours=2)}

    # The batches of other rounds are in a state that the janitor ignores.
    ids = prepare(database, ROUNDS, lambda number: (2, {0: 1 if number % 2 else 0}), state="parked", columns=columns)
    wins = {"ack": 0, "expiry": 0}
    expected: dict[int, tuple[str, int]] = {}
    stage = database.engine.execution_options(isolation_level="AUTOCOMMIT").connect()

    def enter(number: int) -> None:
        """Make this round's batch visible to the janitor, and hide that of the round before."""
        stage.exec_driver_sql(
            "UPDATE batches SET state = CASE state WHEN 'parked' THEN 'open' ELSE CONCAT('was ', state) END "
            "WHERE id IN (%s, %s)",
            (ids[number] if number < ROUNDS else 0, ids[number - 1] if number else 0),
        )

    def check(number: int, answer: AckResult, report: janitor.Report) -> None:
        batch = ids[number]
        expired = batch in report.expired_open
        expected[batch] = ("was expired" if expired else "was open", number % 2 + answer.applied)
        if answer.rejected:
            wins["expiry"] += 1
            assert [rejection.reason for rejection in answer.rejected] == ["expired"]
            assert answer.applied == 0
            assert expired
        else:
            wins["ack"] += 1
            assert answer.applied == 1
            assert number % 4 == 0 or not expired, "it was acked, but expired"
        enter(number + 1)

    with stage:
        enter(0)
        race(
            database,
            ROUNDS,
            lambda service, number: ack(service, (ids[number], 0, 1)),
            lambda service, number: janitor.run_once(service.database, policy),
            check=check,
        )
    rows = recount(database)
    assert {batch: (rows[batch].state, rows[batch].acked) for batch in ids} == expected
    assert min(wins.values()) > ROUNDS // 50, f"the same call nearly always came first: {wins}"


@mutant(
    "ack-does-not-judge-the-state-again-under-the-lock",
    "core.acks.completion:_judge",
    "row is None or (row.state not in TAKES_ACKS and not delta.is_moved)",
    "row is None",
)
@mutant(
    "cancel-decides-on-a-plain-read",
    "core.batches.batch:cancel",
    "lock(tx, batch_id)",
    "get(tx, batch_id), tx.scalar(sa.select(tables.utc_now()))",
)
def test_an_ack_comes_before_the_cancel_or_is_rejected(referee: Service) -> None:
    """A batch is cancelled while an item is acked; nothing is counted after the cancel, and a last ack prevents it."""
    ids = prepare(referee.database, ROUNDS, lambda number: (2 if number % 2 else 3, {0: 1}))
    wins = {"ack": 0, "cancel": 0}
    expected: dict[int, tuple[State, int]] = {}

    def check(number: int, answer: AckResult, cancelled: Any) -> None:
        batch = ids[number]
        wins["cancel" if answer.rejected else "ack"] += 1
        if answer.rejected:
            assert [rejection.reason for rejection in answer.rejected] == ["cancelled"]
        assert answer.applied == (0 if answer.rejected else 1)
        if number % 2 and not answer.rejected:  # this was the last item
            assert newly(answer, batch)
            assert isinstance(cancelled, errors.BatchComplete)
            expected[batch] = State.COMPLETE, 2
        else:
            assert completion_of(answer, batch) is None
            assert cancelled.state is State.CANCELLED
            assert cancelled.acked == 1 + answer.applied, "an ack was counted after the cancel's answer"
            expected[batch] = State.CANCELLED, cancelled.acked

    race(
        referee.database,
        ROUNDS,
        lambda service, number: ack(service, (ids[number], 0, 1)),
        lambda service, number: service.batches.cancel(ids[number]),
        check=check,
    )
    rows = recount(referee.database)
    assert {batch: (rows[batch].state, rows[batch].acked) for batch in ids} == expected
    assert min(wins.values()) > ROUNDS // 50, f"the same call nearly always came first: {wins}"
    verify_some(referee, ids)


def test_an_ack_comes_before_the_open_of_a_child_or_its_item_is_held(referee: Service) -> None:
    """A child is opened under an item that is acked: the open is refused, or the ack is rejected, and the parent waits
    for the child."""
    openings = [batches.Opening(group_size=GROUP, items=items, sealed=True) for items in (1, 2)]
    ids = [referee.batches.open(openings[number // 2 % 2]).batch.id for number in range(ROUNDS)]
    wins = {"ack": 0, "open": 0}
    waiting: set[int] = set()

    def resolve(service: Service, number: int) -> AckResult:
        if number % 2:
            return ack(service, (ids[number], 0, 0))
        return service.acks.ack(Call.of(Verb.ACK, masks=[(ids[number], 0, b"\x01")])).result(120)

    def open_child(service: Service, number: int) -> int:
        opening = batches.Opening(group_size=GROUP, items=1, parent=ItemId(ids[number], 0, 0))
        return service.batches.open(opening).batch.id

    def check(number: int, answer: AckResult, child: int | errors.CoreError) -> None:
        wins["ack" if answer.applied else "open"] += 1
        if answer.applied:
            assert isinstance(child, errors.InvalidRequest | errors.BatchComplete)
            assert answer.rejected == []
        else:
            assert isinstance(child, int)
            assert [(rejection.reason, rejection.count) for rejection in answer.rejected] == [("held", 1)]
            assert answer.completed == {}
            waiting.add(ids[number])

    race(referee.database, ROUNDS, resolve, open_child, check=check)
    rows = recount(referee.database)
    for number, batch in enumerate(ids):
        is_done = batch not in waiting and number // 2 % 2 == 0
        assert rows[batch].state == (State.COMPLETE if is_done else State.SEALED)
    assert min(wins.values()) > ROUNDS // 50, f"the same call nearly always came first: {wins}"
    verify_some(referee, ids)


def test_the_failure_of_a_child_is_not_overtaken_by_an_ack_of_its_item(referee: Service) -> None:
    """The item is acked while its child's only item fails: the ack is rejected, or comes after the failure as a
    redrive. It never completes the parent itself."""
    ids = prepare(referee.database, ROUNDS, lambda number: (1, {}), columns=lambda number: {"children": 1})
    child_of = dict(enumerate(_children(referee.database, ids)))
    wins = {"ack": 0, "child": 0}

    def check(number: int, answer: AckResult, failure: AckResult) -> None:
        assert newly(failure, child_of[number])
        parent = referee.batches.get(ids[number])
        assert parent.complete
        if answer.rejected:
            wins["ack"] += 1
            assert [rejection.reason for rejection in answer.rejected] == ["held"]
        else:
            wins["child"] += 1
            completion = completion_of(answer, ids[number])
            assert completion is not None
            assert (completion.newly, completion.newly_succeeded) == (False, True)
        assert (parent.acked, parent.failed) == ((0, 1) if answer.rejected else (1, 0))

    race(
        referee.database,
        ROUNDS,
        lambda service, number: ack(service, (ids[number], 0, 0)),
        lambda service, number: ack(service, (child_of[number], 0, 0), verb=Verb.FAIL),
        check=check,
    )
    recount(referee.database)
    assert min(wins.values()) > ROUNDS // 50, f"the same call nearly always came first: {wins}"


def _children(database: Database, parents: list[int]) -> list[int]:
    """Children of one item, each under the first item of its parent."""

    def columns(number: int) -> dict[str, Any]:
        return {"parent_batch": parents[number], "parent_number": 0, "parent_group_size": GROUP}

    return prepare(database, len(parents), lambda number: (1, {}), columns=columns)


@mutant("purge-without-the-state-deleting", "core.batches.purge:condemn", "mark(tx, batch_id)", "pass")
@mutant(
    "purge-removes-the-batch-row-first",
    "core.batches.purge:remove_chunk",
    "for table, key in _BY_BATCH:\n    last = tx.execute(sa.select(key).where(table.c.batch_id == "
    "batch_id).order_by(key).limit(1).offset(CHUNK - 1)).scalar()\n    tx.execute(sa.delete("
    "table).where(table.c.batch_id == batch_id, *([] if last is None else [key <= last])))\n    if last "
    "is not None:\n        return False",
    "tx.execute(sa.delete(tables.batches).where(tables.batches.c.id == batch_id))\nfor table, key in "
    "_BY_BATCH:\n    last = tx.execute(sa.select(key).where(table.c.batch_id == batch_id).order_by("
    "key).limit(1).offset(CHUNK - 1)).scalar()\n    tx.execute(sa.delete(table).where(table.c.batch_id "
    "== batch_id, *([] if last is None else [key <= last])))\n    if last is not None:\n        return "
    "False",
)
@mutant(
    "the-janitor-forgets-what-is-half-deleted",
    "core.batches.expiry:half_deleted_or_due",
    "yield from _half_deleted(database)",
    "pass",
)
def test_a_purge_that_dies_between_chunks_leaves_no_rows_and_counts_nothing_twice(
    referee: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acks reach a batch while it is removed in chunks: they came before, or the batch is unknown."""
    monkeypatch.setattr(purge, "CHUNK", 1)
    dice = random.Random(7)
    # Complete batches all of whose acks are redelivered, and open batches where acks add rows.
    shapes = [(2 * GROUP, {0: GROUP, 1: GROUP}), (3 * GROUP, {0: 5})]
    ids = prepare(
        referee.database,
        ROUNDS,
        lambda number: shapes[number % 2],
        columns=lambda number: {"state": State.OPEN if number % 2 else State.COMPLETE, "ended_at": datetime.now(UTC)},
    )
    chunks = [dice.choice([0, 1, 2, 100]) for _ in ids]
    deleted_batches: set[int] = set()

    def remove(service: Service, number: int) -> None:
        batch = ids[number]
        service.database.write(purge.condemn, batch)
        deleted_batches.add(batch)
        for _ in range(chunks[number]):
            if service.database.write(purge.remove_chunk, batch):
                break

    def redeliver(service: Service, number: int) -> list[tuple[bool, AckResult]]:
        batch = ids[number]
        answers_ = []
        for item in ((batch, 1, 7), (batch, 0, 1)):
            is_removed = batch in deleted_batches
            answers_.append((is_removed, ack(service, item)))
        return answers_

    def check(number: int, answers: Any, _: None) -> None:
        assert _ is None
        assert not isinstance(answers, Exception), repr(answers)
        for place, (is_removed, answer) in enumerate(answers):
            assert answer.applied + answer.repeated + len(answer.rejected) == 1
            assert {rejection.reason for rejection in answer.rejected} <= {"unknown_batch"}
            assert answer.rejected or not is_removed, "the batch was removed, but accepted an ack"
            if not answer.rejected:
                new = number % 2 == 1 and place == 0
                assert answer.applied == new, "an item was counted twice, or not at all"
            assert not newly(answer, ids[number])

    race(referee.database, ROUNDS, redeliver, remove, check=check)
    for batch in ids[:100]:
        with pytest.raises(errors.BatchNotFound):
            referee.batches.get(batch)
    janitor.run_once(referee.database, expiry.Policy())
    with referee.database.engine.connect() as tx:
        for table in (tables.batches, tables.item_groups, tables.ack_journal, tables.extends, tables.failures):
            rows_left = tx.scalar(sa.select(sa.func.count()).select_from(table))
            assert rows_left == 0, f"{rows_left} rows of {table.name} are orphaned"


@mutant(
    "extend-does-not-keep-its-key",
    "core.batches.writing:BatchWrites._change",
    'self.pipeline.later(*inserts(extends_table, "batch_id, idempotency_key, start, count, digest", keys))',
    "pass",
)
def test_two_extends_with_one_key_issue_the_same_numbers_once(referee: Service) -> None:
    """A producer and its own retry extend at once with one key; both get the same numbers, issued once."""
    ids = prepare(referee.database, ROUNDS, lambda number: (5, {}), state=State.OPEN)

    def extend(service: Service, number: int) -> batches.Extended:
        return service.batches.extend(ids[number], 60 + number % 10, "chunk-1")

    def check(number: int, first: Any, other: Any) -> None:
        count = 60 + number % 10
        for result in (first, other):
            assert not isinstance(result, Exception), repr(result)
            assert (result.start, result.count, result.batch.items) == (5, count, 5 + count)
        assert [first.replayed, other.replayed].count(True) == 1

    race(referee.database, ROUNDS, extend, extend, check=check)
    rows = recount(referee.database)
    assert [rows[batch].items for batch in ids] == [65 + number % 10 for number in range(ROUNDS)]


@mutant("extend-does-not-compare-the-digests", "core.batches.writing:_extended", "digest != before_digest", "False")
@mutant(
    "extend-does-not-keep-the-digest",
    "core.batches.writing:BatchWrites._change",
    "result.start, result.count, operation.digest",
    "result.start, result.count, None",
)
def test_two_extends_with_one_key_for_other_things_issue_the_numbers_of_one(referee: Service) -> None:
    """Two runs of a producer extend at once with one key, and their digests differ: one of them is refused."""
    ids = prepare(referee.database, ROUNDS, lambda number: (5, {}), state=State.OPEN)

    def check(number: int, first: Any, other: Any) -> None:
        refused = [isinstance(result, errors.IdempotencyKeyReused) for result in (first, other)]
        assert refused.count(True) == 1, repr((first, other))
        won = (first, other)[refused.index(False)]
        assert (won.start, won.count, won.replayed) == (5, 60, False)

    race(
        referee.database,
        ROUNDS,
        lambda service, number: service.batches.extend(ids[number], 60, "chunk-1", "a"),
        lambda service, number: service.batches.extend(ids[number], 60, "chunk-1", "b"),
        check=check,
    )
    rows = recount(referee.database)
    assert [rows[batch].items for batch in ids] == [65] * ROUNDS


@mutant(
    "open-does-not-look-for-its-key",
    "core.batches.writing:BatchWrites._open",
    "key is not None and key in found.opened",
    "False",
)
@mutant(
    "open-gives-up-when-it-comes-second", "core.storage.statements:Pipeline._run", "faults.is_duplicate(error)", "False"
)
@mutant(
    "a-replayed-open-never-gets-newly",
    "core.batches.writing:_replayed",
    "batch.completed_by == operation.fingerprint",
    "False",
)
def test_two_opens_with_one_key_make_one_batch(referee: Service) -> None:
    """A producer and its own retry open at once with one key; both get the same batch and the same `newly`."""

    def opening(number: int) -> batches.Opening:
        # Every other batch is complete from its start: it is empty and sealed.
        return batches.Opening(key=f"catalog-{number}", items=0 if number % 2 else 7, sealed=True)

    def check(number: int, first: Any, other: Any) -> None:
        for result in (first, other):
            assert not isinstance(result, Exception), repr(result)
            assert (result.start, result.count) == (0, 0 if number % 2 else 7)
            assert result.newly == (number % 2 == 1)
        assert first.batch == other.batch
        assert [first.replayed, other.replayed].count(True) == 1

    def move(service: Service, number: int) -> batches.Opened:
        return service.batches.open(opening(number), f"open-{number}")

    race(referee.database, ROUNDS, move, move, check=check)
    rows = recount(referee.database)
    assert sorted(row.batch_key for row in rows.values()) == sorted(f"catalog-{number}" for number in range(ROUNDS))


@mutant("counts-are-judged-before-new-groups-are-written", "core.acks.completion:_judge", "pipeline.flush()", "")
@mutant(
    "a-new-group-overwrites-anothers",
    "core.acks.flush:_write_groups",
    "group_rows.insert(new)",
    "group_rows.upsert(tx, new)",
)
@mutant(
    "newly-is-not-kept-with-the-key",
    "core.acks.completion:completed_for",
    "newly or batch.completed_by == fingerprint",
    "newly",
)
@mutant(
    "every-request-with-a-key-gets-newly",
    "core.acks.completion:completed_for",
    "newly or batch.completed_by == fingerprint",
    "True",
)
@mutant(
    "the-key-alone-names-a-request",
    "core.acks.call:Call.fingerprint",
    "request_fingerprint(self.verb, self.idempotency_key, self._content())",
    "request_fingerprint(self.verb, self.idempotency_key)",
)
def test_only_retries_of_the_completing_request_get_newly_again(referee: Service) -> None:
    """The request that completes a batch runs twice at once and again later; it gets `newly` each time, and no other
    request does."""
    ids = prepare(referee.database, ROUNDS, lambda number: (3, {0: 2} if number % 2 else {}))

    def move(service: Service, number: int) -> AckResult:
        batch = ids[number]
        return ack(service, *((batch, 0, index) for index in range(3)), key="delivery-1")

    def check(number: int, first: AckResult, other: AckResult) -> None:
        batch = ids[number]
        for answer in (first, other, *([move(referee, number)] if number % 10 == 0 else [])):
            outcome = completion_of(answer, batch)
            assert outcome is not None
            assert outcome.newly
            assert outcome.newly_succeeded
        assert first.applied + other.applied == (1 if number % 2 else 3)
        if number % 10 == 0:
            strangers = [
                ack(referee, *((batch, 0, index) for index in range(3))),
                ack(referee, *((batch, 0, index) for index in range(3)), key="delivery-2"),
                ack(referee, (batch, 0, 2), key="delivery-1"),
                ack(referee, *((batch, 0, index) for index in range(3)), verb=Verb.FAIL, key="delivery-1"),
            ]
            for answer in strangers:
                outcome = completion_of(answer, batch)
                assert outcome is not None
                assert not outcome.newly
                assert not outcome.newly_succeeded

    race(referee.database, ROUNDS, move, move, check=check)
    rows = recount(referee.database)
    assert {rows[batch].state for batch in ids} == {State.COMPLETE}


def test_a_rejected_item_is_listed_while_the_rest_of_its_call_counts(referee: Service) -> None:
    """Items of a batch that is being extended count once they are issued, and are rejected by id until then."""
    ids = prepare(referee.database, ROUNDS // 4, lambda number: (GROUP, {}), state=State.OPEN)

    def check(number: int, answer: AckResult, extension: Any) -> None:
        batch = ids[number]
        assert extension.start == GROUP
        early = [(batch, 1, 0)] if answer.rejected else []
        assert answer.rejected == [Rejected("unknown_item", item=item) for item in early]  # type: ignore[arg-type]
        assert answer.applied == 2 - len(early)

    race(
        referee.database,
        ROUNDS // 4,
        lambda service, number: ack(service, (ids[number], 0, 3), (ids[number], 1, 0)),
        lambda service, number: service.batches.extend(ids[number], 1),
        check=check,
    )
    recount(referee.database)


@mutant("a-deleted-batchs-acks-are-not-rejected", "core.acks.completion:_look_again", "raise faults.BeginAgain", "pass")
def test_a_repeat_whose_batch_is_deleted_meanwhile_is_rejected_as_unknown(
    referee: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delete comes between the lock of the group and the second read of its complete batch, if there is one: the call
    starts again."""
    monkeypatch.setattr(flush, "_is_little", lambda units: False)
    # The first of the two batches isn't journaled.
    ids = prepare(referee.database, 2, lambda number: (GROUP, {0: GROUP}), state=State.COMPLETE)[1:]
    locked_count = 0

    def delete_once_the_group_is_locked(*arguments: Any) -> None:
        nonlocal locked_count
        if "item_groups" in arguments[2] and "FOR UPDATE" in arguments[2]:
            locked_count += 1
            if locked_count == 1:
                referee.database.write(purge.condemn, ids[0])

    with Database(referee.database.url.render_as_string(hide_password=False)) as database:
        sa.event.listen(database.engine, "after_cursor_execute", delete_once_the_group_is_locked)
        answer = ack(Service(database, combiner=Inline), (ids[0], 0, 0))
    # OceanBase reads the batch in a later packet, so it is known to be deleted at once.
    assert locked_count == (1 if server_kind() == "oceanbase" else 2), "the call did not start again"
    assert [rejection.reason for rejection in answer.rejected] == ["unknown_batch"]
    assert (answer.applied, answer.repeated, answer.completed) == (0, 0, {})
