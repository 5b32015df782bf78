"""How the item of a task is resolved, for each way in which the task's message can end.

Celery's worker makes a `Request` of each message, in its main process, and calls its methods when the task starts and
ends. Each end leads to `acknowledge` or `reject`, which remove the message or return it to the queue. `ItemRequest`
resolves the items between the two. What could go wrong, and why it can't:

*The message is removed before the commit.* `acknowledge` and `reject` only note what must be done. It is done when the
service has responded.

*The message is removed when the task starts.* Without `acks_late`, Celery does so, and a worker that dies loses the
task. Here a call of `acknowledge` counts only once the task has ended.

*A task that will run again resolves its item.* A retry has published another message with the same id, and so has
`replace`, which then raises `Ignore`. Their old message is removed without resolving anything. So is that of a task
which Celery 5.7 retries because its child process died (`task_retry_on_worker_lost`). A message that is requeued is not
resolved either, nor is that of a task which the worker cancelled because it lost its broker.

*A success is recorded as a failure.* If a child process dies or leaves after the result was stored, Celery reports a
lost worker, a time limit or the child's SystemExit. So in these cases the result backend is asked.

*A message has two ends*, such as a hard time limit, which is reported as a failure and as a timeout. The first one
counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Final

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import states
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore, Reject, Retry, Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.serialization import get_pickled_exception
from celery.worker.request import Request

from lastbit.integrations import _reasons
from lastbit.integrations._resolver import Verb
from lastbit.integrations._settler import Resolution, Settler
from lastbit.integrations._skipped import Skipped
from lastbit.integrations.celery.items import is_item, later_items
from lastbit.integrations.celery.skipping import is_skipped

log = logging.getLogger("lastbit.celery")


REPLACED: Final = ("Replaced by new task",)
"""The arguments of the `Ignore` that `Task.replace` raises after it has published a task with the same id."""

_ENDS_OF_A_CHILD: Final = (WorkerLostError, TimeLimitExceeded, SystemExit, KeyboardInterrupt)
"""How Celery reports that a child process is gone. Billiard 4.3 reports the exception with which it left."""


def unwrapped(exception: BaseException) -> BaseException:
    """The exception that a task raised. On its way from a child process it may have been wrapped."""
    if isinstance(exception, ExceptionWithTraceback):
        exception = exception.exc
    original: BaseException = get_pickled_exception(exception)
    return original


def reason_of(exception: BaseException, retries: int = 0) -> str:
    """A failure's reason, like `ValueError: no such product (after 3 retries)`."""
    if isinstance(exception, TimeLimitExceeded):
        return f"hard time limit of {exception.args[0]:g} s exceeded"
    text = _reasons.reason_of(exception) or "failed"
    return _reasons.accepted(f"{text} (after {retries} {'retry' if retries == 1 else 'retries'})" if retries else text)


def is_replaced(exception: BaseException) -> bool:
    return isinstance(exception, Ignore) and exception.args == REPLACED


class ItemRequest(Request):
    """A message with items that depend on it. Mixed in before the `Request` class of its task."""

    settler: ClassVar[Settler]
    when_ignored: ClassVar[Verb]

    _resolutions: list[Resolution] | None = None
    """What happens to the items; None while the task has not ended."""
    _is_settled = False
    """Whether the message is being removed or returned."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # For each task, Celery derives one more class. Its `on_success` doesn't call super().
        if "on_success" in vars(cls):
            cls.on_success = _resolving(vars(cls)["on_success"])  # type: ignore[method-assign]

    # The task's end, as Celery reports it.

    def on_success(self, result: Any, **options: Any) -> Any:
        return self._resolve_success(super().on_success, result, options)

    def _resolve_success(self, on_success: Callable[..., Any], result: Any, options: Mapping[str, Any]) -> Any:
        if isinstance(result, ExceptionInfo):
            # The pools without child processes pass a SystemExit of the task in this way.
            return self.on_failure(result)
        # Celery's tracer returns 0 or 1. False stands for a greenlet that was killed, and then revoked.
        if not result[0] and result[0] is not False:
            self._end(self._succeeded())
        outcome = on_success(result, **options)
        self.acknowledge()
        return outcome

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        exception = unwrapped(exc_info.exception)
        if isinstance(exception, _ENDS_OF_A_CHILD) and self._has_stored_success():
            return self.on_success((0, None, 0.0))
        if isinstance(exception, Terminated | MemoryError):
            # Terminated: revoked, which `_announce_revoked` is told, or cancelled. MemoryError: the worker ends.
            return super().on_failure(exc_info, send_failed_event, return_ok)
        if isinstance(exception, Retry) or is_replaced(exception):
            self._end([])
        elif is_skipped(exception):
            self._end([])
            self._note_skipped()
        elif isinstance(exception, Skipped):
            self._end(self._skipped(_reasons.reason_of(exception)))
        elif isinstance(exception, Ignore):
            self._end(self._ignored())
        elif isinstance(exception, Reject):
            self._end(self._failed(reason_of(exception)))
        else:
            self._end(self._failed(reason_of(exception, self._request_dict.get("retries") or 0)))
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            # Celery has stored the result, or could not.
            if not self.task.acks_late:
                self.acknowledge()

    def _retry_worker_lost(self, exception: Any, exc_info: Any) -> bool:
        """Called by Celery 5.7 and later. Publishes a retry, and removes the message, or returns False. What it raises
        comes from a user's hook, after the retry was published."""
        failures, self._resolutions = self._resolutions, []
        if super()._retry_worker_lost(exception, exc_info):
            return True
        self._resolutions = failures
        return False

    def on_timeout(self, soft: bool, timeout: float) -> None:
        if not soft:
            self._end(self._failed(reason_of(TimeLimitExceeded(timeout))))
        super().on_timeout(soft, timeout)
        if not soft and not self.task.acks_late:
            self.acknowledge()

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        self._end(self._failed(reason))
        super()._announce_revoked(reason, terminated, signum, expired)

    # What Celery does with the message.

    def acknowledge(self) -> None:
        if self._resolutions is not None:
            self._settle(super().acknowledge)

    def reject(self, requeue: bool = False) -> None:
        if requeue and not self._is_settled:
            self._is_settled = True
            super().reject(requeue=True)
        elif not requeue:
            self._end(self._failed("rejected"))
            self._settle(partial(super().reject, requeue=False))

    def _settle(self, remove: Callable[[], None]) -> None:
        if not self._is_settled:
            self._is_settled = True
            self.settler.settle(self._resolutions or [], remove)

    # What happens to the items.

    def _end(self, resolutions: list[Resolution]) -> None:
        if self._resolutions is None:
            self._resolutions = resolutions

    def _succeeded(self) -> list[Resolution]:
        return [Resolution(self.id)] if is_item(self.id) else []

    def _failed(self, reason: str) -> list[Resolution]:
        own = [Resolution(self.id, "fail", reason)] if is_item(self.id) else []
        cause = f"not run, as an earlier task did not succeed: {reason}"
        return own + [Resolution(item, "fail", cause) for item in self._later_items()]

    def _skipped(self, reason: str | None) -> list[Resolution]:
        resolutions = [Resolution(self.id, "skip", reason)] if is_item(self.id) else []
        cause = "not run, as an earlier task was skipped" + (f": {reason}" if reason else "")
        return resolutions + [Resolution(item, "skip", cause) for item in self._later_items()]

    def _ignored(self) -> list[Resolution]:
        if self.when_ignored == "fail":
            return self._failed("ignored")
        items = [self.id] if is_item(self.id) else []
        reason = None if self.when_ignored == "ack" else "ignored"
        return [Resolution(item, self.when_ignored, reason) for item in (*items, *self._later_items())]

    def _note_skipped(self) -> None:
        self.settler.note_skipped(self.id if is_item(self.id) else self._later_items()[0])

    def _later_items(self) -> list[str]:
        return later_items(self._payload[2])

    def _has_stored_success(self) -> bool:
        backend = self.task.backend
        if self.ignore_result or isinstance(backend, DisabledBackend | RPCBackend):
            return False  # nothing is stored, or it is in a queue of the caller
        try:
            return bool(backend.get_state(self.id) == states.SUCCESS)
        except Exception:  # of any backend
            log.exception("could not read the state of task %s: it counts as failed", self.id)
            return False


def _resolving(on_success: Callable[..., Any]) -> Callable[..., Any]:
    def on_success_of_item(self: ItemRequest, result: Any, **options: Any) -> Any:
        return self._resolve_success(partial(on_success, self), result, options)

    return on_success_of_item
