"""RQ: each job of a fan-out resolves its item when it ends. Needs `pip install 'lastbit[rq]'`.

    rq worker --worker-class lastbit.integrations.rq.LastbitWorker
    batch = fan_out(queue, render, ((product,) for product in products), key="catalog-42")

RQ permits no colons in a job's id, so the job of item `7:0:42` is `lastbit-7-0-42`. What could go wrong:

*A callback is no safe place.* `on_failure` runs at every failure, also before a retry, and not if the work-horse is
killed. `on_success` runs before the job is saved. So the worker resolves items: it fails one before it saves the job as
failed, but not if the job will be retried; and before it saves a job as finished, it notes the item, which it acks
while the next jobs run (`_unacked`). A job that raises `Skipped` ends for RQ as if it had returned None.

*RQ ends a job without a worker*: it is cancelled, or its worker died and somebody's look at a registry cleaned it up.
No hook sees all of these. So workers also compare: at each maintenance, `reconcile` resolves the pending items of jobs
that have ended, and acks those that were noted by a worker that died.

*The service refuses the token.* The worker ends with that error, and takes no more jobs. Finished jobs are noted, so a
later worker acks their items.

*A work-horse inherits a lock* that a thread of its worker held at the fork, and waits for it forever. redis-py's pool
has such a lock, so during a fork no note is removed, and no job at the end of a batch enqueued. Imports have locks, so
the first ack of a worker, which imports modules, is made while its work-horse waits.

What remains is RQ's own: a job that is deleted, or that expires in the queue, leaves no trace, and its item stays
pending. `fan_out` refuses the option `ttl` for that reason.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Unpack

from lastbit import errors
from lastbit.batch import BatchHandle
from lastbit.client import Client, HasClients, client_of
from lastbit.failures import Redrive
from lastbit.ids import ItemId
from lastbit.integrations import _fan_out
from lastbit.integrations._current import handling
from lastbit.integrations._endings import EndingsWorker, with_endings
from lastbit.integrations._fan_out import FanOutOptions
from lastbit.integrations._messages import item_of
from lastbit.integrations._reasons import accepted, reason_of
from lastbit.integrations._settler import Resolution, Settler
from lastbit.integrations._skipped import Skipped
from lastbit.integrations._tracking import announce
from lastbit.integrations._verdicts import Verdict, log_refusal, log_rejections, verdict_of
from lastbit.integrations._versions import warn_of_unknown
from lastbit.integrations.rq._relay import Ack, Fail, Relay, Request, Skip
from lastbit.models import AckResult

try:
    import redis
    from rq import Queue, SimpleWorker, Worker

    try:
        from rq.exceptions import StopRequested
    except ImportError:  # its place in earlier releases
        from rq.worker import StopRequested  # type: ignore[no-redef, attr-defined]
    from rq.job import Job, JobStatus
    from rq.registry import CanceledJobRegistry

    from lastbit.integrations.rq import _endings, _unacked
    from lastbit.integrations.rq._endings import Call
except ImportError as cause:
    raise errors.MissingExtra("rq", "the adapter for RQ") from cause

log = logging.getLogger("lastbit.integrations")

LINGER: Final = 0.05
"""Seconds for which acks are gathered. No job waits meanwhile."""
MOST_UNACKED: Final = 1000
"""While the service is away, a worker finishes this many jobs; the next one waits for it."""
PATIENCE: Final = 10.0
"""Seconds for which a stopping worker waits for its acks."""
PREFIX: Final = "lastbit-"
_REFUSED: Final = {
    "job_id": "the job's id is the item's",
    "ttl": "a job that expires in the queue leaves no trace, so its item would stay pending",
}
_SKIPPED: Final = f"\n{Skipped.__module__}.{Skipped.__qualname__}"
_NEXT: Final = "\nTraceback ("
"""In a traceback: what the text of a `Skipped` begins with, and that of an error that was raised afterwards."""
_UNREACHABLE: Final = (redis.ConnectionError, redis.TimeoutError)


def job_id_of(item: str | ItemId) -> str:
    """The id of the item's job: `lastbit-7-0-42` for `7:0:42`."""
    return PREFIX + str(item).replace(":", "-")


def item_of_job(job_id: str) -> str | None:
    """The item of a job's id; None for jobs that belong to no batch."""
    if not job_id.startswith(PREFIX):
        return None
    return item_of(job_id.removeprefix(PREFIX).replace("-", ":"))


class LastbitMixin:
    """For worker classes: resolves the items of jobs. It comes first among the bases, before RQ's class.

    The service's address and token are LASTBIT_URL and LASTBIT_TOKEN. A class that needs another client overrides
    `lastbit_client`. With `skip_ended`, jobs of batches that were cancelled, have expired or were deleted are deleted
    without being run. `endings` names the functions that may be given as `on_success` and `on_complete`, each with the
    options of its jobs: such a worker enqueues them when a batch of its `app_name` has ended.
    """

    skip_ended = True
    app_name = _endings.APP
    endings: _endings.Allowed = MappingProxyType({})
    _own_client: Client | None = None
    _settler: Settler | None = None
    _has_acked = False
    _is_ending = False
    _refusal: BaseException | None = None
    """The error with which the service refuses calls for good."""
    _relay: Relay | None = None
    _skipped: Skipped | None = None
    """What the job of this process has raised."""
    _endings_worker: EndingsWorker | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compared: dict[str, set[str]] = {}
        """For each queue, the items of finished jobs that need no further look."""

    def lastbit_client(self) -> Client | HasClients:
        """A new client, or a `lastbit.embedded.Lastbit`. It is called once in a worker, and in a work-horse whose
        worker takes no requests."""
        return Client()

    def _client(self) -> Client:
        if self._own_client is None:
            self._own_client = client_of(self.lastbit_client())
        return self._own_client

    def bootstrap(self, *args: Any, **kwargs: Any) -> None:
        super().bootstrap(*args, **kwargs)  # type: ignore[misc]  # it makes the handlers of RQ's log
        announce(self._client().driver, self.log)  # type: ignore[attr-defined]

    def work(self, *args: Any, **kwargs: Any) -> bool:
        """Raises the error with which the service refuses calls for good."""
        worked = False
        warn_of_unknown(self.log)  # type: ignore[attr-defined]
        if self.endings:
            self._start_endings()
        try:
            worked = super().work(*args, **kwargs)  # type: ignore[misc]
        except StopRequested:
            if self._refusal is None:
                raise
        if self._refusal is not None:
            raise self._refusal
        return worked

    def _start_endings(self) -> None:
        self._prepare()
        worker = EndingsWorker(self._client(), self.app_name, self._publish)
        # No thread may import modules during a fork: the first call does that here.
        with suppress(errors.LastbitError):
            worker.is_defined()
        worker.start()
        self._endings_worker = worker

    def _publish(self, message_id: str, text: str) -> bool:
        def new_queue(name: str) -> Queue:
            options = {"job_class": self.job_class, "serializer": self.serializer}  # type: ignore[attr-defined]
            queue: Queue = self.queue_class(name, connection=self.connection, **options)  # type: ignore[attr-defined]
            return queue

        with self._removing:
            return _endings.publish(new_queue, self.endings, message_id, text)

    def execute_job(self, job: Job, queue: Queue, *args: Any, **kwargs: Any) -> None:
        item = item_of_job(job.id)
        if item is not None and self._prepare().skips(item):
            job.delete()
            return
        super().execute_job(job, queue, *args, **kwargs)  # type: ignore[misc]

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        self._prepare()
        self._relay = Relay(self._take)
        with self._removing:
            super().fork_work_horse(job, queue)  # type: ignore[misc]
        self._relay.serve()

    def main_work_horse(self, job: Job, queue: Queue) -> None:
        # The worker goes on with its client, so this process must neither use nor close its connections.
        self._workers_client, self._own_client = self._own_client, None
        if self._relay is not None:
            self._relay.enter_horse()
        super().main_work_horse(job, queue)  # type: ignore[misc]

    def perform_job(self, job: Job, *args: Any, **kwargs: Any) -> Any:
        self._skipped = None
        if item_of_job(job.id) is not None:
            job.perform = partial(self._perform, job.perform)  # type: ignore[method-assign]
        message_id = item_of_job(job.id) or _endings.message_id_of(job.id)
        with handling(message_id, None if self._settler is None else self._settler.ended):
            return super().perform_job(job, *args, **kwargs)  # type: ignore[misc]

    def _perform(self, perform: Callable[[], Any]) -> Any:
        try:
            return perform()
        except Skipped as skip:
            self._skipped = skip
            return None

    def handle_job_success(self, job: Job, queue: Queue, *args: Any, **kwargs: Any) -> None:
        item = item_of_job(job.id)
        if item is not None and self._skipped is not None:
            reason = reason_of(self._skipped)
            _unacked.note_skip(self.connection, job.origin, item, reason)  # type: ignore[attr-defined]
            self._resolve(Skip(item, job.origin, reason))
        elif item is not None:
            _unacked.note(self.connection, job.origin, item)  # type: ignore[attr-defined]
            self._resolve(Ack(item, job.origin))
        super().handle_job_success(job, queue, *args, **kwargs)  # type: ignore[misc]

    def handle_job_failure(
        self, job: Job, queue: Queue, started_job_registry: Any = None, exc_string: str = "", **kwargs: Any
    ) -> None:
        is_stopped = self._stopped_job_id == job.id  # type: ignore[attr-defined]
        if is_stopped or not job.should_retry:
            self._fail(job, exc_string)
        super().handle_job_failure(job, queue, started_job_registry, exc_string, **kwargs)  # type: ignore[misc]

    def handle_job_retry(self, job: Job, queue: Queue, retry: Any, *args: Any, **kwargs: Any) -> None:
        """Called for jobs that return `Retry`. RQ fails them after `retry.max` retries."""
        if job.number_of_retries and job.number_of_retries >= retry.max:
            self._fail(job, f"the job returned Retry after {job.number_of_retries} retries")
        super().handle_job_retry(job, queue, retry, *args, **kwargs)  # type: ignore[misc]

    def clean_registries(self) -> None:
        super().clean_registries()  # type: ignore[misc]
        for queue in self.queues:  # type: ignore[attr-defined]
            try:
                _reconcile(queue, self._client(), self._compared.setdefault(queue.name, set()))
            except errors.LastbitError as error:
                log.warning("jobs of %s are not compared with their items: %s", queue.name, error)
                if verdict_of(error) is Verdict.END:
                    self._refusal = error
                    log_refusal(error)
                    raise StopRequested from error

    def teardown(self) -> None:
        self._is_ending = True
        is_worker = not self.is_horse  # type: ignore[attr-defined]
        try:
            if is_worker and self._endings_worker is not None:
                self._endings_worker.stop()
            if is_worker and self._settler is not None and not self._settler.drain(PATIENCE):
                log.warning("%d items of finished jobs are not acked yet; a later worker acks them", len(self._settler))
                self._settler.abandon()
            if is_worker and self._settler is not None:
                self._settler.leave()
        finally:
            super().teardown()  # type: ignore[misc]

    def _fail(self, job: Job, exc_string: str) -> None:
        item = item_of_job(job.id)
        # The function of a noted item has succeeded, and its job could not be saved as finished.
        if item is not None and not _unacked.is_noted(self.connection, job.origin, item):  # type: ignore[attr-defined]
            self._resolve(Fail(item, _reason(exc_string)))

    def _resolve(self, request: Request) -> None:
        """If the service can't be reached, a maintenance will resolve the item."""
        try:
            if not self.is_horse:  # type: ignore[attr-defined]
                self._take(request)
            elif not self._relayed(request):
                self._resolve_now(request)
        except errors.LastbitError as error:
            log.warning("item %s is not resolved yet, the next maintenance will do it: %s", request.item, error)

    def _relayed(self, request: Request) -> bool:
        """Whether the work-horse's worker has taken the request."""
        if self._relay is None:
            return False
        try:
            self._relay.send(request)
        except (EOFError, OSError) as error:
            log.warning("the worker of this work-horse takes no requests (%r); the work-horse calls the service", error)
            self._relay = None
            return False
        return True

    def _take(self, request: Request) -> None:
        """In the worker: fail or skip the item at once, or ack it later."""
        if not isinstance(request, Ack):
            self._resolve_now(request)
            return
        settler = self._prepare()
        if not self._has_acked:
            self._has_acked = True
            with suppress(errors.LastbitError):
                self._resolve_now(request)
                return
        self._room.acquire()
        settler.settle([Resolution(request.item)], partial(self._acked, request))

    def _prepare(self) -> Settler:
        if self._settler is None:
            self._room = threading.Semaphore(MOST_UNACKED)
            self._removing = threading.Lock()
            settler = Settler(self._client(), self._end, threads=1, linger=LINGER, skip_ended=self.skip_ended)
            settler.start()
            self._settler = settler
        return self._settler

    def _end(self, error: BaseException) -> None:
        """Stop the worker after its current job, as RQ's own command to shut down does."""
        if self._refusal is not None:
            return
        self._refusal = error
        self._room.release()  # for the job that may wait
        # Not if it stops already: a second signal would kill the job.
        if not self._is_ending and signal.getsignal(signal.SIGINT) == self.request_stop:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGINT)

    def _learn(self, result: AckResult) -> None:
        if self._settler is None or self.is_horse:  # type: ignore[attr-defined]
            log_rejections(result)
            return
        for rejection in result.rejected:
            self._settler.learn(rejection)

    def _acked(self, request: Ack) -> None:
        try:
            self._remove(request)
        finally:
            self._room.release()

    def _remove(self, request: Ack | Skip) -> None:
        connection = self.connection  # type: ignore[attr-defined]
        with nullcontext() if self.is_horse else self._removing:  # type: ignore[attr-defined]
            if isinstance(request, Skip):
                _unacked.remove_skip(connection, request.queue, request.item)
            else:
                _unacked.remove(connection, request.queue, [request.item])

    def _resolve_now(self, request: Request) -> None:
        try:
            if isinstance(request, Fail):
                self._learn(self._client().fail(request.item, request.reason))
                return
            if isinstance(request, Skip):
                self._learn(self._client().skip(request.item, request.reason))
            else:
                self._learn(self._client().ack(request.item))
        except errors.LastbitError as error:
            if verdict_of(error) is Verdict.END and not self.is_horse:  # type: ignore[attr-defined]
                log_refusal(error)
                self._end(error)
            raise
        with suppress(*_UNREACHABLE):  # the next maintenance removes it
            self._remove(request)


class LastbitWorker(LastbitMixin, Worker):
    """RQ's worker, which forks for each job."""


class LastbitSimpleWorker(LastbitMixin, SimpleWorker):
    """RQ's worker without forks."""


def reconcile(queue: Queue, client: Client | HasClients | None = None) -> int:
    """Resolve the pending items of jobs of this queue that have ended, and return how many there were.

    Finished jobs ack or skip their items, failed and cancelled ones fail them. Workers call this when they start and at
    each maintenance, by default every ten minutes. The token needs the roles `consume` and `read`. Raises
    `ServiceError`, `ServiceUnreachable`.
    """
    return _reconcile(queue, client_of(client or default_client()), set())


def _reconcile(queue: Queue, client: Client, compared: set[str]) -> int:
    """`reconcile`, without the finished jobs whose items were `compared` before: an item that is acked or skipped stays
    so. There may be thousands of batches, each of which costs a call or two."""
    resolved = _ack_noted(queue, client) + _skip_noted(queue, client)
    canceled = CanceledJobRegistry(queue.name, connection=queue.connection)
    finished = _items_of(queue.finished_job_registry.get_job_ids(cleanup=False), "finished")
    compared.intersection_update(finished)
    ended = {
        **_items_of(queue.failed_job_registry.get_job_ids(cleanup=False), "failed"),
        **_items_of(canceled.get_job_ids(cleanup=False), "canceled"),
        **{item: status for item, status in finished.items() if item not in compared},
    }
    for batch in {ItemId.parse(item).batch for item in ended}:
        for item in _pending(client, batch, [item for item in ended if ItemId.parse(item).batch == batch]):
            if ended[item] == "finished":
                result = client.ack(item)
            elif ended[item] == "canceled":
                result = client.fail(item, "the job was canceled")
            else:
                job = queue.fetch_job(job_id_of(item))
                if job is None or job.get_status() not in (JobStatus.FAILED, JobStatus.STOPPED):
                    continue  # it was put on the queue again
                result = client.fail(item, _reason(_stored_error(job)))
            resolved += result.applied
    compared.update(finished)
    return resolved


def _ack_noted(queue: Queue, client: Client) -> int:
    """Ack the items that workers have noted. Most of them belong to running workers, which ack them too."""
    items = _unacked.noted(queue.connection, queue.name)
    if not items:
        return 0
    result = client.ack(items)
    log_rejections(result)
    _unacked.remove(queue.connection, queue.name, items)
    return result.applied


def _skip_noted(queue: Queue, client: Client) -> int:
    """Skip the items that workers have noted."""
    resolved = 0
    for item, reason in _unacked.noted_skips(queue.connection, queue.name).items():
        result = client.skip(item, reason)
        log_rejections(result)
        _unacked.remove_skip(queue.connection, queue.name, item)
        resolved += result.applied
    return resolved


def _items_of(job_ids: Iterable[str], status: str) -> dict[str, str]:
    return {item: status for job_id in job_ids if (item := item_of_job(job_id)) is not None}


def _pending(client: Client, batch: int, items: Sequence[str]) -> Iterator[str]:
    """Those of the items of a live batch that are pending."""
    handle = client.batch(batch)
    try:
        info = handle.refresh()
        if info.ended:
            return
        ranges = list(handle.pending())
    except errors.BatchNotFound:
        return
    starts = [pending.start for pending in ranges]
    for item in items:
        number = ItemId.parse(item).number(info.group_size)
        place = -1 if number is None else bisect_right(starts, number) - 1
        if place >= 0 and number is not None and number < ranges[place].end:
            yield item


def _stored_error(job: Job) -> str:
    result = job.latest_result()
    return (result.exc_string if result is not None else None) or ""


def _reason(exc_string: str) -> str:
    """The last line of a traceback, which names the exception."""
    lines = exc_string.strip().splitlines()
    return accepted(lines[-1] if lines else "the job failed")


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
        except _UNREACHABLE as error:
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
    except _UNREACHABLE as error:
        return _refused(pairs, error)
    return []


def _refused(pairs: Sequence[tuple[str, Any]], error: Exception) -> Sequence[tuple[str, Any]]:
    log.warning("the broker is unreachable, and %d jobs wait: %s", len(pairs), error)
    return pairs


def _resolve(client: Client, item: str, job: Job) -> None:
    """Resolve the item of a job, if it has run in this process."""
    if job.get_status(refresh=False) == JobStatus.FAILED:
        error = _stored_error(job)
        _, marker, text = error.rpartition(_SKIPPED)
        if marker and _NEXT not in text:
            log_rejections(client.skip(item, accepted(text.removeprefix(": ").strip()) or None))
        else:
            log_rejections(client.fail(item, _reason(error)))
    elif job.ended_at is not None:  # with result_ttl=0, the job is deleted, and its status is not "finished"
        log_rejections(client.ack(item))


_clients: dict[int, Client] = {}


def default_client() -> Client:
    """The client of this process, for LASTBIT_URL and LASTBIT_TOKEN."""
    process = os.getpid()
    if process not in _clients:
        _clients.clear()
        _clients[process] = Client()
    return _clients[process]
