"""Runs a service for which names that end with `.slow.test` resolve after fifteen seconds, and to nothing. A file by
itself, in a folder for PYTHONPATH: the service may be that of another checkout."""

from __future__ import annotations

import runpy
import socket
import time
from typing import Any

_resolve = socket.getaddrinfo


def _slowly(host: Any, *arguments: Any, **options: Any) -> Any:
    if isinstance(host, str) and host.endswith(".slow.test"):
        time.sleep(15)  # what the peer does
        raise socket.gaierror(socket.EAI_AGAIN, "no server answered")
    return _resolve(host, *arguments, **options)


if __name__ == "__main__":
    socket.getaddrinfo = _slowly
    runpy.run_module("api", run_name="__main__", alter_sys=True)
