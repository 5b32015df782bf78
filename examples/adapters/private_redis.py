"""Runs a Redis in memory, in place of this process: `python -m examples.adapters.private_redis PORT FOLDER`."""

from __future__ import annotations

import os
import shutil
import sys


def main() -> None:
    program = shutil.which("redis-server")
    if program is None:
        sys.exit("redis-server is not installed; on Debian it is the package of that name")
    port, folder = sys.argv[1:]
    command = [program, "--port", port, "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
    os.execv(program, command)  # noqa: S606  # a program without a shell


if __name__ == "__main__":
    main()
