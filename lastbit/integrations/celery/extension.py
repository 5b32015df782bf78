"""The object that an application makes of its Celery app."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Unpack

from celery import Celery
from celery.canvas import Signature

from lastbit._protocol import Service
from lastbit.batch import BatchHandle
from lastbit.client import Client, HasClients
from lastbit.errors import InvalidArgument
from lastbit.failures import Redrive
from lastbit.integrations._ended import watch_of
from lastbit.integrations._endings import with_endings
from lastbit.integrations._fan_out import FanOutOptions, fan_out, resend, send_items
from lastbit.integrations._resolver import VERBS, Verb
from lastbit.integrations.celery import current, eager, endings, worker
from lastbit.integrations.celery.publisher import Publisher, identity
from lastbit.models import Completed


def _embedded(database: object) -> HasClients:
    from lastbit import embedded

    return database if isinstance(database, embedded.Lastbit) else embedded.Lastbit(database)


class Lastbit:
    """Tracks the tasks of a Celery app whose id is an item's id, and fans out such tasks.

    `url` and `token`: by default LASTBIT_URL and LASTBIT_TOKEN. `database`: instead of these, for an app without a
    service, the database of `lastbit.embedded`: its URL, an engine of SQLAlchemy, or a `lastbit.embedded.Lastbit`; it
    needs the schema (see `migrate` there). `when_ignored`: whether the item of a task that raised `Ignore` is acked,
    failed, or skipped: not needed, and no failure. `on_completed`: called in a worker's main process with a `Completed`
    for each complete batch that an ack or a failure reports; it may publish a task, but must not wait for one. It is
    called again after a redelivery, and not if the producer's seal completes the batch. `skip_ended`: whether tasks of
    batches that were cancelled, have expired or were deleted do not run. `app_name`: the name that the producers and
    workers of an app share, whose workers publish `on_success` and `on_complete`; by default the name of the Celery
    app.

    Nothing is connected until it is used. Raises `InvalidArgument`, also for a second `Lastbit` of one app.
    """

    def __init__(
        self,
        app: Celery,
        url: str | None = None,
        *,
        token: str | None = None,
        database: object = None,
        when_ignored: Verb = "ack",
        on_completed: Callable[[Completed], object] | None = None,
        skip_ended: bool = True,
        app_name: str | None = None,
    ) -> None:
        if when_ignored not in VERBS:
            raise InvalidArgument(f"when_ignored is one of {', '.join(VERBS)}, not {when_ignored!r}")
        if database is None:
            self._new_client: Callable[[], Client] = partial(Client, url, token=token)
            service = Service.named(url, token, 1.0, None)  # a wrong address is reported here, not by the first task
        elif url is None and token is None:
            self._new_client = _embedded(database).client
            service = self._new_client().driver.service
        else:
            raise InvalidArgument("url and token are those of a service: give either these or database")
        # Before a worker forks its children, which share it.
        watch = watch_of(service) if skip_ended else None
        self.app = app
        self._client: tuple[int, Client] | None = None
        self._lock = threading.Lock()
        worker.install(app, lambda: self.client, when_ignored, on_completed, watch)
        eager.install(app, lambda: self.client, when_ignored)
        current.install(app, None if watch is None else watch.batches)
        self._app_name = app_name or app.main or "celery"
        endings.install(app, lambda: self.client, self._app_name)

    @property
    def client(self) -> Client:
        """This process's client."""
        with self._lock:
            # A child process must not use its parent's connections.
            if self._client is None or self._client[0] != os.getpid():
                self._client = (os.getpid(), self._new_client())
            return self._client[1]

    def fan_out(
        self,
        tasks: Iterable[Signature],
        *,
        batch: BatchHandle | int | None = None,
        identify: Callable[[Signature], Any] | None = None,
        on_success: Signature | None = None,
        on_complete: Signature | None = None,
        **options: Unpack[FanOutOptions],
    ) -> BatchHandle:
        """Publish each signature (a task, a chain or a chord) as an item of a batch, `chunk` at a time; then seal the
        batch and return it.

        It opens a batch, with the options of `Client.open`, or extends the open `batch`. `seal=False` leaves it open
        for more. With `parent=current_item()`, a task opens the batch under its own item; all options are explained at
        `lastbit.integrations.fan_out`. With an `idempotency_key`, a producer that was killed is simply run again: it
        gets the same batch and the same ids, publishes what it had not published, and repeats at most one chunk. The
        signatures must be the same, in the same order, or it raises `MessagesDiffer`: task and arguments are compared,
        or what `identify` returns for a signature. `progress=True` shows a progress line (needs `lastbit[cli]`).

        When the new batch has succeeded, a worker publishes `on_success`. When it has ended in any way (is complete,
        with or without failures, expired or cancelled), a worker publishes `on_complete`. At least once, and normally
        once: the id of the task is the same each time. The token needs the roles `produce`, `consume` and `read`.

        Raises `InvalidArgument` for a group, and for a chain or chord that ends with one, as it has no end of its own:
        pass its tasks. Otherwise raises the errors of `lastbit.integrations.fan_out`, and `MessagesRefused` if the
        broker can't be reached.
        """
        texts = endings.text_of("on_success", on_success), endings.text_of("on_complete", on_complete)
        with Publisher(self.app, self.client) as publisher:
            return fan_out(
                self.client,
                map(publisher.checked, tasks),
                publisher.send,
                batch=batch,
                identify=identify or identity,
                **with_endings(self.client, self._app_name, batch, options, *texts),
            )

    def republish(self, batch: BatchHandle | int, tasks: Iterable[Signature]) -> int:
        """Publish the tasks of pending items again, after the broker has lost messages; returns their number.

        `tasks` are all tasks of the batch, in the order of its fan-outs. A task that is still queued or running will
        run twice, and count once. Raises `InvalidArgument` if the batch has more items than `tasks`.
        """
        handle = self.client.batch(batch) if isinstance(batch, int) else batch
        pending = (item for found in handle.pending() for item in found.ids)
        with Publisher(self.app, self.client) as publisher:
            return send_items(pending, handle.refresh().group_size, map(publisher.checked, tasks), publisher.send)

    def resend(self, redrive: Redrive, tasks: Iterable[Signature]) -> int:
        """Publish the tasks of a redrive's items again; returns their number. Store the redrive's position afterwards.

        `tasks` are all tasks of the batch, in the order of its fan-outs; see `lastbit.integrations.resend`.
        """
        with Publisher(self.app, self.client) as publisher:
            return resend(self.client, redrive, map(publisher.checked, tasks), publisher.send)
