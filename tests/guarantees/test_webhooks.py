"""Webhooks, at least once: dispatchers run as processes that are killed, stopped and run concurrently."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors
from core.acks import parents as payments
from core.acks.call import Call
from core.acks.parents import sweep
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.commits.combiner import Inline
from core.consumer_groups.leases import Caller
from core.dispatcher import Dispatcher
from core.feed import NewEvent
from core.processes import timers
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from core.webhooks import deliveries, subscriptions
from core.webhooks.backoff import Backoff
from core.webhooks.delivery_log import Delivery, Progress
from core.webhooks.replicas import GROUP, Replica
from core.webhooks.sender import SendResult
from lastbit.ids import ItemId
from senders.webhooks import WebhookSender
from tests.guarantees.drivers.rounds import nobody_pays
from tests.guarantees.drivers.strangers import lock_waits, locked
from tests.guarantees.programs.dying import Written, dispatch, mortals
from tests.mutants import mutant
from tests.support.clocks import Clock
from tests.support.nursery import Child
from tests.support.proxies import proxied
from tests.support.receivers import Got, Handler, Receiver, receiving, status
from tests.support.servers import ROOT, ServiceProcess, free_port, run_module, wait_until_it_prints

EVENTS = 300


@pytest.fixture
def service(database: Database) -> Iterator[Service]:
    service_ = Service(database, combiner=Inline, sender=WebhookSender(allow_private=True))
    yield service_
    service_.stop()


@pytest.fixture
def server_service(server_database: Database) -> Iterator[Service]:
    service_ = Service(server_database, combiner=Inline, sender=WebhookSender(allow_private=True))
    yield service_
    service_.stop()


def subscribe(service: Service, receiver: Receiver) -> int:
    creation = service.webhooks.create(receiver.url, None, None)
    receiver.secrets.append(creation.secret)
    return creation.webhook.id


def dispatcher(
    service: Service,
    *arguments: str,
    module: str = "jobs.dispatcher",
    url: sa.URL | None = None,
    with_output: bool = False,
) -> subprocess.Popen[str] | Child:
    """A dispatcher of the service's database, which it reaches at `url` if that is given."""
    environment = {
        **os.environ,
        "LASTBIT_DATABASE_URL": (url or service.database.url).render_as_string(hide_password=False),
        "LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true",
        "LASTBIT_WEBHOOKS_FIRST_DELAY": "0.01",
        "LASTBIT_WEBHOOKS_LONGEST_DELAY": "0.01",
        "LASTBIT_LOG_LEVEL": "info" if with_output else "error",
    }
    arguments = ("--every", "0.05", *arguments)
    nursery = None if with_output else ServiceProcess.nursery
    if nursery is not None:
        return nursery.start(module, arguments, environment=environment)
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE if with_output else None, text=True
    )


@contextlib.contextmanager
def running(service: Service, *, with_output: bool = False) -> Iterator[subprocess.Popen[str] | Child]:
    process = dispatcher(service, with_output=with_output)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)


def once(service: Service) -> None:
    assert dispatcher(service, "--once").wait(60) == 0


def end_leases(service: Service) -> None:
    """Make all leases end now."""
    with service.database.engine.begin() as connection:
        connection.execute(
            sa.update(tables.deliveries).where(tables.deliveries.c.state == "pending").values(due_at=tables.utc_now())
        )


def log(service: Service, webhook: int) -> list[Delivery]:
    return service.webhooks.deliveries(webhook, None, None, 1000)[0]


def wait_until_delivered(service: Service, webhook: int) -> None:
    poll = threading.Event()
    for _ in range(600):
        if all(delivery.state is Progress.DELIVERED for delivery in log(service, webhook)):
            return
        poll.wait(0.1)
    raise AssertionError("not every delivery was made")


@mutant(
    "a-removal-leaves-an-attempt-that-is-logged-meanwhile",
    "core.webhooks.subscriptions:remove",
    "tx.execute(sa.delete(tables.deliveries).where(_deliveries.id.in_(part)))\ntx.execute(sa.delete(tables.delivery_attempts).where(_attempts.delivery_id.in_(part)))",
    "tx.execute(sa.delete(tables.delivery_attempts).where(_attempts.delivery_id.in_(part)))\ntx.execute(sa.delete(tables.deliveries).where(_deliveries.id.in_(part)))",
)
def test_an_attempt_that_is_logged_during_a_removal_is_removed_too(server_service: Service) -> None:
    """The dispatcher records a send between two statements of the removal."""
    database = server_service.database
    created = database.write(subscriptions.create, "https://receiver.example", None, None, "whsec_" + "A" * 44)
    server_service.feed.append([NewEvent("one", "x")])
    database.write_in_chunks(deliveries.plan, created.webhook.id)
    [claim], _ = database.write(deliveries.claim, timedelta(minutes=1), 1, {}, 1)
    record = deliveries.Record(batch=0, claim=claim, answer=SendResult(204, None, 1), chance=0.5)
    records = [record]

    def see(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("DELETE FROM deliveries") and records:
            database.write(deliveries.record, [records.pop()], Backoff())

    with Database(database.url.render_as_string(hide_password=False)) as other:
        sa.event.listen(other.engine, "before_cursor_execute", see)
        subscriptions.delete(other, created.webhook.id)
    assert not records
    for table in (tables.deliveries, tables.delivery_attempts):
        assert database.read(lambda tx, table=table: tx.execute(sa.select(table)).all()) == []  # type: ignore[misc]


def test_a_delivery_that_was_sent_but_not_recorded_is_sent_again_with_its_id(
    service: Service, receiver: Receiver
) -> None:
    """Once its lease is over, and not before; a recorded delivery is not sent again."""
    webhook = subscribe(service, receiver)
    service.feed.append([NewEvent("one", "x")])
    assert dispatcher(service, "--once", module="tests.guarantees.programs.dying_dispatcher").wait(60) == 9
    assert [webhook.id for webhook in receiver.got] == ["one"]
    (delivery,) = log(service, webhook)
    assert (delivery.state, delivery.log) == (Progress.PENDING, [])
    once(service)
    assert len(receiver.got) == 1
    end_leases(service)
    once(service)
    once(service)
    assert [(webhook.id, webhook.valid) for webhook in receiver.got] == [("one", True)] * 2
    assert receiver.got[0].body == receiver.got[1].body
    (delivery,) = log(service, webhook)
    assert (delivery.state, [attempt.status for attempt in delivery.log]) == (Progress.DELIVERED, [204])


class Overlaps:
    """A reply that records whether a delivery is sent twice at the same time; every fifth id gets a 500 on its first
    try. A send is over once its answer is complete, even if this thread doesn't continue before the next try."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.handled: Counter[str] = Counter()
        self.open: set[str] = set()
        self.twice: list[str] = []

    def __call__(self, handler: Handler, webhook: Got) -> None:
        with self.lock:
            if webhook.id in self.open:
                self.twice.append(webhook.id)
            self.open.add(webhook.id)
            self.handled[webhook.id] += 1
            fails = int(webhook.id) % 5 == 0 and self.handled[webhook.id] == 1
        try:
            handler.wfile.write(b"HTTP/1.1 %d -\r\nContent-Length: 2\r\n\r\no" % (500 if fails else 200))
        finally:
            with self.lock:
                self.open.discard(webhook.id)
        handler.wfile.write(b"k")


def test_two_dispatchers_share_the_work(server_service: Service, receiver: Receiver) -> None:
    """Each event is sent as often as needed and no more, never by both at the same time, and all of it is logged."""
    service = server_service
    webhook = subscribe(service, receiver)
    reply = Overlaps()
    receiver.reply = reply
    with running(service), running(service):
        for start in range(0, EVENTS, 20):
            service.feed.append([NewEvent(str(number), "x") for number in range(start, start + 20)])
        receiver.wait_for(EVENTS + EVENTS // 5)
        wait_until_delivered(service, webhook)
    assert {delivery.event: [attempt.status for attempt in delivery.log] for delivery in log(service, webhook)} == {
        str(number): [500, 200] if number % 5 == 0 else [200] for number in range(EVENTS)
    }
    assert reply.twice == []
    assert reply.handled == {str(number): 2 if number % 5 == 0 else 1 for number in range(EVENTS)}
    assert all(webhook_.valid for webhook_ in receiver.got)


@pytest.mark.slow
def test_each_event_arrives_though_dispatchers_are_killed(server_service: Service, receiver: Receiver) -> None:
    """At least once, under its own id, validly signed and logged; one dispatcher after the other is killed at work
    while another goes on."""
    service = server_service
    webhook = subscribe(service, receiver)
    receiver.reply = Overlaps()
    service.feed.append([NewEvent(str(number), "x") for number in range(EVENTS)])
    with running(service):
        for round_ in range(1, 4):
            with running(service) as victim:
                receiver.wait_for(round_ * EVENTS // 5)
                victim.send_signal(signal.SIGKILL)
                victim.wait(60)
        receiver.wait_for(EVENTS)
    end_leases(service)
    with running(service):  # an event whose first try comes now fails once more
        wait_until_delivered(service, webhook)
    assert {webhook_.id for webhook_ in receiver.got} == {str(number) for number in range(EVENTS)}
    assert all(webhook_.valid for webhook_ in receiver.got)
    for delivery in log(service, webhook):
        assert (delivery.state, delivery.last and delivery.last.status) == (Progress.DELIVERED, 200)


def test_a_receiver_that_was_down_gets_every_event(service: Service) -> None:
    """The delivery is refused, logged, and tried again until a receiver listens there."""
    port = free_port()
    webhook = service.webhooks.create(f"http://127.0.0.1:{port}/hook", None, None)
    service.feed.append([NewEvent(str(number), "x") for number in range(5)])
    with running(service):
        poll = threading.Event()
        # All five are planned, and each was tried.
        while sum(bool(delivery.log) for delivery in log(service, webhook.webhook.id)) < 5:
            poll.wait(0.05)
        with receiving(port=port, secrets=[webhook.secret]) as receiver:
            # Including those that have used up their tries meanwhile.
            service.webhooks.redeliver(webhook.webhook.id)
            wait_until_redelivered(service, webhook.webhook.id)
            assert {post.id for post in receiver.got} == {str(number) for number in range(5)}
            assert all(post.valid for post in receiver.got)
    for delivery in log(service, webhook.webhook.id):
        assert delivery.log[0].error == "the connection was refused"
        assert delivery.log[-1].status == 204


def wait_until_redelivered(service: Service, webhook: int) -> None:
    """A delivery may die just before its receiver is up; then it is redelivered."""
    poll = threading.Event()
    for _ in range(600):
        deliveries = log(service, webhook)
        if all(delivery.state is Progress.DELIVERED for delivery in deliveries):
            return
        if any(delivery.state is Progress.DEAD for delivery in deliveries):
            service.webhooks.redeliver(webhook)
        poll.wait(0.1)
    raise AssertionError("not every delivery was made")


class Recorder:
    """A sender whose receiver accepts everything, and that records the events it was given."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def check(self, url: str) -> None:
        pass

    def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        self.events.append(headers["webhook-id"])
        return SendResult(200, None, 0)


class SharingDispatcher:
    """A dispatcher in this process that shares deliveries with others, by the database's clock."""

    def __init__(self, database: Database, name: str, clock: Clock) -> None:
        self.sender = Recorder()
        self.replica = Replica(database, clock=lambda: clock.now.timestamp())
        self.replica.worker = name
        self.dispatcher = Dispatcher(
            database, self.sender, backoff=Backoff(), lease=timedelta(minutes=1), threads=4, replica=self.replica
        )

    def round(self) -> None:
        self.dispatcher.run_once()
        self.dispatcher.settle()


@mutant("a-replica-claims-anothers-deliveries", "core.webhooks.deliveries:_shared", "partitions is None", "True")
def test_replicas_share_due_deliveries(database: Database) -> None:
    """Each sends the deliveries in its own partitions, and each delivery is sent once; when one leaves, the other takes
    over at once."""
    clock = Clock(database)
    service = Service(database, combiner=Inline, sender=Recorder())
    hook = service.webhooks.create("https://receiver.example", None, None).webhook.id
    first, other = SharingDispatcher(database, "one", clock), SharingDispatcher(database, "other", clock)
    for _ in range(3):  # join, hand over, take
        first.round()
        other.round()
        clock.go(4)
    assert (len(first.replica.partitions), len(other.replica.partitions)) == (32, 32)
    service.feed.append([NewEvent(str(number), "x") for number in range(100)])
    for _ in range(2):
        other.round()
        first.round()
    assert sorted(first.sender.events + other.sender.events) == sorted(str(number) for number in range(100))
    own_events = {delivery.event for delivery in log(service, hook) if delivery.id % 64 in first.replica.partitions}
    assert set(first.sender.events) == own_events
    assert 20 < len(own_events) < 80
    first.dispatcher.stop()
    clock.go(4)
    other.round()
    assert len(other.replica.partitions) == 64
    service.feed.append([NewEvent("later", "x")])
    other.round()
    assert other.sender.events[-1] == "later"
    other.dispatcher.stop()
    assert service.consumer_groups.get("lastbit.dispatcher").workers == []


@mutant(
    "a-dead-replicas-deliveries-wait-for-its-lease",
    "core.webhooks.deliveries:_shared",
    "sa.or_(ours, _deliveries.due_at <= tables.clock(tx) - OVERDUE)",
    "ours",
)
def test_no_delivery_waits_for_a_replica_that_is_dead(database: Database) -> None:
    """Any replica may send its deliveries a few seconds after they were due, before its lease has ended; no delivery
    depends on the consumer group."""
    clock = Clock(database)
    service = Service(database, combiner=Inline, sender=Recorder())
    service.webhooks.create("https://receiver.example", None, None)
    dead, other = SharingDispatcher(database, "dead", clock), SharingDispatcher(database, "other", clock)
    dead.round()
    service.feed.append([NewEvent("one", "x")])
    other.round()
    clock.go(4.9)
    other.round()
    assert (len(dead.replica.partitions), other.replica.partitions, other.sender.events) == (64, frozenset(), [])
    clock.go(0.1)
    other.round()
    assert other.sender.events == ["one"]
    for _ in range(2):
        clock.go(4)
        other.round()
    assert len(other.replica.partitions) == 64


def test_a_replica_whose_name_is_taken_joins_under_another(database: Database) -> None:
    """Two containers may have the same host and process name: both must work, and neither replaces the other."""
    clock = Clock(database)
    first, other = SharingDispatcher(database, "same", clock), SharingDispatcher(database, "same", clock)
    for _ in range(4):
        first.round()
        other.round()
        clock.go(4)
    assert first.replica.worker != other.replica.worker
    assert (len(first.replica.partitions), len(other.replica.partitions)) == (32, 32)
    assert not first.replica.partitions & other.replica.partitions


def replicas(service: Service) -> dict[str, int]:
    """The number of partitions of each worker."""
    try:
        return {worker.worker: worker.partitions for worker in service.consumer_groups.get(GROUP).workers}
    except errors.ConsumerGroupNotFound:
        return {}


def wait_until_shared(service: Service, *counts: int) -> None:
    poll = threading.Event()
    for _ in range(600):
        if sorted(replicas(service).values()) == sorted(counts):
            return
        poll.wait(0.05)
    raise AssertionError(replicas(service))


def test_the_others_take_over_from_a_replica_that_is_killed(server_service: Service, receiver: Receiver) -> None:
    """Two processes share the deliveries; one is killed, and every later event arrives once; in the end the other
    leaves."""
    service = server_service
    webhook = subscribe(service, receiver)
    service.consumer_groups.put(GROUP, 64, timedelta(seconds=1))
    with running(service) as survivor:
        with running(service) as victim:
            wait_until_shared(service, 32, 32)
            service.feed.append([NewEvent(f"before-{number}", "x") for number in range(50)])
            receiver.wait_for(50)
            wait_until_delivered(service, webhook)
            victim.send_signal(signal.SIGKILL)
            victim.wait(60)
        service.feed.append([NewEvent(f"after-{number}", "x") for number in range(50)])
        receiver.wait_for(100)
        wait_until_shared(service, 64)
        wait_until_delivered(service, webhook)
        assert Counter(post.id for post in receiver.got).most_common(1)[0][1] == 1
        survivor.send_signal(signal.SIGTERM)
        assert survivor.wait(60) == 0
    assert replicas(service) == {}


def test_once_sends_everything_that_is_due(service: Service, receiver: Receiver) -> None:
    """It doesn't join the group: though another replica holds everything, it ends when nothing is due."""
    subscribe(service, receiver)
    service.consumer_groups.put(GROUP, 64, timedelta(minutes=5))
    service.consumer_groups.sync(GROUP, Caller("frozen", "1"))
    service.feed.append([NewEvent(str(number), "x") for number in range(10)])
    once(service)
    assert {post.id for post in receiver.got} == {str(number) for number in range(10)}
    assert replicas(service) == {"frozen": 64}


@pytest.mark.slow
def test_a_dispatcher_that_dies_at_any_point_loses_no_event(database: Database, tmp_path: Path) -> None:
    """Before and after each statement and each commit, from planning to recording: the next dispatcher sends the rest,
    under the same ids, and logs it."""
    url, sent_log = database.url.render_as_string(hide_password=False), tmp_path / "sent"
    service = Service(database, combiner=Inline, sender=Written(sent_log))
    hook = service.webhooks.create("https://receiver.example", ["batch.completed"], None).webhook.id
    deaths: list[str] = []
    columns = tables.deliveries.c
    with mortals() as dying:
        while True:
            batches = [service.batches.open(Opening(sealed=True)).batch.id for _ in range(2)]
            death = dying.run(url, {"verb": "dispatch", "sent": str(sent_log)}, len(deaths))
            if death is not None:
                deaths.append(death.where)
            # Its claims expire.
            database.write(
                lambda tx: tx.execute(
                    sa.update(tables.deliveries).where(columns.token.is_not(None)).values(due_at=tables.utc_now())
                )
            )
            dispatch(database, sent_log)
            counts = Counter(sent_log.read_text().split())
            for batch in batches:
                assert 1 <= counts[f"batch:{batch}:completed"] <= 2
                (delivery,) = service.webhooks.deliveries_of_batch(batch)
                assert (delivery.webhook, delivery.state) == (hook, Progress.DELIVERED)
                assert delivery.log
            if death is None:
                break
            assert len(deaths) < 200
    assert len(deaths) > 20, deaths
    assert "after COMMIT" in deaths
    assert max(counts.values()) == 2, "no dispatcher died between sending and recording"


def test_a_stop_finishes_deliveries_under_way(service: Service, receiver: Receiver) -> None:
    """On SIGTERM the answer is awaited and recorded, nothing new is started, and the exit status is 0."""
    webhook = subscribe(service, receiver)
    release = threading.Event()

    def held(handler: Handler, webhook: Got) -> None:
        release.wait(60)
        status(200)(handler, webhook)

    receiver.reply = held
    service.feed.append([NewEvent("one", "x")])
    with running(service, with_output=True) as process:
        assert isinstance(process, subprocess.Popen)
        receiver.wait_for(1)
        process.send_signal(signal.SIGTERM)
        wait_until_it_prints(process, "dispatcher_stopping")
        service.feed.append([NewEvent("two", "x")])
        release.set()
        assert process.wait(60) == 0
    assert {delivery.event: delivery.state for delivery in log(service, webhook)} == {"one": Progress.DELIVERED}


def test_a_round_pays_parents_of_ended_children(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between a child's end and its parent's ack leaves a debt; the dispatcher pays it."""
    parent = service.batches.open(Opening(items=1, sealed=True)).batch.id
    child = service.batches.open(Opening(items=1, sealed=True, parent=ItemId(parent, 0, 0))).batch.id
    nobody_pays(monkeypatch)
    service.acks.ack(Call.of(Verb.ACK, [(child, 0, 0)])).result()
    assert service.batches.get(parent).acked == 0
    once(service)
    assert service.batches.get(parent).succeeded


@mutant(
    "a-round-begins-with-the-sweep",
    "core.dispatcher:Dispatcher._round",
    "is_behind = self._prepare()",
    "parents.sweep(self._database, stuck_parents=self._stuck, seconds=SWEEP)\nis_behind = self._prepare()",
)
@pytest.mark.mariadb
def test_a_round_sends_and_fires_before_it_waits_for_a_locked_parent(
    server_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a webhook nor a timer is delayed by it, and the other parents are paid. The next rounds skip it."""
    service = server_service
    parents = [service.batches.open(Opening(items=1, sealed=True)).batch.id for _ in range(2)]
    children = [
        service.batches.open(Opening(items=1, sealed=True, parent=ItemId(parent, 0, 0))).batch.id for parent in parents
    ]
    nobody_pays(monkeypatch)
    for child in children:
        service.acks.ack(Call.of(Verb.ACK, [(child, 0, 0)])).result()
    service.webhooks.create("http://127.0.0.1:9/hook", ["x"], None)
    service.feed.append([NewEvent("one", "x")])
    waits: list[float] = []
    is_sent = threading.Event()

    class Sender(Fake):
        def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
            waits.append(lock_waits())
            is_sent.set()
            return super().send(url, headers, body)

    pay = payments.sweep

    def pay_after_the_send(*arguments: Any, **options: Any) -> int:
        """A busy machine may run the sender's thread late, but the round must not need the parents for it."""
        assert is_sent.wait(60)
        return pay(*arguments, **options)

    monkeypatch.setattr(payments, "sweep", pay_after_the_send)

    before = lock_waits()
    dispatcher = Dispatcher(service.database, Sender(), backoff=Backoff(), lease=timedelta(minutes=1), threads=1)
    fire = timers.fire
    monkeypatch.setattr(timers, "fire", lambda *arguments: (waits.append(lock_waits()), fire(*arguments))[1])
    with locked(service.database, parents[0]):
        dispatcher.run_once()
        dispatcher.settle()
        assert waits == [before, before]
        assert lock_waits() > before
        assert [service.batches.get(parent).succeeded for parent in parents] == [False, True]
        before = lock_waits()
        dispatcher.run_once()
        assert lock_waits() == before, "the locked parent must not be tried again at once"
    dispatcher.stop()
    assert sweep(service.database) == 1
    assert service.batches.get(parents[0]).succeeded


def test_a_single_pass_that_loses_its_database_fails(server_service: Service) -> None:
    """A job that ends with 0 has sent all that was due."""
    url = server_service.database.url
    with receiving() as receiver, proxied(url.port or 0) as proxy:

        def leave(handler: Handler, got: Got) -> None:
            proxy.leave()
            status(204)(handler, got)

        subscribe(server_service, receiver)
        receiver.replies(leave)
        server_service.feed.append([NewEvent("one", "x")])
        assert dispatcher(server_service, "--once", url=url.set(port=proxy.port)).wait(60) == 1
    assert [got.id for got in receiver.got] == ["one"]


class Fake:
    """A sender to which every delivery succeeds."""

    def check(self, url: str) -> None:
        pass

    def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        return SendResult(200, None, 0)


def test_the_command_explains_wrong_use(sqlite_url: str) -> None:
    """Wrong use is exit status 2, a database without a schema 1; both with a message, neither with a traceback."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_module("jobs.dispatcher", *arguments)

    for arguments in (["--every", "-1"], ["--threads", "0"], ["--threads", "x"], ["--nope"]):
        wrong = run(*arguments)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "Traceback" not in wrong.stderr
    Path(sqlite_url.removeprefix("sqlite:///")).touch()
    empty = run("--once", "--database-url", sqlite_url)
    assert empty.returncode == 1
    assert "python -m api migrate" in empty.stderr
