"""The producer: a job for each item of a batch. A queue without workers runs it at once; its item is resolved here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Unpack

from rq import Queue
from rq.job import Job, JobStatus

from lastbit import errors
from lastbit.batch import BatchHandle
from lastbit.client import Client, HasClients, client_of
from lastbit.failures import Redrive
from lastbit.integrations import _fan_out
from lastbit.integrations._current import handling
from lastbit.integrations._endings import with_endings
from lastbit.integrations._fan_out import FanOutOptions
from lastbit.integrations._reasons import accepted
from lastbit.integrations._skipped import Skipped
from lastbit.integrations._verdicts import log_rejections
from lastbit.integrations.rq import _endings
from lastbit.integrations.rq._endings import Call
from lastbit.integrations.rq._jobs import UNREACHABLE, default_client, job_id_of, last_line, stored_error

log = logging.getLogger("lastbit.integrations")

_REFUSED: Final = {
    "job_id": "the job's id is the item's",
    "ttl": "a job that expires in the queue leaves no trace, so its item would stay pending",
}
_SKIPPED: Final = f"\n{Skipped.__module__}.{Skipped.__qualname__}"
_NEXT: Final = "\nTraceback ("
"""In a traceback: what the text of a `Skipped` begins with, and that of an error that was raised afterwards."""


def fan_out(
    queue: Queue,
    function: Any,
    arguments: Iterable[Sequence[Any] | Mapping[str, Any]],
    *,
    client: Client | HasClients | None = None,
    options: Mapping[str, Any] | None = None,
    batch: BatchHandle | int | None = None,
    identify: Callable[[Any], Any] | None = None,
    on_success: Call | None = None,
    on_complete: Call | None = None,
    app_name: str = _endings.APP,
    **batch_options: Unpack[FanOutOptions],
) -> BatchHandle:
    """Issue an item for each call of the function and enqueue its job; then seal the batch and return it.

    `arguments`: a tuple for each call, or a mapping of keyword arguments. `options`: those of `Queue.prepare_data`,
    such as `{"retry": Retry(max=3), "timeout": 60}`; not `ttl`. `client`: also a `lastbit.embedded.Lastbit`; by
    default a client for LASTBIT_URL and LASTBIT_TOKEN. The workers must be a `LastbitWorker`, `LastbitSimpleWorker` or
    have the `LastbitMixin`. Everything else is as in `lastbit.integrations.fan_out`: `idempotency_key` makes it safe to
    run a killed producer again, with the same arguments in the same order. These are compared, or what `identify`
    returns for those of a call.

    When the new batch has succeeded, a worker enqueues `on_success`, such as `(publish, ("catalog-42",))`, in this
    queue; when it has ended in any way, `on_complete`. At least once, and normally once: the id of the job is the same
    each time. Only workers whose class names the function in `endings`, and has the same `app_name`, do so.
    """
    client = client_of(client or default_client())
    texts = _endings.text_of("on_success", queue, on_success), _endings.text_of("on_complete", queue, on_complete)
    return _fan_out.fan_out(
        client,
        _checked(arguments),
        _sender(queue, function, options, client),
        batch=batch,
        identify=identify or partial(_identity, function),
        **with_endings(client, app_name, batch, batch_options, *texts),
    )


def _identity(function: Any, call: Any) -> Any:
    """What stands for a call in a rerun."""
    return function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__), call


def resend(
    queue: Queue,
    function: Any,
    redrive: Redrive,
    arguments: Iterable[Sequence[Any] | Mapping[str, Any]],
    *,
    client: Client | HasClients | None = None,
    options: Mapping[str, Any] | None = None,
) -> int:
    """Enqueue the jobs of a redrive's items again, and return their number. Store the redrive's position afterwards.

    `arguments` are those of all calls of the batch, in the order of its fan-outs; see `lastbit.integrations.resend`.
    All jobs are for one function, so not for a batch with several.
    Everything else is as in `fan_out`.
    """
    client = client_of(client or default_client())
    send = _sender(queue, function, options, client)

    def send_again(pairs: Sequence[tuple[str, Any]]) -> Sequence[tuple[str, Any]]:
        # They would count for the new runs, as RQ keeps the hash of an ended job.
        try:
            with queue.connection.pipeline(transaction=False) as pipeline:
                for item, _ in pairs:
                    pipeline.hdel(Job.key_for(job_id_of(item)), "number_of_retries", "retries_left")
                pipeline.execute()
        except UNREACHABLE as error:
            return _refused(pairs, error)
        return send(pairs)

    return _fan_out.resend(client, redrive, _checked(arguments), send_again)


def _checked(arguments: Iterable[Any]) -> Iterator[Any]:
    for position, call in enumerate(arguments):
        if not isinstance(call, tuple | list | Mapping):
            raise errors.InvalidArgument(
                f"position {position}: expected a tuple of arguments, like (product,), or a mapping of keyword "
                f"arguments, not {type(call).__name__}"
            )
        yield call


def _sender(queue: Queue, function: Any, options: Mapping[str, Any] | None, client: Client) -> _fan_out.Send[Any]:
    for name, reason in _REFUSED.items():
        if name in (options or {}):
            raise errors.InvalidArgument(f"the option {name!r} is not possible here: {reason}")
    return partial(_send, queue, function, dict(options or {}), client)


def _send(
    queue: Queue, function: Any, options: dict[str, Any], client: Client, pairs: Sequence[tuple[str, Any]]
) -> Sequence[tuple[str, Any]]:
    calls = [
        {"args": (), "kwargs": dict(call)} if isinstance(call, Mapping) else {"args": tuple(call), "kwargs": {}}
        for _, call in pairs
    ]
    jobs = [
        {"func": function, "job_id": job_id_of(item), **call, **options}
        for (item, _), call in zip(pairs, calls, strict=True)
    ]
    if not queue.is_async:
        for (item, _), job in zip(pairs, jobs, strict=True):
            with handling(item):
                ended = queue.enqueue_call(**job)
            _resolve(client, item, ended)
        return []
    try:
        queue.enqueue_many([Queue.prepare_data(**job) for job in jobs])
    except UNREACHABLE as error:
        return _refused(pairs, error)
    return []


def _refused(pairs: Sequence[tuple[str, Any]], error: Exception) -> Sequence[tuple[str, Any]]:
    log.warning("the broker is unreachable, and %d jobs wait: %s", len(pairs), error)
    return pairs


def _resolve(client: Client, item: str, job: Job) -> None:
    """Resolve the item of a job, if it has run in this process."""
    if job.get_status(refresh=False) == JobStatus.FAILED:
        error = stored_error(job)
        _, marker, text = error.rpartition(_SKIPPED)
        if marker and _NEXT not in text:
            log_rejections(client.skip(item, accepted(text.removeprefix(": ").strip()) or None))
        else:
            log_rejections(client.fail(item, last_line(error)))
    elif job.ended_at is not None:  # with result_ttl=0, the job is deleted, and its status is not "finished"
        log_rejections(client.ack(item))
