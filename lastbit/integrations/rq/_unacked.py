"""The items of finished jobs that are not acked yet: for each queue, a set in its Redis.

A work-horse notes its item there before it saves the job as finished, and its worker acks the item while other jobs
run. The note is removed after the ack's commit. If the worker dies before, the next maintenance of any worker acks what
is noted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import redis

PREFIX: Final = "lastbit:unacked:"


def note(connection: redis.Redis, queue: str, item: str) -> None:
    connection.sadd(PREFIX + queue, item)


def is_noted(connection: redis.Redis, queue: str, item: str) -> bool:
    return bool(connection.sismember(PREFIX + queue, item))


def noted(connection: redis.Redis, queue: str) -> list[str]:
    members: Any = connection.smembers(PREFIX + queue)
    return [member.decode() if isinstance(member, bytes) else member for member in members]


def remove(connection: redis.Redis, queue: str, items: Iterable[str]) -> None:
    connection.srem(PREFIX + queue, *items)
