"""A private PostgreSQL server for tests: a free port, a temporary folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psycopg

from tests.support.servers import free_port, memory, wait_until_it_prints

BIN: Final = "LASTBIT_TEST_POSTGRESQL_BIN"
"""A variable with the folder of the server's programs, to test another release than Debian's."""
PASSWORD_USER: Final = "lastbit_password"
"""The server asks only this user for a password."""


def programs() -> Path | None:
    """The folder of the server's programs; None if it isn't installed."""
    if BIN in os.environ:
        return Path(os.environ[BIN])
    # Debian installs each release in a folder of its own, which is not on the path.
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    installed = [folder for folder in folders if (folder / "initdb").exists()]
    if installed:
        return installed[-1]
    found = shutil.which("postgres")
    return Path(found).resolve().parent if found and shutil.which("initdb") else None


def account() -> str:
    """The account that runs the server, which refuses to run as root."""
    if os.geteuid() != 0:
        return getpass.getuser()
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class PostgreSQL:
    """A server with default settings, except for its location, and `options` for its command line, such as
    `fsync=off`, and its `environment`. Its default collation sorts by language, unlike Lastbit's keys."""

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
        self.bin = programs()
        self.folder = Path(
            tempfile.mkdtemp(prefix="lastbit-postgresql-", dir=folder or (memory() if in_memory else None))
        )
        self.data = self.folder / "data"
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None
        self.user = "postgres"
        self.account = account()
        self._databases = 0
        if os.geteuid() == 0:
            shutil.chown(self.folder, self.account)

    @property
    def available(self) -> bool:
        return self.bin is not None

    @property
    def has_icu(self) -> bool:
        """Whether its default collation sorts by language. Debian's does; without ICU it sorts by bytes."""
        return "--with-icu" in self.run("pg_config", "--configure")

    def _as_account(self) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        entry = pwd.getpwnam(self.account)
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def run(self, program: str, *arguments: str) -> str:
        """Run one of the server's programs to its end, as the server's account; its standard output."""
        assert self.bin is not None
        process = subprocess.run(
            [str(self.bin / program), *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**os.environ, "TMPDIR": str(self.folder), "HOME": str(self.folder)},
            timeout=120,
            **self._as_account(),
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    def install(self) -> None:
        by_language = ("--locale-provider=icu", "--icu-locale=en") if self.has_icu else ()
        self.run(
            "initdb",
            *("--pgdata", str(self.data), "--username", self.user, "--auth=trust", "--no-sync"),
            *("--encoding=UTF8", "--locale=C.UTF-8", *by_language),
        )
        rules = self.data / "pg_hba.conf"
        rules.write_text(f"host all {PASSWORD_USER} 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")

    def command(self) -> list[str]:
        assert self.bin is not None
        settings = (
            *(f"port={self.port}", "listen_addresses=127.0.0.1", "unix_socket_directories="),
            # The default allows a gigabyte of WAL, which is too much for a folder in memory.
            *("max_connections=400", "max_wal_size=256MB"),
            # In the server's folder. Outside of it, a server that is killed would leave its shared memory behind.
            "dynamic_shared_memory_type=mmap",
            *self.options,
        )
        return [
            *(str(self.bin / "postgres"), "-D", str(self.data)),
            *(word for setting in settings for word in ("-c", setting)),
        ]

    def start(self) -> None:
        environment = {**os.environ, **self.environment}
        self.process = subprocess.Popen(
            self.command(), cwd=self.folder, env=environment, stderr=subprocess.PIPE, text=True, **self._as_account()
        )
        wait_until_it_prints(self.process, "ready to accept")

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop the server: SIGINT ends its sessions first, SIGTERM waits for them, SIGQUIT aborts. SIGKILL kills each
        of its processes, as a machine that fails does."""
        if self.process is None:
            return
        handles = _children(self.process.pid) if number == signal.SIGKILL else []
        self.process.send_signal(number)
        _signal(handles, number)
        self.process.wait(60)
        for handle in handles:
            # Until they have gone, another server can't use the folder.
            select.select([handle], [], [], 60)
            os.close(handle)
        self.process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Within the context, all of the server's processes are stopped, with its connections open."""
        assert self.process is not None
        # First the one that starts the others, so that no new one goes on.
        self.process.send_signal(signal.SIGSTOP)
        handles = _children(self.process.pid)
        try:
            _signal(handles, signal.SIGSTOP)
            yield
        finally:
            _signal(handles, signal.SIGCONT)
            self.process.send_signal(signal.SIGCONT)
            for handle in handles:
                os.close(handle)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def connect(self, database: str | None = None, **options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=self.user,
            dbname=database or "postgres",
            autocommit=True,
            **options,
        )

    def new_database(self, name: str | None = None) -> str:
        """The URL of an empty database."""
        self._databases += 1
        name = name or f"lastbit_{os.getpid()}_{self._databases}"
        with contextlib.closing(self.connect()) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql://{self.user}@127.0.0.1:{self.port}/{name}"

    def unprivileged(self, url: str) -> str:
        """The URL for a user of the database who can't write while the server is read-only: any user."""
        return url

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        with contextlib.closing(self.connect()) as connection:
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            connection.execute("SELECT pg_reload_conf()")
            try:
                yield
            finally:
                connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
                connection.execute("SELECT pg_reload_conf()")

    def end_sessions(self, url: str) -> int:
        """End all connections to a database, as an administrator; their number."""
        with contextlib.closing(self.connect()) as connection:
            found = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [url.rpartition("/")[2]]
            )
            return sum(ended for (ended,) in found)

    def drop_database(self, url: str) -> None:
        with contextlib.closing(self.connect()) as connection:
            # Services that were killed may have left sessions behind for a moment.
            connection.execute(f"DROP DATABASE {url.rpartition('/')[2]} WITH (FORCE)")


def _children(pid: int) -> list[int]:
    """Handles of a process's children."""
    handles = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(int(child)))
    return handles


def _signal(handles: Sequence[int], number: int) -> None:
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)


def dump_database(url: str) -> str:
    """A database's tables and rows, as statements."""
    folder = programs()
    assert folder is not None
    command = [folder / "pg_dump", "--inserts", "--no-owner", "--dbname", url]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    # Lines with a backslash are for psql.
    return "\n".join(line for line in text.splitlines() if line and not line.startswith(("--", "\\")))


@contextlib.contextmanager
def running_postgresql(
    *,
    in_memory: bool = True,
    folder: Path | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[PostgreSQL]:
    """A server that is gone when the context ends."""
    server = PostgreSQL(in_memory=in_memory, folder=folder, options=options, environment=environment)
    try:
        server.install()
        server.start()
        yield server
    finally:
        server.remove()
