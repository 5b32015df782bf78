"""A batch's deadline: judged by the database's clock, under the batch's lock, with one event."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors, janitor, writes
from core.acks.call import AckResult
from core.batches import expiry
from core.batches.batch import Opening
from core.batches.lifecycle import State
from core.commits.combiner import Inline
from core.service import Service
from core.service.batches import opening_of
from core.service.writes import KINDS
from core.storage import schema, tables
from core.storage.database import Database
from lastbit import Client
from lastbit.ids import ItemId
from tests.guarantees.drivers.rounds import GROUP, ROUNDS, ack, prepare, race, recount
from tests.mutants import mutant
from tests.support.clocks import START, Clock
from tests.support.servers import ROOT, run_module, running_service

HOUR = timedelta(hours=1)
PATIENT = 60
"""Seconds after which a test gives up."""


def now(service: Service) -> datetime:
    return service.database.read(tables.clock)


def open_batch(service: Service, items: int, **opening: Any) -> int:
    opening.setdefault("deadline", now(service) + HOUR)
    return service.batches.open(Opening(group_size=GROUP, items=items, **opening)).batch.id


def pass_deadline(service: Service, *batches: int, by: timedelta = HOUR) -> None:
    with service.database.engine.begin() as tx:
        columns = tables.batches.c
        tx.execute(sa.update(tables.batches).where(columns.id.in_(batches)).values(deadline=tables.clock(tx) - by))


def events_of(service: Service, batch: int) -> list[tuple[str, str | None]]:
    """The types of the batch's events, each with the cause in its data."""
    events = service.feed.read(0, 1000, batch=batch).events
    return [(event.type.removeprefix("batch."), json.loads(event.data or "{}").get("cause")) for event in events]


@mutant("a-deadline-is-judged-again-by-idleness-alone", "core.batches.expiry:cause", "return Cause.DEADLINE", "pass")
def test_a_busy_batch_expires_at_its_deadline_and_not_before(service: Service) -> None:
    """Without being idle; its cause is in the event, and later acks are rejected."""
    early, late, none = open_batch(service, 5), open_batch(service, 5), open_batch(service, 5, deadline=None)
    pass_deadline(service, early)
    for batch in (early, late, none):
        assert ack(service, (batch, 0, 1)).applied == 1
    assert janitor.expire_overdue(service.database) == [early]
    assert janitor.expire_overdue(service.database) == []
    assert events_of(service, early) == [("opened", None), ("expired", "deadline")]
    assert [entry.reason for entry in ack(service, (early, 0, 2)).rejected] == ["expired"]
    assert [service.batches.get(batch).state for batch in (late, none)] == [State.OPEN, State.OPEN]
    (reason, *_) = service.batches.explain(early).reasons
    assert "reached its deadline and expired" in reason.text


@mutant(
    "an-open-judges-its-deadline-by-the-services-clock",
    "core.batches.writing:BatchWrites._open",
    "tables.clock(self.pipeline.tx)",
    "datetime.now().astimezone()",
)
@mutant(
    "overdue-batches-are-found-and-judged-by-the-services-clock",
    "core.batches.expiry:cause",
    "is_overdue(State(batch.state), batch.deadline, now=now)",
    "is_overdue(State(batch.state), batch.deadline, now=datetime.now().astimezone())",
)
def test_a_deadline_is_judged_by_the_databases_clock(database: Database) -> None:
    """To the microsecond, and not by the clock of the process: this database's is in the past."""
    clock = Clock(database)
    service = Service(database, combiner=Inline)
    batch = open_batch(service, 5, deadline=START + timedelta(seconds=10))
    assert service.batches.get(batch).deadline == START + timedelta(seconds=10)
    clock.go(9.999999)
    assert janitor.expire_overdue(database) == []
    assert janitor.run_once(database, expiry.Policy()).expired_open == []
    assert expiry.expire(database, batch, expiry.Policy()) is None
    clock.go(0.000001)
    assert janitor.expire_overdue(database) == [batch]
    assert service.batches.get(batch).ended_at == START + timedelta(seconds=10)


def test_an_ended_batch_has_no_deadline(service: Service) -> None:
    """Complete and cancelled batches stay as they are."""
    complete, cancelled = open_batch(service, 1, sealed=True), open_batch(service, 1)
    ack(service, (complete, 0, 0))
    service.batches.cancel(cancelled)
    pass_deadline(service, complete, cancelled)
    assert janitor.expire_overdue(service.database) == []
    assert [service.batches.get(batch).state for batch in (complete, cancelled)] == [State.COMPLETE, State.CANCELLED]


def test_the_event_of_an_idle_batch_has_another_cause(service: Service) -> None:
    """The janitor also expires overdue batches, in case no dispatcher runs; a dry run names them."""
    idle, overdue, parent = open_batch(service, 1), open_batch(service, 1), open_batch(service, 1)
    open_batch(service, 1, parent=ItemId(parent, 0, 0))
    pass_deadline(service, overdue, parent)
    with service.database.engine.begin() as tx:
        moved = tables.clock(tx) - timedelta(days=8)
        times = {"updated_at": moved, "seen_updated_at": moved}
        tx.execute(sa.update(tables.batches).where(tables.batches.c.id == idle).values(times))
    assert janitor.run_once(service.database, expiry.Policy(), dry_run=True).expired_open == [idle, overdue, parent]
    assert janitor.run_once(service.database, expiry.Policy()).expired_open == [idle, overdue, parent]
    assert events_of(service, idle)[1:] == [("expired", "idle")]
    assert events_of(service, overdue)[1:] == [("expired", "deadline")]
    (reason, *_) = service.batches.explain(idle).reasons
    assert "was idle for too long and expired" in reason.text


@mutant(
    "a-deadline-waits-for-the-children",
    "core.batches.expiry:expire",
    "reason is Cause.IDLE and nesting.has_live_children(tx, batch_id)",
    "nesting.has_live_children(tx, batch_id)",
)
def test_a_parent_expires_though_its_children_live_and_a_child_fails_its_item(service: Service) -> None:
    """A deadline is no idleness. Its other child ends with it, and owes it nothing."""
    parent = open_batch(service, 2, sealed=True)
    child, other = (open_batch(service, 2, sealed=True, parent=ItemId(parent, 0, index)) for index in (0, 1))
    pass_deadline(service, child)
    assert janitor.expire_overdue(service.database) == [child]
    assert service.batches.get(parent).failed == 1
    pass_deadline(service, parent)
    assert janitor.expire_overdue(service.database) == [parent]
    assert (service.batches.get(parent).state, service.batches.get(parent).failed) == (State.EXPIRED, 1)
    assert (service.batches.get(other).state, service.batches.get(other).parent_due) == (State.CANCELLED, None)


@mutant(
    "overdue-batches-with-the-same-deadline-are-left-out",
    "core.batches.expiry:overdue",
    "sa.or_(_table.deadline > last.deadline, _table.id > last.id)",
    "_table.deadline > last.deadline",
)
def test_all_overdue_batches_expire_whatever_their_number(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read in pages, also those with the same deadline."""
    monkeypatch.setattr(expiry, "PAGE", 2)
    ids = [open_batch(service, 1) for _ in range(9)]
    pass_deadline(service, *ids[:5])
    pass_deadline(service, *ids[5:], by=2 * HOUR)
    assert janitor.expire_overdue(service.database) == ids[5:] + ids[:5]


def test_a_deadline_in_the_past_is_refused_unless_the_open_is_a_replay(service: Service) -> None:
    """Each open of a transaction is judged by itself."""
    deadline = now(service) + HOUR
    with pytest.raises(errors.InvalidRequest, match="in the future"):
        open_batch(service, 1, deadline=now(service) - timedelta(seconds=0.001))
    opening = Opening(items=1, deadline=deadline)
    first = service.batches.open(opening, "once")
    pass_deadline(service, first.batch.id)
    replay = service.batches.open(opening, "once")
    assert (replay.batch.id, replay.replayed) == (first.batch.id, True)
    for other in (None, deadline + timedelta(microseconds=1)):
        with pytest.raises(errors.IdempotencyKeyReused):
            service.batches.open(Opening(items=1, deadline=other), "once")


def test_opens_that_share_a_transaction_have_their_own_deadlines(service: Service) -> None:
    """One of them is refused, and the others are stored as they were given."""
    start = now(service)
    deadlines: Sequence[datetime | None] = [start + HOUR, None, start - HOUR, start + 2 * HOUR]
    outcomes = writes.commit(service.database, [opening_of(Opening(items=1, deadline=at)) for at in deadlines], KINDS)
    assert [None if one.error else one.value.batch.deadline for one in outcomes] == [*deadlines[:2], None, deadlines[3]]
    assert isinstance(outcomes[2].error, errors.InvalidRequest)
    assert service.batches.get(outcomes[3].value.batch.id).deadline == deadlines[3]


@mutant(
    "an-earlier-release-may-ignore-a-deadline",
    "core.batches.writing:BatchWrites._open",
    "operation.opening.has_policies",
    "False",
)
def test_a_release_that_would_ignore_a_deadline_must_be_gone(database: Database, service: Service) -> None:
    """A batch with a deadline can be opened only after the upgrade is finished."""
    with database.engine.begin() as tx:
        tx.execute(sa.update(tables.schema_support).values(oldest="0012"))
    with pytest.raises(errors.UpgradeNotFinished):
        open_batch(service, 3)
    open_batch(service, 3, deadline=None)
    schema.finish(database)
    assert open_batch(service, 3)


@pytest.mark.mariadb
def test_a_locked_batch_delays_no_other_and_expires_once_it_is_free(mariadb_database: Database) -> None:
    service = Service(mariadb_database, combiner=Inline)
    locked, other = open_batch(service, 1), open_batch(service, 1)
    pass_deadline(service, locked, by=2 * HOUR)
    pass_deadline(service, other)
    with mariadb_database.engine.begin() as tx:
        tx.execute(sa.select(tables.batches.c.id).where(tables.batches.c.id == locked).with_for_update())
        assert janitor.expire_overdue(mariadb_database) == [other]
    assert janitor.expire_overdue(mariadb_database) == [locked]


def test_the_embedded_service_expires_a_batch_at_its_deadline(tmp_path: Path) -> None:
    """The client waits for it; in the service nothing else happens."""
    with running_service(f"sqlite:///{tmp_path / 'lastbit.db'}") as server, Client(server.url) as client:
        batch = client.open(items=1, sealed=True, deadline=timedelta(seconds=1))
        assert batch.wait(timeout=PATIENT).state == "expired"
        assert batch.info.ended_at is not None
        assert batch.info.deadline is not None
        assert batch.info.ended_at >= batch.info.deadline


@pytest.mark.mariadb
def test_a_dispatcher_expires_a_batch_at_its_deadline(mariadb_database: Database) -> None:
    """Each second, and with `--once` before it ends."""
    service = Service(mariadb_database, combiner=Inline)
    url = mariadb_database.url.render_as_string(hide_password=False)
    batch = open_batch(service, 1)
    pass_deadline(service, batch)
    run_module("jobs.dispatcher", "--once", "--database-url", url)
    assert service.batches.get(batch).state is State.EXPIRED
    command = [sys.executable, "-m", "jobs.dispatcher", "--every", "60", "--database-url", url]
    with subprocess.Popen(command, cwd=ROOT) as dispatcher:
        try:
            other = open_batch(service, 1)
            pass_deadline(service, other)
            waiting = threading.Event()
            end = time.monotonic() + PATIENT
            while service.batches.get(other).state is not State.EXPIRED:
                assert time.monotonic() < end
                waiting.wait(0.1)
        finally:
            dispatcher.terminate()


@mutant(
    "a-deadline-is-judged-on-a-plain-read",
    "core.batches.expiry:expire",
    "lock_wait is not None",
    "False",
    ("batches.lock(tx, batch_id)", "batches.get(tx, batch_id), tables.clock(tx)"),
)
@pytest.mark.mariadb
@pytest.mark.timeout(7200)
def test_the_last_ack_comes_before_the_deadline_or_is_rejected(mariadb_database: Database) -> None:
    """A batch whose last item is acked as it expires is complete or expired: one event, and the ack's answer agrees."""
    referee = Service(mariadb_database, combiner=Inline)
    past = now(referee) - HOUR
    ids = prepare(
        mariadb_database,
        ROUNDS,
        lambda number: (2, {0: 1}),
        state="parked",
        columns=lambda number: {"deadline": past, "updated_at": past},
    )
    stage = mariadb_database.engine.execution_options(isolation_level="AUTOCOMMIT").connect()
    wins = {"ack": 0, "expiry": 0}
    expected: dict[int, State] = {}

    def enter(number: int) -> None:
        if number < ROUNDS:
            stage.exec_driver_sql("UPDATE batches SET state = 'sealed' WHERE id = %s", (ids[number],))

    def check(number: int, answer: AckResult, expired: list[int]) -> None:
        batch = ids[number]
        wins["ack" if answer.applied else "expiry"] += 1
        expected[batch] = State.COMPLETE if answer.applied else State.EXPIRED
        assert expired == ([] if answer.applied else [batch])
        assert [entry.reason for entry in answer.rejected] == ([] if answer.applied else ["expired"])
        enter(number + 1)

    with stage:
        enter(0)
        race(
            mariadb_database,
            ROUNDS,
            lambda service, number: ack(service, (ids[number], 0, 1)),
            lambda service, number: janitor.expire_overdue(service.database),
            check=check,
        )
    rows = recount(mariadb_database)
    assert {batch: rows[batch].state for batch in ids} == expected
    with mariadb_database.engine.connect() as tx:
        query = sa.select(tables.feed.c.batch_id, tables.feed.c.type)
        ends = sorted(
            (row.batch_id, row.type) for row in tx.execute(query) if row.type in ("batch.completed", "batch.expired")
        )
    assert ends == [
        (batch, "batch.completed" if state is State.COMPLETE else "batch.expired") for batch, state in expected.items()
    ]
    assert min(wins.values()) > ROUNDS // 50, f"the same call nearly always came first: {wins}"
