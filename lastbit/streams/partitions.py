"""Which partition does a key belong to? The same answer in every process, on every machine, in every release."""

from __future__ import annotations

import zlib

from lastbit.errors import InvalidArgument


def partition_of(key: str | bytes, partitions: int) -> int:
    """The CRC-32 (that of zlib) of the key's bytes, text as UTF-8, modulo `partitions`. Never Python's `hash`, which
    differs from process to process."""
    if partitions < 1:
        raise InvalidArgument(f"there is at least 1 partition, not {partitions!r}")
    return zlib.crc32(key.encode() if isinstance(key, str) else key) % partitions
