"""`lastbit-server`: run the service, its schema migration, its checks or one of its jobs."""

from __future__ import annotations

import sys

from lastbit_server import program

JOBS = {"janitor": "jobs.janitor", "dispatcher": "jobs.dispatcher"}
"""The commands that are separate programs. `api` has all other commands."""


def main() -> int:
    name, *arguments = sys.argv[1:] or [""]
    if name in JOBS:
        module = JOBS[name]
    else:
        module, arguments = "api.__main__", sys.argv[1:]
    status: int = program(module).main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
