"""Celery: the same no-op task untracked, as an item of a batch, and as the header of a chord.

Run by `celery -A bench.peer.tasks worker`, which reads broker and result backend from CELERY_BROKER_URL and
CELERY_RESULT_BACKEND, and Lastbit's URL from LASTBIT_URL.

A worker must prefetch more messages than Lastbit's adapter gathers acks. Celery's default of 4 messages a child suits
long tasks; for short ones its documentation recommends 64 or 128. All tasks here run with 128, tracked or not.
"""

from __future__ import annotations

from celery import Celery

from lastbit.integrations.celery import Lastbit

app = Celery("bench")
app.conf.update(task_acks_late=True, task_ignore_result=True, worker_prefetch_multiplier=128)
lastbit = Lastbit(app)


@app.task
def nothing() -> None: ...


@app.task(ignore_result=False)
def chorded() -> None: ...


@app.task(ignore_result=False)
def count(results: list[None]) -> int:
    """The chord's body, which Celery runs when all tasks of the header have ended."""
    return len(results)
