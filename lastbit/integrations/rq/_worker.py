"""The worker: it resolves the item of each job that ends. What could go wrong:

*A callback is no safe place.* `on_failure` runs at every failure, also before a retry, and not if the work-horse is
killed. `on_success` runs before the job is saved. So the worker resolves items: it fails one before it saves the job as
failed, but not if the job will be retried; and before it saves a job as finished, it notes the item, which it acks
while the next jobs run (`_unacked`). A job that raises `Skipped` ends for RQ as if it had returned None.

*The service refuses the token.* The worker ends with that error, and takes no more jobs. Finished jobs are noted, so a
later worker acks their items.

*A work-horse inherits a lock* that a thread of its worker held at the fork, and waits for it forever. redis-py's pool
has such a lock, so during a fork no note is removed, and no job at the end of a batch enqueued. Imports have locks, so
the first ack of a worker, which imports modules, is made while its work-horse waits.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from rq import Queue, SimpleWorker, Worker
from rq.job import Job

from lastbit import errors
from lastbit.client import Client, HasClients, client_of
from lastbit.integrations._current import handling
from lastbit.integrations._endings import EndingsWorker
from lastbit.integrations._reasons import reason_of
from lastbit.integrations._settler import Resolution, Settler
from lastbit.integrations._skipped import Skipped
from lastbit.integrations._tracking import announce
from lastbit.integrations._verdicts import Verdict, log_refusal, log_rejections, verdict_of
from lastbit.integrations._versions import warn_of_unknown
from lastbit.integrations.rq import _endings, _unacked
from lastbit.integrations.rq._jobs import UNREACHABLE, item_of_job, last_line
from lastbit.integrations.rq._maintenance import compare
from lastbit.integrations.rq._relay import Ack, Fail, Relay, Request, Skip
from lastbit.models import AckResult

try:
    from rq.exceptions import StopRequested
except ImportError:  # its place in earlier releases
    from rq.worker import StopRequested  # type: ignore[no-redef, attr-defined]

log = logging.getLogger("lastbit.integrations")

LINGER: Final = 0.05
"""Seconds for which acks are gathered. No job waits meanwhile."""
MOST_UNACKED: Final = 1000
"""While the service is away, a worker finishes this many jobs; the next one waits for it."""
PATIENCE: Final = 10.0
"""Seconds for which a stopping worker waits for its acks."""


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
                compare(queue, self._client(), self._compared.setdefault(queue.name, set()))
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
            self._resolve(Fail(item, last_line(exc_string)))

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
        with suppress(*UNREACHABLE):  # the next maintenance removes it
            self._remove(request)


class LastbitWorker(LastbitMixin, Worker):
    """RQ's worker, which forks for each job."""


class LastbitSimpleWorker(LastbitMixin, SimpleWorker):
    """RQ's worker without forks."""
