"""The partition of a key: the same in every process, on every machine, in every release."""

from __future__ import annotations

import zlib

from lastbit.errors import InvalidArgument


def partition_of(key: str | bytes, partitions: int) -> int:
    """The CRC-32 (as in zlib) of the key's bytes, modulo `partitions`. Text is encoded as UTF-8. Python's `hash` would
    differ between processes. Raises `InvalidArgument`."""
    if not isinstance(key, str | bytes):
        raise InvalidArgument(f"partition_of takes a key that is a text or bytes, like {str(key)!r}, not {key!r}")
    if partitions < 1:
        raise InvalidArgument(f"partitions must be at least 1, not {partitions!r}")
    return zlib.crc32(key.encode() if isinstance(key, str) else key) % partitions
