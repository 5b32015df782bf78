"""A process's metrics about its transactions, and the gauges that it reads from the database."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Final

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from api.metrics import DatabaseGauges
from core import errors, gauges, janitor
from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.expiry import Policy
from core.batches.lifecycle import Verb
from core.dispatcher import Dispatcher
from core.service import Service
from core.storage import schema, tables
from core.storage.database import Database
from core.storage.job_runs import JobRuns
from core.webhooks import deliveries, subscriptions
from core.webhooks.backoff import Backoff
from senders.webhooks import WebhookSender
from tests.mutants import mutant
from tests.support.exposition import Change
from tests.support.servers import ROOT


def retries(cause: str) -> Change:
    return Change("lastbit_retries_total", cause=cause)


def transactions(outcome: str) -> Change:
    return Change("lastbit_transaction_seconds_count", outcome=outcome)


def test_a_deadlock_is_counted_as_a_conflict(mariadb_database: Database) -> None:
    """Two transactions lock two batches in opposite order; one of them starts again, once."""
    service = Service(mariadb_database)
    ids = [service.batches.open(Opening()).batch.id for _ in range(2)]
    both_hold_one = threading.Barrier(2)
    attempts: list[int] = []
    conflicts, outcomes, commits = retries("conflict"), transactions("conflict"), transactions("committed")

    def touch(tx: Connection, order: list[int]) -> None:
        attempts.append(order[0])
        for position, batch in enumerate(order):
            tx.exec_driver_sql(f"UPDATE batches SET items = items + 1 WHERE id = {batch}")
            if position == 0 and len(attempts) <= 2:
                both_hold_one.wait(10)

    threads = [
        threading.Thread(target=mariadb_database.write, args=(lambda tx, o=order: touch(tx, o),))
        for order in (ids, ids[::-1])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (conflicts(), outcomes(), commits()) == (1, 1, 2)


def test_lock_waits_are_counted(mariadb_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed-out waits count as outcomes, and each one followed by another try counts as a retry."""
    monkeypatch.setattr("core.storage.database.LOCK_WAIT", 1)
    with Database(mariadb_url) as database:
        schema.migrate(database)
        batch = Service(database).batches.open(Opening()).batch.id
        statement = f"SELECT id FROM batches WHERE id = {batch} FOR UPDATE"
        with database.engine.begin() as holder:
            holder.exec_driver_sql(statement)
            waits, outcomes = retries("lock_wait"), transactions("lock_wait")
            with pytest.raises(errors.LockTimeout):
                database.write(lambda tx: tx.exec_driver_sql(statement).all(), lock_waits=1)
        assert (waits(), outcomes()) == (1, 2)


def test_a_batch_that_moves_to_the_second_lane_is_a_retry_after_a_lock_wait(
    mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The combiner starts such a transaction again, with a longer lock wait."""
    monkeypatch.setattr("core.storage.database.LOCK_WAIT", 1)
    with Database(mariadb_url) as database:
        schema.migrate(database)
        service = Service(database)
        batch = service.batches.open(Opening(items=2)).batch.id
        service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])).result(60)
        waits = retries("lock_wait")
        with database.engine.begin() as holder:
            holder.exec_driver_sql(f"SELECT 1 FROM item_groups WHERE batch_id = {batch} FOR UPDATE")
            acked = service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 1)]))
            with pytest.raises(errors.LockTimeout):
                acked.result(60)
        service.stop()
        # Once to enter the second lane, and three times there.
        assert waits() == 4


OUTAGE: Final = """
import contextlib
from prometheus_client import REGISTRY
from core import errors
from core.storage.database import Database
with Database("mysql://lastbit@127.0.0.1:1/nowhere") as database:
    for transaction in (database.write, database.read):
        with contextlib.suppress(errors.Unavailable):
            transaction(lambda tx: None)
        print(REGISTRY.get_sample_value("lastbit_retries_total", {"cause": "outage"}),
              REGISTRY.get_sample_value("lastbit_transaction_seconds_count", {"outcome": "outage"}),
              REGISTRY.get_sample_value("lastbit_transaction_seconds_count", {"outcome": "committed"}))
"""


def test_an_outage_is_counted() -> None:
    """Four tries are three retries, and none commits. A read is not a writing transaction. In a process of its own: in
    this one, a thread that another test has left may count too."""
    process = subprocess.run([sys.executable, "-c", OUTAGE], cwd=ROOT, check=True, capture_output=True, text=True)
    assert process.stdout.split() == ["3.0", "4.0", "0.0", "6.0", "4.0", "0.0"]


def read(database: Database) -> dict[str, float]:
    """The first sample of each family; without groups, those of groups have none."""
    return {family.name: family.samples[0].value for family in database.snapshot(gauges.read) if family.samples}


def test_live_batches_are_counted_with_the_age_of_the_oldest(database: Database) -> None:
    """Ended batches don't count; an empty database has no age."""
    zeros = {
        "lastbit_open_batches": 0,
        "lastbit_sealed_batches": 0,
        "lastbit_oldest_unsealed_age_seconds": 0,
        "lastbit_oldest_pending_age_seconds": 0,
    }
    assert read(database).items() >= zeros.items()
    service = Service(database)
    ended_batch = service.batches.open(Opening(items=1)).batch.id
    sealed = [service.batches.open(Opening(items=1, sealed=True)).batch.id for _ in range(2)]
    open_batches = [service.batches.open(Opening(items=1)).batch.id for _ in range(3)]
    service.batches.cancel(ended_batch)
    ages = {ended_batch: 10_000, sealed[0]: 5_000, sealed[1]: 3_000, open_batches[0]: 2_000, open_batches[1]: 1_000}

    def make_older(tx: Connection) -> None:
        now = tx.scalar(sa.select(tables.utc_now()))
        for batch, age in ages.items():
            creation = sa.update(tables.batches).where(tables.batches.c.id == batch)
            tx.execute(creation.values(created_at=now - timedelta(seconds=age)))

    database.write(make_older)
    gauges_now = read(database)
    assert (gauges_now["lastbit_open_batches"], gauges_now["lastbit_sealed_batches"]) == (3, 2)
    assert 2_000 <= gauges_now["lastbit_oldest_unsealed_age_seconds"] < 2_600
    assert 5_000 <= gauges_now["lastbit_oldest_pending_age_seconds"] < 5_600
    service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0) for batch in sealed])).result(60)
    for batch in open_batches:
        service.batches.cancel(batch)
    assert read(database).items() >= zeros.items()
    service.stop()


def test_the_feeds_position_and_waiting_webhooks_are_measured(database: Database) -> None:
    """An event that is not planned yet waits too; delivered or abandoned ones don't."""
    service = Service(database)
    quiet = {"lastbit_feed_position": 0, "lastbit_webhook_lag_seconds": 0, "lastbit_webhook_deliveries": 0}
    assert read(database).items() >= quiet.items()
    service.batches.open(Opening())
    assert read(database).items() >= {**quiet, "lastbit_feed_position": 1}.items()
    creation = database.write(
        lambda tx: subscriptions.create(tx, "https://example.com", None, None, subscriptions.new_secret())
    )
    service.batches.open(Opening())

    def make_older(tx: Connection) -> None:
        now = tx.scalar(sa.select(tables.utc_now()))
        tx.execute(sa.update(tables.feed).values(appended_at=now - timedelta(seconds=5_000)))

    def lag_and_counts() -> tuple[bool, list[float]]:
        families = {family.name: family for family in database.snapshot(gauges.read)}
        lag = families["lastbit_webhook_lag_seconds"].samples[0].value
        assert lag == 0 or 5_000 <= lag < 5_600
        return lag > 0, [sample.value for sample in families["lastbit_webhook_deliveries"].samples]

    database.write(make_older)
    assert lag_and_counts() == (True, [0, 0])
    database.write(deliveries.plan, creation.webhook.id)
    assert lag_and_counts() == (True, [1, 0])
    database.write(lambda tx: tx.execute(sa.update(tables.deliveries).values(state="dead", due_at=None)))
    assert lag_and_counts() == (False, [0, 1])


def samples(database: Database, name: str, label: str) -> dict[str, float]:
    (family,) = [family for family in database.snapshot(gauges.read) if family.name == name]
    return {sample.labels[label]: sample.value for sample in family.samples}


@mutant("a-batch-that-changes-is-idle", "core.gauges:_idle_batches", "oldest.updated_at <= latest", "True")
def test_batches_are_idle_after_a_day_without_a_change(database: Database) -> None:
    """An old batch that changes is not, and hides none."""
    service = Service(database)
    ids = [service.batches.open(Opening(items=2, sealed=sealed)).batch.id for sealed in (True, True, True, False)]

    def make_older(tx: Connection) -> None:
        day_ago = tx.execute(sa.select(tables.utc_now())).scalar_one() - timedelta(days=1, seconds=1)
        columns = tables.batches.c
        tx.execute(sa.update(tables.batches).values(created_at=day_ago))
        tx.execute(sa.update(tables.batches).where(columns.id.in_(ids[1:])).values(updated_at=day_ago))

    assert samples(database, "lastbit_idle_batches", "state") == {"open": 0, "sealed": 0}
    database.write(make_older)
    assert samples(database, "lastbit_idle_batches", "state") == {"open": 1, "sealed": 2}
    service.stop()


@mutant(
    "only-one-receiver-is-late", "core.gauges:_receivers", "sum(lag > LATE.total_seconds() for _, lag in lags)", "1"
)
@mutant("callbacks-have-their-own-series", "core.gauges:_receivers", "receiver > 0", "True")
def test_each_receiver_has_a_lag_of_its_own(database: Database) -> None:
    """The callbacks to one host have one receiver, and those to all hosts one series."""
    service = Service(database)

    def create(tx: Connection) -> int:
        return subscriptions.create(tx, "https://example.com", None, None, subscriptions.new_secret()).webhook.id

    hooks = [database.write(create) for _ in range(3)]
    for _ in range(4):
        service.batches.open(Opening())

    def fill(tx: Connection) -> None:
        now = tx.execute(sa.select(tables.utc_now())).scalar_one()
        for position, age in ((1, 9000), (2, 900), (3, 200), (4, 0)):
            appended_at = now - timedelta(seconds=age)
            tx.execute(sa.update(tables.feed).where(tables.feed.c.position == position).values(appended_at=appended_at))
        callback = {"types": "[]", "secret": "", "state": "active", "position": 0, "created_at": now}
        for batch, lane in ((1, -7), (2, -7), (3, -8)):
            row = {"url": "https://example.com", "batch_id": batch, "lane": lane, **callback}
            tx.execute(sa.insert(tables.webhooks).values(row))
        callbacks = list(tx.scalars(sa.select(tables.webhooks.c.id).where(tables.webhooks.c.lane < 0).order_by("id")))
        pending = [(hooks[0], 1), (hooks[0], 2), (hooks[1], 3), (callbacks[0], 2), (callbacks[1], 2), (callbacks[2], 4)]
        for webhook, position in pending:
            row = {"webhook_id": webhook, "position": position, "state": "pending", "attempts": 1, "due_at": now}
            tx.execute(sa.insert(tables.deliveries).values(row))

    assert samples(database, "lastbit_receiver_lag_seconds", "webhook") == {"callbacks": 0}
    database.write(fill)
    lags = samples(database, "lastbit_receiver_lag_seconds", "webhook")
    assert {name: round(lag, -2) for name, lag in lags.items()} == {
        "callbacks": 900,
        str(hooks[0]): 9000,
        str(hooks[1]): 200,
    }
    assert read(database)["lastbit_receivers_overdue"] == 2
    service.stop()


@mutant("a-pass-of-the-janitor-is-not-noted", "core.janitor:run_once", 'JobRuns(database, "janitor").succeeded()', "")
@mutant("a-round-of-the-dispatcher-is-not-noted", "core.dispatcher:Dispatcher.run_once", "self._runs.succeeded()", "")
@mutant("the-janitor-forgets-jobs", "core.storage.commit_marks:forget", "columns.writer >= 0", "sa.true()")
def test_each_job_tells_when_it_last_succeeded(database: Database) -> None:
    def ages() -> dict[str, float]:
        return samples(database, "lastbit_job_age_seconds", "name")

    def make_older(tx: Connection) -> None:
        now = tx.execute(sa.select(tables.utc_now())).scalar_one()
        tx.execute(sa.update(tables.commit_marks).values(marked_at=now - timedelta(days=3)))

    assert ages() == dict.fromkeys(("janitor", "dispatcher", "deadlines"), math.inf)
    dispatcher = Dispatcher(database, WebhookSender(timeout=1), backoff=Backoff(), lease=timedelta(minutes=1))
    dispatcher.run_once()
    dispatcher.stop()
    JobRuns(database, "deadlines").noting(lambda: janitor.expire_overdue(database))()
    janitor.run_once(database, Policy(), dry_run=True)
    assert {job: age < 60 for job, age in ages().items()} == {"janitor": False, "dispatcher": True, "deadlines": True}
    database.write(make_older)
    janitor.run_once(database, Policy())
    assert {job: round(age / 86_400) for job, age in ages().items()} == {"janitor": 0, "dispatcher": 3, "deadlines": 3}


@mutant(
    "each-run-is-noted",
    "core.storage.job_runs:JobRuns.succeeded",
    "time.monotonic() - self._noted_at < EVERY",
    "False",
)
def test_successes_are_noted_seldom_and_failures_never(database: Database) -> None:
    commits = Change("lastbit_transaction_seconds_count", outcome="committed")
    runs = JobRuns(database, "deadlines")

    def fail() -> None:
        raise ValueError

    with contextlib.suppress(ValueError):
        runs.noting(fail)()
    assert commits() == 0
    for _ in range(2):
        runs.succeeded()
    assert commits() == 1


def test_timers_are_overdue_after_half_a_minute(database: Database) -> None:
    """Until then they may wait for the dispatcher's next round, as always some do on a busy service."""

    def add(tx: Connection) -> None:
        now = tx.execute(sa.select(tables.utc_now())).scalar_one()
        for age in (-600, 0, 5, 50, 600):
            due_at = now - timedelta(seconds=age)
            row = {"name": "orders", "instance": str(age), "timer": "late", "token": str(age), "due_at": due_at}
            tx.execute(sa.insert(tables.timers).values(row))

    assert read(database)["lastbit_timers_overdue"] == 0
    database.write(add)
    assert read(database)["lastbit_timers_overdue"] == 2


def test_concurrent_scrapes_read_the_database_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """And later scrapes reuse the values for a short time."""
    under_way, go_on = threading.Event(), threading.Event()
    readings: list[int] = []

    def slow(tx: Connection) -> object:
        readings.append(1)
        under_way.set()
        assert go_on.wait(60)
        return _read(tx)

    _read = gauges.read
    monkeypatch.setattr(gauges, "read", slow)
    monkeypatch.setattr("api.metrics.PATIENCE", 60)
    monkeypatch.setattr("api.metrics.FRESH", 3600)
    collector = DatabaseGauges(database)
    values: list[list[float]] = []

    def scrape() -> None:
        values.append([family.samples[0].value for family in collector.collect() if family.samples])

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert under_way.wait(60)
    go_on.set()
    for thread in threads:
        thread.join()
    scrape()
    assert values == [values[0]] * 4
    assert values[0][0] == 1
    assert len(readings) == 1


def test_gauges_of_an_unreachable_database_are_missing() -> None:
    """Only the gauge that the database is unreachable is left."""
    with Database("mysql://lastbit@127.0.0.1:1/nowhere") as database:
        (family,) = DatabaseGauges(database).collect()
        assert (family.name, family.samples[0].value) == ("lastbit_database_up", 0)
