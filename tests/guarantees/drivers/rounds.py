"""Race rounds: a few calls start at the same moment, each on its own sessions, thousands of times.

The batches of all rounds are written beforehand, in bulk. Each runner is a thread with its own connections. A barrier
starts a round, and the last runner to reach it judges the previous round. In each round one random runner leads: the
others start after it has executed its first k statements, with k random too, so that over many rounds they meet at
every statement. From there on nothing holds them back. Idle statements, executed at random, shift them further. Nothing
sleeps. The machine decides who wins a race, and the same runner may win forty rounds in a row. Every seventh round is
therefore no race: its leader, each runner in turn, finishes before the others start. That way every order occurs.

`recount` is the referee: it counts the bits itself, without the code under test.
"""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors
from core.acks import parents
from core.acks.call import AckResult, Call, Completed
from core.batches.lifecycle import State, Verb
from core.bits import journal
from core.commits.combiner import Inline
from core.service import Service
from core.storage import tables
from core.storage.database import Database

ROUNDS = 40_000 if os.environ.get("LASTBIT_SOAK") == "1" else 400
GROUP = 64
"""The group size of all batches here."""
HEAD_START = 7
"""The leader of a round executes fewer statements than this before the others start."""
ALONE_EVERY = 7
"""In one round out of this many, the leader finishes before the others start. The number is coprime to the number of
shapes."""

Move = Callable[[Service, int], Any]
"""A runner's action in a round, given its own service and the round's number. A core error counts as an answer."""


def ack(
    service: Service,
    *items: tuple[int, int, int],
    verb: Verb = Verb.ACK,
    key: str | None = None,
    reason: str | None = None,
) -> AckResult:
    """Send (batch, group, index) items and wait for the answer."""
    return service.acks.ack(Call.of(verb, items, reason=reason, idempotency_key=key)).result(120)


def nobody_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suppress payments, as if each process died after a child ended and before its parent was paid."""
    result: Future[None] = Future()
    result.set_result(None)
    monkeypatch.setattr(parents.Payer, "pay", lambda self, *children: result)


def completion_of(answer: AckResult | Exception, batch: int) -> Completed | None:
    """The batch's completion in the answer, or None; an unexpected error is raised."""
    if isinstance(answer, Exception):
        raise answer
    return answer.completed.get(batch)


def newly(answer: AckResult | Exception, batch: int) -> bool:
    outcome = completion_of(answer, batch)
    return outcome is not None and outcome.newly


def prepare(
    database: Database,
    count: int,
    shape: Callable[[int], tuple[int, Mapping[int, int]]],
    *,
    state: State | str = State.SEALED,
    columns: Callable[[int], Mapping[str, Any]] = lambda number: {},
) -> list[int]:
    """Write `count` batches and return their ids. `shape` returns a batch's number of items, and a map from groups to
    the number of acked items at the group's start; a group that isn't in the map has no row."""
    now = datetime.now(UTC)
    with database.engine.begin() as tx:
        first = (tx.scalar(sa.select(sa.func.max(tables.batches.c.id))) or 0) + 1
    ids = list(range(first, first + count))
    for start in range(0, count, 1000):
        batches, groups = [], []
        for number in range(start, min(start + 1000, count)):
            items, acked = shape(number)
            facts = {
                "id": ids[number],
                "batch_key": f"round-{number}",
                "labels": "{}",
                "group_size": GROUP,
                "items": items,
                "acked": sum(acked.values()),
                "failed": 0,
                "state": state,
                "full_prefix": 0,
                "expires_in": None,
                "open_count": 0,
                "created_at": now - timedelta(hours=3),
                "updated_at": now,
            }
            batches.append({**facts, **columns(number)})
            groups += [
                {"batch_id": ids[number], "group_no": group, "resolved_count": indexes, "failed_count": 0}
                for group, indexes in acked.items()
            ]
        with database.engine.begin() as tx:
            tx.execute(sa.insert(tables.batches), batches)
            if groups:
                tx.execute(sa.insert(tables.item_groups), groups)
            if tx.dialect.name == "postgresql":  # its sequence doesn't notice ids that are given
                tx.exec_driver_sql(f"SELECT setval(pg_get_serial_sequence('batches', 'id'), {ids[-1]})")
    return ids


class _Start:
    """The start of a round: which runner leads, and when the others follow."""

    def __init__(self, dice: random.Random, runners: int, number: int) -> None:
        solo, rest = divmod(number, ALONE_EVERY)
        self.leader = dice.randrange(runners) if rest else solo % runners
        self.left = dice.randrange(HEAD_START) if rest else math.inf
        self.others_begin = threading.Event()

    def executed(self, runner: int) -> None:
        """Record that a runner has executed a statement."""
        if runner == self.leader:
            self.left -= 1
            if self.left <= 0:
                self.others_begin.set()


def race(
    database: Database, rounds: int, *moves: Move, check: Callable[..., None], urls: Sequence[str] | None = None
) -> None:
    """Run the moves against each other, and `check(number, *answers)` after each round while nothing else runs. With
    `urls`, each runner connects to the database through its own URL."""
    number = -1
    answers: list[Any] = [None] * len(moves)
    trouble: list[BaseException] = []
    dice = random.Random()
    start = _Start(dice, len(moves), 0)

    def judge() -> None:
        nonlocal number, start
        if number >= 0:
            check(number, *answers)
        number += 1
        start = _Start(dice, len(moves), number)

    barrier = threading.Barrier(len(moves), action=judge)

    def run(runner: int, move: Move) -> None:
        url = database.url.render_as_string(hide_password=False) if urls is None else urls[runner]
        service = Service(Database(url, connections=2), combiner=Inline)

        @sa.event.listens_for(service.database.engine, "after_cursor_execute")
        def executed(connection: sa.Connection, cursor: Any, *_: object) -> None:
            start.executed(runner)
            if dice.random() < 0.1:
                if connection.dialect.name == "postgresql":
                    cursor.connection.send("SELECT 0")
                else:
                    cursor.connection.query("DO 0")

        try:
            for round_number in range(rounds):
                barrier.wait(120)
                if runner == start.leader and not start.left:
                    start.others_begin.set()
                elif runner != start.leader:
                    start.others_begin.wait(120)
                try:
                    answers[runner] = move(service, round_number)
                except errors.CoreError as error:
                    answers[runner] = error
                finally:
                    start.others_begin.set()
            barrier.wait(120)
        except threading.BrokenBarrierError:
            pass  # another runner failed and reports its error
        except BaseException as error:  # noqa: BLE001  # raised below, in the test's own thread
            trouble.append(error)
            barrier.abort()
        finally:
            service.stop()

    threads = [threading.Thread(target=run, args=move) for move in enumerate(moves)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if trouble:
        trouble[0].add_note(f"in round {number}")
        raise trouble[0]
    assert number == rounds, "the runners stopped early without an error"


def recount(database: Database) -> dict[int, Any]:
    """Check each batch's counts against its bits and its state against its counts; return the batch rows by id."""
    with database.engine.connect() as tx:
        batches = {row.id: row for row in tx.execute(sa.select(tables.batches))}
        journals = {id: journal.recent(tx, id, row.group_size) for id, row in batches.items() if row.journal_next}
        groups = tx.execute(sa.select(tables.item_groups)).all()
    counted = {batch: [0, 0, 0] for batch in batches}
    for row in groups:
        assert row.batch_id in batches, f"group {row.group_no} of batch {row.batch_id} is orphaned"
        batch = batches[row.batch_id]
        issued = max(0, min(batch.group_size, batch.items - row.group_no * batch.group_size))
        first = (1 << row.resolved_count) - 1
        resolved = first if row.resolved is None else int.from_bytes(row.resolved, "little")
        failed = 0 if row.failed is None else int.from_bytes(row.failed, "little")
        skipped = 0 if row.skipped is None else int.from_bytes(row.skipped, "little")
        position = f"batch {row.batch_id}, group {row.group_no}"
        assert resolved < 1 << issued, f"{position}: bits of items that were never issued are set"
        assert not (failed | skipped) & ~resolved, f"{position}: items are failed or skipped, but not resolved"
        assert not failed & skipped, f"{position}: items are both failed and skipped"
        counts = row.resolved_count, row.failed_count, row.skipped_count or 0
        assert (resolved.bit_count(), failed.bit_count(), skipped.bit_count()) == counts, position
        for index in journals.get(row.batch_id, {}).pop(row.group_no, ()):
            resolved |= 1 << index
            assert not (failed | skipped) >> index & 1, f"{position}: item {index} is not acked, but in the journal"
        counted[row.batch_id][0] += resolved.bit_count() - failed.bit_count() - skipped.bit_count()
        counted[row.batch_id][1] += failed.bit_count()
        counted[row.batch_id][2] += skipped.bit_count()
    for id, without_row in journals.items():
        counted[id][0] += sum(len(set(indexes)) for indexes in without_row.values())
    for number, batch in batches.items():
        counts = batch.acked, batch.failed, batch.skipped or 0
        assert counts == tuple(counted[number]), f"batch {number}: counts and bits differ"
        pending = batch.items - sum(counts)
        assert batch.state != State.COMPLETE or not pending, f"batch {number} is complete with {pending} pending"
        assert batch.state != State.SEALED or pending, (
            f"batch {number} is sealed with nothing pending, but not complete"
        )
    return batches
