"""Deliveries: planned once, claimed by one dispatcher, sent again if no result was recorded, logged, and kept until
they are done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest
import sqlalchemy as sa

from core import errors, feed, janitor, tables
from core.batches import expiry
from core.batches.batch import Opening
from core.commits.combiner import Inline
from core.dispatcher import Dispatcher
from core.feed import NewEvent
from core.service import Service
from core.storage.database import Database
from core.webhooks import deliveries, delivery_log, message, subscriptions
from core.webhooks.addresses import Unfit
from core.webhooks.backoff import Backoff
from core.webhooks.deliveries import Claim
from core.webhooks.delivery_log import Delivery, Progress
from core.webhooks.sender import SendResult
from core.webhooks.subscriptions import State
from tests.support.clocks import Clock

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
    return service.database.write(deliveries.record, claim, answer, backoff, 0.5)


def log(service: Service, webhook: int) -> list[Delivery]:
    return service.webhooks.deliveries(webhook, None, None, 1000)[0]


def make_due(service: Service, delivery: int | None = None) -> None:
    """Make deliveries due, as if their lease or pause were over."""
    with service.database.engine.begin() as connection:
        query = sa.update(tables.deliveries).where(tables.deliveries.c.state == "pending")
        if delivery is not None:
            query = query.where(tables.deliveries.c.id == delivery)
        connection.execute(query.values(due_at=tables.utc_now()))


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
    """A webhook with a thousand due deliveries leaves room for one with a single delivery."""
    crowd = hook(service, ["crowd"])
    quiet = hook(service, ["quiet"])
    append(service, *(str(number) for number in range(200)), type="crowd")
    append(service, "alone", type="quiet")
    plan(service)
    first = claim(service, limit=10, share=4)
    assert {claim_.webhook for claim_ in first} == {crowd}
    assert len(first) == 4
    second = claim(service, limit=10, room={crowd: 0}, share=4)
    assert [claim_.webhook for claim_ in second] == [quiet]


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
    dispatcher = Dispatcher(service.database, sender, backoff=Backoff(), lease=LEASE, threads=4, chance=lambda: 0.5)
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


def test_the_secret_is_in_no_representation(service: Service) -> None:
    """Neither in a webhook's representation nor in the dispatcher's objects."""
    creation = service.webhooks.create("https://a.example/", None, None)
    append(service, "one")
    plan(service)
    (claim_,) = claim(service)
    assert creation.secret.startswith("whsec_")
    assert claim_.secret == creation.secret
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
