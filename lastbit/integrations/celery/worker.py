"""Connects a settler to a worker's consumer, as a bootstep, which is Celery's interface for extensions of a worker.

A consumer has a *strategy* for each registered task, a function that receives its messages. The step gives each task a
second one, whose requests resolve items, and passes it the messages with an item. So all other messages take Celery's
own path, and tasks may have any base class, and any `Request` class of their own.

Messages that never become a request, because their task isn't registered or their content can't be read, are removed by
methods of the consumer. The step resolves their items first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

from celery import Celery, bootsteps
from celery.platforms import EX_FAILURE
from celery.utils.imports import symbol_by_name
from celery.worker import state

from lastbit.client import Client
from lastbit.errors import InvalidArgument
from lastbit.integrations._ended import Watch
from lastbit.integrations._resolver import Verb
from lastbit.integrations._settler import Resolution, Settler
from lastbit.integrations.celery import settings, skipping
from lastbit.integrations.celery.items import items_of_message
from lastbit.integrations.celery.requests import ItemRequest, reason_of
from lastbit.models import Completed

log = logging.getLogger("lastbit.celery")

LINGER: Final = 0.1
"""Seconds that acks are gathered, if that cannot leave the worker without work."""
LARGE_PREFETCH: Final = 200
"""Messages. An acker gathers at most a hundred items, so a worker with this prefetch has as many other tasks to run."""
PATIENCE: Final = 10.0
"""Seconds for which a worker that stops waits for the service. Messages that it can't remove are redelivered."""


def install(
    app: Celery,
    client: Callable[[], Client],
    when_ignored: Verb,
    on_completed: Callable[[Completed], object] | None,
    watch: Watch | None,
) -> None:
    """Add the step to all consumers of the app. Raises `InvalidArgument` if it has one."""
    steps = app.steps["consumer"]
    if any(isinstance(step, type) and issubclass(step, LastbitStep) for step in steps):
        raise InvalidArgument(f"{app!r} has a Lastbit already: make one per app")
    attributes = {
        "__module__": __name__,
        "new_settler": staticmethod(
            lambda linger: Settler(
                client(), _end_worker, on_completed, threads=1, linger=linger, skip_ended=watch is not None
            )
        ),
        "is_ended": None if watch is None else staticmethod(lambda item: watch.is_ended(client().driver, item)),
        "when_ignored": when_ignored,
    }
    steps.add(type("Tracking", (LastbitStep,), attributes))


class LastbitStep(bootsteps.StartStopStep):
    """Started after the consumer has its strategies, and before it receives messages."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    new_settler: ClassVar[Callable[[float], Settler]]
    """Makes a settler that gathers acks for this many seconds."""
    when_ignored: ClassVar[Verb]
    is_ended: ClassVar[Callable[[str], bool] | None]
    """Whether the batch of an item has ended; None if that doesn't matter."""

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._consumer = consumer
        self._guard_all()  # before the pool forks its first children
        # With fewer messages, those that wait for their ack would soon be all that the broker gives to this worker. 0:
        # it gives any number.
        is_large = consumer.initial_prefetch_count == 0 or consumer.initial_prefetch_count >= LARGE_PREFETCH
        self._settler = type(self).new_settler(LINGER if is_large else 0.0)
        update_strategies = consumer.update_strategies

        def update_and_track() -> None:
            update_strategies()
            self._guard_all()
            for name in list(consumer.strategies):
                self._track(consumer, name)

        # On the instance: it is called at each connection, and when a pool restarts with reloaded modules.
        consumer.update_strategies = update_and_track
        for name in ("on_unknown_task", "on_invalid_task"):
            setattr(consumer, name, partial(self._fail_first, consumer, getattr(consumer, name)))
        on_decode_error = consumer.on_decode_error
        consumer.on_decode_error = lambda message, error: self._fail_first(
            consumer, lambda _, message, error: on_decode_error(message, error), None, message, error
        )

    def _guard_all(self) -> None:
        is_ended = type(self).is_ended
        if is_ended is not None:
            for task in self._consumer.app.tasks.values():
                skipping.guard(task, is_ended)

    def start(self, consumer: Any) -> None:
        # At the first connection: after the pool has forked its first children.
        self._settler.start()
        for line in settings.warnings(consumer):
            log.warning(line)
        if consumer.hub is not None:
            # Called while the event loop closes, after the pool has stopped. Then the loop removes the messages.
            consumer.hub.on_close.add(self._flush_at_close)

    def shutdown(self, consumer: Any) -> None:
        """Called after the pool has stopped, before the connection is closed."""
        if consumer.hub is None:
            self._flush()
            consumer.perform_pending_operations()

    def _flush_at_close(self, hub: Any) -> None:
        # An event loop is also closed, and opened again, when the broker is lost.
        if self._consumer.blueprint.state != bootsteps.RUN:
            self._flush()

    def _flush(self) -> None:
        if not self._settler.drain(PATIENCE):
            log.error("the worker stops before all items are resolved: their messages will be redelivered")
            self._settler.abandon()
        self._settler.leave()

    def _track(self, consumer: Any, name: str) -> None:
        task = consumer.app.tasks[name]
        original = task.Request
        attributes = {"settler": self._settler, "when_ignored": self.when_ignored}
        # A strategy reads the class when it is made, so the task has ours only meanwhile.
        task.Request = type("ItemRequest", (ItemRequest, symbol_by_name(original)), attributes)
        try:
            tracked = task.start_strategy(consumer.app, consumer)
        finally:
            task.Request = original
        consumer.strategies[name] = _divided(consumer.strategies[name], tracked)

    def _fail_first(
        self, consumer: Any, remove: Callable[[Any, Any, Any], None], body: Any, message: Any, error: Exception
    ) -> None:
        """Fail the items of a message that no task can receive, then let Celery remove it."""
        try:
            payload = message.payload
        except Exception:  # noqa: BLE001  # of any decoder; this may be the reason why Celery removes it
            payload = None
        reason = f"no task for it: {reason_of(error)}"
        failures = [Resolution(item, "fail", reason) for item in items_of_message(message.headers, payload)]
        if failures:
            self._settler.settle(failures, partial(consumer.call_soon, remove, body, message, error))
        else:
            remove(body, message, error)


def _end_worker(error: BaseException) -> None:
    """As a signal does: the worker's loop looks at this, waits for running tasks, and returns the messages."""
    state.should_stop = EX_FAILURE


def _divided(plain: Callable[..., Any], tracked: Callable[..., Any]) -> Callable[..., Any]:
    def receive(message: Any, body: Any, *args: Any, **options: Any) -> Any:
        strategy = tracked if items_of_message(message.headers, message.payload) else plain
        return strategy(message, body, *args, **options)

    return receive
