"""The items: the `.py` files of the running interpreter's standard library."""

from __future__ import annotations

import ast
import os
import random
import sysconfig
import warnings
from pathlib import Path

_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}


def standard_library() -> list[Path]:
    """Always in the same order: a producer that starts again must find the same items behind the same numbers."""
    found: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - _NOT_OURS
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def uneven_chunks(files: list[Path]) -> list[list[Path]]:
    """The files in order, cut into about twenty chunks of very different lengths; the same ones each time."""
    chance = random.Random("chunks")  # noqa: S311
    longest = max(2, len(files) // 10)
    chunks: list[list[Path]] = []
    start = 0
    while start < len(files):
        length = chance.randint(1, longest)
        chunks.append(files[start : start + length])
        start += length
    return chunks


def fault(path: Path) -> str | None:
    """Parse a file; None where it is Python, else what it is not. The library's own tests bring a few that aren't."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the files, not of ours
        try:
            ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError, RecursionError) as error:
            return f"{type(error).__name__}: {getattr(error, 'msg', error)}"
    return None
