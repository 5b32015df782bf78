"""Celery: the same no-op task untracked, acked to Lastbit, and as the header of a chord.

Run by `celery -A bench.peer.tasks worker`, which reads broker and result backend from CELERY_BROKER_URL and
CELERY_RESULT_BACKEND, and Lastbit's URL from LASTBIT_URL.

This is how a careful user acks a batch's tasks. The item's id is the task's id, so tasks keep their arguments, and a
task that is retried or delivered twice is the same item. A task is acked to Lastbit when it has succeeded, and its
message is removed from the broker only after that commit (`acks_late`): whatever dies in between, the message is
redelivered, the task runs again, and its item counts once. No task waits for the ack. The ack is made where Celery
learns that a task has ended: in the worker's main process, by a custom `Request` class, as Celery documents it. So one
acker serves all of a worker's children, with any pool. In the children of a prefork pool, with one task at a time each,
an acker would have nothing to combine, and each task would wait for a commit.

As no task waits, acks may be delayed: ended tasks are given to the acker after `GATHER` seconds, or once there are
`MOST`. Given one by one they would go in calls of one or two, since the acker sends at once when it is idle, and a call
costs more than such a task. The worker must prefetch more than that. Celery's default of 4 messages a child suits long
tasks; for short ones its documentation recommends 64 or 128. All tasks here run with 128, tracked or not.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from concurrent.futures import Future
from typing import Any

from celery import Celery, Task, bootsteps
from celery.signals import worker_shutdown
from celery.worker.request import Request

from lastbit import Client
from lastbit.acker import Acker, Told
from lastbit.errors import ItemRejected

GATHER = 0.1
MOST = 100

app = Celery("bench")
app.conf.update(task_acks_late=True, task_ignore_result=True, worker_prefetch_multiplier=128)

succeeded_requests: deque[AckingRequest] = deque()
"""Succeeded tasks that the acker does not have yet. Empty except in a worker's main process."""


@functools.cache
def acker() -> Acker:
    """Created with the first ack, after the worker has forked its children."""
    return Client().acker()


def give_to_acker() -> None:
    with contextlib.suppress(IndexError):  # empty; several threads of a pool may get here at the same time
        while True:
            request = succeeded_requests.popleft()
            acker().ack(request.id).add_done_callback(request.settle)


class Gather(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """A part of the worker that gives ended tasks to the acker from time to time."""

    requires = ("celery.worker.components:Timer",)

    def start(self, worker: Any) -> None:
        worker.timer.call_repeatedly(GATHER, give_to_acker)


app.steps["worker"].add(Gather)


@worker_shutdown.connect
def close_acker(**_: object) -> None:
    """Ack ended tasks. Messages that can no longer be removed are redelivered, as repeats."""
    give_to_acker()
    if acker.cache_info().currsize:
        acker().close()


class AckingRequest(Request):
    """A task's message, removed from the broker after its item was acked. Retries and failures are not acked here:
    retries are redelivered with the same id, and failures are for `acker().fail` when the user decides to give up."""

    has_failed = False

    def on_failure(self, *args: Any, **kwargs: Any) -> Any:
        self.has_failed = True  # or must be retried
        return super().on_failure(*args, **kwargs)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        self.has_failed = self.has_failed or not soft
        super().on_timeout(soft, timeout)

    def acknowledge(self) -> None:
        if self.has_failed or self.time_start is None:  # None: revoked or expired before it ran
            super().acknowledge()
        else:
            succeeded_requests.append(self)
            if len(succeeded_requests) >= MOST:
                give_to_acker()

    def settle(self, acked: Future[Told]) -> None:
        """Called in the acker's thread; Celery passes the following calls to its event loop."""
        error = acked.exception()
        if error is None:
            super().acknowledge()
        else:
            # If the service is away for longer than the client retries, the broker keeps the message. An item that was
            # rejected, because its batch was cancelled, will be rejected the next time too.
            self.reject(requeue=not isinstance(error, ItemRejected))


class AckingTask(Task):  # type: ignore[misc]
    Request = AckingRequest


@app.task
def untracked() -> None: ...


@app.task(base=AckingTask)
def acked() -> None: ...


@app.task(ignore_result=False)
def chorded() -> None: ...


@app.task(ignore_result=False)
def count(results: list[None]) -> int:
    """The chord's body, which Celery runs when all tasks of the header have ended."""
    return len(results)
