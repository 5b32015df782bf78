"""Deliveries: planned once, claimed by one dispatcher, sent again if no result was recorded, logged, and kept until
they are done."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

import core.dispatcher
from core import errors, feed, janitor
from core.batches import expiry
from core.batches.batch import Opening
from core.batches.callbacks import Callback
from core.commits.combiner import Inline
from core.dispatcher import Dispatcher
from core.feed import NewEvent
from core.processes import timers
from core.service import Service
from core.storage import statements, tables
from core.storage.database import Database
from core.webhooks import deliveries, delivery_log, due_times, message, subscriptions
from core.webhooks.addresses import Unfit
from core.webhooks.backoff import Backoff
from core.webhooks.deliveries import Claim, Record
from core.webhooks.delivery_log import Delivery, Progress
from core.webhooks.sender import SendResult
from core.webhooks.subscriptions import State
from tests.mutants import mutant
from tests.support import plans
from tests.support.clocks import Clock
from tests.support.waits import freeze_before, waits_for_a_lock

DAY = timedelta(days=1)
LEASE = timedelta(seconds=60)
OK = SendResult(204, None, 3)
FAILED = SendResult(500, None, 3)


class Script:
    """A sender that gives scripted answers, and records the events it was given."""

    def __init__(self, *answers: SendResult) -> None:
        self.answers = list(answers) or [OK]
        self.sent: list[tuple[str, dict[str, str], bytes]] = []
        self.lock = threading.Lock()

    def check(self, url: str) -> None:
        if "private" in url:
            raise Unfit("the host is an address that is not public")

    def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        with self.lock:
            self.sent.append((url, headers, body))
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def sender() -> Script:
    return Script()


@pytest.fixture
def service(database: Database, sender: Script) -> Iterator[Service]:
    service_ = Service(database, combiner=Inline, sender=sender)
    yield service_
    service_.stop()


def hook(service: Service, types: list[str] | None = None, name: str = "a") -> int:
    return service.webhooks.create(f"https://{name}.example/", types, None).webhook.id


def append(service: Service, *ids: str, type: str = "card.charged") -> None:
    service.feed.append([NewEvent(id, type) for id in ids])


def plan(service: Service) -> None:
    for webhook in service.database.read(deliveries.behind):
        while service.database.write(deliveries.plan, webhook):
            pass


def claim(service: Service, limit: int = 100, room: dict[int, int] | None = None, share: int = 100) -> list[Claim]:
    return service.database.write(deliveries.claim, LEASE, limit, room or {}, share)[0]


def record(service: Service, claim: Claim, answer: SendResult, backoff: Backoff = Backoff()) -> Progress | None:  # noqa: B008
    entry = Record(claim=claim, answer=answer, chance=0.5)
    return service.database.write(deliveries.record, [entry], backoff)[0]


def log(service: Service, webhook: int) -> list[Delivery]:
    return service.webhooks.deliveries(webhook, None, None, 1000)[0]


def make_due(service: Service, delivery: int | None = None) -> None:
    """Make deliveries due, as if their lease or pause were over for a second: OceanBase's clock moves in steps."""
    with service.database.engine.begin() as connection:
        now = connection.scalar(sa.select(tables.utc_now()))
        assert now is not None
        query = sa.update(tables.deliveries).where(tables.deliveries.c.state == "pending")
        if delivery is not None:
            query = query.where(tables.deliveries.c.id == delivery)
        connection.execute(query.values(due_at=now - timedelta(seconds=1)))


def seconds_until(service: Service, delivery: Delivery) -> float:
    now = service.database.read(lambda tx: tx.scalar(sa.select(tables.utc_now())))
    assert delivery.next_attempt_at is not None
    assert now is not None
    return (delivery.next_attempt_at - now).total_seconds()


def test_a_webhook_gets_events_after_its_creation(service: Service) -> None:
    """With its types, or with all; each event once, however often it is planned."""
    append(service, "before")
    unfiltered, filtered = hook(service), hook(service, ["card.charged", "batch.completed"])
    append(service, "one")
    append(service, "two", type="other")
    batch = service.batches.open(Opening(sealed=True)).batch.id
    plan(service)
    plan(service)
    assert [delivery.event for delivery in reversed(log(service, unfiltered))] == [
        *("one", "two", f"batch:{batch}:opened", f"batch:{batch}:sealed"),
        *(f"batch:{batch}:completed", f"batch:{batch}:succeeded"),
    ]
    assert [delivery.event for delivery in log(service, filtered)] == [f"batch:{batch}:completed", "one"]
    assert service.webhooks.get(filtered).position == service.feed.head()
    assert service.database.read(deliveries.behind) == []


def test_planning_works_in_pages(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page in its own transaction; a crash between two loses nothing and duplicates nothing."""
    monkeypatch.setattr(deliveries, "PAGE", 3)
    webhook = hook(service)
    append(service, *(str(number) for number in range(10)))
    assert service.database.write(deliveries.plan, webhook)
    assert [delivery.position for delivery in log(service, webhook)] == [3, 2, 1]
    plan(service)
    assert [delivery.position for delivery in log(service, webhook)] == list(range(10, 0, -1))


@mutant(
    "a-backlog-is-planned-ahead-of-its-receiver",
    "core.webhooks.deliveries:plan",
    "row is None or row.state != State.ACTIVE or _is_ahead(tx, webhook, row.position)",
    "row is None or row.state != State.ACTIVE",
)
@mutant(
    "a-claimed-delivery-holds-planning-back",
    "core.webhooks.deliveries:_is_ahead",
    "row is not None and row.state == Progress.PENDING and not row.attempts and row.token is None",
    "row is not None and row.state == Progress.PENDING and not row.attempts",
)
@mutant(
    "a-failed-delivery-holds-planning-back",
    "core.webhooks.deliveries:_is_ahead",
    "row is not None and row.state == Progress.PENDING and not row.attempts and row.token is None",
    "row is not None and row.state == Progress.PENDING and row.token is None",
)
def test_no_more_is_planned_for_a_receiver_that_is_far_behind(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its first deliveries are claimed, or were tried. Other webhooks don't wait for it."""
    monkeypatch.setattr(deliveries, "PAGE", 2)
    monkeypatch.setattr(deliveries, "AHEAD", 4)
    monkeypatch.setattr(deliveries, "CANDIDATES", 0)  # in the order of their positions
    slow = hook(service)
    append(service, *(str(number) for number in range(1, 21)))

    def planned() -> int:
        plan(service)
        return service.webhooks.get(slow).position

    assert planned() == planned() == 6
    assert {claimed.event.position for claimed in claim(service, limit=2)} == {1, 2}
    assert planned() == planned() == 8
    for failed in claim(service, limit=2):
        record(service, failed, FAILED)
    assert planned() == planned() == 10
    other = hook(service, name="b")
    append(service, "21")
    plan(service)
    assert service.webhooks.get(slow).position == 10
    assert [delivery.position for delivery in log(service, other)] == [21]


def test_everything_is_delivered_though_planning_waits_for_the_receiver(
    service: Service, sender: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a dispatcher that stops when nothing is left; also if most events are of types that nobody wants."""
    monkeypatch.setattr(deliveries, "PAGE", 3)
    monkeypatch.setattr(deliveries, "AHEAD", 5)
    hook(service)
    hook(service, ["rare"], name="b")
    for number in range(40):
        append(service, str(number), type="rare" if number % 7 == 0 else "frequent")
    dispatcher = Dispatcher(service.database, sender, backoff=Backoff(), lease=LEASE, threads=4)
    while dispatcher.run_once():
        dispatcher.settle()
    dispatcher.stop()
    sent = Counter((url, headers["webhook-id"]) for url, headers, _ in sender.sent)
    assert sent == Counter(
        [("https://a.example/", str(number)) for number in range(40)]
        + [("https://b.example/", str(number)) for number in range(0, 40, 7)]
    )


def test_concurrent_planning_plans_each_event_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """While events are being appended."""
    monkeypatch.setattr(deliveries, "PAGE", 5)
    webhook = hook(service)
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            plan(service)

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run) for _ in range(2)]
        for number in range(60):
            append(service, f"{number}a", f"{number}b")
        stop.set()
        for run in runs:
            run.result()
    plan(service)
    assert [delivery.position for delivery in log(service, webhook)] == list(range(120, 0, -1))


def test_a_claimed_delivery_is_not_claimed_again(service: Service) -> None:
    """Until its lease is over; then another dispatcher sends it, with the same id."""
    webhook = hook(service)
    append(service, "one", "two")
    plan(service)
    first = claim(service, limit=1)
    second = claim(service)
    assert sorted(claim_.event.id for claim_ in first + second) == ["one", "two"]
    assert claim(service) == []
    make_due(service, first[0].delivery)
    (claim_,) = claim(service)
    assert (claim_.event.id, claim_.delivery) == (first[0].event.id, first[0].delivery)
    # The slow dispatcher has sent it nevertheless: that is logged, and doesn't settle the delivery.
    assert record(service, first[0], OK) is None
    assert claim(service) == []
    assert record(service, claim_, FAILED) is Progress.PENDING
    delivery = next(entry for entry in log(service, webhook) if entry.id == claim_.delivery)
    assert ([attempt.status for attempt in delivery.log], delivery.attempts, delivery.state) == (
        [204, 500],
        1,
        "pending",
    )


@mutant(
    "a-merged-claim-takes-what-another-has-claimed",
    "core.webhooks.deliveries:claim",
    "f\"state = '{Progress.PENDING}' AND due_at <= {dialects.of(tx).now}\"",
    "f\"state = '{Progress.PENDING}'\"",
)
def test_concurrent_claims_never_overlap(service: Service) -> None:
    """Each delivery is claimed by one of them, whichever is first."""
    hook(service)
    append(service, *(str(number) for number in range(150)))
    plan(service)
    start = threading.Barrier(6)

    def run() -> list[int]:
        start.wait()
        claims: list[int] = []
        while service.database.read(deliveries.is_due):
            claims += [claim_.delivery for claim_ in claim(service, limit=3)]
        return claims

    with ThreadPoolExecutor(6) as pool:
        runs = [pool.submit(run) for _ in range(6)]
        claims = [delivery for run_ in runs for delivery in run_.result()]
    assert len(claims) == 150
    assert len(set(claims)) == 150


def test_no_webhook_gets_more_than_its_share(service: Service) -> None:
    """A webhook with many due deliveries leaves room for one with a single delivery, in the same claim and in a later
    one."""
    crowd = hook(service, ["crowd"])
    quiet = hook(service, ["quiet"])
    append(service, *(str(number) for number in range(200)), type="crowd")
    append(service, "alone", type="quiet")
    plan(service)
    first = claim(service, limit=10, share=4)
    assert Counter(claim_.webhook for claim_ in first) == {crowd: 4, quiet: 1}
    append(service, "another", type="quiet")
    plan(service)
    second = claim(service, limit=10, room={crowd: 0}, share=4)
    assert [claim_.webhook for claim_ in second] == [quiet]
    third = claim(service, limit=10, room={crowd: 7}, share=4)
    assert Counter(claim_.webhook for claim_ in third) == {crowd: 7}


def test_webhooks_that_may_claim_much_leave_room_for_others(service: Service) -> None:
    """Three have a backlog, and as much room as a dispatcher gives to one webhook; a fourth has a later delivery."""
    crowds = [hook(service, [f"crowd{number}"]) for number in range(3)]
    quiet = hook(service, ["quiet"])
    for number in range(3):
        append(service, *(f"{number}-{place}" for place in range(400)), type=f"crowd{number}")
    append(service, "alone", type="quiet")
    plan(service)
    claims = claim(service, limit=1024, room=dict.fromkeys(crowds, 256), share=4)
    counts = Counter(claim_.webhook for claim_ in claims)
    assert counts[quiet] == 1
    assert all(counts[crowd] <= 256 for crowd in crowds)


def test_a_delivery_is_tried_until_it_dies(service: Service) -> None:
    """With growing pauses; each attempt is in the log."""
    webhook = hook(service)
    append(service, "one")
    plan(service)
    ceilings = []
    for _ in range(10):
        make_due(service)
        record(service, claim(service)[0], FAILED)
        (delivery,) = log(service, webhook)
        if delivery.state is Progress.PENDING:
            ceilings.append(seconds_until(service, delivery))
    assert ceilings == pytest.approx([2.5, 12.5, 62.5, 312.5, 1562.5, 7812.5, 39_062.5, 43_200, 43_200], abs=2)
    assert (delivery.state, delivery.attempts, len(delivery.log)) == (Progress.DEAD, 10, 10)
    assert delivery.next_attempt_at is None
    make_due(service)
    assert claim(service) == []


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (SendResult(429, None, 1, retry_after=600), 600),
        (SendResult(503, None, 1, retry_after=10**9), 86_400),
        (SendResult(500, None, 1, retry_after=600), 2.5),
        (SendResult(None, "the connection was refused", 1), 2.5),
        (SendResult(302, "a redirect, which is not followed", 1), 2.5),
        (SendResult(200, "the connection was closed in the middle of the response", 1), 2.5),
        (SendResult(404, None, 1), 2.5),
    ],
)
def test_every_other_answer_is_a_failure(service: Service, answer: SendResult, seconds: float) -> None:
    """Retry-After is respected if the receiver reports too many requests."""
    webhook = hook(service)
    append(service, "one")
    plan(service)
    assert record(service, claim(service)[0], answer) is Progress.PENDING
    (delivery,) = log(service, webhook)
    assert seconds_until(service, delivery) == pytest.approx(seconds, abs=2)
    assert (delivery.log[0].status, delivery.log[0].error) == (answer.status, answer.error)


def test_a_410_disables_the_webhook_and_its_deliveries(service: Service) -> None:
    """Its pending deliveries die, and nothing is planned or redelivered."""
    webhook = hook(service)
    append(service, "one", "two")
    plan(service)
    assert record(service, claim(service, limit=1)[0], SendResult(410, None, 1)) is Progress.DEAD
    assert service.webhooks.get(webhook).state is State.DISABLED
    assert claim(service) == []
    append(service, "three")
    plan(service)
    assert [delivery.state for delivery in log(service, webhook)] == [Progress.DEAD, Progress.DEAD]
    with pytest.raises(errors.WebhookDisabled):
        service.webhooks.redeliver(webhook)


def test_a_redelivery_restarts_the_count_and_keeps_the_log(service: Service) -> None:
    """Of one event, by position or id, in any state; or of all that are dead."""
    webhook = hook(service)
    append(service, "one", "two", "three")
    plan(service)
    policy = Backoff(tries=1)
    for claim_ in claim(service):
        record(service, claim_, OK if claim_.event.id == "one" else FAILED, policy)
    assert service.webhooks.redeliver(webhook) == 2
    assert [delivery.state for delivery in log(service, webhook)] == ["pending", "pending", "delivered"]
    assert service.webhooks.redeliver(webhook, position=1) == 1
    assert service.webhooks.redeliver(webhook, event="one") == 1
    claims = claim(service)
    assert sorted(claim_.event.id for claim_ in claims) == ["one", "three", "two"]
    assert service.webhooks.redeliver(webhook, event="two") == 1
    assert claim(service) == []  # a delivery under way is not sent twice at once
    for claim_ in claims:
        assert record(service, claim_, OK) is Progress.DELIVERED
    assert [(delivery.attempts, len(delivery.log)) for delivery in log(service, webhook)] == [(1, 2)] * 3
    assert service.webhooks.redeliver(webhook) == 0


def test_an_impossible_redelivery_is_refused(service: Service) -> None:
    """An event of another type, one from before the webhook, one that is not planned yet, none at all."""
    append(service, "before")
    webhook = hook(service, ["wanted"])
    append(service, "other")
    plan(service)
    append(service, "later", type="wanted")
    for position in (1, 2, 3, 99):
        with pytest.raises(errors.InvalidRequest, match=r"body\.position"):
            service.webhooks.redeliver(webhook, position=position)
    for event in ("before", "other", "later", "none"):
        with pytest.raises(errors.InvalidRequest, match=r"body\.event"):
            service.webhooks.redeliver(webhook, event=event)
    with pytest.raises(errors.WebhookNotFound):
        service.webhooks.redeliver(webhook + 1)


@pytest.mark.parametrize("chosen", [{}, {"position": 1}, {"event": "one"}], ids=["dead", "position", "event"])
def test_a_redelivery_during_the_deletion_finds_no_webhook(server_database: Database, chosen: dict[str, Any]) -> None:
    """Not an event that was never planned for it."""
    service = Service(server_database, combiner=Inline, sender=Script())
    webhook = hook(service)
    append(service, "one")
    plan(service)
    with Database(server_database.url.render_as_string(hide_password=False)) as slow:
        has_stopped, wake = freeze_before(slow, f"SELECT {tables.deliveries.name}.id")
        with ThreadPoolExecutor(1) as threads:
            redelivery = threads.submit(delivery_log.redeliver, slow, webhook, **chosen)
            assert has_stopped.wait(60)
            service.webhooks.delete(webhook)
            wake.set()
            with pytest.raises(errors.WebhookNotFound):
                redelivery.result(60)
    service.stop()


def age_events(service: Service) -> None:
    with service.database.engine.begin() as connection:
        long_ago = connection.scalar(sa.select(tables.utc_now())) - 31 * DAY  # type: ignore[operator]
        connection.execute(sa.update(tables.feed).values(appended_at=long_ago))


def count_rows(service: Service) -> tuple[int, int, int]:
    """The numbers of events, deliveries and attempts."""
    with service.database.engine.connect() as connection:
        feed_, deliveries_, attempts = (
            connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0
            for table in (tables.feed, tables.deliveries, tables.delivery_attempts)
        )
        return feed_, deliveries_, attempts


def test_events_that_a_webhook_still_needs_are_not_trimmed(service: Service) -> None:
    """First those that it has to plan, then those that it has to send; then all are trimmed, with the deliveries and
    their log."""
    webhook = hook(service)
    append(service, "one", "two", "three")
    age_events(service)
    janitor.run_once(service.database, expiry.Policy())
    assert count_rows(service) == (3, 0, 0)
    plan(service)
    claims = {claim_.event.id: claim_ for claim_ in claim(service)}
    record(service, claims["one"], OK)
    record(service, claims["three"], FAILED, Backoff(tries=1))
    janitor.run_once(service.database, expiry.Policy())
    assert count_rows(service) == (2, 2, 1)
    with pytest.raises(errors.PositionTrimmed):
        service.webhooks.redeliver(webhook, position=1)
    assert service.webhooks.redeliver(webhook, event="three") == 1
    record(service, claims["two"], OK)
    record(service, claim(service)[0], OK)
    janitor.run_once(service.database, expiry.Policy())
    assert count_rows(service) == (0, 0, 0)


def test_a_disabled_or_deleted_webhook_needs_nothing(service: Service) -> None:
    """Its events are trimmed when their time has come."""
    disabled_hook, deleted_hook = hook(service), hook(service)
    append(service, "one", "two")
    plan(service)
    (first,) = [claim_ for claim_ in claim(service) if (claim_.webhook, claim_.event.id) == (disabled_hook, "one")]
    record(service, first, SendResult(410, None, 1))
    service.webhooks.delete(deleted_hook)
    with pytest.raises(errors.WebhookNotFound):
        service.webhooks.get(deleted_hook)
    assert count_rows(service) == (2, 2, 1)
    age_events(service)
    janitor.run_once(service.database, expiry.Policy())
    assert count_rows(service) == (0, 0, 0)


def test_a_delivery_of_a_deleted_webhook_is_not_sent(service: Service) -> None:
    """Also if a crash left it behind, or if it was under way when the webhook was deleted."""
    webhook = hook(service)
    append(service, "one", "two")
    plan(service)
    (claim_,) = claim(service, limit=1)
    with service.database.engine.begin() as connection:
        connection.execute(sa.delete(tables.webhooks))
    assert claim(service) == []
    assert record(service, claim_, OK) is Progress.DELIVERED
    with service.database.engine.begin() as connection:
        connection.execute(sa.delete(tables.deliveries))
    assert record(service, claim_, OK) is None
    with pytest.raises(errors.WebhookNotFound):
        service.webhooks.delete(webhook)


def test_a_large_webhook_is_deleted_in_chunks(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completely, with the log."""
    monkeypatch.setattr(subscriptions, "CHUNK", 3)
    webhook, other = hook(service), hook(service)
    append(service, *(str(number) for number in range(10)))
    plan(service)
    for claim_ in claim(service):
        record(service, claim_, FAILED, Backoff(tries=1))
    assert service.webhooks.redeliver(other) == 10
    service.webhooks.delete(webhook)
    assert count_rows(service) == (10, 10, 10)
    assert {claim_.webhook for claim_ in claim(service)} == {other}


def test_a_batch_lists_its_undelivered_events(service: Service) -> None:
    """With the webhook, its attempts, the last answer, and the time of the next try."""
    webhook = hook(service)
    batch = service.batches.open(Opening(sealed=True)).batch.id
    append(service, "another")
    plan(service)
    for claim_ in claim(service):
        answer = FAILED if claim_.event.type == "batch.completed" else OK
        record(service, claim_, answer)
    (undelivered,) = service.database.read(delivery_log.undelivered, batch)
    assert (undelivered.webhook, undelivered.event, undelivered.state, undelivered.attempts) == (
        webhook,
        f"batch:{batch}:completed",
        "pending",
        1,
    )
    assert undelivered.last is not None
    assert undelivered.last.status == 500
    assert undelivered.next_attempt_at is not None
    assert [delivery.type for delivery in service.webhooks.deliveries_of_batch(batch)] == [
        *("batch.succeeded", "batch.completed", "batch.sealed", "batch.opened"),
    ]
    with pytest.raises(errors.BatchNotFound):
        service.webhooks.deliveries_of_batch(batch + 1)


def test_the_dispatcher_sends_all_due_deliveries(service: Service, sender: Script) -> None:
    """A failed delivery is left for later; a dispatcher that stops starts no further one."""
    sender.answers = [FAILED, OK]
    webhook = hook(service)
    append(service, *(str(number) for number in range(50)))
    backoff = Backoff(first=DAY.total_seconds())  # however slow this machine is, the pause isn't over by itself
    dispatcher = Dispatcher(service.database, sender, backoff=backoff, lease=LEASE, threads=4, chance=lambda: 0.5)
    while dispatcher.run_once():
        dispatcher.settle()
    states = [delivery.state for delivery in log(service, webhook)]
    assert (states.count(Progress.DELIVERED), states.count(Progress.PENDING)) == (49, 1)
    make_due(service)
    dispatcher.run_once()
    dispatcher.settle()
    assert {delivery.state for delivery in log(service, webhook)} == {Progress.DELIVERED}
    assert len(sender.sent) == 51
    append(service, "late")
    dispatcher.stop()
    assert dispatcher.run_once() == 0
    assert len(sender.sent) == 51


def settle(dispatcher: Dispatcher) -> None:
    """As `Dispatcher.settle`, but fails if that takes long."""
    settling = threading.Thread(target=dispatcher.settle, daemon=True)
    settling.start()
    settling.join(20)
    assert not settling.is_alive(), "claims are left that nothing will free"


@mutant(
    "a-dispatcher-claims-without-a-thread-to-record",
    "core.dispatcher:Dispatcher._start_threads",
    "self._records.start()",
    "pass",
)
@mutant(
    "a-dispatcher-counts-on-a-thread-that-did-not-start",
    "core.dispatcher:Dispatcher._start_threads",
    'self._claimer = threads.start(_run, self._claims, name="dispatcher-claims")',
    "self._claimer = threading.main_thread()\nself._claimer = threads.start(_run, self._claims, "
    'name="dispatcher-claims")',
)
@mutant(
    "a-second-sender-that-cannot-start-ends-the-first",
    "core.dispatcher:Dispatcher._take",
    "errors.Unavailable",
    "ZeroDivisionError",
)
@pytest.mark.parametrize("refused", ["combiner-deliveries", "dispatcher-claims", "dispatcher-0", "dispatcher-1"])
def test_a_thread_that_cannot_start_can_start_later(
    service: Service, sender: Script, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Until then, a round without a thread of each kind fails and claims nothing. Without a second thread to send, the
    first sends everything."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    webhooks = hook(service, name="a"), hook(service, name="b")
    append(service, *(str(number) for number in range(100)))
    dispatcher = Dispatcher(service.database, sender, backoff=Backoff(), lease=LEASE, threads=2)
    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", refuse)
        if refused != "dispatcher-1":
            with pytest.raises(errors.Unavailable, match="no more threads"):
                dispatcher.run_once()
            settle(dispatcher)
            assert not sender.sent
            patches.undo()
        while dispatcher.run_once():
            settle(dispatcher)
        assert len(sender.sent) == 200
    dispatcher.stop()
    for webhook in webhooks:
        assert {delivery.state for delivery in log(service, webhook)} == {Progress.DELIVERED}


@mutant(
    "a-result-that-is-not-accepted-keeps-its-claim", "core.dispatcher:Dispatcher._record", "self._free([claim])", "pass"
)
def test_a_result_that_is_not_accepted_frees_its_claim(
    service: Service, sender: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claims expire, and the deliveries are sent again. Meanwhile, the webhook has room for others."""
    webhook = hook(service)
    append(service, "lost")
    dispatcher = Dispatcher(service.database, sender, backoff=Backoff(), lease=LEASE, threads=1)

    def refuse(*_: object) -> None:
        raise errors.Overloaded("too many deliveries arrive")

    with monkeypatch.context() as patches:
        patches.setattr(dispatcher._records, "submit", refuse)
        assert dispatcher.run_once()
        settle(dispatcher)
    assert [delivery.state for delivery in log(service, webhook)] == [Progress.PENDING]
    make_due(service)
    append(service, "next")
    while dispatcher.run_once():
        dispatcher.settle()
    dispatcher.stop()
    assert [delivery.state for delivery in log(service, webhook)] == [Progress.DELIVERED] * 2
    assert len(sender.sent) == 3


def test_a_receiver_that_hangs_delays_nobody_else(service: Service) -> None:
    """Its share of the threads waits for it; the others' deliveries continue."""
    release = threading.Event()

    class Hanging(Script):
        def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
            if "slow" in url:
                release.wait(60)
            return super().send(url, headers, body)

    sender = Hanging()
    slow, quick = hook(service, name="slow"), hook(service, name="quick")
    append(service, *(str(number) for number in range(40)))
    dispatcher = Dispatcher(service.database, sender, backoff=Backoff(), lease=LEASE, threads=8)
    poll = threading.Event()
    try:
        while {delivery.state for delivery in log(service, quick)} != {Progress.DELIVERED}:
            dispatcher.run_once()
            poll.wait(0.01)
        assert {delivery.state for delivery in log(service, slow)} == {Progress.PENDING}
    finally:
        release.set()
    while dispatcher.run_once():
        dispatcher.settle()
    dispatcher.settle()
    dispatcher.stop()
    assert {delivery.state for delivery in log(service, slow)} == {Progress.DELIVERED}
    assert len(sender.sent) == 80


@mutant(
    "receivers-that-hang-get-every-thread",
    "core.dispatcher:Dispatcher._take",
    "others < max(1, self._threads // 2)",
    "True",
)
def test_any_number_of_receivers_that_hang_delay_no_receiver_that_works(service: Service) -> None:
    """Half of the threads wait for them, each for another one, as for the callbacks of a tenant to many hosts."""
    release = threading.Event()

    class Hanging(Script):
        def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
            answer = super().send(url, headers, body)
            if "hangs" in url:
                release.wait(60)
            return answer

    sender = Hanging()
    works = hook(service, ["paid"], name="works")
    dispatcher = Dispatcher(service.database, sender, backoff=Backoff(), lease=LEASE, threads=8)
    poll = threading.Event()

    def deliver(event: str) -> None:
        append(service, event, type="paid")
        while event not in {entry.event for entry in log(service, works) if entry.state is Progress.DELIVERED}:
            dispatcher.run_once()
            poll.wait(0.01)

    try:
        deliver("before")
        for number in range(20):
            hook(service, ["late"], name=f"hangs-{number}")
        append(service, "late", type="late")
        while len(sender.sent) < 5:
            dispatcher.run_once()
            poll.wait(0.01)
        for number in range(5):
            deliver(f"beside-{number}")
        assert len(sender.sent) == 1 + 4 + 5
    finally:
        release.set()
    dispatcher.settle()  # all is claimed already, so a round alone finds nothing
    while dispatcher.run_once():
        dispatcher.settle()
    dispatcher.stop()
    assert len(sender.sent) == 1 + 20 + 5


class Crowd(Script):
    """A sender that counts the sends to "busy" that are under way. After `free` of them, each waits for a permit, and
    then answers with `late`."""

    def __init__(self, free: int, late: SendResult) -> None:
        super().__init__()
        self.free = free
        self.late = late
        self.permits = threading.Semaphore(0)
        self.changed = threading.Condition()
        self.under_way = 0
        self.most = 0

    def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        answer = super().send(url, headers, body)
        if "busy" not in url:
            return answer
        with self.changed:
            self.free -= 1
            waits = self.free < 0
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            self.changed.notify_all()
        if waits:
            assert self.permits.acquire(timeout=60)
            answer = self.late
        with self.changed:
            self.under_way -= 1
            self.changed.notify_all()
        return answer

    def wait_for(self, under_way: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.under_way >= under_way, 60), self.under_way


def crowded(service: Service, sender: Crowd, count: int) -> tuple[Dispatcher, int]:
    """A dispatcher of eight threads, and a webhook whose receiver was quick, and has half of them now."""
    busy = hook(service, ["busy"], name="busy")
    append(service, *(f"b{number}" for number in range(count)), type="busy")
    dispatcher = Dispatcher(
        service.database, sender, backoff=Backoff(first=DAY.total_seconds()), lease=LEASE, threads=8, chance=lambda: 0.5
    )
    dispatcher.run_once()
    sender.wait_for(4)
    return dispatcher, busy


SLOW = SendResult(204, None, 10_000)


@mutant("a-quick-receiver-gets-every-thread", "core.dispatcher:Dispatcher._take", "free > self._threads // 2", "True")
@pytest.mark.parametrize("late", [FAILED, SLOW])
def test_a_quick_receiver_gets_half_of_the_threads(service: Service, late: SendResult) -> None:
    """While it is quick, and no more: another webhook's deliveries go on though all of its sends hang. After a failure
    or a slow answer it has a quarter again."""
    sender = Crowd(60, late)
    dispatcher, busy = crowded(service, sender, 200)
    quiet = hook(service, ["quiet"], name="quiet")

    def deliver_others(count: int) -> None:
        append(service, *(f"{sender.under_way}-{number}" for number in range(count)), type="quiet")
        delivered = count + sum(delivery.state is Progress.DELIVERED for delivery in log(service, quiet))
        poll = threading.Event()
        while sum(delivery.state is Progress.DELIVERED for delivery in log(service, quiet)) < delivered:
            dispatcher.run_once()
            poll.wait(0.01)

    deliver_others(20)
    assert (sender.under_way, sender.most) == (4, 4)
    sender.permits.release(4)
    while len([url for url, _, _ in sender.sent if "busy" in url]) < 66:
        sender.wait_for(1)
    deliver_others(20)
    assert sender.under_way == 2
    assert len([url for url, _, _ in sender.sent if "busy" in url]) == 66
    sender.permits.release(200)
    dispatcher.settle()
    while dispatcher.run_once():
        dispatcher.settle()
    dispatcher.stop()
    assert len(sender.sent) == 240
    states = Counter(delivery.state for delivery in log(service, busy))
    assert states == ({Progress.DELIVERED: 200} if late is SLOW else {Progress.DELIVERED: 60, Progress.PENDING: 140})


def test_a_dispatcher_that_stops_gives_back_what_it_has_not_sent(service: Service) -> None:
    """Sends under way are finished and recorded; another dispatcher can claim the rest at once."""
    sender = Crowd(60, OK)
    dispatcher, busy = crowded(service, sender, 200)
    stop = threading.Thread(target=dispatcher.stop)
    stop.start()
    poll = threading.Event()
    while not dispatcher._stopping:
        poll.wait(0.01)
    sender.permits.release(200)
    stop.join()
    states = Counter(delivery.state for delivery in log(service, busy))
    assert states == {Progress.DELIVERED: 64, Progress.PENDING: 136}
    claims = claim(service, limit=200, share=200)
    assert len(claims) == 136
    assert all(delivery.attempts == len(delivery.log) for delivery in log(service, busy))


def test_a_receiver_that_is_gone_gets_nothing_that_waits(service: Service) -> None:
    """Of many claimed deliveries, only those under way are sent after a 410; the rest dies."""
    sender = Crowd(60, SendResult(410, None, 1))
    dispatcher, busy = crowded(service, sender, 200)
    sender.permits.release(200)
    dispatcher.settle()
    while dispatcher.run_once():
        dispatcher.settle()
    dispatcher.stop()
    assert service.webhooks.get(busy).state is State.DISABLED
    states = Counter(delivery.state for delivery in log(service, busy))
    assert states == {Progress.DELIVERED: 60, Progress.DEAD: 140}
    assert len(sender.sent) < 80


@mutant(
    "a-claim-is-sent-however-long-it-has-waited",
    "core.dispatcher:Dispatcher._take",
    "time.monotonic() - since < PATIENCE",
    "True",
)
def test_a_claim_that_has_waited_too_long_is_not_sent(
    service: Service, sender: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease could end during the send. It is given back, which is no attempt."""
    webhook = hook(service)
    append(service, *(str(number) for number in range(10)))
    dispatcher = Dispatcher(service.database, sender, backoff=Backoff(), lease=LEASE, threads=4)
    given_back = threading.Event()
    original = deliveries.record

    def record(tx: Connection, records: Sequence[Record], backoff: Backoff) -> list[Progress | None]:
        results = original(tx, records, backoff)
        assert results == [Progress.PENDING] * len(records)
        assert sender.sent == []
        given_back.set()
        monkeypatch.undo()
        return results

    monkeypatch.setattr(core.dispatcher, "PATIENCE", 0)
    monkeypatch.setattr(deliveries, "record", record)
    dispatcher.run_once()
    assert given_back.wait(60)
    while dispatcher.run_once():
        dispatcher.settle()
    dispatcher.settle()
    dispatcher.stop()
    assert len(sender.sent) == 10
    assert {(delivery.state, delivery.attempts, len(delivery.log)) for delivery in log(service, webhook)} == {
        (Progress.DELIVERED, 1, 1)
    }


ANSWERS = [
    *(OK, FAILED, OK, SendResult(503, None, 1, retry_after=3000), SendResult(None, "the connection was refused", 7)),
    *(SendResult(410, None, 1), OK, None, OK, OK, FAILED),
]
"""The results of deliveries that share a transaction. None: nothing was sent."""
LOST, REMOVED, LAST_TRY = 8, 9, 10
"""The places of deliveries that were claimed again, removed, and tried often before."""


@mutant("a-merged-record-settles-anothers-claim", "core.webhooks.deliveries:record", "token != claim.token", "False")
def test_results_that_share_a_transaction_count_as_if_alone(service: Service) -> None:
    """Each with its own answer, token and number of attempts; a lost or removed delivery affects no other."""
    columns = tables.deliveries.c
    outcomes = []
    for name in ("together", "alone"):
        webhook = hook(service, [name])
        append(service, *(f"{name}{number:02}" for number in range(len(ANSWERS))), type=name)
        plan(service)
        claims = sorted(claim(service), key=lambda claim_: claim_.event.position)
        with service.database.engine.begin() as connection:

            def change(place: int, claims: list[Claim] = claims, tx: Connection = connection, **values: object) -> None:
                tx.execute(sa.update(tables.deliveries).where(columns.id == claims[place].delivery).values(**values))

            change(LOST, token=b"x" * 16)
            change(LAST_TRY, attempts=9)
            connection.execute(sa.delete(tables.deliveries).where(columns.id == claims[REMOVED].delivery))
        records = [
            Record(claim=claim_, answer=answer, chance=0.5) for claim_, answer in zip(claims, ANSWERS, strict=True)
        ]
        parts = [records] if name == "together" else [[entry] for entry in records]
        results = [
            result for part in parts for result in service.database.write(deliveries.record, part, Backoff(first=1000))
        ]
        rows = [
            (
                *(delivery.state, delivery.attempts, [(entry.status, entry.error) for entry in delivery.log]),
                None if delivery.next_attempt_at is None else round(seconds_until(service, delivery), -2),
            )
            for delivery in log(service, webhook)
        ]
        outcomes.append((results, rows, service.webhooks.get(webhook).state))
    assert outcomes[0] == outcomes[1]
    pending, delivered, dead = Progress.PENDING, Progress.DELIVERED, Progress.DEAD
    assert outcomes[0][0] == [
        *(delivered, pending, delivered, pending, pending, dead, delivered, pending, None, None, dead),
    ]
    assert outcomes[0][2] is State.DISABLED


@mutant(
    "a-record-reads-tokens-without-a-lock",
    "core.webhooks.deliveries:_lock",
    "f\"SELECT id, token, attempts, {dialect.now} FROM {dialect.by_primary_key('deliveries')} WHERE id "
    "IN ({','.join(map(str, part))}) AND {condition} ORDER BY id{dialect.for_update()}{skip}\"",
    "f\"SELECT id, token, attempts, {dialect.now} FROM {dialect.by_primary_key('deliveries')} WHERE id "
    "IN ({','.join(map(str, part))}) AND {condition} ORDER BY id{skip}\"",
)
@pytest.mark.mariadb
def test_a_record_waits_for_a_claim_that_is_about_to_commit(mariadb_database: Database, sender: Script) -> None:
    """The delivery was claimed again, as its lease was over: the earlier result doesn't settle it."""
    service = Service(mariadb_database, combiner=Inline, sender=sender)
    webhook = hook(service)
    append(service, "one")
    plan(service)
    (first,) = claim(service)
    make_due(service)
    with ThreadPoolExecutor(1) as pool:
        with mariadb_database.engine.connect() as other:
            other.begin()
            ((again,), _) = deliveries.claim(other, LEASE, 1, {}, 1)
            result = pool.submit(record, service, first, OK)
            assert waits_for_a_lock(mariadb_database, result)
            statements.commit(other)
        assert result.result() is None
    assert record(service, again, FAILED) is Progress.PENDING
    assert [entry.status for entry in log(service, webhook)[0].log] == [204, 500]


@pytest.mark.mariadb
def test_a_locked_delivery_delays_no_other_record(mariadb_database: Database, sender: Script) -> None:
    """The others that shared its transaction are recorded, and it is recorded once it is free."""
    service = Service(mariadb_database, combiner=Inline, sender=sender)
    webhook = hook(service)
    append(service, *(str(number) for number in range(30)))
    plan(service)
    started = threading.Event()
    release = threading.Event()

    class Held(Script):
        def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
            started.set()
            assert release.wait(60)
            return super().send(url, headers, body)

    dispatcher = Dispatcher(mariadb_database, Held(), backoff=Backoff(), lease=LEASE, threads=16)
    dispatcher.run_once()
    assert started.wait(60)
    poll = threading.Event()
    with mariadb_database.engine.begin() as stranger:
        first = tables.deliveries.c.token.is_not(None)
        locked = stranger.scalar(sa.select(tables.deliveries.c.id).where(first).limit(1).with_for_update())
        release.set()
        while sum(delivery.state is Progress.DELIVERED for delivery in log(service, webhook)) < 29:
            dispatcher.run_once()
            poll.wait(0.01)
        assert [delivery.id for delivery in log(service, webhook) if delivery.state is Progress.PENDING] == [locked]
    dispatcher.settle()
    dispatcher.stop()
    assert {(delivery.state, len(delivery.log)) for delivery in log(service, webhook)} == {(Progress.DELIVERED, 1)}


def sent_in_a_round(dispatcher: Dispatcher, sender: Script) -> list[str]:
    """Receivers and ids of what one round sends."""
    dispatcher.run_once()
    dispatcher.settle()
    with sender.lock:
        calls, sender.sent = sender.sent, []
    return sorted(f"{url.removesuffix('.example/')} {headers['webhook-id']}" for url, headers, _ in calls)


@mutant(
    "a-locked-webhook-delays-all",
    "core.webhooks.deliveries:plan",
    "query.with_for_update(skip_locked=True)",
    "query.with_for_update()",
)
@mutant(
    "a-locked-timer-delays-everything",
    "core.processes.timers:_fire",
    "sa.select(_timers.token, _timers.data).where(*conditions, _timers.due_at <= tables.utc_now("
    ")).with_for_update(skip_locked=True)",
    "sa.select(_timers.token, _timers.data).where(*conditions, _timers.due_at <= tables.utc_now()).with_for_update()",
)
@pytest.mark.mariadb
def test_a_locked_webhook_or_timer_does_not_delay_others(server_database: Database, sender: Script) -> None:
    """Other webhooks' deliveries are planned and sent, and other timers fire, meanwhile."""
    service = Service(server_database, combiner=Inline, sender=sender)
    held, free = hook(service, name="held"), hook(service, name="free")
    with server_database.engine.begin() as tx:
        for name in ("held", "free"):
            values = {"name": "p", "instance": name, "timer": "t", "token": name, "due_at": tables.utc_now()}
            tx.execute(sa.insert(tables.timers).values(values))
    dispatcher = Dispatcher(server_database, sender, backoff=Backoff(), lease=LEASE, threads=4)

    sent = partial(sent_in_a_round, dispatcher, sender)
    with server_database.engine.begin() as stranger:
        for table, condition in (
            (tables.webhooks, tables.webhooks.c.id == held),
            (tables.timers, sa.and_(tables.timers.c.name == "p", tables.timers.c.instance == "held")),
        ):
            assert len(stranger.execute(sa.select(table).where(condition).with_for_update()).all()) == 1
        append(service, "first")
        assert sent() == ["https://free first", "https://free timer:free"]
    events = ("first", "timer:free", "timer:held")
    assert sent() == ["https://free timer:held", *(f"https://held {id}" for id in events)]
    dispatcher.stop()
    assert {delivery.state for webhook in (held, free) for delivery in log(service, webhook)} == {Progress.DELIVERED}


@mutant("a-round-plans-a-whole-backlog", "core.dispatcher:Dispatcher._prepare", "time.monotonic() >= until", "False")
def test_a_backlog_is_prepared_in_turns(service: Service, sender: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round sends before all of a long backlog is planned, for each webhook, and although many timers are due."""
    monkeypatch.setattr(core.dispatcher, "PREPARE", 0.0)
    monkeypatch.setattr(timers, "PAGE", 1)
    monkeypatch.setattr(deliveries, "PAGE", 2)
    for name in ("a", "b"):
        hook(service, name=name)
    append(service, *map(str, range(4)))
    with service.database.engine.begin() as tx:
        for name in ("1", "2"):
            due = {"due_at": datetime(2001, 1, int(name), tzinfo=UTC)}
            tx.execute(sa.insert(tables.timers).values(name="p", instance=name, timer="t", token=name, **due))
    dispatcher = Dispatcher(service.database, sender, backoff=Backoff(), lease=LEASE, threads=4)
    rounds = [sent_in_a_round(dispatcher, sender) for _ in range(3)]
    pages = [("0", "1"), ("2", "3"), ("timer:1", "timer:2")]
    assert rounds == [[f"https://{name} {id}" for name in ("a", "b") for id in page] for page in pages]
    assert dispatcher.run_once() == 0
    dispatcher.stop()


@mutant(
    "a-round-with-a-backlog-is-the-last",
    "core.dispatcher:Dispatcher._prepare",
    "bool(plans) or fired >= timers.PAGE",
    "fired >= timers.PAGE",
)
def test_a_round_with_something_left_to_plan_is_not_the_last(
    service: Service, sender: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nothing of the first pages may be to send."""
    monkeypatch.setattr(core.dispatcher, "PREPARE", 0.0)
    monkeypatch.setattr(deliveries, "PAGE", 2)
    hook(service, ["wanted"])
    append(service, "1", "2", "3")
    append(service, "4", type="wanted")
    dispatcher = Dispatcher(service.database, sender, backoff=Backoff(), lease=LEASE, threads=4)
    while dispatcher.run_once():
        dispatcher.settle()
    dispatcher.stop()
    assert [headers["webhook-id"] for _, headers, _ in sender.sent] == ["4"]


@mutant(
    "all-due-times-are-looked-through-in-one-round",
    "core.webhooks.due_times:DueTimes.correct",
    "time.monotonic() >= until",
    "False",
)
@mutant(
    "a-page-of-due-times-ends-before-its-last",
    "core.webhooks.due_times:DueTimes._look",
    "_deliveries.due_at >= before",
    "_deliveries.due_at > before",
)
def test_due_times_are_corrected_a_page_at_a_time(
    database: Database, sender: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long backlog takes many rounds."""
    monkeypatch.setattr(due_times, "PAGE", 2)
    clock = Clock(database)
    service = Service(database, combiner=Inline, sender=sender)
    webhook = hook(service)
    for event in map(str, range(5)):
        append(service, event)
        plan(service)
        clock.go(1)
    clock.go(-86_400)
    times = due_times.DueTimes(database, DAY)

    def due_in() -> list[float]:
        times.correct(0.0)
        return [seconds_until(service, delivery) for delivery in log(service, webhook)]

    later = [86_400 - number for number in range(1, 6)]
    assert due_in() == [0, 0, *later[2:]]
    assert due_in() == [0, 0, 0, 0, *later[4:]]
    assert due_in() == [0] * 5


@mutant(
    "a-second-jump-of-the-clock-corrects-only-the-rest",
    "core.webhooks.due_times:DueTimes.correct",
    "self._looking, self._before, self._were_locked = (True, None, False)",
    "self._looking = True",
)
def test_all_due_times_are_looked_through_again_after_a_second_jump(
    database: Database, sender: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ones checked before the jump were right at that time."""
    monkeypatch.setattr(due_times, "PAGE", 1)
    clock = Clock(database)
    service = Service(database, combiner=Inline, sender=sender)
    webhook = hook(service)
    for event in ("1", "2"):
        append(service, event)
        plan(service)
        [claim_] = claim(service)
        record(service, claim_, FAILED, Backoff(first=80_000))
        clock.go(1)
    times = due_times.DueTimes(database, DAY)
    times.correct(0.0)
    assert [seconds_until(service, delivery) for delivery in log(service, webhook)] == [39_999, 39_998]
    clock.go(-86_400)
    times.correct(1.0)
    assert [seconds_until(service, delivery) for delivery in log(service, webhook)] == [86_400, 86_400]


@mutant(
    "due-times-are-corrected-all-at-once", "core.webhooks.due_times:DueTimes.correct", "chunks(late, PAGE)", "[late]"
)
def test_due_times_that_are_equal_are_corrected_by_short_transactions(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a jump of the clock, a long backlog would be locked for long by one transaction."""
    monkeypatch.setattr(due_times, "PAGE", 2)
    webhook = hook(service)
    append(service, *map(str, range(5)))
    plan(service)
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.deliveries).values(due_at=datetime(2100, 1, 1, tzinfo=UTC)))
    counts: list[int] = []
    updates = partial(_count_updates, counts)
    sa.event.listen(service.database.engine, "after_cursor_execute", updates)
    due_times.DueTimes(service.database, DAY).correct(0.0)
    assert counts == [2, 2, 1]
    assert len(claim(service)) == len(log(service, webhook)) == 5


def _count_updates(counts: list[int], _: object, cursor: Any, text: str, *__: object) -> None:
    if text.startswith("UPDATE deliveries"):
        counts.append(cursor.rowcount)


@mutant(
    "the-position-of-the-callbacks-is-waited-for",
    "core.webhooks.callbacks:plan",
    "query.with_for_update(skip_locked=True)",
    "query.with_for_update(skip_locked=False)",
)
@mutant(
    "a-claim-waits-for-a-locked-delivery",
    "core.webhooks.deliveries:claim",
    "_lock(tx, chosen | dead, is_due, skip_locked=True)",
    "_lock(tx, chosen | dead, is_due, skip_locked=False)",
)
@mutant(
    "a-start-waits-for-a-locked-delivery",
    "core.webhooks.due_times:DueTimes._bring_closer",
    "query.with_for_update(skip_locked=True)",
    "query.with_for_update(skip_locked=False)",
)
@mutant(
    "a-locked-delivery-stays-far-in-the-future",
    "core.webhooks.due_times:DueTimes.correct",
    "self._were_locked |= corrected < len(part)",
    "pass",
)
@pytest.mark.mariadb
def test_a_locked_delivery_or_callback_does_not_delay_others(server_database: Database, sender: Script) -> None:
    """Not even when a dispatcher starts, which corrects due times after a jump of the clock; it is sent once it is
    free."""
    service = Service(server_database, combiner=Inline, sender=sender)
    held, free = hook(service, name="held"), hook(service, name="free")
    append(service, "due", "late")
    plan(service)
    service.batches.open(Opening(items=1, callback=Callback("https://callback.example/", ("batch.opened",))))
    held_rows = tables.deliveries.c.webhook_id == held
    with server_database.engine.begin() as stranger:
        late = tables.deliveries.c.position == 2
        stranger.execute(
            sa.update(tables.deliveries).where(held_rows, late).values(due_at=datetime(2100, 1, 1, tzinfo=UTC))
        )
    with server_database.engine.begin() as stranger:
        for query, count in (
            (sa.select(tables.callback_cursor), 1),
            (sa.select(tables.deliveries).where(held_rows), 2),
        ):
            assert len(stranger.execute(query.with_for_update()).all()) == count
        dispatcher = Dispatcher(server_database, sender, backoff=Backoff(), lease=LEASE, threads=4)
        sent = partial(sent_in_a_round, dispatcher, sender)
        free_ones = [f"https://free {id}" for id in ("batch:1:opened", "due", "late")]
        first = sent()
        assert [line for line in first if line.startswith("https://free")] == free_ones
        # A webhook has one place here, and each claim fills it at random, perhaps with a locked delivery.
        later = (line for _ in range(64) for line in sent())
        assert next(chain(first[3:], later), None) == "https://held batch:1:opened"
    assert sent() == ["https://callback batch:1:opened", "https://held due", "https://held late"]
    dispatcher.stop()
    assert {delivery.state for webhook in (held, free) for delivery in log(service, webhook)} == {Progress.DELIVERED}


@mutant("a-whole-backlog-is-read-under-the-feeds-lock", "core.feed:trim", "needed(tx, first_kept)", "needed(tx, None)")
@pytest.mark.mariadb
def test_the_backlog_of_a_disabled_webhook_does_not_hold_the_feed(mariadb_database: Database, sender: Script) -> None:
    """The janitor reads, under the feed's lock, no more of it than of the events that it may remove."""
    service = Service(mariadb_database, combiner=Inline, sender=sender)
    disabled = hook(service)
    hook(service, name="b")
    append(service, *(f"e{number}" for number in range(1000)))
    plan(service)
    with mariadb_database.engine.begin() as tx:
        tx.execute(sa.update(tables.webhooks).where(tables.webhooks.c.id == disabled).values(state=State.DISABLED))
        delivered = tables.deliveries.c.webhook_id != disabled
        tx.execute(sa.update(tables.deliveries).where(delivered).values(state=Progress.DELIVERED, due_at=None))
    plans.analyze(mariadb_database, "deliveries")
    with plans.executions(mariadb_database) as executions:
        assert feed.trim(mariadb_database, timedelta(days=1), needed=janitor.needed) == 0
    locked = next(place for place, (text, _) in enumerate(executions) if text.endswith("FOR UPDATE"))
    text, values = next(execution for execution in executions[locked:] if "FROM deliveries" in execution[0])
    with mariadb_database.engine.connect() as tx:
        assert plans.rows_read(tx, text, values) < 10


def test_the_secret_is_in_no_representation(service: Service) -> None:
    """Neither in a webhook's representation nor in the dispatcher's objects."""
    creation = service.webhooks.create("https://a.example/", None, None)
    append(service, "one")
    plan(service)
    (claim_,) = claim(service)
    assert creation.secret.startswith("whsec_")
    assert claim_.secrets == (creation.secret,)
    for value in (creation, creation.webhook, claim_, service.webhooks.get(creation.webhook.id)):
        assert creation.secret not in repr(value)
        assert creation.secret[6:] not in repr(value)


def test_a_url_is_checked_before_anything_is_stored(service: Service) -> None:
    """With the sender's message."""
    with pytest.raises(errors.InvalidRequest, match="not public"):
        service.webhooks.create("https://private.example/", None, None)
    assert service.webhooks.page(None, 10) == ([], None)


def test_the_body_follows_the_specification() -> None:
    """Type, timestamp, and the event as the feed has it."""
    time = datetime.fromisoformat("2026-05-04T08:00:00.000007+00:00")
    event = feed.Event(7, "order:1", "card.charged", None, "ö", '{"cents":100}', time)
    assert message.body(event).decode() == (
        '{"type":"card.charged","timestamp":"2026-05-04T08:00:00.000007Z","data":{"position":7,"id":"order:1",'
        '"type":"card.charged","batch":null,"key":"ö","data":{"cents":100},"at":"2026-05-04T08:00:00.000007Z"}}'
    )


@mutant(
    "one-round-empties-the-backlog-of-a-disabled-webhook",
    "core.dispatcher:Dispatcher._claim",
    "time.monotonic() >= until",
    "False",
)
@mutant("a-round-forgets-that-it-left-a-backlog", "core.dispatcher:Dispatcher._claim", "max(count, 1)", "count")
def test_the_backlog_of_a_disabled_webhook_takes_many_rounds(
    service: Service, sender: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them, the dispatcher renews its lease, plans, and fires timers."""
    monkeypatch.setattr(core.dispatcher, "CLAIM", 0.0)
    monkeypatch.setattr(deliveries, "LOOK", 2)
    dead_hook = hook(service)
    append(service, *map(str, range(5)))
    plan(service)
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.webhooks).values(state=State.DISABLED))
    dispatcher = Dispatcher(service.database, sender, backoff=Backoff(), lease=LEASE, threads=4)
    progress = []
    while dispatcher.run_once():
        progress.append([delivery.state for delivery in log(service, dead_hook)].count(Progress.DEAD))
    dispatcher.stop()
    assert progress == [2, 4, 5]
    assert not sender.sent


def test_dying_deliveries_do_not_delay_later_ones(service: Service, sender: Script) -> None:
    """A webhook that was disabled with many deliveries due; one round is enough for the one after them."""
    dead_hook, other = hook(service, ["many"]), hook(service, ["one"])
    append(service, *(f"m{number}" for number in range(3 * deliveries.CANDIDATES)), type="many")
    append(service, "last", type="one")
    plan(service)
    with service.database.engine.begin() as connection:
        connection.execute(
            sa.update(tables.webhooks).where(tables.webhooks.c.id == dead_hook).values(state=State.DISABLED)
        )
    dispatcher = Dispatcher(service.database, sender, backoff=Backoff(), lease=LEASE, threads=4)
    assert dispatcher.run_once() == 1
    dispatcher.stop()
    assert [delivery.state for delivery in log(service, other)] == [Progress.DELIVERED]
    assert {delivery.state for delivery in log(service, dead_hook)} == {Progress.DEAD}


@mutant(
    "a-dispatcher-shortens-the-claims-of-others",
    "core.webhooks.due_times:DueTimes._longest_wait",
    "lease_of(row.token)",
    "timedelta(seconds=60)",
)
def test_a_claim_has_the_lease_of_its_own_dispatcher(database: Database, sender: Script) -> None:
    """Another dispatcher, whose sends have a shorter timeout, doesn't send the event meanwhile: neither when it starts,
    which corrects due times, nor after the clock was set back."""
    is_sending, may_end = threading.Event(), threading.Event()

    class Slow(Script):
        def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
            is_sending.set()
            assert may_end.wait(60)
            return super().send(url, headers, body)

    clock = Clock(database)
    slow = Slow()
    service = Service(database, combiner=Inline, sender=slow)
    webhook = hook(service)
    append(service, "one")
    first = Dispatcher(database, slow, backoff=Backoff(), lease=2 * LEASE, threads=4)
    first.run_once()
    assert is_sending.wait(60)

    second = Dispatcher(database, sender, backoff=Backoff(), lease=LEASE, threads=4)

    def until_due() -> float:
        assert second.run_once() == 0
        return seconds_until(service, log(service, webhook)[0])

    lease = LEASE.total_seconds()
    try:
        second.run_once()
        clock.go(lease + 1)
        assert until_due() == lease - 1
        clock.go(-86_400)
        assert until_due() == 2 * lease
    finally:
        may_end.set()
        for dispatcher in (first, second):
            dispatcher.stop()
    assert (len(slow.sent), len(sender.sent)) == (1, 0)
    assert [(delivery.state, len(delivery.log)) for delivery in log(service, webhook)] == [(Progress.DELIVERED, 1)]


@mutant(
    "the-claims-of-earlier-releases-are-shortened", "core.webhooks.deliveries:lease_of", "return UNKNOWN_LEASE", "pass"
)
@pytest.mark.parametrize("token_bytes", [16, 15])
def test_a_claim_of_an_earlier_release_has_its_longest_lease(database: Database, token_bytes: int) -> None:
    """Its token doesn't contain the lease."""
    clock = Clock(database)
    service = Service(database, combiner=Inline, sender=Script())
    webhook = hook(service)
    append(service, "one")
    plan(service)
    assert len(claim(service)) == 1
    if token_bytes == 16:
        with database.engine.begin() as tx:
            tx.execute(sa.update(tables.deliveries).values(token=bytes(16)))
    clock.go(-86_400)
    due_times.DueTimes(database, DAY).correct(1.0)
    expected = deliveries.UNKNOWN_LEASE if token_bytes == 16 else LEASE
    assert seconds_until(service, log(service, webhook)[0]) == expected.total_seconds()


def test_deliveries_do_not_wait_for_a_clock_that_went_back(database: Database, sender: Script) -> None:
    """A planned delivery is due at once, a claimed one after a lease, a failed one after the longest pause. An earlier
    due time stays."""
    clock = Clock(database)
    service = Service(database, combiner=Inline, sender=sender)
    webhook = hook(service)
    dispatcher = Dispatcher(database, sender, backoff=Backoff(longest=40), lease=LEASE, chance=lambda: 0.5)
    dispatcher.run_once()
    append(service, "failed")
    plan(service)
    [failed] = claim(service)
    record(service, failed, SendResult(503, None, 3, retry_after=30 * 86_400), Backoff(longest=40 * 86_400))
    append(service, "claimed")
    plan(service)
    assert len(claim(service)) == 1
    append(service, "planned")
    plan(service)
    clock.go(-4 * 86_400)
    append(service, "soon")
    append(service, "sending")
    plan(service)
    early, _ = claim(service)
    record(service, early, FAILED)
    until = {claim_.event: seconds_until(service, claim_) for claim_ in log(service, webhook)}
    assert dispatcher.run_once() == 1
    dispatcher.settle()
    deliveries_by_event = {delivery.event: delivery for delivery in log(service, webhook)}
    assert deliveries_by_event["planned"].state is Progress.DELIVERED
    assert seconds_until(service, deliveries_by_event["claimed"]) == LEASE.total_seconds()
    assert seconds_until(service, deliveries_by_event["failed"]) == 40
    for event in (early.event.id, "sending" if early.event.id == "soon" else "soon"):
        assert seconds_until(service, deliveries_by_event[event]) == until[event] > 0
    dispatcher.stop()
