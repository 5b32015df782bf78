"""Every way in which a job can end, with RQ's own worker command and a real Redis."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from types import ModuleType
from typing import Any

import pytest
import redis
from rq import Queue, Retry, SimpleWorker
from rq.command import send_stop_job_command

import lastbit
from lastbit import Client, errors
from lastbit.integrations.rq import (
    LastbitMixin,
    LastbitSimpleWorker,
    LastbitWorker,
    fan_out,
    item_of_job,
    job_id_of,
    reconcile,
    resend,
)
from lastbit.integrations.rq._maintenance import compare
from lastbit.integrations.rq._relay import Ack, Fail, Relay
from lastbit.integrations.rq._unacked import note, noted, noted_skips, remove
from tests.integrations.conftest import TOKEN
from tests.integrations.redrives import redriven
from tests.integrations.rq.conftest import StartWorker
from tests.integrations.workers import reasons_by_number as reasons
from tests.integrations.workers import wait_until
from tests.mutants import mutant
from tests.support.servers import ServiceProcess, sqlite_file
from tests.support.threads import no_more_threads


def runs(store: Any) -> dict[int, int]:
    return {int(job.split("-")[3]): int(count) for job, count in store.hgetall("runs").items() if "lastbit" in job}


def test_each_ending_resolves_its_item(app: ModuleType, worker: StartWorker, client: Client, store: Any) -> None:
    """One batch with a job for each ending that needs no help. A job that is retried stays pending until its last
    run."""
    batch = client.open()
    calls: list[tuple[Any, dict[str, Any]]] = [
        (app.succeeds, {}),
        (app.succeeds_at_the_third_run, {"retry": Retry(max=4)}),
        (app.fails, {"retry": Retry(max=1)}),
        (app.fails, {"retry": Retry(max=1, interval=3600)}),
        (app.returns_retry_twice, {}),
        (app.always_returns_retry, {}),
        (app.exceeds_its_time, {"timeout": 1}),
        (app.kills_itself, {}),
        (app.kills_itself_at_first, {"retry": Retry(max=1)}),
        ("tests.integrations.rq.app.unheard_of", {}),
    ]
    for function, options in calls:
        fan_out(app.queue, function, [()], options=options, batch=batch, seal=False)
    app.queue.enqueue(app.succeeds)  # not an item's
    with worker():
        wait_until(lambda: batch.refresh().pending == 1, "all but one are resolved")
        wait_until(lambda: app.queue.started_job_registry.count == 0 == app.queue.count, "all have ended")
    assert [pending.start for pending in batch.pending()] == [3]
    found = reasons(batch)
    assert "Work-horse terminated unexpectedly; waitpid returned 9" in found.pop(7)
    assert "unheard_of" in found.pop(9)
    assert "exceeded maximum timeout value (1 seconds)" in found.pop(6)
    assert found == {2: "ValueError: no such picture", 5: "the job returned Retry after 1 retries"}
    assert runs(store) == {0: 1, 1: 3, 2: 2, 3: 1, 4: 3, 5: 2, 7: 1, 8: 2}
    assert batch.verify().ok


def test_a_job_knows_its_item(app: ModuleType, worker: StartWorker, store: Any) -> None:
    """In a work-horse, and in the process of the producer."""
    with worker():
        batch = fan_out(app.queue, app.notes_its_item, [()])
        batch.wait(30)
    here = fan_out(Queue(connection=app.store, is_async=False), app.notes_its_item, [()])
    assert here.refresh().succeeded
    assert store.lrange("items", 0, -1) == [f"{batch.id}:0:0", f"{here.id}:0:0"]


def test_redriven_jobs_run_again(app: ModuleType, worker: StartWorker, client: Client, store: Any) -> None:
    """Only the failed items run again, each with its own arguments, and with the new options."""
    calls = [(word,) for word in ("wrong", "right", "wrong", "right")]
    with worker():
        batch = fan_out(app.queue, app.fails_at_first_if_wrong, calls)
        assert batch.wait(30).failed == 2
        redrive = redriven(client, batch)
        assert resend(app.queue, app.fails_at_first_if_wrong, redrive, calls, options={"timeout": 30}) == 2
        wait_until(lambda: batch.refresh().succeeded, "the failed items are acked")
    assert runs(store) == {0: 2, 1: 1, 2: 2, 3: 1}
    with pytest.raises(errors.InvalidArgument, match="the option 'ttl' is not possible here"):
        resend(app.queue, app.fails, redrive, calls, options={"ttl": 1})


def test_a_redriven_job_has_all_its_retries_again(app: ModuleType, client: Client, store: Any) -> None:
    """RQ counts the retries of a job that returns Retry in the job's hash, which outlives the job."""
    batch = fan_out(app.queue, app.always_returns_retry, [()], client=client)
    LastbitSimpleWorker([app.queue], connection=app.store).work(burst=True)
    assert (batch.refresh().failed, runs(store)) == (1, {0: 2})
    resend(app.queue, app.always_returns_retry, redriven(client, batch), [()], client=client)
    LastbitSimpleWorker([app.queue], connection=app.store).work(burst=True)
    assert runs(store) == {0: 4}


@pytest.mark.slow
def test_a_stopped_job_fails_its_item(app: ModuleType, worker: StartWorker, client: Client, store: Any) -> None:
    """Although it has retries left."""
    with worker():
        batch = fan_out(app.queue, app.waits_in_its_first_run, [("s",)], options={"retry": Retry(max=3)})
        store.blpop(["begun:s"], 30)
        send_stop_job_command(app.store, job_id_of(f"{batch.id}:0:0"))
        batch.wait(30)
    assert reasons(batch) == {0: "Job stopped by user, work-horse terminated."}


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 2])
def test_the_job_of_a_killed_worker_is_retried_or_fails_its_item(
    app: ModuleType, worker: StartWorker, client: Client, store: Any, retries: int
) -> None:
    """SIGKILL of worker and work-horse. RQ notices it when the job's time is over, which is made to pass here: then the
    next worker retries it, or fails it."""
    options = {"retry": Retry(max=retries)} if retries else {}
    with worker() as first:
        batch = fan_out(app.queue, app.waits_in_its_first_run, [("k",)], options=options)
        _, horse = store.blpop(["begun:k"], 30)
        first.kill()
        os.kill(int(horse), signal.SIGKILL)  # it has a process group of its own
    assert batch.refresh().pending == 1
    (started,) = store.zrange("rq:wip:default", 0, -1)
    store.zadd("rq:wip:default", {started: 1})
    with worker():
        batch.wait(30)
    assert batch.info.succeeded == bool(retries)
    assert reasons(batch).keys() == (set() if retries else {0})


def test_a_refused_token_ends_the_worker(app: ModuleType, worker: StartWorker, tokens_url: str) -> None:
    """With an exit code that a supervisor sees. The item is noted for the next worker."""
    with Client(tokens_url, token=TOKEN) as client, worker(LASTBIT_URL=tokens_url) as running:
        (item,) = client.open(items=1).ids
        app.queue.enqueue(app.succeeds, job_id=job_id_of(item))
        assert running.wait() == 1
    assert noted(app.store, "default") == [item]


def test_a_work_horse_outlives_its_worker(app: ModuleType, worker: StartWorker, client: Client, store: Any) -> None:
    """It acks the item itself then, removes its note, and saves the job as finished."""
    with worker() as first:
        batch = fan_out(app.queue, app.waits_for_a_go, [("w",)])
        store.blpop(["begun:w"], 30)
        first.kill()  # the work-horse has a process group of its own
        assert batch.refresh().pending == 1
        store.rpush("go:w", 1)
        assert batch.wait(30).succeeded
        job = app.queue.fetch_job(job_id_of(f"{batch.id}:0:0"))
        wait_until(lambda: job.get_status() == "finished", "the job is finished")
        assert noted(app.store, "default") == []


def test_a_work_horse_gets_the_errors_of_its_worker() -> None:
    """And continues after an error."""
    taken: list[Ack | Fail] = []

    def take(request: Ack | Fail) -> None:
        if isinstance(request, Fail):
            raise errors.LastbitError("no service")
        taken.append(request)

    def run_horse() -> None:
        relay.enter_horse()
        for request in (Fail("1:0:1", "broken"), Ack("1:0:0", "default")):
            try:
                relay.send(request)
                answers.put("taken")
            except errors.LastbitError as error:
                answers.put(str(error))

    fork = multiprocessing.get_context("fork")
    relay, answers = Relay(take), fork.SimpleQueue()
    horse = fork.Process(target=run_horse)
    horse.start()
    relay.serve()
    assert [answers.get(), answers.get()] == ["no service", "taken"]
    assert taken == [Ack("1:0:0", "default")]
    horse.join(30)
    wait_until(lambda: "lastbit-relay" not in {thread.name for thread in threading.enumerate()}, "the thread has ended")


def test_a_work_horse_does_not_wait_for_a_worker_that_can_start_no_thread() -> None:
    """It gets an error, and then calls the service itself."""
    fork = multiprocessing.get_context("fork")
    relay, answers = Relay(lambda request: None), fork.SimpleQueue()

    def run_horse() -> None:
        relay.enter_horse()
        try:
            relay.send(Ack("1:0:0", "default"))
        except (EOFError, OSError) as error:
            answers.put(type(error).__name__)

    horse = fork.Process(target=run_horse)
    horse.start()
    with no_more_threads():
        relay.serve()
    try:
        horse.join(30)
        assert horse.exitcode == 0
        assert answers.get() in {"EOFError", "BrokenPipeError", "ConnectionResetError"}
    finally:
        horse.kill()


@mutant(
    "what-a-killed-worker-noted-is-not-acked",
    "lastbit.integrations.rq._maintenance:compare",
    "_ack_noted(queue, client)",
    "0",
)
@mutant(
    "cancelled-jobs-are-overlooked",
    "lastbit.integrations.rq._maintenance:compare",
    "canceled.get_job_ids(cleanup=False)",
    "[]",
)
def test_reconcile_resolves_what_ended_without_a_worker(app: ModuleType, client: Client) -> None:
    """Cancelled jobs, jobs that another worker class has run, and what a killed worker has noted, though its job has
    expired meanwhile. It does not touch jobs that wait."""
    batch = fan_out(app.queue, app.succeeds, [(), ()], client=client)
    fan_out(app.queue, app.fails, [()], client=client, batch=client.open(), seal=False)
    failing = client.batch(batch.id + 1)
    SimpleWorker([app.queue], connection=app.store).work(burst=True)
    waiting = fan_out(app.queue, app.succeeds, [(), ()], client=client)
    app.queue.fetch_job(job_id_of(f"{waiting.id}:0:1")).cancel()
    noted_one = client.open(items=1)
    note(app.store, "default", f"{noted_one.id}:0:0")
    assert reconcile(app.queue, client) == 5
    assert reconcile(app.queue, client) == 0
    assert noted_one.refresh().acked == 1
    assert noted(app.store, "default") == []
    assert batch.refresh().succeeded
    assert reasons(failing) == {0: "ValueError: no such picture"}
    assert reasons(waiting) == {1: "the job was canceled"}
    assert [pending.start for pending in waiting.pending()] == [0]
    LastbitSimpleWorker([app.queue], connection=app.store).work(burst=True)
    assert waiting.refresh().complete


@mutant(
    "a-job-that-failed-in-the-producer-is-left",
    "lastbit.integrations.rq._fan_out:_resolve",
    "job.get_status(refresh=False) == JobStatus.FAILED",
    "False",
)
def test_a_queue_without_workers_resolves_at_once(app: ModuleType, client: Client) -> None:
    """As in tests, with `is_async=False`."""
    queue = Queue(is_async=False, connection=app.store)
    batch = fan_out(queue, app.fails, [()], client=client, seal=False)
    fan_out(queue, app.succeeds, [(1,), {"number": 2}], client=client, batch=batch)
    assert (batch.refresh().acked, batch.refresh().failed, batch.refresh().complete) == (2, 1, True)
    assert reasons(batch) == {0: "ValueError: no such picture"}


@mutant(
    "an-error-after-a-skip-is-a-skip",
    "lastbit.integrations.rq._fan_out:_resolve",
    "_NEXT not in text",
    "True",
)
def test_a_job_skips_itself_in_the_producer(app: ModuleType, client: Client) -> None:
    """If it raises something else in the end, it fails."""
    queue = Queue(is_async=False, connection=app.store)
    batch = fan_out(queue, app.skips_itself, [(), ("two\nlines",)], client=client, seal=False)
    fan_out(queue, app.skips_itself_and_fails, [()], client=client, batch=batch)
    assert (batch.refresh().skipped, batch.refresh().failed) == (2, 1)
    assert [span.reasons for span in batch.skipped()] == [{f"{batch.id}:0:1": "two\nlines"}]
    assert reasons(batch) == {2: "ValueError: no such picture"}


@mutant(
    "a-job-that-skips-itself-leaves-no-note",
    "lastbit.integrations.rq._unacked:note_skip",
    "connection.hset(UNSKIPPED + queue, item, reason or '')",
    "pass",
)
@mutant(
    "a-noted-skip-is-left-to-the-registry-of-finished-jobs",
    "lastbit.integrations.rq._maintenance:compare",
    "_ack_noted(queue, client) + _skip_noted(queue, client)",
    "_ack_noted(queue, client)",
)
@pytest.mark.parametrize("reason", [None, "not in the catalog any more"])
def test_a_job_skips_itself_while_the_service_is_away(app: ModuleType, client: Client, reason: str | None) -> None:
    """A work-horse notes it. It is skipped at the next maintenance, and not acked as the finished job that it is."""

    class CutOff(LastbitWorker):
        def lastbit_client(self) -> Client:
            return Client("http://127.0.0.1:1", retry=lastbit.Retry(attempts=1))

    batch = fan_out(app.queue, app.skips_itself, [(reason,)], client=client)
    CutOff([app.queue], connection=app.store).work(burst=True)
    assert (app.queue.finished_job_registry.count, batch.refresh().pending) == (1, 1)
    assert reconcile(app.queue, client) == 1
    assert (batch.refresh().skipped, batch.info.succeeded) == (1, True)
    assert [span.reasons for span in batch.skipped()] == [{f"{batch.id}:0:0": reason} if reason else {}]
    assert reconcile(app.queue, client) == 0


def test_a_work_horse_skips_its_item(app: ModuleType, worker: StartWorker, client: Client) -> None:
    with worker():
        batch = fan_out(app.queue, app.skips_itself, [("not in the catalog any more",)], client=client)
        assert batch.wait(30).succeeded
        wait_until(lambda: not noted_skips(app.store, "default"), "the note is removed")
    assert [span.reasons for span in batch.skipped()] == [{f"{batch.id}:0:0": "not in the catalog any more"}]


def test_a_job_whose_result_is_not_kept_is_resolved_in_the_producer(app: ModuleType, client: Client) -> None:
    """RQ deletes it at once. One that waits for another job has not run."""
    queue = Queue(is_async=False, connection=app.store)
    batch = fan_out(queue, app.succeeds, [()], client=client, options={"result_ttl": 0})
    assert batch.refresh().succeeded
    other = app.queue.enqueue(app.succeeds)
    batch = fan_out(queue, app.succeeds, [()], client=client, options={"depends_on": other})
    assert batch.refresh().pending == 1


def test_the_job_of_a_held_item_ends(app: ModuleType, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """A nested batch resolves the item, so nobody is warned, also at the next maintenance."""
    batch = fan_out(app.queue, app.succeeds, [()], client=client)
    child = client.open(items=1, sealed=True, parent=f"{batch.id}:0:0")
    LastbitSimpleWorker([app.queue], connection=app.store).work(burst=True)
    assert app.queue.fetch_job(job_id_of(f"{batch.id}:0:0")).is_finished
    assert reconcile(app.queue, client) == 0
    assert (batch.refresh().pending, "rejected" in caplog.text) == (1, False)
    client.ack(child.ids)
    assert batch.refresh().succeeded


def test_a_job_that_succeeded_does_not_fail_its_item(app: ModuleType, client: Client) -> None:
    """Although it could not be saved as finished, and so has failed for RQ."""

    class Broken(SimpleWorker):
        def handle_job_success(self, *arguments: Any, **options: Any) -> None:  # type: ignore[override]
            raise ConnectionError

    class Worker(LastbitMixin, Broken):
        def _take(self, request: Ack | Fail) -> None:
            """It dies before the ack is sent."""
            if isinstance(request, Fail):
                super()._take(request)

    batch = fan_out(app.queue, app.succeeds, [()], client=client)
    Worker([app.queue], connection=app.store).work(burst=True)
    assert app.queue.failed_job_registry.count == 1
    assert (batch.refresh().pending, noted(app.store, "default")) == (1, [f"{batch.id}:0:0"])
    assert reconcile(app.queue, client) == 1
    assert batch.refresh().succeeded


def test_a_note_that_cannot_be_removed_does_not_fail_its_job(
    app: ModuleType, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A maintenance removes it when Redis is back."""
    numbers = itertools.count(1)

    def remove_later(connection: Any, queue: str, items: Any) -> None:
        if next(numbers) == 1:
            raise redis.ConnectionError("Connection reset by peer")
        remove(connection, queue, items)

    monkeypatch.setattr("lastbit.integrations.rq._unacked.remove", remove_later)
    batch = fan_out(app.queue, app.succeeds, [()], client=client)
    LastbitSimpleWorker([app.queue], connection=app.store).work(burst=True)
    assert app.queue.finished_job_registry.count == 1
    assert batch.refresh().succeeded
    assert noted(app.store, "default") == [f"{batch.id}:0:0"]
    reconcile(app.queue, client)
    assert noted(app.store, "default") == []


@mutant(
    "each-maintenance-asks-for-each-batch",
    "lastbit.integrations.rq._maintenance:compare",
    "item not in compared",
    "True",
)
@mutant(
    "jobs-that-finish-later-are-overlooked",
    "lastbit.integrations.rq._maintenance:compare",
    "item not in compared",
    "not compared",
)
def test_a_maintenance_asks_only_for_jobs_that_it_has_not_compared(app: ModuleType, client: Client) -> None:
    """RQ keeps finished jobs for minutes, perhaps of thousands of batches."""
    nowhere = Client("http://127.0.0.1:1", retry=lastbit.Retry(attempts=1))
    compared: set[str] = set()
    for _ in range(2):
        batch = fan_out(app.queue, app.succeeds, [()], client=client)
        SimpleWorker([app.queue], connection=app.store).work(burst=True)
        assert compare(app.queue, client, compared) == 1
        assert batch.refresh().succeeded
        assert compare(app.queue, nowhere, compared) == 0
    with pytest.raises(errors.ServiceUnreachable):
        reconcile(app.queue, nowhere)
    app.store.delete(app.queue.finished_job_registry.key)
    assert compare(app.queue, client, compared) == 0
    assert not compared


def test_no_work_horse_is_forked_while_a_note_is_removed(
    app: ModuleType, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would inherit the lock of Redis's connection pool, which no thread of its own releases."""
    removes, forks, has_lock = threading.Event(), threading.Event(), threading.Event()
    numbers = itertools.count(1)

    def remove_slowly(connection: Any, queue: str, items: Any) -> None:
        if next(numbers) == 2:  # the work-horse of the first one waits for it
            removes.set()
            assert forks.wait(30)
            with connection.connection_pool._lock:
                has_lock.set()
                threading.Event().wait(0.2)
        remove(connection, queue, items)

    class Worker(LastbitWorker):
        def fork_work_horse(self, job: Any, queue: Any) -> None:
            if removes.is_set():
                forks.set()
                assert has_lock.wait(30)
            super().fork_work_horse(job, queue)

    monkeypatch.setattr("lastbit.integrations.rq._unacked.remove", remove_slowly)
    batch = fan_out(app.queue, app.succeeds, [()] * 50, client=client, options={"timeout": 1})
    worker = Worker([app.queue], connection=app.store)
    worker.work(burst=True)
    assert has_lock.is_set()
    assert batch.refresh().succeeded
    assert app.queue.failed_job_registry.count == 0


def test_the_next_worker_acks_what_a_killed_one_has_finished(
    app: ModuleType, worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job is finished, so it won't run again."""
    with sqlite_file() as url:
        service = ServiceProcess(url).start()
        try:
            monkeypatch.setenv("LASTBIT_URL", service.url)
            batch = fan_out(app.queue, app.succeeds, [()], client=Client(service.url))
            item = f"{batch.id}:0:0"
            service.stop()
            with worker() as first:
                wait_until(lambda: app.queue.finished_job_registry.count == 1, "the job is finished")
                first.kill()
            app.store.delete(app.queue.finished_job_registry.key)  # as after its result_ttl
            service.start()
            assert (batch.refresh().pending, noted(app.store, "default")) == (1, [item])
            with worker():
                assert batch.wait(30).succeeded
                wait_until(lambda: not noted(app.store, "default"), "the note is removed")
        finally:
            service.remove()


@pytest.mark.parametrize("item", ["7:0:42", "9007199254740991:0:0"])
def test_job_ids_name_their_items(item: str) -> None:
    """And nothing else does."""
    assert item_of_job(job_id_of(item)) == item
    others = (item, item.replace(":", "-"), "lastbit-1-2", "lastbit-01-2-3", "lastbit-", "lastbit-1-2-3-4")
    assert [item_of_job(other) for other in others] == [None] * len(others)


@pytest.mark.parametrize(("option", "message"), [("ttl", "leaves no trace"), ("job_id", "the job's id is the item's")])
def test_options_that_lose_items_are_refused(app: ModuleType, client: Client, option: str, message: str) -> None:
    """Before a batch is opened; and what is no tuple of arguments."""
    with pytest.raises(errors.InvalidArgument, match=message):
        fan_out(app.queue, app.succeeds, [()], client=client, options={option: 1})
    with pytest.raises(errors.InvalidArgument, match="position 0: expected a tuple"):
        fan_out(app.queue, app.succeeds, ["chair"], client=client)
