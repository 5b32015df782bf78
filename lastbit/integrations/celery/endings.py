"""The signature at the end of a batch: stored by a fan-out, published by a worker's main process.

The id of its task is the id of the batch's event, which is no item's id.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from celery import Celery, bootsteps
from celery.canvas import Signature
from celery.exceptions import NotRegistered
from kombu.utils import json

from lastbit.client import Client
from lastbit.errors import InvalidArgument
from lastbit.integrations._endings import EndingsWorker
from lastbit.integrations.celery.items import has_one_end
from lastbit.integrations.celery.publisher import Publisher


def text_of(option: str, signature: Signature | None) -> str | None:
    """The signature as it is stored. Raises `InvalidArgument`."""
    if signature is None:
        return None
    if not isinstance(signature, Signature) or not has_one_end(signature):
        raise InvalidArgument(f"{option}: expected a signature like task.s(…), and no group, not {signature!r}")
    try:
        text: str = json.dumps(signature, ensure_ascii=False, separators=(",", ":"), sort_keys=True)  # type: ignore[no-untyped-call]
    except Exception as error:  # of any type, such as kombu's own
        raise InvalidArgument(f"{option}: the arguments must be JSON: {error}") from error
    return text


def install(app: Celery, client: Callable[[], Client], name: str) -> None:
    """Let the workers of the app publish the endings of this name."""

    def new_worker() -> EndingsWorker:
        workers_client = client()
        return EndingsWorker(workers_client, name, partial(_publish, app, workers_client))

    attributes = {"__module__": __name__, "new_worker": staticmethod(new_worker)}
    app.steps["consumer"].add(type("Endings", (EndingsStep,), attributes))


def _publish(app: Celery, client: Client, message_id: str, text: str) -> bool:
    signature = Signature.from_dict(json.loads(text), app=app)  # type: ignore[no-untyped-call]
    if signature.task not in app.tasks:
        # The worker that got it would remove it.
        raise NotRegistered(signature.task)
    with Publisher(app, client) as publisher:
        return not publisher.send([(message_id, signature)])


class EndingsStep(bootsteps.StartStopStep):
    """Started after the pool has forked its first children."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    new_worker: ClassVar[Callable[[], EndingsWorker]]

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._worker: EndingsWorker | None = None

    def start(self, consumer: Any) -> None:
        # Called at each connection.
        if self._worker is None:
            self._worker = type(self).new_worker()
            self._worker.start()

    def shutdown(self, consumer: Any) -> None:
        if self._worker is not None:
            self._worker.stop()
