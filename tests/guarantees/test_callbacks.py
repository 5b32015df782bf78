"""Callbacks: each is made with its batch, gets exactly its batch's events, at least once, and goes with its batch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import core.dispatcher
from core import errors, feed, janitor
from core.acks.call import Call
from core.batches import purge
from core.batches.batch import Opened, Opening
from core.batches.callbacks import DEFAULT_TYPES, Callback
from core.batches.expiry import Policy
from core.batches.lifecycle import Verb
from core.commits.combiner import Inline
from core.dispatcher import Dispatcher
from core.feed import NewEvent
from core.service import Service
from core.service.batches import opening_of
from core.service.writes import KINDS
from core.storage import tables
from core.storage.database import Database
from core.webhooks import callbacks, deliveries
from core.webhooks.addresses import NOT_FOUND
from core.webhooks.backoff import Backoff
from core.webhooks.delivery_log import Progress
from core.webhooks.sender import SendResult
from core.writes import commit
from senders.webhooks import WebhookSender
from tests.guarantees.programs.dying import Written, dispatch, mortals
from tests.guarantees.test_webhooks import end_leases, log, once, running, wait_until_delivered
from tests.mutants import mutant
from tests.support import plans
from tests.support.clocks import Clock
from tests.support.receivers import Receiver, receiving
from tests.support.servers import free_port

COMPLETED = ("batch.completed",)


@pytest.fixture
def service(database: Database) -> Iterator[Service]:
    service_ = Service(database, combiner=Inline, sender=WebhookSender(allow_private=True))
    yield service_
    service_.stop()


def open_batch(service: Service, url: str, *types: str, key: str | None = None, **opening: Any) -> Opened:
    callback = Callback(url, types) if types else Callback(url)
    return service.batches.open(Opening(items=2, sealed=True, callback=callback, **opening), key)


def complete(service: Service, batch: int) -> None:
    service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0), (batch, 0, 1)])).result()


def count(database: Database, table: sa.Table) -> int:
    return database.read(lambda tx: tx.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def plan_all(database: Database) -> None:
    database.write_in_chunks(callbacks.plan)


def test_a_callback_gets_the_promised_events_of_its_batch_alone(service: Service, receiver: Receiver) -> None:
    """By default those that tell how the batch ended, or the given types; nothing of other batches. Every request is
    signed with the secret of a callback."""
    first = open_batch(service, f"{receiver.url}/first")
    other = open_batch(service, f"{receiver.url}/other", "batch.opened", "batch.sealed", "batch.completed")
    third = service.batches.open(Opening(items=1, callback=Callback(f"{receiver.url}/third")))
    service.batches.open(Opening(sealed=True))
    service.feed.append([NewEvent("own", "batch-like", None, None)])
    complete(service, first.batch.id)
    complete(service, other.batch.id)
    service.batches.cancel(third.batch.id)
    batches = [first, other, third]
    receiver.secrets += [entry.callback.secret for entry in batches if entry.callback is not None]
    once(service)
    assert len(set(receiver.secrets)) == 3
    assert all(post.valid for post in receiver.got)
    got = Counter((post.path.rsplit("/", 1)[1], post.id) for post in receiver.got)
    expected = [("first", first, ("completed", "succeeded")), ("other", other, ("opened", "sealed", "completed"))]
    expected.append(("third", third, ("cancelled",)))
    assert got == Counter((path, f"batch:{entry.batch.id}:{name}") for path, entry, names in expected for name in names)
    assert DEFAULT_TYPES == ("batch.cancelled", "batch.completed", "batch.expired", "batch.succeeded")
    assert service.webhooks.page(None, 10) == ([], None)


def test_a_callback_reaches_a_receiver_that_was_down(service: Service) -> None:
    """It is refused, logged and tried again, like every webhook; a redelivery goes by the callback's id."""
    port = free_port()
    batch = open_batch(service, f"http://127.0.0.1:{port}/hook", *COMPLETED)
    assert batch.callback is not None
    complete(service, batch.batch.id)
    poll = threading.Event()
    with running(service):
        while not any(delivery.log for delivery in log(service, batch.callback.id)):
            poll.wait(0.05)
        with receiving(port=port, secrets=[batch.callback.secret]) as receiver:
            service.webhooks.redeliver(batch.callback.id, event=f"batch:{batch.batch.id}:completed")
            receiver.wait_for(1)
            wait_until_delivered(service, batch.callback.id)
            assert {(post.id, post.valid) for post in receiver.got} == {(f"batch:{batch.batch.id}:completed", True)}
    (delivery,) = log(service, batch.callback.id)
    assert (delivery.log[0].error, delivery.log[-1].status) == ("the connection was refused", 204)


@mutant(
    "a-callback-gets-the-events-of-all-batches",
    "core.webhooks.callbacks:plan",
    "_webhooks.batch_id == _feed.batch_id",
    "sa.true()",
)
@mutant(
    "a-callback-gets-all-types",
    "core.webhooks.callbacks:plan",
    "row.type in json.loads(row.types)",
    "json.loads(row.types)",
)
@pytest.mark.slow
def test_a_dispatcher_that_dies_at_any_point_loses_no_callback(database: Database, tmp_path: Path) -> None:
    """Before and after each statement and each commit; each event of a callback is planned once and sent at least
    once."""
    url, sent_log = database.url.render_as_string(hide_password=False), tmp_path / "sent"
    service = Service(database, combiner=Inline, sender=Written(sent_log))
    deaths: list[str] = []
    with mortals() as dying:
        while True:
            batches = [
                service.batches.open(Opening(sealed=True, callback=Callback("https://receiver.example", COMPLETED)))
                for _ in range(2)
            ]
            death = dying.run(url, {"verb": "dispatch", "sent": str(sent_log)}, len(deaths))
            if death is not None:
                deaths.append(death.where)
            end_leases(service)
            dispatch(database, sent_log)
            counts = Counter(sent_log.read_text().split())
            for entry in batches:
                assert 1 <= counts[f"batch:{entry.batch.id}:completed"] <= 2
                (delivery,) = service.webhooks.deliveries_of_batch(entry.batch.id)
                assert entry.callback is not None
                assert (delivery.webhook, delivery.state) == (entry.callback.id, Progress.DELIVERED)
            if death is None:
                break
            assert len(deaths) < 200
    assert len(deaths) > 15, deaths
    assert "after COMMIT" in deaths


def test_a_repeated_open_returns_the_same_secret(service: Service, database: Database, receiver: Receiver) -> None:
    """Also if both are in one transaction. Another callback under the key is another request."""
    first = open_batch(service, receiver.url, key="k")
    reopened = open_batch(service, receiver.url, key="k")
    assert first.callback is not None
    assert (reopened.replayed, reopened.batch.id, reopened.callback) == (True, first.batch.id, first.callback)
    with pytest.raises(errors.IdempotencyKeyReused):
        open_batch(service, receiver.url, "batch.sealed", key="k")
    with pytest.raises(errors.IdempotencyKeyReused):
        service.batches.open(Opening(items=2, sealed=True), "k")
    callback = Callback(receiver.url)
    operations = [opening_of(Opening(callback=callback), "shared") for _ in range(2)]
    operations += [opening_of(Opening(), None), opening_of(Opening(callback=callback), None)]
    results = [outcome.value for outcome in commit(database, operations, KINDS)]
    assert [entry.replayed for entry in results] == [False, True, False, False]
    assert results[0].callback == results[1].callback
    assert results[2].callback is None
    assert results[3].callback.id != results[0].callback.id
    assert service.webhooks.of_batch(results[3].batch.id) == service.webhooks.get(results[3].callback.id)
    assert count(database, tables.webhooks) == 3


def test_the_host_is_looked_up_only_to_send(database: Database) -> None:
    """An open with a callback, its repeat and a new webhook wait for no resolver."""
    hosts: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        hosts.append(host)
        return []

    service = Service(database, combiner=Inline, sender=WebhookSender(resolve=resolve))
    opened = open_batch(service, "https://receiver.example", *COMPLETED, key="k")
    assert open_batch(service, "https://receiver.example", *COMPLETED, key="k").callback == opened.callback
    webhook = service.webhooks.create("https://other.example", ["none"], None).webhook
    assert hosts == []
    _, result = service.webhooks.test(webhook.id)
    assert result.error == f"not sent: {NOT_FOUND}"
    assert hosts == ["other.example"]
    with pytest.raises(errors.InvalidRequest, match="the host is an address that is not public"):
        open_batch(service, "https://10.0.0.1/")
    service.stop()


def test_a_callback_goes_with_its_batch(service: Service, database: Database, receiver: Receiver) -> None:
    """With its deliveries and their attempts, and without another request; the other callback stays."""
    receiver.secrets += ["whsec_" + "A" * 44]
    kept = open_batch(service, receiver.url, "batch.opened")
    batch = open_batch(service, receiver.url, "batch.opened", "batch.completed")
    once(service)
    assert len(receiver.got) == 2
    complete(service, batch.batch.id)
    plan_all(database)
    service.batches.delete(batch.batch.id)
    once(service)
    assert len(receiver.got) == 2
    (webhook,) = database.read(lambda tx: list(tx.scalars(sa.select(tables.webhooks.c.batch_id))))
    assert webhook == kept.batch.id
    assert count(database, tables.deliveries) == 1
    assert count(database, tables.delivery_attempts) == 1


@mutant(
    "a-callback-stays-active-while-its-batch-is-removed",
    "core.batches.purge:condemn",
    "callbacks.disable(tx, batch_id)",
    "pass",
)
def test_a_batch_that_is_being_deleted_sends_nothing_more(
    service: Service, database: Database, receiver: Receiver
) -> None:
    """The purge may be interrupted after its first step."""
    batch = open_batch(service, receiver.url, *COMPLETED)
    complete(service, batch.batch.id)
    database.write(purge.condemn, batch.batch.id)
    once(service)
    assert receiver.got == []
    purge.purge(database, batch.batch.id)
    assert count(database, tables.webhooks) == 0


def test_idle_callbacks_cost_a_dispatcher_nothing(service: Service, database: Database) -> None:
    """A plan has as many statements with a thousand callbacks as with one, and none of them is behind afterwards."""
    url = "https://127.0.0.1/"
    lengths = []
    for opens in (1, 999):
        for first in range(0, opens, 333):
            operations = [opening_of(Opening(callback=Callback(url))) for _ in range(min(333, opens - first))]
            commit(database, operations, KINDS)
        plan_all(database)
        service.batches.cancel(1 if opens == 1 else 2)
        with plans.executions(database) as executions:
            assert database.read(callbacks.behind)
            assert database.read(deliveries.behind) == []
            plan_all(database)
            assert not database.read(callbacks.behind)
        lengths.append(len(executions))
    assert lengths[0] == lengths[1]
    assert count(database, tables.deliveries) == 2


@mutant("no-event-is-kept-for-a-callback", "core.webhooks.callbacks:needed", "exist(tx)", "False")
def test_events_are_kept_until_they_are_planned_for_a_callback(
    service: Service, database: Database, receiver: Receiver
) -> None:
    """And no event is kept when there is none; a callback that is opened after a trim misses nothing."""
    service.feed.append([NewEvent(str(number), "x") for number in range(3)])
    now = timedelta(0)
    assert feed.trim(database, now, needed=deliveries.needed) == 3
    batch = open_batch(service, receiver.url, *COMPLETED)
    complete(service, batch.batch.id)
    assert feed.trim(database, now, needed=deliveries.needed) == 0
    plan_all(database)
    assert feed.trim(database, now, needed=deliveries.needed) == 2  # opened, sealed
    assert batch.callback is not None
    receiver.secrets.append(batch.callback.secret)
    once(service)
    assert [post.id for post in receiver.got] == [f"batch:{batch.batch.id}:completed"]


@mutant(
    "retention-deletes-a-batch-whose-callback-was-not-planned",
    "core.batches.callbacks:is_owed",
    "(not_planned, pending)",
    "(pending,)",
)
@mutant(
    "retention-deletes-a-batch-whose-callback-was-not-sent",
    "core.batches.callbacks:is_owed",
    "(not_planned, pending)",
    "(not_planned,)",
)
def test_retention_keeps_a_batch_until_its_callback_was_sent(
    service: Service, database: Database, receiver: Receiver
) -> None:
    """Neither an event that is not planned yet nor a delivery that is not made yet is deleted with the batch."""
    batch = open_batch(service, receiver.url, *COMPLETED)
    assert batch.callback is not None
    receiver.secrets.append(batch.callback.secret)
    complete(service, batch.batch.id)
    nothing_is_kept = Policy(keep=timedelta(0), keep_events=timedelta(0))
    assert janitor.run_once(database, nothing_is_kept).deleted == []
    plan_all(database)
    for dry_run in (True, False):
        assert janitor.run_once(database, nothing_is_kept, dry_run=dry_run).deleted == []
    once(service)
    assert [post.id for post in receiver.got] == [f"batch:{batch.batch.id}:completed"]
    assert janitor.run_once(database, nothing_is_kept).deleted == [batch.batch.id]


def test_the_first_callback_does_not_wait_for_the_whole_feed(
    service: Service, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without callbacks the position is moved to the head now and then, which loses no event of a later one."""
    monkeypatch.setattr(callbacks, "LEAP", 5)
    service.feed.append([NewEvent(str(number), "x") for number in range(4)])
    assert not database.read(callbacks.behind)
    service.feed.append([NewEvent(f"more-{number}", "x") for number in range(4)])
    assert database.read(callbacks.behind)
    plan_all(database)
    assert database.read(lambda tx: tx.scalar(sa.select(tables.callback_cursor.c.position))) == 8
    batch = open_batch(service, "https://127.0.0.1/", "batch.opened")
    plan_all(database)
    (delivery,) = service.webhooks.deliveries_of_batch(batch.batch.id)
    assert delivery.event == f"batch:{batch.batch.id}:opened"


@mutant(
    "callbacks-to-one-host-have-lanes-of-their-own",
    "core.webhooks.deliveries:_choose",
    "row.lane or row.webhook_id",
    "row.webhook_id",
)
def test_callbacks_to_one_host_share_a_lane(service: Service, database: Database) -> None:
    """A host that hangs holds one share of the dispatcher's threads, whatever the number of its callbacks."""
    for number in range(8):
        open_batch(service, f"https://127.0.0.1/{number}", "batch.opened")
    other = open_batch(service, "https://127.0.0.2/", "batch.opened")
    plan_all(database)
    lease = timedelta(minutes=1)
    claims, _ = database.write(deliveries.claim, lease, 100, {}, 2)
    assert other.callback is not None
    assert Counter(claim.url.split("/")[2] for claim in claims) == {"127.0.0.1": 2, "127.0.0.2": 1}
    (hanging,) = {claim.lane for claim in claims if claim.webhook != other.callback.id}
    assert hanging < 0
    claims, _ = database.write(deliveries.claim, lease, 100, {hanging: 0}, 2)
    assert claims == []
    claims, _ = database.write(deliveries.claim, lease, 100, {hanging: 3}, 2)
    assert [claim.lane for claim in claims] == [hanging] * 3


def lane_of(database: Database, opened: Opened) -> int:
    query = sa.select(tables.webhooks.c.lane).where(tables.webhooks.c.batch_id == opened.batch.id)
    return database.read(lambda tx: tx.execute(query).scalar_one())


def due(database: Database) -> Counter[int | None]:
    """The number of due deliveries of each lane; those of other webhooks have none."""
    query = (
        sa.select(tables.webhooks.c.lane)
        .join_from(tables.deliveries, tables.webhooks, tables.webhooks.c.id == tables.deliveries.c.webhook_id)
        .where(tables.deliveries.c.state == Progress.PENDING, tables.deliveries.c.due_at <= tables.utc_now())
    )
    return database.read(lambda tx: Counter(tx.scalars(query)))


@mutant(
    "a-claimed-delivery-is-postponed",
    "core.webhooks.deliveries:postpone",
    "_deliveries.token.is_(None)",
    "sa.true()",
    (
        "f\"state = '{Progress.PENDING}' AND token IS NULL AND due_at <= {dialects.of(tx).now}\"",
        "f\"state = '{Progress.PENDING}' AND due_at <= {dialects.of(tx).now}\"",
    ),
)
@mutant(
    "deliveries-to-all-hosts-are-postponed", "core.webhooks.deliveries:postpone", "_webhooks.lane == lane", "sa.true()"
)
def test_deliveries_to_a_slow_host_are_postponed(
    service: Service, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for a given number, those with a claim, those to other hosts, and those of other webhooks."""
    monkeypatch.setattr(deliveries, "PAGE", 2)
    hook = service.webhooks.create("https://127.0.0.1/", ["batch.opened"], None).webhook.id
    slow = [open_batch(service, "https://127.0.0.1/", "batch.opened") for _ in range(8)]
    lane, other = (
        lane_of(database, slow[0]),
        lane_of(database, open_batch(service, "https://127.0.0.2/", "batch.opened")),
    )
    plan_all(database)
    while database.read(deliveries.behind):
        database.write(deliveries.plan, hook)
    assert len(database.write(deliveries.claim, timedelta(minutes=1), 1, {hook: 0, other: 0}, 1)[0]) == 1
    end_leases(service)
    assert due(database) == {lane: 8, other: 1, None: 9}
    assert [database.write(deliveries.postpone, lane, 3) for _ in range(3)] == [True, True, False]
    assert due(database) == {lane: 4, other: 1, None: 9}


class Hanging:
    """A sender. The host in its `hangs` doesn't respond until `wakes`."""

    def __init__(self) -> None:
        self.wakes = threading.Event()
        self.sent: Counter[str] = Counter()
        self.lock = threading.Lock()

    def check(self, url: str) -> None:
        pass

    def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        if "hanging" in url:
            assert self.wakes.wait(60)
        with self.lock:
            self.sent[url] += 1
        return SendResult(204, None, 3)


@mutant(
    "deliveries-to-a-hanging-host-are-never-postponed", "core.dispatcher:Dispatcher._round", "self._postpone()", "pass"
)
def test_a_hanging_host_has_few_due_deliveries(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each claim for others would read past all of them. Once it responds, it gets all, each once."""
    monkeypatch.setattr(core.dispatcher, "SLOW", 0.0)
    monkeypatch.setattr(deliveries, "POSTPONED", timedelta(seconds=5))
    monkeypatch.setattr(deliveries, "PAGE", 10)
    clock, sender = Clock(database), Hanging()
    service = Service(database, combiner=Inline, sender=sender)
    urls = [f"https://hanging.example/{number}" for number in range(40)]
    lane = {lane_of(database, open_batch(service, url, "batch.opened")) for url in urls}.pop()
    dispatcher = Dispatcher(database, sender, backoff=Backoff(), lease=timedelta(minutes=1), threads=4)
    try:
        for _ in range(2):  # the first round finds out that the host hangs
            dispatcher.run_once()
        assert due(database) == {lane: 10}  # a place of the dispatcher makes two quick sends a second
        open_batch(service, "https://other.example/", "batch.opened")
        dispatcher.run_once()
        poll = threading.Event()
        while not sender.sent:
            poll.wait(0.01)
        assert sender.sent == {"https://other.example/": 1}
    finally:
        sender.wakes.set()
        dispatcher.settle()
    clock.go(6)
    while dispatcher.run_once():
        dispatcher.settle()
    dispatcher.stop()
    assert sender.sent == dict.fromkeys([*urls, "https://other.example/"], 1)


@mutant(
    "an-earlier-release-may-get-callbacks",
    "core.batches.writing:BatchWrites._open",
    "operation.opening.has_policies",
    "False",
)
def test_a_release_that_would_mistreat_a_callback_must_be_gone(
    service: Service, database: Database, receiver: Receiver
) -> None:
    """It would send the events of all batches to it."""
    with database.engine.begin() as tx:
        tx.execute(sa.update(tables.schema_support).values(oldest="0012"))
    with pytest.raises(errors.UpgradeNotFinished):
        open_batch(service, receiver.url)
    assert count(database, tables.batches) == count(database, tables.webhooks) == 0
