"""Celery tasks as items of a batch. One line of setup, `lastbit = Lastbit(app)`, and tasks need no change.

An item's id is the id of its task, which survives retries. `fan_out` opens a batch and publishes its tasks. A worker
resolves an item when its task has ended, however it ends, and removes the message from the broker after Lastbit's
commit. Tasks with other ids take Celery's own path.

    extension.py   the object that an application makes
    items.py       the items that depend on a message
    requests.py    which ending of a task resolves its item in which way
    resolver.py    the acker of a worker's main process
    worker.py      connects them to a worker's consumer
    eager.py       tasks that run without a message
    current.py     the item that a task works for
    skipping.py    tasks that skip themselves, and those that do not run, as their batch has ended
    endings.py     the task at the end of a batch
    publisher.py   sends the tasks of a fan-out
"""

from __future__ import annotations

from lastbit.errors import MissingExtra

try:
    import celery  # noqa: F401
except ImportError as cause:
    raise MissingExtra("celery", "lastbit.integrations.celery") from cause

from lastbit.integrations.celery.extension import Lastbit
from lastbit.integrations.celery.skipping import Skipped

__all__ = ["Lastbit", "Skipped"]
