"""The names and the version of our programs, for help and hints."""

from __future__ import annotations

import sys
from importlib import metadata


def command(module: str, *words: str) -> str:
    """How a user runs `module` here: `lastbit-server migrate`, or in a checkout `python -m api migrate`."""
    if "lastbit_server" not in sys.modules:
        return " ".join(["python -m", module, *words])
    name = [] if module == "api" else [module.removeprefix("jobs.")]
    return " ".join(["lastbit-server", *name, *words])


def version() -> str:
    """The version of the installed wheel, or of the SDK that is installed from the same checkout."""
    for distribution in ("lastbit-server", "lastbit"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "(not installed)"
