"""A worker of an app's endings, whose broker is a file: `python -m tests.integrations.endings_app URL APP FILE [DIES]`.

It dies (SIGKILL) at its first message: `before` the broker has it, `after` that, or when the service has noted it
(`noted`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from lastbit import Client
from lastbit.integrations import _endings
from lastbit.processes.calls import Processes
from tests import mutants

mutants.from_environment()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    url, app, path, *dies = sys.argv[1:]
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    client = Client(url)

    def publish(message_id: str, message: str) -> bool:
        if "before" in dies:
            die()
        os.write(file, f"{message_id} {message}\n".encode())
        if "after" in dies:
            die()
        return True

    if "noted" in dies:
        handle_many = Processes.handle_many

        def handle_and_die(self: Processes, *arguments: Any) -> Any:
            handle_many(self, *arguments)
            die()

        setattr(Processes, "handle_many", handle_and_die)  # noqa: B010
    _endings.TTL = 1.0  # type: ignore[misc]
    _endings.LOOK = 0.1  # type: ignore[misc]
    _endings.EndingsWorker(client, app, publish).start()
    print("started", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
