"""File systems that a test can fill."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL_SERVER = {
    "mariadb": ["--innodb-log-file-size=8M", "--innodb-data-file-path=ibdata1:12M:autoextend:max:16M"],
    "postgresql": ["min_wal_size=32MB", "max_wal_size=32MB"],
}
"""Options for a server that has 128 MiB."""


@contextlib.contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """A file system that can be filled."""
    with tempfile.TemporaryDirectory(prefix="lastbit-disk-") as folder:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={megabytes}m".encode()):
            pytest.skip(f"may not mount: {os.strerror(ctypes.get_errno())}")
        try:
            yield Path(folder)
        finally:
            libc.umount2(folder.encode(), 2)  # unmount once the last file is closed


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        filler.unlink()
