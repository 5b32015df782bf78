"""Sends the messages of a batch, ten to a call.

Things that could go wrong, and why they can't:

*A message is refused and never sent.* SQS answers 200 and lists failed entries. They are returned, and sent again.

*A FIFO queue gets a group's messages in another order*, because one was refused and its successor was not. A call has
at most one message of each group, and the next one is sent after it was accepted.

*A call is too large.* Calls are filled up to 1 MiB, counted as SQS counts: body, and names, types and values of
attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from lastbit import errors
from lastbit.integrations.sqs._queue import ITEM, MOST_ENTRIES, Queue, failed_entries

MOST_BYTES: Final = 1_048_576
"""Maximum size of a message, and of all messages of a call."""
MOST_ATTRIBUTES: Final = 10
"""Maximum message attributes."""

Body = str | Mapping[str, Any]
"""A body, or an entry for `send_message_batch` without its Id."""
Pair = tuple[str, Body]
Group = str | Callable[[Body], str]


@dataclass(frozen=True, slots=True)
class _Entry:
    pair: Pair
    fields: Mapping[str, Any]
    size: int

    @property
    def group(self) -> str | None:
        group: str | None = self.fields.get("MessageGroupId")
        return group


class Sender:
    """Sends messages to a queue, with several calls at a time. `occasion`: appended to the deduplication ids, so that
    SQS doesn't drop messages that are sent again on purpose."""

    def __init__(self, client: Any, queue: Queue, group: Group | None, executor: Executor, occasion: str = "") -> None:
        self._client = client
        self._url = queue.url
        self._is_fifo = queue.is_fifo
        self._group = group
        self._executor = executor
        self._occasion = occasion

    def __call__(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """Send the messages. Returns those that SQS refused, or that must wait for a refused one, in their order."""
        entries = [self._entry(item, body) for item, body in pairs]
        if not self._is_fifo:
            return [entry.pair for entry in self._send(entries)]
        refused_entries: list[_Entry] = []
        while entries:
            firsts: dict[str | None, _Entry] = {}
            successors = [entry for entry in entries if firsts.setdefault(entry.group, entry) is not entry]
            failed = self._send(list(firsts.values()))
            blocked_groups = {entry.group for entry in failed}
            refused_entries += failed
            refused_entries += [entry for entry in successors if entry.group in blocked_groups]
            entries = [entry for entry in successors if entry.group not in blocked_groups]
        return [entry.pair for entry in refused_entries]

    def _entry(self, item: str, body: Body) -> _Entry:
        fields: dict[str, Any] = dict(body) if isinstance(body, Mapping) else {"MessageBody": body}
        if not isinstance(fields.get("MessageBody"), str):
            raise errors.InvalidArgument(
                f"item {item}: a body is a text, or a mapping with a text as MessageBody, not {body!r:.200}"
            )
        attributes = {**fields.get("MessageAttributes", {}), ITEM: {"DataType": "String", "StringValue": item}}
        if len(attributes) > MOST_ATTRIBUTES:
            raise errors.InvalidArgument(
                f"item {item}: a message has at most {MOST_ATTRIBUTES} attributes, and {ITEM} is one of them"
            )
        fields["MessageAttributes"] = attributes
        if self._group is not None and "MessageGroupId" not in fields:
            fields["MessageGroupId"] = self._group if isinstance(self._group, str) else self._group(body)
        if self._is_fifo:
            if "MessageGroupId" not in fields:
                raise errors.InvalidArgument("messages of a FIFO queue have a group: pass group, a text or a function")
            # SQS drops a repeat within five minutes, as after a rerun of the producer.
            fields.setdefault("MessageDeduplicationId", item + self._occasion)
        size = _size(fields)
        if size > MOST_BYTES:
            raise errors.InvalidArgument(f"item {item}: a message has at most {MOST_BYTES:,} bytes, not {size:,}")
        return _Entry((item, body), fields, size)

    def _send(self, entries: Sequence[_Entry]) -> list[_Entry]:
        """Send the entries in parallel calls. Returns those that SQS refused."""
        return [entry for call in self._executor.map(self._call, _calls(entries)) for entry in call]

    def _call(self, entries: Sequence[_Entry]) -> list[_Entry]:
        body = [{"Id": str(position), **entry.fields} for position, entry in enumerate(entries)]
        call = partial(self._client.send_message_batch, QueueUrl=self._url, Entries=body)
        faults = failed_entries(call, range(len(entries)))
        for position, fault in faults.items():
            if fault.is_lasting:
                raise errors.InvalidArgument(f"item {entries[position].pair[0]}: SQS refuses its message: {fault}")
        return [entries[position] for position in faults]


def _calls(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Divide the entries into calls that SQS accepts."""
    call: list[_Entry] = []
    size = 0
    for entry in entries:
        if len(call) == MOST_ENTRIES or size + entry.size > MOST_BYTES:
            yield call
            call, size = [], 0
        call.append(entry)
        size += entry.size
    if call:
        yield call


def _size(fields: Mapping[str, Any]) -> int:
    """The bytes of an entry, as SQS counts them."""
    size = len(fields["MessageBody"].encode())
    for name, attribute in fields["MessageAttributes"].items():
        size += len(name.encode()) + len(attribute["DataType"].encode())
        size += len(attribute.get("StringValue", "").encode()) + len(attribute.get("BinaryValue", b""))
    return size
