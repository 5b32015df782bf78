"""Real servers for tests: a private MariaDB, and the service as a real process. Free ports, temporary folders."""

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


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = range(11_000 + _WORKER % 4, 32_768, 4)
"""Below the range from which the system picks ports for outgoing connections, so that none of those occupies a server's
port while the server is down; and above the last port that a browser refuses. Each process of pytest-xdist has its own,
so that none takes the port of another one's server that doesn't listen yet, or is down."""
_lot = random.SystemRandom()  # hypothesis resets the default generator before each example
_given: set[int] = set()


def free_port() -> int:
    """A port on which nothing listens, and that this process was not given before, as long as there are such: it may
    not be in use yet."""
    while True:
        if len(_given) == len(PORTS):
            _given.clear()
        port = _lot.choice(PORTS)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def memory() -> str | None:
    """The folder for temporary files: in memory, if possible. Most tests don't depend on durability, and fsync is
    slow."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextlib.contextmanager
def sqlite_file() -> Iterator[str]:
    """The URL of an empty SQLite file that is removed when the context ends."""
    with tempfile.TemporaryDirectory(prefix="lastbit-sqlite-", dir=memory()) as folder:
        yield f"sqlite:///{folder}/lastbit.db"


def wait_until_it_prints(
    process: subprocess.Popen[str], word: str, seconds: float = 60, lines: list[str] | None = None
) -> str:
    """Read standard error, or standard output if only that is a pipe, until a line contains `word`; the rest is
    drained, so that the process never blocks on it. `lines`: a list for all lines, also the later ones."""
    stream = process.stderr or process.stdout
    assert stream is not None
    lines = [] if lines is None else lines
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
    assert word in text, f"{process.args} did not print {word!r} but:\n{text}"
    return text


class MariaDB:
    """A server with default settings, except for its location, `options` for its command line, and its
    `environment`."""

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
            # Not the machine's: at startup a server deletes files there that look like its own.
            f"--tmpdir={self.folder}",
            *("--bind-address=127.0.0.1", "--skip-name-resolve", "--max-connections=400"),
            *self.options,
        ]

    def start(self) -> None:
        environment = {**os.environ, **self.environment}
        self.process = subprocess.Popen(self.command(), env=environment, stderr=subprocess.PIPE, text=True)
        wait_until_it_prints(self.process, "ready for connections")

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Within the context, the server's process is stopped, with its connections open."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def remove(self) -> None:
        self.stop(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def connect(self, database: str | None = None) -> pymysql.Connection:
        # If TLS is possible, PyMySQL reads all certificates of the machine for each connection.
        return pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", database=database, autocommit=True, ssl_disabled=True
        )

    def new_database(self, name: str | None = None) -> str:
        """The URL of an empty database."""
        self._databases += 1
        name = name or f"lastbit_{os.getpid()}_{self._databases}"
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
        return f"mysql://root@127.0.0.1:{self.port}/{name}"

    def unprivileged(self, url: str) -> str:
        """The URL for a user of the database who can't write while the server is read-only."""
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE OR REPLACE USER service@'127.0.0.1'")  # an administrator could still write
            cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {url.rpartition('/')[2]}.* TO service@'127.0.0.1'")
        return url.replace("root@", "service@")

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SET GLOBAL read_only = 1")
            try:
                yield
            finally:
                cursor.execute("SET GLOBAL read_only = 0")

    def end_sessions(self, url: str) -> int:
        """Kill all connections to a database, as an administrator; their number."""
        killed = 0
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", [url.rpartition("/")[2]])
            for (value,) in cursor.fetchall():
                with contextlib.suppress(pymysql.MySQLError):  # the connection has already ended
                    cursor.execute(f"KILL HARD CONNECTION {value}")
                    killed += 1
        return killed

    def drop_database(self, url: str) -> None:
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {url.rpartition('/')[2]}")


class ServiceProcess:
    """`python -m api` (or another module) on a free port."""

    nursery: ClassVar[Nursery | None] = None
    """If it is set, services with one process are forked from it."""

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
        # The mutant must be applied in the service too.
        self.module = (
            "tests.guarantees.programs.mutated_api" if module == "api" and "LASTBIT_MUTANT" in os.environ else module
        )
        self.environment = dict(environment or {})
        self.log = log
        """The file for its standard error; without one, it goes to ours."""
        self.root = root
        """The root folder of its code."""
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
        # One log line per request is useful only if the log is kept.
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
        """Poll /readyz until it succeeds; each try waits for the connection, so nothing spins."""
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

    def worker_ids(self) -> list[int]:
        """The process ids of its workers, if it has several."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]

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
        """End the service by SIGKILL, which is fastest; under `make coverage` by SIGTERM, so that it writes its
        figures."""
        if "COVERAGE_PROCESS_CONFIG" in os.environ:
            with contextlib.suppress(TimeoutError, subprocess.TimeoutExpired):
                self.stop(signal.SIGTERM)
        self.stop(signal.SIGKILL)


def _nursery(environment: Mapping[str, str]) -> Nursery | None:
    """The nursery to use; None if the environment has variables that the linker reads at program start, such as a fake
    clock's library: for a fork they come too late."""
    return None if "LD_PRELOAD" in environment else ServiceProcess.nursery


def run_module(
    module: str, *arguments: str, stdin: str | bytes = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ARGUMENTS` to its end in the checkout's root, by default with this process's
    environment."""
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
        # It is killed in the end, so files that several workers share are left behind.
        environment = {"TMPDIR": folder, **environment}
        service = ServiceProcess(database_url, workers=workers, module=module, environment=environment).start()
        try:
            yield service
        finally:
            service.remove()
