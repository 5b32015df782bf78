"""`lastbit-server`: run the service, its schema migration, its checks or one of its jobs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

JOBS = {"janitor": "jobs.janitor", "dispatcher": "jobs.dispatcher"}
"""The commands that are separate programs. `api` has all other commands."""


def main() -> int:
    _find_programs()
    name, *arguments = sys.argv[1:] or [""]
    if name in JOBS:
        module = JOBS[name]
    else:
        module, arguments = "api.__main__", sys.argv[1:]
    status: int = importlib.import_module(module).main(arguments)
    return status


def _find_programs() -> None:
    """Put the folder of the programs first on the path, so that no other package called `api` or `core` is imported,
    neither from the working directory nor from site-packages. Worker processes are spawned, and inherit the path."""
    here = Path(__file__).resolve().parent
    app = here / "_app"
    sys.path.insert(0, str(app if app.is_dir() else here.parent))


if __name__ == "__main__":
    sys.exit(main())
