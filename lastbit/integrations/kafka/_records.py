"""What a record carries: the id of its item, and as a dead letter the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lastbit.errors import InvalidArgument
from lastbit.integrations._workers import ITEM

REASONS: Final = ("lastbit-reason", "kafka_dlt-exception-message", "__connect.errors.exception.message")
"""Headers that tell why a record is a dead letter: by handlers of your own, by Spring, by Kafka Connect."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to publish. Without a partition, the client chooses one by the key."""

    value: bytes | str | None
    key: bytes | str | None = None
    headers: Mapping[str, bytes | str] | None = None
    partition: int | None = None


Value = bytes | str | Outgoing


def outgoing(value: Value, item: str) -> Outgoing:
    """Raises `InvalidArgument` if it isn't a value."""
    if isinstance(value, Outgoing):
        return value
    if isinstance(value, bytes | str):
        return Outgoing(value)
    raise InvalidArgument(f"item {item}: a value is bytes, a text or an Outgoing, not {value!r:.200}")


def encoded(text: bytes | str | None) -> bytes | None:
    return text.encode() if isinstance(text, str) else text


def headers_with(item: str, record: Outgoing) -> list[tuple[str, bytes]]:
    """All headers to publish, as both clients take them."""
    headers = {**(record.headers or {}), ITEM: item}
    return [(name, encoded(value) or b"") for name, value in headers.items()]


def headers_of(record: Any) -> dict[str, bytes]:
    """The headers of a client's record; of several with one name, the last."""
    headers = record.headers
    return dict((headers() if callable(headers) else headers) or ())


def item_of(record: Any) -> str | None:
    """The id in the header of a record; None if it has none."""
    value = headers_of(record).get(ITEM)
    return None if value is None else value.decode(errors="replace")


def death_of(record: Any) -> str:
    """The reason of a dead letter, from its headers."""
    headers = headers_of(record)
    for name in REASONS:
        if text := headers.get(name):
            return f"dead-lettered: {text.decode(errors='replace')}"
    return "dead-lettered"
