"""A worker that is told to revoke, loses its service, or dies: no item is lost, and none counts twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lastbit import Client
from tests.integrations.celery.workers import PATIENCE, Place, Worker, outcomes
from tests.integrations.conftest import TOKEN
from tests.integrations.workers import wait_until
from tests.support.servers import ServiceProcess, sqlite_file

BROKERS = ["redis", pytest.param("rabbitmq", marks=pytest.mark.xdist_group("rabbitmq"))]


@pytest.fixture(scope="module")
def place(new_place: Any) -> Place:
    """For tests that leave the worker alive."""
    place: Place = new_place(options={"when_ignored": "fail"}, settings={"task_acks_late": False})
    return place


@pytest.fixture(scope="module")
def worker(place: Place) -> Iterator[Worker]:
    with place.worker() as worker:
        yield worker
        assert worker.stop() == 0
    assert place.messages() == 0


def revoke(place: Place, item: str, **options: Any) -> None:
    """Revoke a task, and wait until the worker knows it. It may be ready for tasks before it listens to broadcasts."""
    arguments = {"task_id": item, **options}
    for _ in range(PATIENCE):
        if place.app.control.broadcast("revoke", arguments, reply=True, limit=1, timeout=1):
            return
    raise TimeoutError("the worker did not answer")


def test_a_revoked_task_that_has_not_run_fails(place: Place, worker: Worker) -> None:
    batch, (item,) = place.open()
    revoke(place, item)
    place.task("succeed").apply_async(task_id=item)
    assert outcomes(batch) == {item: "revoked"}
    assert place.runs(item) == 0


def test_a_task_that_is_terminated_while_it_runs_fails(place: Place, worker: Worker) -> None:
    batch, (item,) = place.open()
    place.task("hang").apply_async(task_id=item)
    place.wait_until_started(item)
    revoke(place, item, terminate=True)
    assert outcomes(batch) == {item: "terminated"}


def test_an_ignored_task_fails_if_the_option_says_so(place: Place, worker: Worker) -> None:
    batch = place.publish("ignore")
    assert list(outcomes(batch).values()) == ["ignored"]


def test_the_callback_is_called_when_the_batch_is_complete(place: Place, worker: Worker) -> None:
    batch = place.publish("succeed")
    outcomes(batch)
    assert place.read_note("completed", batch.id) == "True"


def test_other_tasks_are_untouched(place: Place, worker: Worker) -> None:
    result = place.task("succeed").apply_async()
    assert result.get(PATIENCE) == "done"
    for almost_an_item in ("7:0", "07:0:1", "urn:uuid:1", "7:0:9007199254740993"):
        assert place.task("succeed").apply_async(task_id=almost_an_item).get(PATIENCE) == "done"


def test_settings_that_lead_to_duplicate_runs_are_reported_at_the_start(place: Place, worker: Worker) -> None:
    assert "acks_late is off for apply_inside, complete_a_batch, die, " in worker.output
    assert "die_once" not in worker.output
    assert "visibility timeout" not in worker.output


@pytest.mark.slow
def test_a_short_visibility_timeout_is_reported_at_the_start(new_place: Any) -> None:
    settings = {
        "broker_transport_options": {"visibility_timeout": 100},
        "task_time_limit": 60,
        "worker_prefetch_multiplier": 2,
    }
    place: Place = new_place(settings=settings)
    with place.worker() as worker:
        assert (
            "the visibility timeout is 100.0 s, but 2 prefetched messages per process may take longer" in worker.output
        )
        assert "acks_late" not in worker.output


def test_a_refused_token_ends_the_worker(new_place: Any, tokens_url: str) -> None:
    """With an exit code that a supervisor sees. The message returns."""
    place: Place = new_place(service_url=tokens_url)
    with Client(tokens_url, token=TOKEN) as client, place.worker() as worker:
        batch = client.open(items=1)
        place.task("succeed").apply_async(task_id=batch.ids[0])
        assert worker.process.wait(PATIENCE) == 1
        assert (place.messages(), batch.refresh().pending) == (1, 1)


def new_worker_place(new_place: Any, broker: str, **arguments: Any) -> Place:
    """A place whose broker redelivers soon after a worker was killed. On Redis, a worker looks for overdue messages
    when it starts, and after that only every 100 s, so the timeout must be shorter than the start of the next one."""
    settings = {"broker_transport_options": {"visibility_timeout": 0.1}} if broker == "redis" else {}
    place: Place = new_place(broker, settings=settings, **arguments)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_killed_in_the_middle_of_a_task_is_followed_by_another(new_place: Any, broker: str, pool: str) -> None:
    place = new_worker_place(new_place, broker)
    batch, (item,) = place.open()
    place.task("wait").apply_async(task_id=item)
    with place.worker(pool) as worker:
        place.wait_until_started(item)
        worker.stop(9)
    assert batch.refresh().pending == 1
    with place.worker(pool) as worker:
        place.wait_until_started(item)
        place.let_go(item, 10)  # on Redis the message may come again and again
        assert outcomes(batch) == {}
        assert worker.stop() == 0
    assert place.runs(item) >= 2
    if broker == "rabbitmq":
        assert place.messages() == 0


@pytest.mark.slow
@pytest.mark.parametrize("broker", BROKERS)
def test_a_worker_killed_between_the_commit_and_the_removal_counts_once(new_place: Any, broker: str) -> None:
    place = new_worker_place(new_place, broker)
    batch = place.publish("succeed")
    item = f"{batch.id}:0:0"
    with place.worker(TEST_DIES="1") as worker:
        assert worker.process.wait(PATIENCE) == -9
    assert batch.refresh().complete
    with place.worker() as worker:
        for _ in range(2):
            place.wait_until_started(item)
        assert [place.read_note("completed", batch.id) for _ in range(2)] == ["True", "False"]
        assert worker.stop() == 0
    verification = batch.verify()
    assert verification.ok
    assert verification.counted.acked == 1
    assert place.messages() == 0


@pytest.mark.slow
@pytest.mark.parametrize("broker", BROKERS)
def test_while_the_service_is_away_messages_stay(new_place: Any, broker: str) -> None:
    with sqlite_file() as database:
        service = ServiceProcess(database).start()
        place: Place = new_place(broker, service_url=service.url, settings={"worker_prefetch_multiplier": 1})
        batch, items = place.open(10)
        service.stop(9)
        with place.worker(concurrency=2) as worker:
            for item in items:
                place.task("succeed").apply_async(task_id=item)
            # The worker takes no more than its prefetch limit.
            for item in items[:2]:
                place.wait_until_started(item)
            service.start()
            assert outcomes(batch) == {}
            assert worker.stop() == 0
        assert [place.runs(item) for item in items] == [1] * 10
        assert place.messages() == 0
        service.remove()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_pool_runs_no_task_of_an_ended_batch(new_place: Any, pool: str) -> None:
    """Not even those that it had when the batch was cancelled. The tasks that run learn of it, in child processes too.
    Tasks of other batches run."""
    place = new_place()
    with place.worker(pool) as worker:
        batch = place.lastbit.fan_out([place.task("wait_for_the_end") for _ in range(12)])
        for number in range(2):
            place.wait_until_started(f"{batch.id}:0:{number}")
        batch.cancel()
        other = place.publish("succeed")
        assert outcomes(other) == {}
        wait_until(lambda: place.messages() == 0, "all messages are removed")
        assert worker.stop() == 0
    assert sum(place.runs(f"{batch.id}:0:{number}") for number in range(12)) == 2
    assert (batch.refresh().state, batch.info.pending) == ("cancelled", 12)
