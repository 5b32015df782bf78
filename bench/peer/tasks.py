"""Celery: the same no-op task untracked, acked to Lastbit, and as the header of a chord.

Run by `celery -A bench.peer.tasks worker`, which takes broker and result backend from CELERY_BROKER_URL and
CELERY_RESULT_BACKEND, and Lastbit from LASTBIT_URL.

How a careful user acks a batch's tasks. The item's id is the task's id, so tasks keep their arguments, and a task that
is retried or delivered twice is the same item. A task is acked to Lastbit when it has ended well, and only once that is
committed is its message removed from the broker (`acks_late`): whatever dies in between, the message comes back, the
task runs again, and its item counts once. No task waits for it. The ack is made where Celery knows that a task has
ended: in the worker's main process, by a `Request` class of its own, as Celery documents them. So one acker serves all
of a worker's children, with any pool. In the children of a prefork pool, with one task at a time each, an acker would
have nothing to gather, and each task would wait for a commit.

As no task waits, acks may: what has ended is given to the acker after `GATHER` seconds, or once there are `MOST`. Given
one by one they would go in calls of one or two, since the acker sends at once when it is idle, and a call costs more
than such a task. The worker must prefetch more than that. Celery's default of 4 messages a child suits long tasks; for
short ones its documentation says 64 or 128. All tasks here run with 128, tracked or not.
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

ended: deque[AckingRequest] = deque()
"""Well, and not yet given to the acker. Empty but in a worker's main process."""


@functools.cache
def acker() -> Acker:
    """Made with the first ack: after the worker has forked its children."""
    return Client().acker()


def give() -> None:
    with contextlib.suppress(IndexError):  # empty; threads of a pool may give at the same time
        while True:
            request = ended.popleft()
            acker().ack(request.id).add_done_callback(request.told)


class Gather(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Part of the worker: gives on what has ended, from time to time."""

    requires = ("celery.worker.components:Timer",)

    def start(self, worker: Any) -> None:
        worker.timer.call_repeatedly(GATHER, give)


app.steps["worker"].add(Gather)


@worker_shutdown.connect
def close_acker(**_: object) -> None:
    """Ended tasks are acked. Messages that can't be removed any more come back, as repeats."""
    give()
    if acker.cache_info().currsize:
        acker().close()


class AckingRequest(Request):
    """A task's message, removed from the broker after its item was acked. Retries and failures are not acked here: the
    first come again under the same id, the second are for `acker().fail` and the user's choice of when to give up."""

    ended_badly = False

    def on_failure(self, *args: Any, **kwargs: Any) -> Any:
        self.ended_badly = True  # or is to be retried
        return super().on_failure(*args, **kwargs)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        self.ended_badly = self.ended_badly or not soft
        super().on_timeout(soft, timeout)

    def acknowledge(self) -> None:
        if self.ended_badly or self.time_start is None:  # None: revoked or expired before it ran
            super().acknowledge()
        else:
            ended.append(self)
            if len(ended) >= MOST:
                give()

    def told(self, acked: Future[Told]) -> None:
        """In the acker's thread; Celery itself hands what follows to its event loop."""
        error = acked.exception()
        if error is None:
            super().acknowledge()
        else:
            # Where the service is away for longer than the client tries, the broker holds the message. An item that is
            # rejected, as its batch was cancelled, won't be accepted the next time either.
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
