"""The janitor expires idle batches, deletes batches that ended long ago, and keeps live ones."""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors, janitor
from core.acks.call import Call
from core.batches import expiry, purge
from core.batches.batch import Opening
from core.batches.expiry import Policy
from core.batches.lifecycle import State, Verb
from core.batches.redrive import Wish
from core.batches.update import Patch
from core.commits.combiner import Inline
from core.janitor import run_once
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from tests.mutants import mutant
from tests.support import plans
from tests.support.clocks import Clock
from tests.support.servers import run_module

DAY = timedelta(days=1)
SECOND = timedelta(seconds=1)
LONG_AGO = {"seen_updated_at": datetime(1970, 1, 1, tzinfo=UTC)}
"""What a batch has that was opened by a release before the janitor's index."""


def age(database: Database, batch: int, duration: timedelta) -> None:
    """Move a batch's times back."""
    with database.engine.begin() as connection:
        row = connection.execute(sa.text("SELECT updated_at, ended_at FROM batches WHERE id = :b"), {"b": batch}).one()
        shift = {
            "sqlite": "strftime('%Y-%m-%d %H:%M:%f', {0}, '-{1} seconds') || '000'",
            "mysql": "DATE_SUB({0}, INTERVAL {1} SECOND)",
            "postgresql": "{0} - {1} * INTERVAL '1 second'",
        }[database.url.get_backend_name()]
        columns = ["updated_at", "seen_updated_at"] + (["ended_at"] if row.ended_at is not None else [])
        settings = ", ".join(f"{c} = {shift.format(c, int(duration.total_seconds()))}" for c in columns)
        connection.execute(sa.text(f"UPDATE batches SET {settings} WHERE id = :b"), {"b": batch})


def state(service: Service, batch: int) -> State | None:
    try:
        return service.batches.get(batch).state
    except errors.BatchNotFound:
        return None


def test_idle_batches_expire_by_their_state(service: Service) -> None:
    """Open ones after open_idle, sealed ones after sealed_idle, unless a batch has its own expires_in."""
    batches = {
        name: service.batches.open(opening).batch.id
        for name, opening in {
            "open": Opening(items=1),
            "no items": Opening(),
            "sealed": Opening(items=1, sealed=True),
            "sealed long": Opening(items=1, sealed=True),
            "own, short": Opening(items=1, expires_in=60),
            "own, long": Opening(items=1, expires_in=10**6),
            "fresh": Opening(items=1),
        }.items()
    }
    for name, batch in batches.items():
        if name != "fresh":
            age(service.database, batch, {"own, short": DAY / 24, "sealed long": 40 * DAY}.get(name, 8 * DAY))
    report = run_once(service.database, Policy())
    assert {name for name, batch in batches.items() if state(service, batch) is State.EXPIRED} == {
        *("open", "no items", "sealed long", "own, short"),
    }
    assert sorted(report.expired_open) == sorted([batches["open"], batches["no items"], batches["own, short"]])
    assert report.expired_sealed == [batches["sealed long"]]
    assert run_once(service.database, Policy()).expired_open == []


def test_an_expired_batch_is_a_tombstone(service: Service) -> None:
    """Its verbs are refused by name, its items are rejected, its bits stay true."""
    batch = service.batches.open(Opening(items=2)).batch.id
    service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])).result()
    age(service.database, batch, 8 * DAY)
    run_once(service.database, Policy())
    for verb in (
        lambda: service.batches.extend(batch, 1),
        lambda: service.batches.seal(batch),
        lambda: service.batches.cancel(batch),
    ):
        with pytest.raises(errors.BatchExpired):
            verb()
    answer = service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 1)])).result()
    assert [rejection.reason for rejection in answer.rejected] == ["expired"]
    assert [(r.start, r.end) for r in service.batches.ranges(batch, "pending", 0, 9)[1].ranges] == [(1, 2)]
    assert service.batches.verify(batch).ok


@pytest.mark.parametrize("kept_alive_by", ["ack", "fail", "extend", "seal", "redrive"])
def test_changes_keep_a_batch_alive(service: Service, kept_alive_by: str) -> None:
    """And a repeat does not."""
    batch = service.batches.open(Opening(items=3)).batch.id
    service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])).result()
    service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 2)])).result()
    age(service.database, batch, 8 * DAY)
    {
        "ack": lambda: service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 1)])).result(),
        "fail": lambda: service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 1)])).result(),
        "extend": lambda: service.batches.extend(batch, 1),
        "seal": lambda: service.batches.seal(batch),
        "redrive": lambda: service.batches.redrive(batch, Wish(), "once"),
    }[kept_alive_by]()
    run_once(service.database, Policy(sealed_idle=7 * DAY))
    assert state(service, batch) in (State.OPEN, State.SEALED)
    age(service.database, batch, 8 * DAY)
    service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])).result()
    if kept_alive_by == "redrive":
        assert service.batches.redrive(batch, Wish(), "once").replayed
    run_once(service.database, Policy(sealed_idle=7 * DAY))
    assert state(service, batch) is State.EXPIRED


@pytest.mark.parametrize("verb", ["extend", "seal", "ack", "update", "redrive", "repair"])
def test_no_change_makes_a_batch_look_idle_longer(database: Database, verb: str) -> None:
    """The clock was set back, or a statement has the time from before it waited for a lock."""
    clock = Clock(database)
    service = Service(database, combiner=Inline)
    batch = service.batches.open(Opening(items=3)).batch.id
    service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 1)])).result()
    clock.go(-600)
    if verb == "extend":
        service.batches.extend(batch, 1)
    elif verb == "seal":
        service.batches.seal(batch)
    elif verb == "ack":
        assert service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])).result().applied == 1
    elif verb == "redrive":
        assert service.batches.redrive(batch, Wish()).batch.updated_at == clock.now + timedelta(seconds=600)
    elif verb == "repair":
        with database.engine.begin() as tx:
            tx.execute(sa.update(tables.batches).values(acked=1))
        assert service.batches.repair(batch).faults
    else:
        service.batches.update(batch, Patch(labels={"a": "b"}), "u")
    assert service.batches.get(batch).updated_at == clock.now + timedelta(seconds=600)


def test_batches_that_ended_long_ago_are_deleted(service: Service) -> None:
    """Completely: groups, extends and reasons too; recently ended ones are kept."""
    old = service.batches.open(Opening(group_size=64, items=640)).batch.id
    service.batches.extend(old, 1, "key")
    service.acks.ack(Call.of(Verb.FAIL, [(old, g, 1) for g in range(10)], reason="gone")).result()
    service.batches.cancel(old)
    young = service.batches.open(Opening(sealed=True)).batch.id
    age(service.database, old, 61 * DAY)
    assert run_once(service.database, Policy()).deleted == [old]
    assert (state(service, old), state(service, young)) == (None, State.COMPLETE)
    with service.database.engine.connect() as connection:
        for table in ("item_groups", "ack_journal", "extends", "failures"):
            assert connection.execute(sa.text(f"SELECT COUNT(*) FROM {table}")).scalar() == 0


@mutant(
    "a-batch-is-deleted-in-the-middle-of-a-redrive",
    "core.batches.expiry:_is_due",
    "max(batch.ended_at, batch.updated_at)",
    "batch.ended_at",
)
@mutant(
    "a-redrive-leaves-its-batch-to-the-janitor",
    "core.batches.redrive:_append",
    "batches.save(tx, before, batch)",
    "pass",
)
def test_a_batch_in_the_middle_of_a_redrive_is_kept(service: Service) -> None:
    """However long ago it ended: from the request for as long as `keep`, and again from each ack of a failed item."""
    batch = service.batches.open(Opening(items=2, sealed=True)).batch.id
    service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 0), (batch, 0, 1)])).result()
    changes: tuple[Callable[[], object], ...] = (
        lambda: service.batches.redrive(batch, Wish()),
        lambda: service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])).result(),
        lambda: service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 1)])).result(),
    )
    for change in changes:
        age(service.database, batch, 61 * DAY)
        change()
        for dry_run in (True, False):
            assert run_once(service.database, Policy(), dry_run=dry_run).deleted == []
    assert service.batches.get(batch).succeeded
    # A repeat is no change.
    age(service.database, batch, 31 * DAY)
    service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 1)])).result()
    assert run_once(service.database, Policy()).deleted == [batch]


@mutant(
    "a-last-change-is-not-judged-under-the-lock",
    "core.batches.expiry:remove",
    "not _is_due(batch, now, policy)",
    "now - batch.ended_at < policy.kept(failed=True)",
)
def test_a_redrive_just_before_the_deletion_prevents_it(service: Service) -> None:
    """A pass has found the batch due, and the redrive has got its lock first."""
    batch = service.batches.open(Opening(items=1, sealed=True)).batch.id
    service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 0)])).result()
    age(service.database, batch, 61 * DAY)
    assert list(expiry.half_deleted_or_due(service.database, Policy())) == [batch]
    service.batches.redrive(batch, Wish())
    assert not expiry.remove(service.database, batch, Policy())
    assert service.batches.get(batch).failed == 1


@mutant(
    "a-batch-with-failures-is-deleted-with-the-others",
    "core.batches.expiry:Policy.kept",
    "not failed",
    "True",
)
@mutant(
    "the-flag-for-batches-with-failures-is-ignored",
    "core.batches.expiry:Policy.kept",
    "self.keep_failed is None",
    "True",
)
@mutant(
    "failures-are-not-judged-under-the-lock",
    "core.batches.expiry:_is_due",
    "policy.kept(failed=batch.failed > 0)",
    "min(policy.kept(failed=True), policy.keep)",
)
@mutant(
    "batches-with-failures-are-looked-for-too-late",
    "core.batches.expiry:half_deleted_or_due",
    "_table.ended_at <= max(latest, latest_failed)",
    "_table.ended_at <= latest",
)
@pytest.mark.parametrize(
    ("policy", "keep", "keep_failed"),
    [
        (Policy(), 30 * DAY, 60 * DAY),
        (Policy(keep=10 * DAY), 10 * DAY, 20 * DAY),
        (Policy(keep_failed=90 * DAY), 30 * DAY, 90 * DAY),
        (Policy(keep_failed=10 * DAY), 30 * DAY, 10 * DAY),
    ],
)
def test_batches_with_failures_are_kept_for_a_time_of_their_own(
    service: Service, policy: Policy, keep: timedelta, keep_failed: timedelta
) -> None:
    """By default twice as long, also if they are within the tolerance, or the batch was cancelled. A batch whose last
    failed item was acked is kept like one that never had any."""
    openings = Opening(items=2, sealed=True), Opening(items=2, sealed=True, tolerated_failures=1), Opening(items=2)
    *failed, redriven = [service.batches.open(opening).batch.id for opening in (*openings, openings[0])]
    for batch in (*failed, redriven):
        service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 0)])).result()
        service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 1)])).result()
    service.acks.ack(Call.of(Verb.ACK, [(redriven, 0, 0)])).result()
    pending = service.batches.open(openings[2]).batch.id
    for batch in (failed[2], pending):
        service.batches.cancel(batch)
    for batches, kept in (([redriven, pending], keep), (failed, keep_failed)):
        for batch in batches:
            age(service.database, batch, kept - 60 * SECOND)
        assert run_once(service.database, policy).deleted == []
        assert [expiry.remove(service.database, batch, policy) for batch in batches] == [False] * len(batches)
        for batch in batches:
            age(service.database, batch, 60 * SECOND)
        for dry_run in (True, False):
            assert run_once(service.database, policy, dry_run=dry_run).deleted == batches


@mutant(
    "the-janitor-passes-over-those-with-failures-one-by-one",
    "core.batches.expiry:half_deleted_or_due",
    "sa.or_(_table.failed == 0, _table.ended_at <= latest_failed)",
    "sa.true()",
)
def test_kept_batches_with_failures_cost_no_statement(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have ended longer ago than others are kept."""
    monkeypatch.setattr(expiry, "PAGE", 2)
    for _ in range(5):
        batch = service.batches.open(Opening(items=1, sealed=True)).batch.id
        service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 0)])).result()
        age(service.database, batch, 40 * DAY)
    with plans.executions(service.database) as executions:
        assert run_once(service.database, Policy(), dry_run=True).deleted == []
    assert len([text for text, _ in executions if "ended_at <=" in text]) == 1


def test_batches_that_changed_after_their_end_cost_one_look_a_pass(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages go on after them, whether a page has only such batches or a due one at its end."""
    monkeypatch.setattr(expiry, "PAGE", 2)
    batches = [service.batches.open(Opening(items=1, sealed=True)).batch.id for _ in range(7)]
    for place, batch in enumerate(batches):
        service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 0)])).result()
        age(service.database, batch, (90 - place) * DAY)
        if place not in (3, 6):
            service.batches.redrive(batch, Wish())
    with plans.executions(service.database) as executions:
        assert run_once(service.database, Policy(), dry_run=True).deleted == [batches[3], batches[6]]
    assert len([text for text, _ in executions if "ended_at <=" in text]) == 4
    assert run_once(service.database, Policy()).deleted == [batches[3], batches[6]]


def test_an_interrupted_deletion_is_continued(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A condemned batch is unknown at once, and the next pass removes the rest."""
    monkeypatch.setattr(purge, "CHUNK", 3)
    batch = service.batches.open(Opening(group_size=64, items=640)).batch.id
    service.acks.ack(Call.of(Verb.ACK, [(batch, g, 1) for g in range(10)])).result()
    service.database.write(purge.condemn, batch)
    assert not service.database.write(purge.remove_chunk, batch)
    assert state(service, batch) is None
    assert service.acks.ack(Call.of(Verb.ACK, [(batch, 9, 2)])).result().rejected[0].reason == "unknown_batch"
    assert run_once(service.database, Policy()).deleted == [batch]
    with service.database.engine.connect() as connection:
        assert connection.execute(sa.text("SELECT COUNT(*) FROM item_groups")).scalar() == 0


def test_a_dry_run_changes_nothing(service: Service) -> None:
    """And reports what a run would do."""
    idle = service.batches.open(Opening(items=1)).batch.id
    batch = service.batches.open(Opening(sealed=True)).batch.id
    age(service.database, idle, 8 * DAY)
    age(service.database, batch, 31 * DAY)
    report = run_once(service.database, Policy(), dry_run=True)
    assert (report.expired_open, report.deleted) == ([idle], [batch])
    assert (state(service, idle), state(service, batch)) == (State.OPEN, State.COMPLETE)
    second = run_once(service.database, Policy())
    assert (second.expired_open, second.deleted) == ([idle], [batch])


def test_two_concurrent_janitors_do_everything_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every idle batch is expired by one of them; every old one is deleted; neither of them fails."""
    monkeypatch.setattr(expiry, "PAGE", 5)
    idle = [service.batches.open(Opening(items=1)).batch.id for _ in range(30)]
    batches = [service.batches.open(Opening(sealed=True)).batch.id for _ in range(30)]
    for batch in (*idle, *batches):
        age(service.database, batch, 31 * DAY)
    start = threading.Barrier(2)
    reports: list[janitor.Report] = []

    def run() -> None:
        start.wait()
        reports.append(run_once(service.database, Policy(sealed_idle=99 * DAY, keep=30 * DAY)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 2
    assert sorted(b for report in reports for b in report.expired_open) == idle
    assert {b for report in reports for b in report.deleted} == set(batches)
    assert {state(service, batch) for batch in batches} == {None}


@mutant(
    "the-janitor-looks-at-all-that-has-ended",
    "core.batches.expiry:half_deleted_or_due",
    "_table.ended_at <= max(latest, latest_failed)",
    "_table.ended_at.is_not(None)",
)
def test_a_pass_reads_due_batches_and_not_all_ended_ones(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of kept ended batches cost no statement and, by the server's count, no rows."""
    monkeypatch.setattr(expiry, "PAGE", 5)
    database = service.database

    def pass_of_nothing() -> list[tuple[str, Any]]:
        with plans.executions(database) as executions:
            assert not run_once(database, Policy(), dry_run=True).deleted
        return executions

    service.batches.open(Opening(sealed=True))
    baseline = len(pass_of_nothing())
    columns = [column for column in tables.batches.c if column.name != "id"]
    copies = sa.select(*columns).where(tables.batches.c.state == State.COMPLETE)
    for _ in range(11):
        with database.engine.begin() as tx:
            tx.execute(sa.insert(tables.batches).from_select([column.name for column in columns], copies))
    executions = pass_of_nothing()
    assert len(executions) == baseline
    look, values = next((text, values) for text, values in executions if "ended_at <=" in text)
    plans.finds_nothing_by(database, "batches_ended", look, values)


@mutant(
    "the-janitor-looks-at-all-live-batches",
    "core.batches.expiry:_unseen",
    "_table.seen_updated_at <= until",
    "_table.seen_updated_at <= until + limit",
)
@mutant("the-janitor-looks-at-busy-batches-again", "core.batches.expiry:due", "active and not dry_run", "False")
@mutant("a-dry-run-notes-what-it-saw", "core.batches.expiry:due", "active and not dry_run", "active")
@pytest.mark.parametrize("expires_in", [None, 3600])
def test_a_pass_reads_batches_that_may_be_idle_and_not_all_live_ones(
    service: Service, monkeypatch: pytest.MonkeyPatch, expires_in: int | None
) -> None:
    """Thousands of live batches cost no statement and, by the server's count, no rows. Those of an earlier release,
    which noted nothing when it opened them, cost them once."""
    monkeypatch.setattr(expiry, "PAGE", 50)
    database = service.database

    def pass_of_nothing(*, dry_run: bool = True) -> list[tuple[str, Any]]:
        with plans.executions(database) as executions:
            assert not run_once(database, Policy(), dry_run=dry_run).expired_open
        return executions

    service.batches.open(Opening(items=1, expires_in=expires_in))
    baseline = len(pass_of_nothing())
    names = [column.name for column in tables.batches.c if column.name not in ("id", "open_key")]
    for _ in range(11):
        with database.engine.begin() as tx:
            copies = sa.select(*(tables.batches.c[name] for name in names))
            tx.execute(sa.insert(tables.batches).from_select(names, copies))
    plans.analyze(database, "batches")
    for is_earlier_release in (False, True):
        if is_earlier_release:
            with database.engine.begin() as tx:
                tx.execute(sa.update(tables.batches).values(LONG_AGO))
            for dry_run in (True, True, False):
                assert len(pass_of_nothing(dry_run=dry_run)) > baseline + 40
        executions = pass_of_nothing()
        assert len(executions) == baseline
        for look, values in executions:
            if "seen_updated_at <=" in look:
                # PostgreSQL uses another index for a state that no batch has.
                plans.finds_nothing_by(database, "batches_idle" if database.is_embedded else "", look, values)


@mutant("the-time-of-a-look-counts-as-a-change", "core.batches.expiry:_see", "_table.updated_at", "tables.utc_now()")
@mutant(
    "batches-with-a-limit-of-their-own-are-not-looked-at",
    "core.batches.expiry:due",
    "(None, *_own_limits(database, state))",
    "(None,)",
)
@mutant(
    "the-longest-of-their-own-limits-is-left-out",
    "core.batches.expiry:_own_limits",
    "yield above",
    "yield from () if above == 100 else (above,)",
)
@mutant(
    "batches-that-were-seen-at-the-same-time-are-left-out",
    "core.batches.expiry:_unseen",
    "list(tx.execute(same.order_by(_table.id).limit(PAGE)))",
    "[]",
)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 8))])
def test_batches_expire_in_the_first_pass_after_their_limit(
    database: Database, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever earlier passes saw, under longer or shorter limits; and a dry run names the same batches. Some batches
    were opened by an earlier release."""
    monkeypatch.setattr(expiry, "PAGE", 3)
    dice, clock = random.Random(seed), Clock(database)
    service = Service(database, combiner=Inline)
    changed: dict[int, datetime] = {}
    own_limits: dict[int, int | None] = {}
    sealed: set[int] = set()
    expired = 0
    for _ in range(40):
        clock.go(dice.choice((0, 1, 5, 20, 60)))
        for _ in range(dice.randrange(3)):
            own = dice.choice((None, None, 7, 30, 31, 100))
            batch = service.batches.open(Opening(items=10, expires_in=own)).batch.id
            changed[batch], own_limits[batch] = clock.now, own
            if dice.random() < 0.3:
                with database.engine.begin() as tx:
                    tx.execute(sa.update(tables.batches).where(tables.batches.c.id == batch).values(LONG_AGO))
        for batch in changed:
            if dice.random() < 0.2 and batch not in sealed:
                service.batches.extend(batch, 1)
                changed[batch] = clock.now
            if dice.random() < 0.1 and batch not in sealed:
                service.batches.seal(batch)
                changed[batch] = clock.now
                sealed.add(batch)
        defaults = {is_sealed: dice.choice((10, 40, 90)) for is_sealed in (False, True)}
        limits = {batch: own_limits[batch] or defaults[batch in sealed] for batch in changed}
        idle = [batch for batch, at in changed.items() if clock.now - at >= limits[batch] * SECOND]
        policy = Policy(open_idle=defaults[False] * SECOND, sealed_idle=defaults[True] * SECOND)
        for dry_run in (True, False):
            report = run_once(database, policy, dry_run=dry_run)
            assert sorted(report.expired_open + report.expired_sealed) == idle
        for batch in idle:
            del changed[batch]
        expired += len(idle)
    assert expired >= 10


@mutant(
    "a-look-waits-for-busy-batches",
    "core.batches.expiry:_see",
    "sa.select(_table.id).where(_table.id.in_(ids)).order_by(_table.id).with_for_update(skip_locked=True)",
    "sa.select(_table.id).where(_table.id.in_(ids)).order_by(_table.id).with_for_update()",
)
@pytest.mark.mariadb
def test_a_pass_notes_changes_without_waiting_for_busy_batches(server_database: Database) -> None:
    """An ack holds a batch's row; the next pass looks at this batch again, and not at the others."""
    service = Service(server_database, combiner=Inline)
    busy, *_ = [service.batches.open(Opening(items=1)).batch.id for _ in range(3)]
    unseen = sa.select(tables.batches.c.id).where(tables.batches.c.seen_updated_at != tables.batches.c.updated_at)
    with server_database.engine.begin() as tx:
        tx.execute(sa.update(tables.batches).values(LONG_AGO))
    with server_database.engine.begin() as holder:
        holder.execute(sa.select(tables.batches).where(tables.batches.c.id == busy).with_for_update()).one()
        start = time.monotonic()
        assert run_once(server_database, Policy()).locked == []
        assert time.monotonic() - start < 1
        assert server_database.read(lambda tx: tx.scalars(unseen).all()) == [busy]
    run_once(server_database, Policy())
    assert server_database.read(lambda tx: tx.scalars(unseen).all()) == []


@mutant(
    "the-janitors-next-page-begins-too-late",
    "core.batches.expiry:half_deleted_or_due",
    "sa.or_(_table.ended_at > last.ended_at, _table.id > last.id)",
    "_table.ended_at > last.ended_at",
)
def test_batches_that_ended_at_the_same_time_are_deleted_in_pages(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oldest first, whatever their ids are; a page may end between two with the same time."""
    monkeypatch.setattr(expiry, "PAGE", 3)
    batches = [service.batches.open(Opening(sealed=True)).batch.id for _ in range(11)]
    with service.database.engine.begin() as tx:
        same_end = sa.update(tables.batches).values(ended_at=service.batches.get(batches[0]).ended_at)
        tx.execute(same_end)
    for batch in batches[8:]:
        age(service.database, batch, 2 * DAY)
    for batch in batches[1:]:
        age(service.database, batch, 31 * DAY)
    report = run_once(service.database, Policy(), dry_run=True)
    assert report.deleted == [*batches[8:], *batches[1:8]]
    assert run_once(service.database, Policy()).deleted == report.deleted
    assert {batch for batch in batches if state(service, batch)} == {batches[0]}


@mutant("a-locked-batch-ends-the-pass", "core.janitor:run_once", "errors.LockTimeout", "ZeroDivisionError")
@pytest.mark.mariadb
def test_a_locked_batch_is_left_to_the_next_pass(mariadb_database: Database) -> None:
    """Others are processed, whether their ids are lower or higher, and the report names the locked ones."""
    service = Service(mariadb_database, combiner=Inline)
    idle = [service.batches.open(Opening(items=1)).batch.id for _ in range(3)]
    batches = [service.batches.open(Opening(sealed=True)).batch.id for _ in range(3)]
    for batch in (*idle, *batches):
        age(mariadb_database, batch, 31 * DAY)
    with mariadb_database.engine.begin() as holder:
        for batch in (idle[1], batches[1]):
            holder.execute(sa.select(tables.batches).where(tables.batches.c.id == batch).with_for_update()).one()
        report = run_once(mariadb_database, Policy())
    assert report.locked == [idle[1], batches[1]]
    assert (report.expired_open, report.deleted) == ([idle[0], idle[2]], [batches[0], batches[2]])
    second = run_once(mariadb_database, Policy())
    assert (second.locked, second.expired_open, second.deleted) == ([], [idle[1]], [batches[1]])


def janitor_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_module("jobs.janitor", *arguments, environment={**os.environ, **environment})


def test_the_command_reports_in_json(service: Service) -> None:
    """One line on standard output, exit status 0."""
    idle = service.batches.open(Opening(items=1)).batch.id
    age(service.database, idle, DAY)
    url = service.database.url.render_as_string(hide_password=False)
    process = janitor_command("--database-url", url, "--open-idle", "12h", "--sealed-idle", "30d", "--keep", "30d")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {
        "dry_run": False,
        "expired": {"open": 1, "sealed": 0},
        "deleted": 0,
        "parents": 0,
        "children": 0,
        "events": 0,
        "inbox": 0,
        "instances": 0,
        "commands": 0,
        "batches": {"expired": [idle], "deleted": [], "locked": []},
    }


def test_the_command_explains_wrong_use(sqlite_url: str) -> None:
    """Wrong use is exit status 2, a database without a schema 1; both with a message, neither with a traceback."""
    for arguments in (
        ["--keep", "30"],
        ["--keep", "-1d"],
        ["--keep", "1y"],
        ["--keep", "999999999w"],
        ["--keep", "999999w"],
        ["--keep", "60000w"],
        ["--keep-failed", "1y"],
        ["--nope"],
    ):
        wrong = janitor_command(*arguments)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "Traceback" not in wrong.stderr
    for name, value, expected in (
        ("LASTBIT_WORKERS", "none", "expected a whole number, got 'none'"),
        ("LASTBIT_WEBHOOKS_LONGEST_DELAY", "1e9", "expected at most 2,592,000, got '1e9'"),
        ("LASTBIT_WEBHOOKS_ALLOW_PRIVATE", "maybe", "expected true or false, got 'maybe'"),
        ("LASTBIT_LOG_LEVEL", "loud", "expected 'debug', 'info', 'warning' or 'error', got 'loud'"),
        ("LASTBIT_SESSION_KEY", "short", ""),
    ):
        wrong = janitor_command(**{name: value})
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "Traceback" not in wrong.stderr
        assert f"{name}: {expected}" in wrong.stderr
        assert f"got {value!r}" in wrong.stderr or name == "LASTBIT_SESSION_KEY"
        assert "'short'" not in wrong.stderr  # a secret is not printed
    Path(sqlite_url.removeprefix("sqlite:///")).touch()
    empty = janitor_command("--database-url", sqlite_url)
    assert empty.returncode == 1
    assert "python -m api migrate" in empty.stderr
