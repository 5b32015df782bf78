"""Settings of a worker that lead to duplicate runs, reported when it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from celery.utils.imports import symbol_by_name
from celery.worker.strategy import default

MOST_NAMES: Final = 5
DEFAULT_VISIBILITY: Final = {"redis": 3600, "sqs": 1800}
"""Seconds after which the transport redelivers a message that was not acknowledged, by its type."""


def warnings(consumer: Any) -> Iterator[str]:
    """A line for each problem with the settings of this worker and its tasks."""
    tasks = [task for name, task in sorted(consumer.app.tasks.items()) if not name.startswith("celery.")]
    if early := [task.name for task in tasks if not task.acks_late]:
        yield (
            f"acks_late is off for {_listed(early)}. If such a task is an item, its message is removed after the item "
            "is resolved nevertheless, so that no item is lost with a worker: the task may run more than once. Set "
            "task_acks_late = True (or acks_late=True for the tasks that are items) to show that they expect this"
        )
    if strange := [task.name for task in tasks if symbol_by_name(task.Strategy) is not default]:
        yield (
            f"{_listed(strange)} has a Strategy of its own, which may end its tasks without a Request: items among "
            "them may stay pending"
        )
    visibility = _visibility(consumer)
    if visibility is None:
        return
    # A pool process receives up to so many messages, and runs them one after the other.
    queued = consumer.prefetch_multiplier or 1
    default_limit = consumer.controller.time_limit
    slow = [task.name for task in tasks if queued * (task.time_limit or default_limit or 0) > visibility]
    if slow:
        yield (
            f"the visibility timeout is {visibility} s, but {queued} prefetched messages per process may take longer "
            f"under the time limit of {_listed(slow)}: the broker would redeliver messages while they wait, and run "
            "them twice. Raise broker_transport_options['visibility_timeout'], or lower worker_prefetch_multiplier or "
            "the time limit"
        )


def _visibility(consumer: Any) -> float | None:
    """The visibility timeout in seconds; None if the broker has none."""
    default = DEFAULT_VISIBILITY.get(consumer.connection.transport.driver_type)
    if default is None:
        return None
    options = consumer.app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout", default))


def _listed(names: list[str]) -> str:
    name_list = ", ".join(names[:MOST_NAMES])
    return name_list if len(names) <= MOST_NAMES else f"{name_list} and {len(names) - MOST_NAMES} more"
