"""Rotated secrets: each message is signed with the secrets that are valid by the database's clock, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from standardwebhooks import Webhook, WebhookVerificationError

from core import errors
from core.batches.batch import Opening
from core.batches.callbacks import Callback
from core.commits.combiner import Inline
from core.dispatcher import Dispatcher
from core.feed import NewEvent
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from core.webhooks import rotation, subscriptions
from core.webhooks.backoff import Backoff
from core.webhooks.sender import SendResult
from senders.webhooks import WebhookSender
from tests.guarantees.test_webhooks import once
from tests.mutants import mutant
from tests.support.clocks import Clock
from tests.support.receivers import Got, Receiver
from tests.support.waits import waits_for_a_lock

HOUR = timedelta(hours=1)


class Recorder:
    """A sender whose receiver accepts everything, and that records the messages."""

    def __init__(self) -> None:
        self.messages: list[tuple[dict[str, str], bytes]] = []

    def check(self, url: str) -> None:
        pass

    def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        self.messages.append((headers, body))
        return SendResult(200, None, 0)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def clock(database: Database) -> Clock:
    return Clock(database)


@pytest.fixture
def service(database: Database, recorder: Recorder) -> Iterator[Service]:
    service_ = Service(database, combiner=Inline, sender=recorder)
    yield service_
    service_.stop()


class Signers:
    """Which secrets sign the next event, by the names that they have here."""

    def __init__(self, service: Service, recorder: Recorder) -> None:
        self.service = service
        self.recorder = recorder
        self.secrets: dict[str, str] = {}
        self.events = 0

    def __call__(self) -> str:
        self.events += 1
        self.service.feed.append([NewEvent(str(self.events), "x")])
        dispatcher = Dispatcher(
            self.service.database, self.recorder, backoff=Backoff(), lease=timedelta(minutes=1), threads=2
        )
        dispatcher.run_once()
        dispatcher.settle()
        dispatcher.stop()
        headers, body = self.recorder.messages[-1]
        assert headers["webhook-id"] == str(self.events)
        time = datetime.fromtimestamp(int(headers["webhook-timestamp"]), UTC)
        names = {
            Webhook(secret).sign(headers["webhook-id"], time, body.decode()): name
            for name, secret in self.secrets.items()
        }
        return " ".join(names[signature] for signature in headers["webhook-signature"].split(" "))


@pytest.fixture
def signers(service: Service, recorder: Recorder) -> Signers:
    return Signers(service, recorder)


def accepts(secret: str, message: Got) -> bool:
    """Whether a receiver with this secret accepts the message."""
    try:
        Webhook(secret).verify(message.body, message.headers)
    except WebhookVerificationError:
        return False
    return True


def test_receivers_accept_both_secrets_until_the_overlap_ends(database: Database, receiver: Receiver) -> None:
    """By the official library, with either secret alone; then with the new one only."""
    service = Service(database, combiner=Inline, sender=WebhookSender(allow_private=True))
    creation = service.webhooks.create(receiver.url, None, None)
    new = service.webhooks.rotate_secret(creation.webhook.id, HOUR)
    service.feed.append([NewEvent("during", "x")])
    once(service)
    webhooks = tables.webhooks.c
    with database.engine.begin() as tx:
        document = json.loads(tx.execute(sa.select(webhooks.rotation)).scalar_one())
        (earlier,) = document["earlier"]
        earlier[1] = (datetime.fromisoformat(earlier[1]) - HOUR).isoformat()
        tx.execute(sa.update(tables.webhooks).values(rotation=json.dumps(document)))
    service.feed.append([NewEvent("after", "x")])
    once(service)
    first, second = receiver.got
    assert (first.id, second.id) == ("during", "after")
    secrets = creation.secret, new.secret
    assert [accepts(secret, first) for secret in secrets] == [True, True]
    assert [accepts(secret, second) for secret in secrets] == [False, True]
    service.stop()


@mutant("only-the-newest-secret-signs", "core.webhooks.message:headers", "secrets", "secrets[:1]")
@mutant("an-earlier-secret-is-valid-forever", "core.webhooks.rotation:_earlier", "until > now", "True")
@mutant(
    "the-dispatchers-clock-judges-a-secret",
    "core.webhooks.deliveries:claim",
    "rotation.valid(row.secret, row.rotation, now)",
    "rotation.valid(row.secret, row.rotation, datetime.now(UTC))",
)
@mutant(
    "the-services-clock-begins-an-overlap",
    "core.webhooks.rotation:rotate",
    "tables.clock(tx)",
    "datetime.now().astimezone()",
)
def test_the_databases_clock_ends_an_overlap(service: Service, clock: Clock, signers: Signers) -> None:
    """To the microsecond; the field shows the end until then, and a test event is signed in the same way."""
    creation = service.webhooks.create("https://receiver.example", None, None)
    webhook = creation.webhook.id
    new = service.webhooks.rotate_secret(webhook, HOUR)
    signers.secrets = {"old": creation.secret, "new": new.secret}
    assert new.webhook.overlap_until == clock.now + HOUR
    clock.go((HOUR - timedelta(microseconds=1)).total_seconds())
    assert signers() == "new old"
    service.webhooks.test(webhook)
    assert len(signers.recorder.messages[-1][0]["webhook-signature"].split()) == 2
    clock.go(0.000001)
    assert signers() == "new"
    service.webhooks.test(webhook)
    assert len(signers.recorder.messages[-1][0]["webhook-signature"].split()) == 1
    assert service.webhooks.get(webhook).overlap_until is None


@mutant(
    "a-rotation-ends-other-secrets-at-once",
    "core.webhooks.rotation:rotate",
    "[(row.secret, end), *((old, min(until, end)) for old, until in _earlier(row.rotation, now))]",
    "[(row.secret, end), ]",
)
@mutant("a-rotation-doesnt-shorten-earlier-overlaps", "core.webhooks.rotation:rotate", "min(until, end)", "until")
def test_each_earlier_secret_has_its_own_end(service: Service, clock: Clock, signers: Signers) -> None:
    """A shorter overlap shortens the earlier ones, none ends them at once, and a longer one doesn't prolong them."""
    creation = service.webhooks.create("https://receiver.example", None, None)
    webhook = creation.webhook.id
    signers.secrets["a"] = creation.secret
    for name, hours in (("b", 2), ("c", 5)):
        signers.secrets[name] = service.webhooks.rotate_secret(webhook, hours * HOUR).secret
    assert signers() == "c b a"
    clock.go(7200)
    assert signers() == "c b"
    signers.secrets["d"] = service.webhooks.rotate_secret(webhook, HOUR).secret
    assert signers() == "d c b"
    clock.go(3600)
    assert signers() == "d"
    signers.secrets["e"] = service.webhooks.rotate_secret(webhook, HOUR).secret
    signers.secrets["f"] = service.webhooks.rotate_secret(webhook, timedelta(0)).secret
    assert signers() == "f"


def test_at_most_four_earlier_secrets_sign(service: Service, signers: Signers) -> None:
    """The oldest ends."""
    creation = service.webhooks.create("https://receiver.example", None, None)
    signers.secrets["0"] = creation.secret
    for number in range(1, 7):
        signers.secrets[str(number)] = service.webhooks.rotate_secret(creation.webhook.id).secret
    assert signers() == "6 5 4 3 2"


@mutant("a-repeat-rotates-again", "core.webhooks.rotation:rotate", 'last.get("key") == idempotency_key', "False")
def test_a_repeat_returns_the_same_secret(service: Service, clock: Clock) -> None:
    """At any later time, until another rotation; for another overlap it is refused. A transaction that is run again
    after a COMMIT whose result is unknown changes nothing more."""
    webhook = service.webhooks.create("https://receiver.example", None, None).webhook.id
    first = service.webhooks.rotate_secret(webhook, HOUR, "k")
    clock.go(7200)
    repeat = service.webhooks.rotate_secret(webhook, HOUR, "k")
    assert (repeat.secret, repeat.replayed, repeat.webhook.overlap_until) == (first.secret, True, None)
    with pytest.raises(errors.IdempotencyKeyReused):
        service.webhooks.rotate_secret(webhook, 2 * HOUR, "k")
    second = service.webhooks.rotate_secret(webhook, HOUR, "l")
    assert service.webhooks.rotate_secret(webhook, HOUR, "k").secret not in {first.secret, second.secret}
    secret = subscriptions.new_secret()
    results = [service.database.write(subscriptions.rotate_secret, webhook, secret, HOUR, None) for _ in range(2)]
    assert results[0] == results[1]


@mutant(
    "equal-rotations-at-once-dont-wait",
    "core.webhooks.rotation:rotate",
    "sa.select(_webhooks.secret, _webhooks.rotation).where(_webhooks.id == webhook).with_for_update()",
    "sa.select(_webhooks.secret, _webhooks.rotation).where(_webhooks.id == webhook)",
)
def test_equal_requests_at_once_rotate_once(server_database: Database) -> None:
    """All of them return the same secret, although they all begin before the first of them has rotated it."""
    service = Service(server_database, combiner=Inline, sender=Recorder())
    webhook = service.webhooks.create("https://receiver.example", None, None).webhook.id
    row = sa.select(tables.webhooks.c.id).where(tables.webhooks.c.id == webhook)
    with ThreadPoolExecutor(4) as pool, server_database.engine.connect() as holder:
        holder.execute(row.with_for_update())
        rotations = [pool.submit(service.webhooks.rotate_secret, webhook, HOUR, "k") for _ in range(4)]
        assert waits_for_a_lock(server_database, *rotations)
        holder.rollback()
        results = [rotation.result(60) for rotation in rotations]
    assert len({result.secret for result in results}) == 1
    assert [result.replayed for result in results].count(False) == 1
    service.stop()


def test_a_callbacks_secret_is_rotated(service: Service) -> None:
    """A repeat of its open returns the new one."""
    opening = Opening(callback=Callback("https://receiver.example"))
    callback = service.batches.open(opening, "k").callback
    assert callback is not None
    new = service.webhooks.rotate_secret(callback.id)
    repeat = service.batches.open(opening, "k").callback
    assert repeat is not None
    assert repeat.secret == new.secret != callback.secret


@mutant(
    "a-secret-is-rotated-beside-an-earlier-release",
    "core.webhooks.rotation:rotate",
    "not schema.serves_only(tx, SINCE)",
    "False",
)
def test_nothing_is_rotated_while_an_earlier_release_may_run(service: Service) -> None:
    """It would sign with the new secret alone."""
    creation = service.webhooks.create("https://receiver.example", None, None)
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.schema_support).values(oldest="0015"))
    with pytest.raises(errors.UpgradeNotFinished, match=rotation.SINCE):
        service.webhooks.rotate_secret(creation.webhook.id)
    with service.database.engine.begin() as tx:
        assert tx.execute(sa.select(tables.webhooks.c.secret)).scalar_one() == creation.secret


def test_an_unknown_webhook_has_no_secret(service: Service) -> None:
    """Nor has one that was deleted."""
    with pytest.raises(errors.WebhookNotFound):
        service.webhooks.rotate_secret(10**6)
