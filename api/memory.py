"""The memory of this process, and the least that its control groups or the machine allow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_GROUPS: Final = Path("/sys/fs/cgroup")


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def limit() -> int:
    """Bytes. A limit that can't be read is none."""
    limits = [os.sysconf("SC_PHYS_PAGES") * _PAGE]
    for file in _limit_files(Path("/proc/self/cgroup").read_text()):
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or its text is "max"
            limits.append(int(file.read_text()))
    return min(limits)


def _limit_files(groups: str) -> Iterator[Path]:
    """The files with the limits of these groups and of those around them. `groups`: the lines of /proc/self/cgroup."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = _GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = _GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may see its own group as the root, and the path may be the one outside.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            yield folder / group.relative_to("/") / name
