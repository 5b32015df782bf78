"""The app of the tests' workers: a task for each way to end. It is configured by the environment."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import redis
from celery import Celery, Task
from celery.exceptions import Ignore, Reject
from celery.signals import task_postrun
from celery.worker.request import Request

from lastbit import Completed
from lastbit.integrations import _endings, current_batch, current_batch_ended, current_item
from lastbit.integrations.celery import Lastbit, Skipped
from lastbit.integrations.celery.items import is_item
from tests import mutants

mutants.from_environment()
app = Celery("tests", broker=os.environ.get("TEST_BROKER"), backend=os.environ.get("TEST_BACKEND"))
app.conf.update(json.loads(os.environ.get("TEST_SETTINGS", "{}")))
_endings.TTL = 1.0  # type: ignore[misc]
_endings.LOOK = 0.1  # type: ignore[misc]
notes = redis.Redis.from_url(os.environ.get("TEST_NOTES", "redis://127.0.0.1"))


def note_completion(completion: Completed) -> None:
    """Called after the commit, and before the message is removed."""
    notes.rpush(note("completed", completion.batch), str(completion.newly))
    if "TEST_DIES" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)


lastbit = Lastbit(app, on_completed=note_completion, **json.loads(os.environ.get("TEST_OPTIONS", "{}")))


def note(kind: str, name: object) -> str:
    """The key of a note: ids of items are the same in each new service, and queues are not."""
    return f"{app.conf.task_default_queue}:{kind}:{name}"


def run_of(task: Any) -> int:
    """Record that the task runs, and return how often it has, including this time. It knows its item, in each pool and
    attempt."""
    if is_item(task.request.id):
        assert current_item() == task.request.id
    elif task.request.id.startswith("batch:"):
        assert task.request.id.startswith(f"batch:{current_batch()}:")
    run: int = notes.incr(note("runs", task.request.id))
    notes.rpush(note("started", task.request.id), os.getpid())
    return run


@app.task(name="succeed", bind=True)
def succeed(self: Any, *args: Any) -> str:
    run_of(self)
    return "done"


@app.task(name="fail", bind=True)
def fail(self: Any, *args: Any) -> None:
    run_of(self)
    raise ValueError("no such product")


class Strange(Exception):
    """Can't be pickled, and its message is no UTF-8."""

    def __init__(self, lock: Any) -> None:
        super().__init__("a file named \udcff" + "!" * 1000)
        self.lock = lock


@app.task(name="fail_strangely", bind=True)
def fail_strangely(self: Any) -> None:
    run_of(self)
    raise Strange(threading.Lock())


@app.task(name="retry_once", bind=True)
def retry_once(self: Any, *args: Any) -> None:
    if run_of(self) == 1:
        raise self.retry(countdown=0)


@app.task(name="retry_always", bind=True, max_retries=2)
def retry_always(self: Any) -> None:
    run_of(self)
    raise self.retry(countdown=0, exc=ValueError("still no such product"))


@app.task(name="ignore", bind=True)
def ignore(self: Any, *args: Any) -> None:
    run_of(self)
    raise Ignore("nothing to do")


@app.task(name="skip", bind=True, autoretry_for=(Exception,))
def skip(self: Any, *args: Any) -> None:
    run_of(self)
    raise Skipped("not in the catalog any more")


@app.task(name="reject", bind=True)
def reject(self: Any) -> None:
    run_of(self)
    raise Reject("unreadable", requeue=False)


@app.task(name="requeue_once", bind=True)
def requeue_once(self: Any) -> None:
    if run_of(self) == 1:
        raise Reject("not now", requeue=True)


@app.task(name="die", bind=True)
def die(self: Any, *args: Any) -> None:
    run_of(self)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="die_once", bind=True, acks_late=True, reject_on_worker_lost=True)
def die_once(self: Any) -> None:
    if run_of(self) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="die_after_success", bind=True, reject_on_worker_lost=True)
def die_after_success(self: Any) -> str:
    run_of(self)
    return "stored"


@task_postrun.connect(sender=die_after_success)
def kill(**_: object) -> None:
    """At this point, the result is stored, and the main process doesn't have it."""
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="leave_after_success", bind=True)
def leave_after_success(self: Any) -> str:
    run_of(self)
    return "stored"


@task_postrun.connect(sender=leave_after_success)
def leave_now(**_: object) -> None:
    sys.exit("enough")


@app.task(name="die_and_retry", bind=True, retry_on_worker_lost=True, default_retry_delay=0)
def die_and_retry(self: Any) -> None:
    if run_of(self) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="die_and_retry_late", bind=True, retry_on_worker_lost=True, default_retry_delay=0, acks_late=True)
def die_and_retry_late(self: Any) -> None:
    if run_of(self) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="die_always", bind=True, retry_on_worker_lost=True, default_retry_delay=0, max_retries=1)
def die_always(self: Any) -> None:
    run_of(self)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="leave", bind=True)
def leave(self: Any) -> None:
    run_of(self)
    sys.exit("enough")


@app.task(name="hang", bind=True)
def hang(self: Any) -> None:
    run_of(self)
    threading.Event().wait()


@app.task(name="hang_once", bind=True, acks_late=True, acks_on_failure_or_timeout=False)
def hang_once(self: Any) -> None:
    if run_of(self) == 1:
        threading.Event().wait()


@app.task(name="dead_letter", bind=True, acks_late=True, acks_on_failure_or_timeout=False)
def dead_letter(self: Any) -> None:
    run_of(self)
    raise ValueError("for the dead letters")


@app.task(name="replace", bind=True)
def replace(self: Any, *names: str) -> Any:
    """Replace this task by a chain of others."""
    run_of(self)
    signatures = [app.signature(name) for name in names]
    return self.replace(signatures[0] if len(names) == 1 else signatures[0] | signatures[1])


class OwnRequest(Request):  # type: ignore[misc]
    def on_accepted(self, pid: int, time_accepted: float) -> None:
        notes.rpush(note("accepted", self.id), pid)
        super().on_accepted(pid, time_accepted)


class OwnTask(Task):  # type: ignore[misc]
    """A base class that doesn't derive from the app's, with a Request class of its own."""

    Request = OwnRequest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


@app.task(name="own_base", bind=True, base=OwnTask)
def own_base(self: Any) -> None:
    run_of(self)


@app.task(name="spawn", bind=True)
def spawn(self: Any) -> None:
    """Publish a task that fails. It belongs to no batch."""
    run_of(self)
    fail.apply_async(task_id=f"child of {self.request.id}")


@app.task(name="complete_a_batch", bind=True)
def complete_a_batch(self: Any) -> None:
    """In the process of the task."""
    run_of(self)
    batch = lastbit.client.open(items=1, sealed=True)
    lastbit.client.ack(batch.ids)
    notes.rpush(note("batch", self.request.id), batch.id)


@app.task(name="apply_inside", bind=True)
def apply_inside(self: Any, item: str) -> None:
    """Run another item's task in this process."""
    run_of(self)
    succeed.apply(task_id=item)


@app.task(name="wait", bind=True)
def wait(self: Any) -> None:
    """Run until the test lets it go."""
    run_of(self)
    notes.blpop([note("go", self.request.id)])


@app.task(name="wait_for_the_end", bind=True)
def wait_for_the_end(self: Any) -> None:
    """Run until the process knows that the batch has ended."""
    run_of(self)
    pause = threading.Event()
    while not current_batch_ended():
        pause.wait(0.02)


@app.task(name="total", bind=True)
def total(self: Any, results: list[str]) -> int:
    run_of(self)
    return len(results)
