"""The job at the end of a batch: stored by a fan-out, enqueued by a worker.

RQ runs any function whose name is in a job. Who may open batches can't write to Redis, and must not get that far. So a
worker enqueues only functions that its class names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from inspect import isbuiltin, isfunction
from typing import Any, Final, TypeAlias

import redis
from rq import Queue

from lastbit.errors import InvalidArgument
from lastbit.integrations import _endings

log = logging.getLogger("lastbit.integrations")

APP: Final = "rq"
"""The default name that the producers and workers of an app share."""
Call: TypeAlias = "tuple[Callable[..., Any] | str, Sequence[Any] | Mapping[str, Any]]"
"""A function, or its name, and its arguments: a tuple of positional ones, or a mapping of keyword arguments."""
Allowed: TypeAlias = "Mapping[str, Mapping[str, Any]]"
"""The functions' names, each with the options of its jobs."""


class NotAllowed(LookupError):
    """The worker's class does not name the function in `endings`."""


def text_of(option: str, queue: Queue, call: Call | None) -> str | None:
    """The call as it is stored. Raises `InvalidArgument`."""
    if call is None:
        return None
    function, args, kwargs = _endings.call_of(option, call)
    return _endings.text_of(
        option, {"queue": queue.name, "call": _name(option, function), "args": args, "kwargs": kwargs}
    )


def _name(option: str, function: object) -> str:
    """As RQ names it."""
    if isinstance(function, str):
        return function
    if not (isfunction(function) or isbuiltin(function)) or function.__module__ == "__main__":
        raise InvalidArgument(f"{option}: expected a function of a module that workers import, not {function!r}")
    return f"{function.__module__}.{function.__qualname__}"


def job_id_of(message_id: str) -> str:
    """The id of the job at an end: `batch-7-succeeded` for `batch:7:succeeded`."""
    return message_id.replace(":", "-")


def message_id_of(job_id: str) -> str | None:
    """The event's id of such a job; None for all others."""
    return job_id.replace("-", ":") if job_id.startswith("batch-") else None


def publish(new_queue: Callable[[str], Queue], allowed: Allowed, message_id: str, text: str) -> bool:
    """Enqueue the job. Returns False if Redis can't be reached; raises `NotAllowed`."""
    message = json.loads(text)
    if message["call"] not in allowed:
        raise NotAllowed(f"{message['call']} is not in `endings` of the worker's class")
    options = {**allowed[message["call"]], "job_id": job_id_of(message_id)}
    try:
        new_queue(message["queue"]).enqueue_call(message["call"], message["args"], message["kwargs"], **options)
    except (redis.ConnectionError, redis.TimeoutError) as error:
        log.warning("the broker is unreachable: %s", error)
        return False
    return True
