"""Tasks that skip themselves, and those that do not run, as their batch has ended.

Many messages are in a pool before their batch ends, so the last look is in the child process, immediately before the
task's function: Celery calls `before_start` of a task there. The child sees what its worker has learned. `Ignore` ends
the run, and the worker's main process removes the message without resolving an item.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery import Task
from celery.exceptions import Ignore

from lastbit.integrations import _skipped
from lastbit.integrations._current import current_item

SKIPPED: Final = ("Its batch has ended",)
"""The arguments of the `Ignore` that is raised instead of running a task."""


class Skipped(_skipped.Skipped, Ignore):
    """`lastbit.integrations.Skipped`, which Celery does not take for an error: it neither logs it nor retries the
    task."""


def is_skipped(exception: BaseException) -> bool:
    return isinstance(exception, Ignore) and exception.args == SKIPPED


def guard(task: Task, is_ended: Callable[[str], bool]) -> None:
    """Let the task ask, before each run, whether the batch of its item has ended. Each task has a class of its own."""
    kind = type(task)
    if hasattr(vars(kind).get("before_start"), "lastbit"):
        return
    before_start = kind.before_start

    def before_start_or_skip(self: Task, task_id: str, args: Any, kwargs: Any) -> None:
        item = current_item(None)
        if item is not None and is_ended(item):
            raise Ignore(*SKIPPED)
        before_start(self, task_id, args, kwargs)

    before_start_or_skip.lastbit = True  # type: ignore[attr-defined]
    kind.before_start = before_start_or_skip
