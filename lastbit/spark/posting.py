"""Sends masks to the service from executors, with only this package and the standard library.

Each partition, and each micro-batch of a writer, has one `Poster`. It sends a request before the waiting masks exceed
the limits of one, and adds up the results. It may run twice, even at the same time: Spark retries tasks, and
speculation runs copies. The bits are idempotent, so no item is acked twice. Only the counts of the copies move from
applied to repeated.

A request's Idempotency-Key is derived from the run's key and the request's content. If a task is run again with the
same rows in the same order, it sends the same requests with the same keys. So it sees `newly` again if the first
response was lost.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lastbit import _calls, _masks, errors
from lastbit._urllib import Connection
from lastbit.ids import MAX_GROUP_SIZE, MIN_GROUP_SIZE

Verb = Literal["acks", "skips", "failures"]
Mask = tuple[int | None, int | None, bytes | None, bytes | None, bytes | None, int, int, int]
"""A row of `item_masks`: batch, group, bits, failed_bits, skipped_bits, items, beyond, rows."""

GROUPS_A_CALL = 512
"""The default number of groups in a call: the number that the service locks in one transaction."""


@dataclass(frozen=True, slots=True)
class Posting:
    """How masks are sent. `run` identifies the call of `ack` in the Idempotency-Keys."""

    connection: Connection
    run: str
    reason: str | None = None
    groups: int = GROUPS_A_CALL

    def __post_init__(self) -> None:
        if not 1 <= self.groups <= _masks.MOST_GROUPS:
            raise errors.InvalidArgument(f"a call has 1 to {_masks.MOST_GROUPS:,} groups, not {self.groups!r}")


@dataclass(slots=True)
class Posted:
    """One partition's counts and results. `groups` counts the bitfields that the service has answered. `error` is set
    if the partition failed before its end."""

    rows: int = 0
    items: int = 0
    malformed: int = 0
    groups: int = 0
    applied: int = 0
    repeated: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    completed: set[int] = field(default_factory=set)
    error: errors.LastbitError | None = None

    def add(self, other: Posted) -> None:
        self.rows += other.rows
        self.items += other.items
        self.malformed += other.malformed
        self.groups += other.groups
        self.applied += other.applied
        self.repeated += other.repeated
        self.rejected += other.rejected
        self.completed |= other.completed
        self.error = self.error or other.error


def post(masks: Iterable[Mask], posting: Posting) -> Iterator[Posted]:
    """Send a partition's masks. Yields one `Posted`, which contains an error of the service instead of raising it:
    Spark would retry the task, in addition to the client's retries, and wrap the error in its own."""
    poster = Poster(posting)
    try:
        for mask in masks:
            poster.add(mask)
        poster.flush()
    except errors.LastbitError as error:
        poster.posted.error = error
    yield poster.posted


class Poster:
    """Posts masks; `posted` has the results. Call `flush` at the end. Its methods raise `ServiceError`,
    `ServiceUnreachable`, `UnexpectedAnswer`."""

    def __init__(self, posting: Posting) -> None:
        self.posted = Posted()
        self._posting = posting
        self._driver = posting.connection.driver()
        self._waiting: dict[Verb, _Waiting] = {"acks": _Waiting(), "skips": _Waiting(), "failures": _Waiting()}
        self._batches: dict[int, tuple[int, str]] = {}
        """Of each batch that was looked up: the group size, and the reason for rejecting an index beyond it."""

    def add(self, mask: Mask) -> None:
        batch, group, bits, failed_bits, skipped_bits, items, beyond, rows = mask
        self.posted.rows += rows
        if batch is None or group is None:
            self.posted.malformed += rows
            return
        self.posted.items += items
        if beyond:
            self.posted.rejected[self._batch(batch)[1]] += beyond
        self._put("acks", batch, group, bits)
        self._put("skips", batch, group, skipped_bits)
        self._put("failures", batch, group, failed_bits)

    def flush(self) -> None:
        """Send all waiting masks."""
        for verb in self._waiting:
            self._send(verb)

    def _put(self, verb: Verb, batch: int, group: int, bits: bytes | None) -> None:
        in_range = self._cut(batch, bytes(bits or b"").rstrip(b"\0"))
        if not in_range:
            return
        waiting = self._waiting[verb]
        text = b64encode(in_range).decode()
        mask = {"batch": batch, "group": group, "bits": text}
        size = len(text) + 80  # the longest batch and group number, names and punctuation
        if len(waiting.groups) == self._posting.groups or waiting.size + size > _masks.MOST_BYTES:
            self._send(verb)
            waiting = self._waiting[verb]
        waiting.groups.append(mask)
        waiting.size += size

    def _cut(self, batch: int, bits: bytes) -> bytes:
        """The bits within the batch's group size. The others are counted as rejected."""
        if len(bits) * 8 <= MIN_GROUP_SIZE:
            return bits
        group_size, reason_beyond = self._batch(batch)
        room = group_size // 8
        if len(bits) > room:
            self.posted.rejected[reason_beyond] += int.from_bytes(bits[room:], "little").bit_count()
        return bits[:room].rstrip(b"\0")

    def _batch(self, batch: int) -> tuple[int, str]:
        """The batch's group size, and the reason for rejecting an index beyond it, as the service would report it."""
        if batch not in self._batches:
            try:
                details = self._driver.run(_calls.get, batch)
            except errors.BatchNotFound:
                self._batches[batch] = (MAX_GROUP_SIZE, "unknown_batch")
            else:
                is_closed = details.state in {"expired", "cancelled"}
                self._batches[batch] = (details.group_size, details.state if is_closed else "unknown_item")
        return self._batches[batch]

    def _send(self, verb: Verb) -> None:
        waiting = self._waiting[verb]
        if not waiting.groups:
            return
        self._waiting[verb] = _Waiting()
        reason = None if verb == "acks" else self._posting.reason
        key = _key(self._posting.run, verb, waiting.groups)
        result = self._driver.run(_calls.resolve, verb, iter([{"groups": waiting.groups}]), reason, key)
        self.posted.groups += len(waiting.groups)
        self.posted.applied += result.applied
        self.posted.repeated += result.repeated
        for rejection in result.rejected:
            self.posted.rejected[rejection.reason] += rejection.count
        self.posted.completed |= {completion.batch for completion in result.completed}


@dataclass(slots=True)
class _Waiting:
    groups: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0


def _key(run: str, verb: Verb, groups: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps([run, verb, groups]).encode()).hexdigest()
