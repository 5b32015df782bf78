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
    """Sorted, because a restarted producer must assign the same files to the same numbers."""
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - _NOT_OURS
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def uneven_chunks(files: list[Path]) -> list[list[Path]]:
    """The files in order, in about twenty chunks of very different lengths, the same in each run."""
    dice = random.Random("chunks")  # noqa: S311
    longest = max(2, len(files) // 10)
    chunks: list[list[Path]] = []
    start = 0
    while start < len(files):
        length = dice.randint(1, longest)
        chunks.append(files[start : start + length])
        start += length
    return chunks


def fault(path: Path) -> str | None:
    """Parse a file. Returns None if it is valid Python, else the error. A few files of the library's own tests are not
    valid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the files' code
        try:
            ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError, RecursionError) as error:
            return f"{type(error).__name__}: {getattr(error, 'msg', error)}"
    return None
