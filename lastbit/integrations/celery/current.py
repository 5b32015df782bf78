"""The current item of a task, in every pool and in the caller's process.

Celery announces the begin and the end of each run in the thread of the task. An earlier task of a chain works for the
item of the chain, whose last task has the id.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.signals import task_postrun, task_prerun

from lastbit.integrations import _current
from lastbit.integrations._ended import EndedBatches
from lastbit.integrations.celery.items import is_item, later_items


def install(app: Celery, ended: EndedBatches | None) -> None:
    """Set the current item of the app's tasks. `ended`: what their worker knows."""

    def enter(sender: Any, task_id: str, **_: object) -> None:
        if sender.app is app:
            _current.enter(item_of(task_id, sender.request) or task_id, ended)

    def leave(sender: Any, **_: object) -> None:
        if sender.app is app:
            _current.leave()

    task_prerun.connect(enter, weak=False)
    task_postrun.connect(leave, weak=False)


def item_of(task_id: str, request: Any) -> str | None:
    """The item that a run works for. None if there is none, or if several wait for its success."""
    if is_item(task_id):
        return task_id
    items = later_items({"chain": request.chain, "chord": request.chord, "callbacks": request.callbacks})
    return items[0] if len(items) == 1 else None
