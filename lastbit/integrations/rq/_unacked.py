"""The items of finished jobs that are not resolved yet: for each queue, a set in its Redis.

A work-horse notes its item there before it saves the job as finished, and its worker acks the item while other jobs
run. The note is removed after the ack's commit. If the worker dies before, the next maintenance of any worker acks what
is noted. So it is with the item of a job that has skipped itself, in a hash with the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import redis

PREFIX: Final = "lastbit:unacked:"
UNSKIPPED: Final = "lastbit:unskipped:"


def note(connection: redis.Redis, queue: str, item: str) -> None:
    connection.sadd(PREFIX + queue, item)


def is_noted(connection: redis.Redis, queue: str, item: str) -> bool:
    return bool(connection.sismember(PREFIX + queue, item))


def noted(connection: redis.Redis, queue: str) -> list[str]:
    members: Any = connection.smembers(PREFIX + queue)
    return [_text(member) for member in members]


def remove(connection: redis.Redis, queue: str, items: Iterable[str]) -> None:
    connection.srem(PREFIX + queue, *items)


def note_skip(connection: redis.Redis, queue: str, item: str, reason: str | None) -> None:
    connection.hset(UNSKIPPED + queue, item, reason or "")


def noted_skips(connection: redis.Redis, queue: str) -> dict[str, str | None]:
    """The reason of each item."""
    reasons: Any = connection.hgetall(UNSKIPPED + queue)
    return {_text(item): _text(reason) or None for item, reason in reasons.items()}


def remove_skip(connection: redis.Redis, queue: str, item: str) -> None:
    connection.hdel(UNSKIPPED + queue, item)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
