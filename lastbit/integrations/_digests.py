"""The digest of a fan-out's messages, by which a rerun is checked: one for all messages so far, after each chunk.

Equal messages have equal digests in any process: mappings and sets are read in an order of their own, and nothing
depends on an object's address or pickle. Other messages, or the same in another order, have other digests: each value
is written with its kind and length, so that no two sequences of values are written alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from numbers import Integral
from typing import Any, Final
from uuid import UUID

from lastbit import errors

_AS_TEXT: Final = (Decimal, UUID, date, time, timedelta)
"""Types whose text is the same in each process, and tells their values apart. A `datetime` is a `date`."""


class Digest:
    """Of the messages that were added. `identify` returns what stands for a message; by default the message itself."""

    def __init__(self, identify: Callable[[Any], Any] | None = None) -> None:
        self._identify = identify
        self._hash = hashlib.blake2b(digest_size=16)
        self._count = 0

    def after(self, messages: Iterable[Any]) -> str:
        """Add messages, and return the digest of all so far. Raises `InvalidArgument`."""
        for message in messages:
            value = message if self._identify is None else self._identify(message)
            try:
                self._hash.update(_written(value))
            except TypeError as error:
                raise errors.InvalidArgument(
                    f"message {self._count} can't be compared with that of a rerun, because {error}: pass identify=, a "
                    "function that returns what stands for a message: text, bytes, a number or a tuple of them"
                ) from None
            self._count += 1
        return self._hash.hexdigest()


def _written(value: Any) -> bytes:
    """The value as bytes of which no others are a continuation. Raises `TypeError`."""
    match value:
        case str():
            return _measured(b"s", value.encode(errors="surrogatepass"))
        case bytes() | bytearray() | memoryview():
            return _measured(b"b", bytes(value))
        case None | bool():
            return _measured(b"c", str(value).encode())
        case Integral():
            return _measured(b"i", b"%x" % int(value))
        case float():
            return _measured(b"f", repr(float(value)).encode())
        case list() | tuple():
            return _measured(b"l", b"".join(map(_written, value)))
        case Mapping():
            return _measured(b"m", b"".join(sorted(_written(key) + _written(entry) for key, entry in value.items())))
        case Set():
            return _measured(b"e", b"".join(sorted(map(_written, value))))
        case _ if isinstance(value, _AS_TEXT):
            return _measured(b"t", f"{type(value).__name__} {value}".encode())
        case _ if is_dataclass(value) and not isinstance(value, type):
            return _written({field.name: getattr(value, field.name) for field in fields(value)})
        case _:
            raise TypeError(f"it holds an object of {type(value).__name__}")


def _measured(kind: bytes, content: bytes) -> bytes:
    return b"%b%d:%b" % (kind, len(content), content)
