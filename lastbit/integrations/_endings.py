"""One message at the end of a batch: `on_success` and `on_complete` of a fan-out.

The producer puts the message into the batch's labels, which each of its events has. The workers of an app share one
process manager, whose function publishes the message of each ending.

What could go wrong, and why it can't:

*A message is lost.* The event of an ending is written in the transaction that ends the batch. The service knows which
events are handled, and the feed keeps the others. An event is handled after the broker has its message. If that can't
be published, the event is parked, and an operator retries it.

*A message is sent again*, as a worker died between the two. It has the same id: that of the event. If the worker died
later, the service tells the next one that the event was handled.

*Nobody publishes.* The process is defined before the batch is opened, so the service shows that it has no workers, and
the explanation of each batch says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from lastbit import errors
from lastbit._drivers import HasDriver
from lastbit.endings import APP, LABELS, ON_COMPLETE, ON_SUCCESS, process_name
from lastbit.groups import Groups
from lastbit.integrations._fan_out import FanOutOptions
from lastbit.models import Event
from lastbit.processes.calls import Processes
from lastbit.processes.definition import Finish, Process
from lastbit.processes.worker import ProcessWorker

if TYPE_CHECKING:
    from lastbit.client import AsyncClient, Client

log = logging.getLogger("lastbit.integrations")

MOST_TEXT: Final = 1024
"""Maximum characters of a message, as of every label's value."""
LOOK: Final = 30.0
"""Most seconds between two looks of a worker whether its app has endings."""
FIRST_LOOK: Final = 1.0
"""Seconds until the second look; each pause is twice as long as the one before. Who tries endings out has just started
a worker."""
PAUSE: Final = 1.0
"""Seconds until a message that the broker has refused is published again."""
TTL: Final = 15.0
"""Seconds after which another worker publishes the messages of a killed one."""
PATIENCE: Final = 5.0
"""Seconds for which a worker that stops waits."""

Publish = Callable[[str, str], bool]
"""Publishes a message, given its id and its text. Returns False if the broker refuses it or can't be reached. If it
raises, the message can't be published by this worker."""


def labels_of(app: str, on_success: str | None, on_complete: str | None) -> dict[str, str]:
    """The labels of a batch with these messages; none without a message. Raises `InvalidArgument`."""
    messages = {"on_success": (ON_SUCCESS, on_success), "on_complete": (ON_COMPLETE, on_complete)}
    labels = {}
    for option, (label, text) in messages.items():
        if text is None:
            continue
        if len(text) > MOST_TEXT:
            raise errors.InvalidArgument(
                f"{option} has {len(text):,} characters, and at most {MOST_TEXT:,} are possible: pass ids, not data"
            )
        labels[label] = text
    return {APP: app, **labels} if labels else {}


def define(client: Client, app: str) -> None:
    """Define the process of an app's endings, before a batch that has one is opened. Raises `ServiceError`,
    `ServiceUnreachable`."""
    end = client.events(limit=1).last
    client.processes.define(process_name(app), partitions=1, after=end)


async def define_async(client: AsyncClient, app: str) -> None:
    """`define`, awaited."""
    end = (await client.events(limit=1)).last
    await client.processes.define(process_name(app), partitions=1, after=end)


def with_endings(
    client: Client, app: str, batch: object, options: FanOutOptions, on_success: str | None, on_complete: str | None
) -> FanOutOptions:
    """The options of a fan-out to this `batch`, or a new one, with its messages. Defines the process if it has any.
    Raises `InvalidArgument`, `ServiceError`, `ServiceUnreachable`."""
    labels = _labels_for(app, batch, on_success, on_complete)
    if labels:
        define(client, app)
    return _labelled(options, labels)


async def with_endings_async(
    client: AsyncClient,
    app: str,
    batch: object,
    options: FanOutOptions,
    on_success: str | None,
    on_complete: str | None,
) -> FanOutOptions:
    """`with_endings`, awaited."""
    labels = _labels_for(app, batch, on_success, on_complete)
    if labels:
        await define_async(client, app)
    return _labelled(options, labels)


def _labels_for(app: str, batch: object, on_success: str | None, on_complete: str | None) -> dict[str, str]:
    labels = labels_of(app, on_success, on_complete)
    if labels and batch is not None:
        raise errors.InvalidArgument(
            "on_success and on_complete are for a new batch: give them to the fan_out that opens it"
        )
    return labels


def _labelled(options: FanOutOptions, labels: Mapping[str, str]) -> FanOutOptions:
    return {**options, "labels": {**(options.get("labels") or {}), **labels}} if labels else options


def text_of(option: str, message: Mapping[str, Any]) -> str:
    """A message as it is stored. Raises `InvalidArgument`."""
    try:
        return json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument(f"{option}: the arguments must be JSON: {error}") from error


def call_of(option: str, call: object) -> tuple[Any, list[Any], dict[str, Any]]:
    """The callable of an ending, and its positional and keyword arguments. Raises `InvalidArgument`."""
    match call:
        case (called, Mapping() as kwargs):
            return called, [], dict(kwargs)
        case (called, tuple() | list() as args):
            return called, list(args), {}
    raise errors.InvalidArgument(
        f"{option}: expected what to call and its arguments, like (publish, (product,)), not {call!r}"
    )


class Endings(Process):
    """The process of an app's endings. Each ending is an instance, which has the id of its event. Not a pure function:
    it publishes, and may do so again for the same event."""

    counts_unnamed = False
    """Most batches have no ending, or are another app's."""

    def __init__(self, client: HasDriver, app: str, publish: Publish, stopping: threading.Event) -> None:
        super().__init__(process_name(app), dict.fromkeys(LABELS, "labels"), self._end)
        self._processes = Processes(client.driver)
        self._app = app
        self._publish = publish
        self._stopping = stopping

    def instances_of(self, event: Event) -> list[str]:
        if event.type not in LABELS:
            return super().instances_of(event)
        return [] if self._message_of(event) is None else [event.id]

    def _message_of(self, event: Event) -> str | None:
        labels: Mapping[str, str] = event.data["labels"]
        return labels.get(LABELS[event.type]) if labels.get(APP) == self._app else None

    def _end(self, state: Any, event: Event) -> Finish:
        message = self._message_of(event)
        assert message is not None
        while not self._is_published(event.id, message):
            if self._stopping.wait(PAUSE):
                raise _Interrupted
        return Finish()

    def _is_published(self, message_id: str, message: str) -> bool:
        """Whether it was published before, or is now."""
        try:
            # The last owner may have died before its position was committed.
            if self._processes.get(self.name, message_id).status == "finished":
                return True
        except errors.InstanceNotFound:
            pass
        except errors.LastbitError as error:
            if not error.is_temporary:
                raise
            return False
        if self._publish(message_id, message):
            return True
        log.warning("the broker does not take the message %s, which is published again", message_id)
        return False


class EndingsWorker:
    """Publishes the messages of an app's endings in threads of its own, beside the other workers of the app. These take
    no lock that a handler takes after a fork: the client is the worker's own, and is made before."""

    def __init__(self, client: HasDriver, app: str, publish: Publish) -> None:
        self._client = client
        self._app = app
        self._publish = publish
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._worker: ProcessWorker | None = None
        self._thread = threading.Thread(target=self._run, name="lastbit-endings", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave the endings to the other workers."""
        with self._lock:
            self._stopping.set()
            if self._worker is not None:
                self._worker.stop()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        pause = min(FIRST_LOOK, LOOK)
        while not self._stopping.is_set():
            try:
                if self.is_defined():
                    self._work()
            except (_Interrupted, asyncio.CancelledError):
                return
            except (errors.Forbidden, errors.InvalidRequest) as error:
                log.info("this worker publishes no messages at the end of batches: %s", error)
                return
            except Exception as error:  # noqa: BLE001  # whatever it is, no other thread would go on
                log.warning("the messages at the end of batches wait for %.0f s: %r", pause, error)
            self._stopping.wait(pause)
            pause = min(2 * pause, LOOK)

    def is_defined(self) -> bool:
        """Whether the app has endings. Raises `ServiceError`, `ServiceUnreachable`."""
        try:
            Groups(self._client.driver).get(f"process.{process_name(self._app)}")
        except errors.ConsumerGroupNotFound:
            return False
        return True

    def _work(self) -> None:
        name = f"{socket.gethostname()[:100]}-{os.getpid()}-{secrets.token_hex(4)}"
        process = Endings(self._client, self._app, self._publish, self._stopping)
        worker = ProcessWorker(process, self._client, name, partitions=1, ttl=TTL, lanes=1)
        with self._lock:
            if self._stopping.is_set():
                return
            self._worker = worker
        worker.run()


class _Interrupted(BaseException):
    """The worker stops before the broker has taken a message. Not an `Exception`, which would park the event instead of
    leaving it to the next owner."""
