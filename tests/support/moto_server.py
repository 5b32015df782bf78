"""Moto's server as a process: `python -m tests.support.moto_server PORT`. Three things differ from moto's own.

Moto is not safe for threads. A deletion replaces a queue's list of messages, so a message that is sent or deleted at
the same time would be lost, or come back. Here calls are carried out one at a time, except that a receive doesn't hold
up others while it waits for messages.

For each message sent, moto computes all attributes of its queue, and so counts all of its messages. Here only a request
for the attributes counts them.

SQS refuses an entry of a batch call now and then. Here a message asks for it in its body: `refuse 2 sends`, `refuse 1
deletes`.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.sqs.models import Queue, SQSBackend
from werkzeug.serving import WSGIRequestHandler, make_server

CALLS = (
    "create_queue",
    "delete_queue",
    "send_message",
    "send_message_batch",
    "receive_message",
    "delete_message",
    "delete_message_batch",
    "change_message_visibility",
    "change_message_visibility_batch",
    "get_queue_attributes",
)
COUNTS = (
    "approximate_number_of_messages",
    "approximate_number_of_messages_delayed",
    "approximate_number_of_messages_not_visible",
)
lock = threading.RLock()
refusals: Counter[tuple[str, str]] = Counter()
is_counting = False
"""Changed and read under the lock."""


def locked(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return method(*args, **kwargs)

    return call


def wait_unlocked(queue: Queue, timeout: int) -> None:
    lock.release()
    try:
        with queue._messages_lock:
            queue._messages_lock.wait_for(lambda: queue.messages, timeout)
    finally:
        lock.acquire()


def is_refused(body: str, action: str) -> bool:
    wanted = re.search(rf"refuse (\d+) {action}", body)
    if wanted is None or refusals[body, action] == int(wanted[1]):
        return False
    refusals[body, action] += 1
    return True


def internal_error(entry: Any) -> dict[str, Any]:
    return {"Id": entry["Id"], "SenderFault": False, "Code": "InternalError", "Message": "try again"}


def sending(method: Callable[..., Any]) -> Callable[..., Any]:
    def send_message_batch(backend: SQSBackend, queue: str, entries: dict[str, Any]) -> Any:
        refused = [entry for entry in entries.values() if is_refused(entry["MessageBody"], "sends")]
        messages, failed = method(
            backend, queue, {key: entry for key, entry in entries.items() if entry not in refused}
        )
        return messages, failed + [internal_error(entry) for entry in refused]

    return send_message_batch


def deleting(method: Callable[..., Any]) -> Callable[..., Any]:
    def delete_message_batch(backend: SQSBackend, queue: str, entries: list[Any]) -> Any:
        bodies = {message.receipt_handle: message.body for message in backend.queues[queue]._messages}
        refused = [entry for entry in entries if is_refused(bodies.get(entry["ReceiptHandle"], ""), "deletes")]
        ids, failed = method(backend, queue, [entry for entry in entries if entry not in refused])
        return ids, failed + [internal_error(entry) for entry in refused]

    return delete_message_batch


def counted_on_request(name: str) -> property:
    count = getattr(Queue, name).fget
    return property(lambda queue: count(queue) if is_counting else 0)


def counting(method: Callable[..., Any]) -> Callable[..., Any]:
    def get_queue_attributes(*args: Any, **kwargs: Any) -> Any:
        global is_counting
        is_counting = True
        try:
            return method(*args, **kwargs)
        finally:
            is_counting = False

    return get_queue_attributes


class Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open
    disable_nagle_algorithm = True

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


def main(port: int) -> None:
    SQSBackend.send_message_batch = sending(SQSBackend.send_message_batch)  # type: ignore[method-assign]
    SQSBackend.delete_message_batch = deleting(SQSBackend.delete_message_batch)  # type: ignore[method-assign]
    SQSBackend.get_queue_attributes = counting(SQSBackend.get_queue_attributes)  # type: ignore[method-assign]
    for name in COUNTS:
        setattr(Queue, name, counted_on_request(name))
    for name in CALLS:
        setattr(SQSBackend, name, locked(getattr(SQSBackend, name)))
    Queue.wait_for_messages = wait_unlocked  # type: ignore[method-assign]
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", port, app, threaded=True, request_handler=Handler)
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
