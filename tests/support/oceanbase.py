"""A private seekdb for tests: OceanBase's engine as one program, on a free port and in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pymysql

from tests.support.servers import ROOT, MariaDB

PROGRAM: Final = "LASTBIT_TEST_SEEKDB"
"""A variable with the path of the program, if it isn't the one that `make` installs."""
SETTINGS: Final = (
    # The defaults take half of the machine's memory, and gigabytes of disk. With much less the server doesn't start.
    *("memory_limit=2G", "log_disk_size=2G", "datafile_size=128M", "datafile_next=64M"),
    "syslog_level=ERROR",
)
START: Final = 90
"""Seconds."""
LEFT_OUT: Final = {
    "test_a_full_disk_under_a_server": "it reserves gigabytes for its log at its start, more than a small disk has",
    "test_a_full_disk_shows_while_reads_are_answered": "as above",
    "test_a_frozen_process_loses_its_locks_and_goes_on": "seekdb 1.4 ends idle transactions only sometimes",
    "test_the_clock_of_the_database_may_jump": "it doesn't start with libfaketime",
    "test_settings_of_others_change_nothing": "the settings are those of other servers; test_oceanbase has its own",
}
"""Tests that can't run on seekdb, and why; decision 46 has them."""


def program() -> Path | None:
    """The server's program; None if it isn't installed."""
    if PROGRAM in os.environ:
        return Path(os.environ[PROGRAM])
    programs = sorted(ROOT.glob(".venv-seekdb/lib/python3.*/site-packages/pylibseekdb/seekdb"))
    return programs[-1] if programs else None


class OceanBase(MariaDB):
    """A server with default settings, except for its location and size, and `options` for its command line. It listens
    on all addresses, and accepts connections from this machine alone."""

    def __init__(
        self,
        *,
        in_memory: bool = True,
        folder: Path | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(in_memory=in_memory, folder=folder, options=options, environment=environment)
        path = program()
        self.program = None if path is None else str(path)

    @property
    def available(self) -> bool:
        return self.program is not None

    def install(self) -> None:
        """The server does it itself, when it starts for the first time."""

    def command(self) -> list[str]:
        assert self.program is not None
        return [
            *(self.program, "--nodaemon", "-P", str(self.port), "--base-dir", str(self.folder)),
            *(word for setting in SETTINGS for word in ("--parameter", setting)),
            *("--variable", "ob_tcp_invited_nodes=127.0.0.1"),
            *self.options,
        ]

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command(),
            cwd=self.folder,
            env={**os.environ, **self.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + START
        while True:
            try:
                self.connect().close()
                return
            except pymysql.MySQLError as error:
                # It prints nothing when it is ready.
                assert self.process.poll() is None, f"{self.process.args} ended"
                if time.monotonic() > end:
                    raise AssertionError(f"{self.process.args} did not accept connections") from error
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.05)

    def unprivileged(self, url: str) -> str:
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("DROP USER IF EXISTS service")
            cursor.execute("CREATE USER service")
            cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {url.rpartition('/')[2]}.* TO service")
        return url.replace("root@", "service@")

    def end_sessions(self, url: str) -> int:
        count = 0
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", [url.rpartition("/")[2]])
            for (value,) in cursor.fetchall():
                with contextlib.suppress(pymysql.MySQLError):  # the connection has already ended
                    cursor.execute(f"KILL {value}")
                    count += 1
        return count

    def drop_database(self, url: str) -> None:
        """Nothing: to drop one table after the other takes seconds, and the folder is removed."""


@contextlib.contextmanager
def running_oceanbase(
    *,
    in_memory: bool = True,
    folder: Path | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[OceanBase]:
    """A server that is gone when the context ends."""
    server = OceanBase(in_memory=in_memory, folder=folder, options=options, environment=environment)
    try:
        server.start()
        yield server
    finally:
        server.remove()
