"""A Redis server of our own: as Debian ships it, on a free port and a temporary folder. Without options it keeps what
it has in memory alone."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from tests.servers import free_port

SYNCED = ("--appendonly", "yes", "--appendfsync", "always")
"""Options with which a write is on disk before it is answered."""


@dataclass(frozen=True)
class RedisServer:
    port: int

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("redis-server is not installed; on Debian it is the package of that name")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="lastbit-redis-") as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if "Ready to accept connections" in line:
                        break
                else:
                    raise RuntimeError("redis-server did not start")
                yield RedisServer(port)
            finally:
                process.terminate()
