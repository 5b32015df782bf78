"""What a user does first with the installed wheels: without a service, and with one. It runs in the environment that
has them, in any folder but the checkout; see check_wheels.sh."""

import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from lastbit import Client, Retry, __version__
from lastbit.embedded import Lastbit

PROGRAMS = Path(sys.executable).parent


def completes(client: Client) -> bool:
    batch = client.open(key="first", items=3, sealed=True)
    return [bool(client.ack(item_id).completed) for item_id in batch.ids] == [False, False, True]


def prints(*words: str) -> str:
    return subprocess.run([PROGRAMS / words[0], *words[1:]], check=True, capture_output=True, text=True).stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        url = f"sqlite:///{folder}/lastbit.db"
        with Lastbit(url) as lastbit:
            lastbit.migrate()
            assert completes(lastbit.client())
        assert prints("lastbit-server", "--version") == f"lastbit-server {__version__}\n"
        assert "database" in prints("lastbit-server", "check", "--database-url", url)
        port = str(free.getsockname()[1])
        free.close()
        service = subprocess.Popen([PROGRAMS / "lastbit-server", "--port", port, "--database-url", url])
        try:
            address = f"http://127.0.0.1:{port}"
            with Client(address, retry=Retry(attempts=500, cap=0.2)) as client:
                assert completes(client)
            assert prints("lastbit", "--url", address, "verify", "--all") == "2 batches, 6 items: ok\n"
        finally:
            service.terminate()
            service.wait(60)
    print(f"lastbit {__version__} works on Python {platform.python_version()}")  # noqa: T201


main()
