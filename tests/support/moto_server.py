"""Moto's server as a process: `python -m tests.support.moto_server PORT`. Some things differ from moto's own.

Moto is not safe for threads. A deletion replaces a queue's list of messages, so a message that is sent or deleted at
the same time would be lost, or come back. Here calls are carried out one at a time, except that a receive doesn't hold
up others while it waits for messages.

Moto looks at all messages of a queue, and at the clock for each, when one is sent, received or deleted. With ten
thousand messages it would take minutes. Here a call looks at few, or at least quickly.

If several messages of a FIFO queue's group become visible together, moto delivers the last one first, as it takes the
others for pending. Here none of them is.

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

from moto.core.utils import unix_time_millis
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.sqs.exceptions import ReceiptHandleIsInvalid
from moto.sqs.models import Message, Queue, SQSBackend
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
lock = threading.RLock()
refusals: Counter[tuple[str, str]] = Counter()
receipts: dict[str, Message] = {}
"""The message of each receipt handle."""
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
        refused_entries = [entry for entry in entries.values() if is_refused(entry["MessageBody"], "sends")]
        messages, failed = method(
            backend, queue, {key: entry for key, entry in entries.items() if entry not in refused_entries}
        )
        return messages, failed + [internal_error(entry) for entry in refused_entries]

    return send_message_batch


def deleting(method: Callable[..., Any]) -> Callable[..., Any]:
    def delete_message_batch(backend: SQSBackend, queue: str, entries: list[Any]) -> Any:
        bodies = {message.receipt_handle: message.body for message in backend.queues[queue]._messages}
        refused_entries = [entry for entry in entries if is_refused(bodies.get(entry["ReceiptHandle"], ""), "deletes")]
        ids, failed = method(backend, queue, [entry for entry in entries if entry not in refused_entries])
        return ids, failed + [internal_error(entry) for entry in refused_entries]

    return delete_message_batch


def visible_messages(queue: Queue) -> list[Message]:
    now = unix_time_millis()
    visible = [message for message in queue._messages if now > message.visible_at and now >= message.delayed_until]
    queue.pending_messages.difference_update(visible)
    return visible


def receiving(method: Callable[..., Any]) -> Callable[..., Any]:
    def mark_received(message: Message, visibility_timeout: int | None = None) -> None:
        method(message, visibility_timeout)
        receipts[str(message.receipt_handle)] = message

    return mark_received


def delete_message(queue: Queue, receipt_handle: str) -> None:
    if receipt_handle in queue.deleted_messages:
        return
    message = receipts.get(receipt_handle)
    if message not in queue._messages:
        raise ReceiptHandleIsInvalid
    queue._messages.remove(message)
    queue.pending_messages.discard(message)
    queue.deleted_messages.update(map(str, message.all_receipt_handles))


def had_receipt_handle(message: Message, receipt_handle: str) -> bool:
    return receipts.get(receipt_handle) is message


def visible_count(queue: Queue) -> int:
    return len(queue.messages) if is_counting else 0


def hidden_count(queue: Queue) -> int:
    return len(queue._messages) - len(queue.messages) if is_counting else 0


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
    Message.mark_received = receiving(Message.mark_received)  # type: ignore[method-assign]
    Message.had_receipt_handle = had_receipt_handle  # type: ignore[method-assign]
    Queue.delete_message = delete_message  # type: ignore[method-assign]
    Queue.messages = property(visible_messages)  # type: ignore[assignment,method-assign]
    SQSBackend.get_queue_attributes = counting(SQSBackend.get_queue_attributes)  # type: ignore[method-assign]
    Queue.approximate_number_of_messages = property(visible_count)  # type: ignore[assignment,method-assign]
    Queue.approximate_number_of_messages_not_visible = property(hidden_count)  # type: ignore[assignment,method-assign]
    Queue.approximate_number_of_messages_delayed = property(lambda queue: 0)  # type: ignore[assignment,method-assign]
    SQSBackend.is_message_valid_based_on_retention_period = lambda *_: True  # type: ignore[method-assign]
    for name in CALLS:
        setattr(SQSBackend, name, locked(getattr(SQSBackend, name)))
    Queue.wait_for_messages = wait_unlocked  # type: ignore[method-assign]
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", port, app, threaded=True, request_handler=Handler)
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
