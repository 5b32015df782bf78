"""Tasks that run in the caller's process, with `task_always_eager` or `apply()`: mostly in tests.

There is no message, and so no redelivery: the item is resolved before the call returns. Celery sends `task_postrun` at
the end of each run. A retry follows as another run with the same id. If exceptions propagate to the caller, Celery does
not retry, and reports no state: then the exception that is on its way is the outcome.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from celery import Celery, states
from celery.signals import task_postrun

from lastbit.client import Client
from lastbit.integrations import _reasons
from lastbit.integrations._resolver import Verb
from lastbit.integrations._skipped import Skipped
from lastbit.integrations.celery.items import is_item
from lastbit.integrations.celery.requests import is_replaced, reason_of, unwrapped


def install(app: Celery, client: Callable[[], Client], when_ignored: Verb) -> None:
    """Resolve the items of eager tasks of the app. An error of the service is logged by Celery."""

    def resolve(sender: Any, task_id: str, retval: Any, state: str | None, **_: object) -> None:
        if not is_item(task_id) or not sender.request.is_eager or sender.app is not app:
            return
        error = retval if isinstance(retval, BaseException) else sys.exc_info()[1]
        error = None if error is None or state == states.SUCCESS else unwrapped(error)
        if state == states.RETRY or (error is not None and is_replaced(error)):
            return
        if isinstance(error, Skipped):
            client().skip(task_id, _reasons.reason_of(error))
        elif state == states.SUCCESS or (state == states.IGNORED and when_ignored == "ack"):
            client().ack(task_id)
        elif state == states.IGNORED:
            (client().skip if when_ignored == "skip" else client().fail)(task_id, "ignored")
        else:
            reason = "failed" if error is None else reason_of(error, sender.request.retries or 0)
            client().fail(task_id, reason)

    task_postrun.connect(resolve, weak=False)
