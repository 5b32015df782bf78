"""Real servers for tests: a MariaDB of our own, and the service as a real process. Free ports, temporary folders."""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, ClassVar

import httpx
import pymysql

from tests.support.nursery import Child, Nursery

ROOT = Path(__file__).resolve().parents[2]


PORTS = range(11_000, 32_768)
"""Below those that the system gives to connections going out: none of these sits on a server's port while that is down.
And above the last one that a browser refuses."""
_lot = random.SystemRandom()  # hypothesis sets the other one back before each example
_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, and that this process has not been given before: it may not be in use yet."""
    while True:
        port = _lot.choice(PORTS)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def memory() -> str | None:
    """Where temporary folders go: memory, if at hand. Durability on disk is not what most tests are about, and fsync is
    slow."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextlib.contextmanager
def sqlite_file() -> Iterator[str]:
    """The URL of an empty SQLite file, gone when the context ends."""
    with tempfile.TemporaryDirectory(prefix="lastbit-sqlite-", dir=memory()) as folder:
        yield f"sqlite:///{folder}/lastbit.db"


def wait_until_it_says(process: subprocess.Popen[str], word: str, seconds: float = 60) -> str:
    """Read standard error, or standard output where that alone is a pipe, until a line has `word`; the rest is drained,
    so that the process never blocks on it."""
    stream = process.stderr or process.stdout
    assert stream is not None
    lines: list[str] = []
    is_ready = threading.Event()

    def listen() -> None:
        for line in stream:
            lines.append(line)
            if word in line:
                is_ready.set()
        is_ready.set()

    threading.Thread(target=listen, daemon=True).start()
    is_ready.wait(seconds)
    text = "".join(lines)
    assert word in text, f"{process.args} did not say {word!r} but:\n{text}"
    return text


class MariaDB:
    """A server at its defaults, but for where it lives, `options` as on its command line, and its `environment`."""

    def __init__(
        self,
        *,
        in_memory: bool = True,
        folder: Path | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.options = tuple(options)
        self.environment = dict(environment or {})
        parent = folder or (memory() if in_memory else None)
        self.folder = Path(tempfile.mkdtemp(prefix="lastbit-mariadb-", dir=parent))
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None
        self.user = getpass.getuser()
        path = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
        self.program = shutil.which("mariadbd", path=path)
        self.installer = shutil.which("mariadb-install-db", path=path)
        self._databases = 0

    @property
    def available(self) -> bool:
        return self.program is not None and self.installer is not None

    def install(self) -> None:
        assert self.installer is not None
        command = [
            *(self.installer, "--no-defaults", f"--datadir={self.folder}/data", "--skip-test-db"),
            *("--auth-root-authentication-method=normal", f"--user={self.user}"),
        ]
        # Not the machine's /tmp, as below.
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout + process.stderr

    def command(self) -> list[str]:
        assert self.program is not None
        return [
            *(self.program, "--no-defaults", f"--user={self.user}", f"--datadir={self.folder}/data"),
            *(f"--socket={self.folder}/socket", f"--pid-file={self.folder}/pid", f"--port={self.port}"),
            # Not the machine's: a server that starts clears what looks like its own there.
            f"--tmpdir={self.folder}",
            *("--bind-address=127.0.0.1", "--skip-name-resolve", "--max-connections=400"),
            *self.options,
        ]

    def start(self) -> None:
        environment = {**os.environ, **self.environment}
        self.process = subprocess.Popen(self.command(), env=environment, stderr=subprocess.PIPE, text=True)
        wait_until_it_says(self.process, "ready for connections")

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None

    def remove(self) -> None:
        self.stop(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def connect(self, database: str | None = None) -> pymysql.Connection:
        # Where there may be TLS, PyMySQL reads all certificates of the machine for each connection.
        return pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", database=database, autocommit=True, ssl_disabled=True
        )

    def new_database(self) -> str:
        """The URL of an empty database."""
        self._databases += 1
        name = f"lastbit_{os.getpid()}_{self._databases}"
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
        return f"mysql://root@127.0.0.1:{self.port}/{name}"

    def drop_database(self, url: str) -> None:
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {url.rpartition('/')[2]}")


class ServiceProcess:
    """`python -m api` (or another module) on a free port."""

    nursery: ClassVar[Nursery | None] = None
    """Where there is one, services of one process are forked from it."""

    def __init__(
        self,
        database_url: str,
        *,
        workers: int = 1,
        module: str = "api",
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        root: Path = ROOT,
    ) -> None:
        self.database_url = database_url
        self.workers = workers
        # A mutant is put in place in the service too.
        self.module = (
            "tests.guarantees.programs.mutated_api" if module == "api" and "LASTBIT_MUTANT" in os.environ else module
        )
        self.environment = dict(environment or {})
        self.log = log
        """Where its standard error goes, if not to ours."""
        self.root = root
        """The folder of its code."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | Child | None = None

    def start(self) -> ServiceProcess:
        with contextlib.ExitStack() as stack:
            self._spawn(None if self.log is None else stack.enter_context(self.log.open("ab")))
        self.wait_until_ready()
        return self

    def _spawn(self, log: IO[bytes] | None) -> None:
        arguments = ["--port", str(self.port), "--workers", str(self.workers), "--database-url", self.database_url]
        # A line a request is of use only where somebody reads it.
        environment = {**({} if log else {"LASTBIT_LOG_LEVEL": "warning"}), **os.environ, **self.environment}
        nursery = _nursery(environment)
        if nursery is not None and self.workers == 1 and self.root == ROOT:
            self.process = nursery.start(
                self.module, arguments, environment=environment, stderr=2 if log is None else log
            )
            return
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, *arguments],
            cwd=self.root,
            env=environment,
            stderr=log,
            start_new_session=True,
        )

    def wait_until_ready(self, seconds: float = 60) -> None:
        """Ask /readyz until it says yes; each try waits for the connection, so nothing spins."""
        assert self.process is not None
        transport = httpx.HTTPTransport(retries=0)
        pause = threading.Event()
        with httpx.Client(transport=transport, timeout=5) as client:
            for _ in range(int(seconds / 0.05)):
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}/readyz").status_code == 200:
                        return
                if self.process.poll() is not None:
                    break
                pause.wait(0.05)
        raise AssertionError(f"the service at {self.url} did not become ready (exit code {self.process.poll()})")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal to the service (SIGKILL: to its workers too) and wait for its end."""
        assert self.process is not None
        if number == signal.SIGKILL and isinstance(self.process, subprocess.Popen):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.send_signal(number)
        return self.process.wait(60)

    def remove(self) -> None:
        """End the service by SIGKILL, which is fastest; under `make coverage` by SIGTERM, so that it writes figures."""
        if "COVERAGE_PROCESS_CONFIG" in os.environ:
            with contextlib.suppress(TimeoutError, subprocess.TimeoutExpired):
                self.stop(signal.SIGTERM)
        self.stop(signal.SIGKILL)


def _nursery(environment: Mapping[str, str]) -> Nursery | None:
    """None for what the linker reads when a program begins, as a library of a false clock: a fork comes too late."""
    return None if "LD_PRELOAD" in environment else ServiceProcess.nursery


def run_module(
    module: str, *arguments: str, stdin: str | bytes = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ARGUMENTS` in the checkout's root, to its end; by default with our environment."""
    environment = os.environ if environment is None else environment
    input_bytes = stdin.encode() if isinstance(stdin, str) else stdin
    nursery = _nursery(environment)
    if nursery is not None:
        process = nursery.run(module, arguments, environment=environment, input=input_bytes, timeout=60)
    else:
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.run(command, cwd=ROOT, env=environment, input=input_bytes, capture_output=True, timeout=60)
    return subprocess.CompletedProcess(
        process.args, process.returncode, process.stdout.decode(), process.stderr.decode()
    )


@contextlib.contextmanager
def running_service(
    database_url: str, *, workers: int = 1, module: str = "api", **environment: str
) -> Iterator[ServiceProcess]:
    """A service that is gone when the context ends; `environment` are its LASTBIT_… settings."""
    with tempfile.TemporaryDirectory(prefix="lastbit-service-", dir=memory(), ignore_cleanup_errors=True) as folder:
        # It is killed in the end, so what several workers share stays behind.
        environment = {"TMPDIR": folder, **environment}
        service = ServiceProcess(database_url, workers=workers, module=module, environment=environment).start()
        try:
            yield service
        finally:
            service.remove()
