"""Publishes the tasks of a fan-out, with the items' ids as their ids.

What could go wrong, on RabbitMQ:

*A message is lost.* RabbitMQ does not respond to a published message unless it is asked for confirmations, so a message
may be lost with the connection, or refused by a full queue. So a publisher has its own connection, with confirmations.
The other transports of Celery publish by a command that the broker responds to.

*A message expires in the queue.* For a task with `expires`, Celery also sets the message's own expiration. RabbitMQ
then drops the message, and no worker sees it. So messages of items are published without it: a worker receives them,
and fails their items.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from amqp.exceptions import MessageNacked
from celery import Celery
from celery.canvas import Signature
from celery.signals import before_task_publish
from kombu.exceptions import OperationalError

from lastbit.client import Client
from lastbit.errors import InvalidArgument
from lastbit.integrations.celery.items import has_one_end, items_of_message
from lastbit.integrations.celery.requests import reason_of

log = logging.getLogger("lastbit.celery")


@before_task_publish.connect  # type: ignore[untyped-decorator]
def remove_expiration(body: Any, headers: Mapping[str, Any], properties: dict[str, Any], **_: object) -> None:
    """Let the worker, and not the broker, find that an item's task has expired. This includes retries."""
    if "expiration" in properties and headers.get("expires") and items_of_message(headers, body):
        del properties["expiration"]


def identity(value: Any) -> Any:
    """What stands for a task in a rerun: names and arguments, without the options, which may have ids and times."""
    if isinstance(value, Signature):
        return value.task, identity(value.args), identity(value.kwargs)
    if isinstance(value, Mapping):
        return {name: identity(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [identity(entry) for entry in value]
    return value


class Publisher:
    """A context manager, for one fan-out."""

    def __init__(self, app: Celery, client: Client) -> None:
        self._app = app
        self._client = client
        self._resources = ExitStack()
        self._producer: Any = None
        self._checked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def checked(self, task: Signature) -> Signature:
        """The signature, if it can be an item. Raises `InvalidArgument`."""
        if not isinstance(task, Signature):
            raise InvalidArgument(f"position {self._checked}: expected a signature like task.s(…), not {task!r}")
        if not has_one_end(task):
            raise InvalidArgument(
                f"position {self._checked}: a group can't be an item, or its last part, as it has no end of its own. "
                "Pass its tasks, or make it the header of a chord"
            )
        self._checked += 1
        return task

    def send(self, pairs: Sequence[tuple[str, Signature]]) -> Sequence[tuple[str, Signature]]:
        """Publish the tasks; returns those that are left when the broker refuses one or can't be reached."""
        for position, (item, task) in enumerate(pairs):
            try:
                if self._app.conf.task_always_eager:
                    self._run(item, task)
                else:
                    task.apply_async(task_id=item, producer=self._opened())
            except (OperationalError, MessageNacked) as error:
                log.warning("the broker is unreachable, and %d tasks wait: %s", len(pairs) - position, error)
                self._resources.close()
                self._producer = None
                return pairs[position:]
        return ()

    def _run(self, item: str, task: Signature) -> None:
        """Run the task in this process. If an earlier task of a chain fails, the last one, which is the item, doesn't
        run, and Celery raises the error here."""
        try:
            task.apply_async(task_id=item)
        except Exception as error:
            self._client.fail(item, reason_of(error))
            if self._app.conf.task_eager_propagates:
                raise

    def _opened(self) -> Any:
        if self._producer is None:
            connection = self._app.connection_for_write()
            if connection.transport_cls in ("amqp", "amqps", "pyamqp") or connection.transport.driver_type == "amqp":
                connection.transport_options = {**(connection.transport_options or {}), "confirm_publish": True}
            self._resources.enter_context(connection)
            self._producer = self._app.amqp.Producer(connection, auto_declare=False)
        return self._producer
