"""The names and the version of our programs, for help and hints."""

from __future__ import annotations

from functools import cache
from importlib import metadata


def command(module: str, *words: str) -> str:
    """The command that runs `module` here: `lastbit-server migrate`, or in a checkout `python -m api migrate`."""
    if __package__ == "core":
        return " ".join(["python -m", module, *words])
    name = [] if module == "api" else [module.removeprefix("jobs.")]
    return " ".join(["lastbit-server", *name, *words])


def examples(*lines: str) -> str:
    """The examples at the end of a program's help. The parser's `formatter_class` must keep the line breaks."""
    return "\n".join(["Examples:", *(f"  {line}" for line in lines)])


@cache
def version() -> str:
    """The version of the installed wheel, or of the SDK if that is installed from the same checkout."""
    for distribution in ("lastbit-server", "lastbit"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "(not installed)"
