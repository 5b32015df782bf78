"""Real brokers for tests and benchmarks: a private Redis and RabbitMQ, on free ports and with temporary folders, and a
connection to them that can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers import free_port, memory, wait_until_it_prints

SYNCED = ("--appendonly", "yes", "--appendfsync", "always")
"""Options with which a write is on disk before it is answered."""


@dataclass(frozen=True)
class RedisServer:
    port: int

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """Debian's Redis; without options it keeps its data in memory only."""
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("redis-server is not installed; on Debian it is the package of that name")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="lastbit-redis-") as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            wait_until_it_prints(process, "Ready to accept connections")
            yield RedisServer(port)
        finally:
            process.terminate()
            process.wait(60)


RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""Not the one in /usr/sbin: Debian's wrapper switches to another user and writes to the machine's folders."""


class RabbitMQ:
    """A private node with its own folders, port mapper and cookie. It listens on loopback only."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lastbit-rabbitmq-", dir=memory()))
        self.port = free_port()
        self._mapper: subprocess.Popen[bytes] | None = None
        self._node: subprocess.Popen[str] | None = None

    @property
    def available(self) -> bool:
        return RABBITMQ.exists() and shutil.which("epmd") is not None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"

    def start(self) -> None:
        mapper_port = free_port()
        (self.folder / "rabbitmq.conf").write_text("disk_free_limit.absolute = 1MB\n")
        (self.folder / "enabled_plugins").write_text("[].\n")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))},
            "HOME": str(self.folder),  # for the cookie
            "ERL_EPMD_PORT": str(mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": "lastbit@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            # Schedulers that don't spin, so that the tests get the CPU.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none",
            # The script is replaced by the virtual machine, which makes that our child process.
            "RUNNING_UNDER_SYSTEMD": "true",
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "none"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.folder / "config"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_LOGS": "-",
        }
        # In the foreground: a port mapper that Erlang starts itself outlives the node.
        self._mapper = subprocess.Popen(["epmd", "-port", str(mapper_port), "-address", "127.0.0.1"], env=environment)
        self._node = subprocess.Popen(
            [str(RABBITMQ)],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until_it_prints(self._node, "Server startup complete", 120)

    def remove(self) -> None:
        """Kill it at once: its data isn't needed."""
        if self._node is not None:
            # The virtual machine and the helpers that it starts.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._node.pid, signal.SIGKILL)
            self._node.wait(60)
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)


class Wire:
    """Forwards connections to a port of this machine until it is cut: then all of them end, as in a network failure.
    Later connections are forwarded again."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._cut_at_answer = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client = self._listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    self._ends += [client, far]
                for ends in ((client, far, False), (far, client, True)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, from_target: bool) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(65536)) and not (from_target and self._cut_at_answer):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut_at_the_next_answer(self) -> None:
        """Drop the next answer and end its connection, and so on for further answers until `cut()`."""
        self._cut_at_answer = True

    def cut(self) -> None:
        self._cut_at_answer = False
        with self._lock:
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            self._ends.clear()

    def close(self) -> None:
        self._listening.close()
        self.cut()
