"""The message at the end of a batch: for each ending, among kills, with a broker that refuses it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.storage.database import Database
from lastbit import AsyncClient, Client, Forbidden, InvalidArgument, tokens
from lastbit.batch import BatchHandle
from lastbit.integrations import _endings
from lastbit.tokens import Role
from tests.conftest import KINDS_OF_CONTRACT
from tests.mutants import mutant
from tests.support import templates
from tests.support.exposition import eventually
from tests.support.servers import ROOT, running_service, sqlite_file


@pytest.fixture(scope="module", params=KINDS_OF_CONTRACT)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "sqlite":
            database = stack.enter_context(sqlite_file())
        else:
            database = request.getfixturevalue(request.param).new_database()
            with Database(database) as new_database:
                templates.migrate(new_database)
        service = stack.enter_context(running_service(database, LASTBIT_DISPATCHER_EVERY="0.05"))
        if request.param != "sqlite":
            stack.enter_context(dispatching(database))
        yield service.url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture
def app() -> str:
    return f"app-{uuid.uuid4()}"


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_endings, "LOOK", 0.05)
    monkeypatch.setattr(_endings, "TTL", 1.0)
    monkeypatch.setattr(_endings, "PAUSE", 0.02)


@contextmanager
def dispatching(database: str) -> Iterator[None]:
    """A dispatcher, which on SQLite is part of the service."""
    command = [sys.executable, "-m", "jobs.dispatcher", "--every", "0.05", "--database-url", database]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield
    finally:
        process.kill()
        process.wait(60)


class Broker:
    def __init__(self) -> None:
        self.messages: list[tuple[str, str]] = []
        self.refusals = 0
        self.tries = 0

    def publish(self, message_id: str, message: str) -> bool:
        self.tries += 1
        if message == "unknown":
            raise LookupError("no such task")
        if self.tries <= self.refusals:
            return False
        self.messages.append((message_id, message))
        return True


@contextmanager
def working(client: Client, app: str, broker: Broker) -> Iterator[_endings.EndingsWorker]:
    worker = _endings.EndingsWorker(client, app, broker.publish)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def open_batch(
    client: Client, app: str, items: int = 2, on_success: str | None = "publish", on_complete: str | None = "report"
) -> BatchHandle:
    _endings.define(client, app)
    return client.open(items=items, labels=_endings.labels_of(app, on_success, on_complete))


def seal_first(batch: BatchHandle, client: Client) -> None:
    batch.seal()
    assert batch.ids is not None
    client.ack(batch.ids)


def seal_last(batch: BatchHandle, client: Client) -> None:
    assert batch.ids is not None
    client.ack(batch.ids)
    batch.seal()


def fail_one(batch: BatchHandle, client: Client) -> None:
    assert batch.ids is not None
    client.fail(batch.ids[:1])
    client.ack(batch.ids[1:])
    batch.seal()


def redrive(batch: BatchHandle, client: Client) -> None:
    assert batch.ids is not None
    fail_one(batch, client)
    client.ack(batch.ids[:1])


def expire(batch: BatchHandle, client: Client) -> None:
    batch.update(deadline=timedelta(seconds=2))


def reopen(batch: BatchHandle, client: Client) -> None:
    batch.cancel()
    batch.reopen()
    seal_first(batch, client)


def delete(batch: BatchHandle, client: Client) -> None:
    batch.delete()


BOTH = {"completed": "report", "succeeded": "publish"}
ENDINGS = [
    (seal_first, BOTH),
    (seal_last, BOTH),
    (fail_one, {"completed": "report"}),
    (redrive, BOTH),
    (expire, {"expired": "report"}),
    (lambda batch, client: batch.cancel(), {"cancelled": "report"}),
    (delete, {"cancelled": "report"}),
    (reopen, {"cancelled": "report", "completed:1": "report", "succeeded:1": "publish"}),
]
NAMES = ["acked", "sealed", "failed", "redriven", "expired", "cancelled", "deleted", "reopened"]


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize(("end", "expected"), ENDINGS, ids=NAMES)
@mutant(
    "batches-of-other-apps-are-published",
    "lastbit.integrations._endings:Endings._message_of",
    "labels.get(APP) == self._app",
    "True",
)
@mutant(
    "endings-before-the-first-batch-are-published",
    "lastbit.integrations._endings:define",
    "client.processes.define(process_name(app), partitions=1, after=end)",
    "client.processes.define(process_name(app), partitions=1)",
)
def test_each_ending_has_its_message(
    client: Client, app: str, end: Callable[[BatchHandle, Client], object], expected: dict[str, str]
) -> None:
    """Under the id of its event, once; whoever ends the batch. Other batches have none."""
    broker = Broker()
    # Not defined yet, as by a process that was deleted.
    seal_first(client.open(items=1, labels=_endings.labels_of(app, "old", "old")), client)
    with working(client, app, broker):
        batch = open_batch(client, app)
        seal_first(open_batch(client, "another", on_success="theirs"), client)
        seal_first(client.open(items=1), client)
        end(batch, client)
        messages = {f"batch:{batch.id}:{event}": message for event, message in expected.items()}
        eventually(lambda: len(broker.messages) >= len(messages), True)
        sentinel = open_batch(client, app, on_complete=None)
        seal_first(sentinel, client)
        eventually(lambda: broker.messages[-1], (f"batch:{sentinel.id}:succeeded", "publish"))
    assert dict(broker.messages[:-1]) == messages
    assert len(broker.messages) == len(messages) + 1


@contextmanager
def killable(url: str, app: str, file: Path, *dies: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.integrations.endings_app", url, app, str(file), *dies]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize(("dies", "count"), [("before", 1), ("after", 2), ("noted", 1)])
@mutant(
    "an-ending-that-was-noted-is-published-again",
    "lastbit.integrations._endings:Endings._is_published",
    "self._processes.get(self.name, message_id).status == 'finished'",
    "False",
)
def test_the_message_survives_its_worker(
    url: str, client: Client, app: str, tmp_path: Path, dies: str, count: int
) -> None:
    """It is sent again only if the worker died between the broker and the service, under the same id."""
    file = tmp_path / "broker"
    batch = open_batch(client, app, on_complete=None)
    with killable(url, app, file, dies) as victim:
        seal_first(batch, client)
        assert victim.wait(60) == -9
    with killable(url, app, file):
        eventually(lambda: client.processes.list() != () and handled(client, app), 1)
        later_batch = open_batch(client, app, on_complete=None)
        seal_first(later_batch, client)
        eventually(lambda: file.exists() and f"batch:{later_batch.id}:" in file.read_text(), True)
    lines = file.read_text().splitlines()
    assert lines == [f"batch:{batch.id}:succeeded publish"] * count + [f"batch:{later_batch.id}:succeeded publish"]


def handled(client: Client, app: str) -> int:
    """The number of endings that the service has noted."""
    [summary] = [process for process in client.processes.list() if process.name == _endings.process_name(app)]
    return summary.finished


ACK_AND_DIE = """
import os, sys
from lastbit import Client
Client(sys.argv[1]).ack(sys.argv[2].split())
os.kill(os.getpid(), 9)
"""


@pytest.mark.usefixtures("short_times")
def test_the_message_survives_the_last_ack(url: str, client: Client, app: str) -> None:
    """No worker runs at that time, and the one that acks dies with the answer."""
    batch = open_batch(client, app)
    batch.seal()
    assert batch.ids is not None
    assert subprocess.run([sys.executable, "-c", ACK_AND_DIE, url, " ".join(batch.ids)], cwd=ROOT).returncode == -9
    broker = Broker()
    with working(client, app, broker):
        eventually(lambda: {message for _, message in broker.messages}, {"publish", "report"})


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("is_published", [False, True], ids=["before", "after"])
def test_the_message_survives_the_service(app: str, is_published: bool) -> None:
    """It is killed between the last ack and the publish, or between the publish and its note: then the message may be
    sent again, under the same id."""
    with sqlite_file() as database, running_service(database) as service, Client(service.url) as client:
        broker = Broker()
        publish = broker.publish

        def publish_and_kill(message_id: str, message: str) -> bool:
            if broker.tries == 0:
                service.stop(signal.SIGKILL)
                if not is_published:
                    broker.tries += 1
                    return False
            return publish(message_id, message)

        broker.publish = publish_and_kill  # type: ignore[method-assign]
        with working(client, app, broker):
            batch = open_batch(client, app, on_complete=None)
            seal_first(batch, client)
            eventually(lambda: broker.tries > 0, True)
            service.start()
            later_batch = open_batch(client, app, on_complete=None)
            seal_first(later_batch, client)
            eventually(lambda: broker.messages[-1:], [(f"batch:{later_batch.id}:succeeded", "publish")])
        assert set(broker.messages[:-1]) == {(f"batch:{batch.id}:succeeded", "publish")}
        assert len(broker.messages[:-1]) <= 1 + is_published


@pytest.mark.usefixtures("short_times")
def test_a_broker_that_refuses_gets_the_message_again(client: Client, app: str) -> None:
    """In the feed's order."""
    broker = Broker()
    broker.refusals = 3
    with working(client, app, broker):
        batches = [open_batch(client, app, on_complete=None) for _ in range(3)]
        for batch in batches:
            seal_first(batch, client)
        messages = [(f"batch:{batch.id}:succeeded", "publish") for batch in batches]
        eventually(lambda: broker.messages, messages)
    assert broker.tries == 6


@pytest.mark.usefixtures("short_times")
@mutant(
    "a-worker-that-stops-parks-what-the-broker-refuses",
    "lastbit.integrations._endings:Endings._end",
    "raise _Interrupted",
    "raise RuntimeError",
)
def test_a_worker_that_stops_leaves_a_refused_message_to_the_next(client: Client, app: str) -> None:
    broker = Broker()
    broker.refusals = 10**9
    with working(client, app, broker):
        batch = open_batch(client, app, on_complete=None)
        seal_first(batch, client)
        eventually(lambda: broker.tries > 0, True)
    assert not list(client.processes.instances(_endings.process_name(app), status="parked"))
    broker.refusals = 0
    with working(client, app, broker):
        eventually(lambda: broker.messages, [(f"batch:{batch.id}:succeeded", "publish")])


@pytest.mark.usefixtures("short_times")
def test_a_message_that_cannot_be_published_is_parked(client: Client, app: str) -> None:
    """With the error. Others go on, and it is published when an operator retries it."""
    broker = Broker()
    with working(client, app, broker):
        poisoned_batch = open_batch(client, app, on_success="unknown", on_complete=None)
        seal_first(poisoned_batch, client)
        seal_first(open_batch(client, app, on_complete=None), client)
        eventually(lambda: len(broker.messages), 1)
        name, instance = _endings.process_name(app), f"batch:{poisoned_batch.id}:succeeded"
        # Both may be handled in one call, after the good one's message is published.
        eventually(lambda: len(list(client.processes.instances(name, status="parked"))), 1)
        details = client.processes.get(name, instance)
        assert (details.parked, "no such task" in (details.history[0].error or "")) == (1, True)
    broker.publish = lambda message_id, message: not broker.messages.append((message_id, message))  # type: ignore[method-assign,func-returns-value]
    with working(client, app, broker):
        assert client.processes.retry(name, instance) == 1
        eventually(lambda: broker.messages[1:], [(instance, "unknown")])


@pytest.mark.usefixtures("short_times")
def test_workers_share_the_endings(client: Client, app: str) -> None:
    broker = Broker()
    with working(client, app, broker), working(client, app, broker), working(client, app, broker):
        batches = [open_batch(client, app) for _ in range(20)]
        threads = [threading.Thread(target=seal_first, args=(batch, client)) for batch in batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: handled(client, app), 40)
    assert len(broker.messages) == len(set(broker.messages)) == 40


@pytest.mark.usefixtures("short_times")
def test_a_worker_ends_with_the_event_loop_of_its_client(url: str, app: str) -> None:
    """As in a program that closes the loop without a shutdown."""

    async def start() -> _endings.EndingsWorker:
        async with AsyncClient(url) as client:
            driver = client.driver.for_threads(asyncio.get_running_loop())
            worker = _endings.EndingsWorker(SimpleNamespace(driver=driver), app, Broker().publish)
            worker.start()
        return worker

    worker = asyncio.run(start())
    worker._thread.join(60)
    assert not worker._thread.is_alive()


def test_a_long_message_is_refused() -> None:
    assert _endings.labels_of("app", None, None) == {}
    with pytest.raises(InvalidArgument, match="on_complete has 1,025 characters"):
        _endings.labels_of("app", "x" * 1024, "x" * 1025)


def test_a_limited_token_is_refused(app: str) -> None:
    """By the producer's call, before it opens a batch; and a worker with it ends quietly."""
    token = tokens.new()
    line = tokens.known(token, "shop", list(Role), prefix="shop-").line()
    with (
        sqlite_file() as database,
        running_service(database, LASTBIT_TOKENS=line) as service,
        Client(service.url, token=token) as client,
    ):
        with pytest.raises(Forbidden):
            _endings.define(client, app)
        worker = _endings.EndingsWorker(client, app, Broker().publish)
        worker.start()
        worker._thread.join(60)
        assert not worker._thread.is_alive()


def unpublished(batch: BatchHandle) -> list[str | None]:
    """The events that the explanation names, of which nobody publishes the message; None: of those to come."""
    return [reason.facts["event"] for reason in batch.explain().reasons if reason.code == "ending_without_worker"]


@pytest.mark.usefixtures("short_times")
@mutant(
    "a-worker-that-runs-is-missed",
    "core.consumer_groups.details:has_live_worker",
    "bool(snapshot.scalar(sa.select(sa.exists().where(*live))))",
    "False",
)
@mutant(
    "a-message-that-was-published-is-missed",
    "core.explain:_unhandled_event",
    "columns.position > floor",
    "columns.position > 0",
)
@mutant(
    "messages-at-all-ends-are-missed",
    "core.explain:_unhandled_event",
    "columns.type.in_(types)",
    "columns.type != ''",
)
def test_an_explanation_tells_that_nobody_publishes(client: Client, app: str) -> None:
    """Before the end and after it, until the message is published. Batches without a message have no such reason."""
    batch = open_batch(client, app, on_complete=None)
    plain_batch = client.open(items=1, labels={"team": "search"})
    assert unpublished(plain_batch) == []
    assert unpublished(batch) == [None]
    assert f"the process endings.{app} has no worker" in batch.explain().reasons[-1].text
    broker = Broker()
    with working(client, app, broker):
        eventually(lambda: unpublished(batch), [])
    assert unpublished(batch) == [None]
    fail_one(batch, client)
    assert batch.explain().done
    assert unpublished(batch) == []  # it has no message for this end
    client.ack(batch.ids[:1])
    assert unpublished(batch) == [f"batch:{batch.id}:succeeded"]
    with working(client, app, broker):
        eventually(lambda: len(broker.messages), 1)
        eventually(lambda: unpublished(batch), [])
    assert unpublished(batch) == []
    live = open_batch(client, app)
    client.processes.delete(f"endings.{app}")
    assert unpublished(live) == [None]
    live.cancel()
    assert unpublished(live) == []  # nothing is known of what was published


@pytest.mark.usefixtures("short_times")
def test_a_worker_that_was_killed_publishes_nothing(url: str, client: Client, app: str, tmp_path: Path) -> None:
    """It is no worker any more when its lease has expired."""
    batch = open_batch(client, app)
    with killable(url, app, tmp_path / "broker") as victim:
        eventually(lambda: unpublished(batch), [])
        victim.kill()
        eventually(lambda: unpublished(batch), [None])
