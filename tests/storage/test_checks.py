"""`python -m api check` names unsafe settings with advice; a database that is configured well passes."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.storage import checks, schema
from core.storage.checks import Finding, Verdict, sqlite
from core.storage.checks.sqlite import file_system
from core.storage.database import Database
from tests.conftest import running_mariadb
from tests.support.servers import MariaDB, run_module

FLUSH = "SET GLOBAL innodb_flush_log_at_trx_commit"
PACKET = "SET GLOBAL max_allowed_packet"


def troubles(database: Database, *, workers: int = 1) -> dict[str, Finding]:
    """The findings that aren't fine, by subject. Each has advice."""
    findings = {
        check.about: check for check in checks.check(database, workers=workers) if check.verdict is not Verdict.FINE
    }
    assert all(finding.do for finding in findings.values())
    return findings


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDB]:
    """A private server with the configuration that the documentation recommends."""
    with running_mariadb(options=["--log-bin=binlog", "--sync-binlog=1"]) as server:
        yield server


@contextlib.contextmanager
def executed(mariadb: MariaDB, statement: str, undo: str) -> Iterator[None]:
    with contextlib.closing(mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        try:
            yield
        finally:
            cursor.execute(undo)


def test_a_server_with_a_flushed_binary_log_is_fine(mariadb_database: Database) -> None:
    """Each rule has run, and none has advice."""
    findings = checks.check(mariadb_database, workers=2)
    assert {finding.about for finding in findings if finding.verdict is not Verdict.FINE} == set()
    assert {"version", "schema", "writes", "replica", "durability", "isolation", "packet", "clock"} <= {
        finding.about for finding in findings
    }


@pytest.mark.parametrize(
    ("statement", "undo", "subject", "verdict"),
    [
        (f"{FLUSH} = 2", f"{FLUSH} = 1", "durability", Verdict.UNSAFE),
        ("SET GLOBAL read_only = 1", "SET GLOBAL read_only = 0", "read_only", Verdict.BROKEN),
        (f"{PACKET} = 1048576", f"{PACKET} = 16777216", "packet", Verdict.UNSAFE),
        ("SET GLOBAL max_connections = 99", "SET GLOBAL max_connections = 400", "connections", Verdict.UNSAFE),
        ("CHANGE MASTER TO MASTER_HOST = '127.0.0.1'", "RESET SLAVE ALL", "replica", Verdict.UNSAFE),
    ],
)
def test_an_unsafe_setting_is_named(
    mariadb: MariaDB, mariadb_database: Database, statement: str, undo: str, subject: str, verdict: Verdict
) -> None:
    """That setting and no other; and none once it is restored."""
    with executed(mariadb, statement, undo):
        assert {name: finding.verdict for name, finding in troubles(mariadb_database, workers=2).items()} == {
            subject: verdict
        }
    assert troubles(mariadb_database, workers=2) == {}


def test_a_server_at_its_defaults_lacks_a_binary_log() -> None:
    """InnoDB shows a commit before it is on disk then; nothing else is wrong."""
    with running_mariadb() as server, Database(server.new_database()) as database:
        schema.migrate(database)
        findings = troubles(database)
    assert {name: finding.verdict for name, finding in findings.items()} == {"binary_log": Verdict.UNSAFE}


def test_unsafe_start_options_are_named() -> None:
    """A binary log that isn't flushed and can't be written; pages that can't be repaired; no flushes at all."""
    options = ["--log-bin", "--binlog-format=STATEMENT", "--skip-innodb-doublewrite", "--innodb-flush-method=nosync"]
    with running_mariadb(options=options) as server, Database(server.new_database()) as database:
        findings = troubles(database)
    assert findings.keys() == {"schema", "binary_log", "binlog_format", "doublewrite", "flush_method"}
    assert "python -m api migrate" in str(findings["schema"].do)


@contextlib.contextmanager
def as_user(mariadb: MariaDB, database: Database, rights: str, limit: str = "") -> Iterator[Database]:
    """The same database, with a new account."""
    user = "somebody@'127.0.0.1'"
    with (
        executed(mariadb, f"CREATE USER {user} {limit}", f"DROP USER {user}"),
        executed(mariadb, f"GRANT {rights} ON {database.url.database}.* TO {user}", "SELECT 1"),
        Database(str(database.url.set(username="somebody"))) as limited,
    ):
        yield limited


@pytest.fixture
def account(mariadb: MariaDB, mariadb_database: Database) -> Iterator[Database]:
    """The same database, with an account that may only read."""
    with as_user(mariadb, mariadb_database, "SELECT") as database:
        yield database


def test_an_account_that_may_not_write_is_named(account: Database) -> None:
    """With the refused statement and table."""
    findings = troubles(account)
    assert findings.keys() == {"writes"}
    assert findings["writes"].verdict is Verdict.BROKEN
    assert "INSERT" in findings["writes"].says


def test_a_limit_of_the_account_is_named(mariadb: MariaDB, mariadb_database: Database) -> None:
    """The service gets no more connections than its account, whatever the server allows."""
    with as_user(mariadb, mariadb_database, "ALL", limit="WITH MAX_USER_CONNECTIONS 3") as database:
        findings = troubles(database)
    assert findings.keys() == {"connections"}
    assert "max_user_connections of the account is 3" in findings["connections"].says


def test_a_clock_that_is_off_is_named(mariadb: MariaDB, account: Database) -> None:
    """With the difference and its direction."""
    now = int(time.time())
    for offset, words in ((3600, "s ahead of"), (-3600, "s behind")):
        with executed(
            mariadb, f"SET GLOBAL init_connect = 'SET timestamp = {now + offset}'", "SET GLOBAL init_connect = ''"
        ):
            account.dispose()
            clock = troubles(account)["clock"]
        assert clock.verdict is Verdict.UNSAFE
        assert words in clock.says


def test_a_table_without_transactions_is_named(mariadb: MariaDB, mariadb_database: Database) -> None:
    """MyISAM would keep data that was rolled back."""
    with (
        contextlib.closing(mariadb.connect(mariadb_database.url.database)) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("ALTER TABLE extends ENGINE = MyISAM")
    findings = troubles(mariadb_database)
    assert findings.keys() == {"engine"}
    assert "extends uses MyISAM" in findings["engine"].says


def test_a_file_on_a_disk_is_fine_and_one_in_memory_is_not(tmp_path: Path) -> None:
    """SQLite: by the type of its file system. Memory isn't durable."""
    for folder, in_memory in ((tmp_path, False), (Path("/dev/shm"), True)):
        kind = file_system(folder.resolve(), Path("/proc/self/mountinfo").read_text())
        if (kind in sqlite.MEMORY) is not in_memory:
            continue  # this machine has another file system there
        file = folder / f"lastbit-check-{os.getpid()}.db"
        try:
            with Database(f"sqlite:///{file}") as database:
                schema.migrate(database)
                assert troubles(database).keys() == ({"file_system"} if in_memory else set())
        finally:
            for file_left in folder.glob(f"{file.name}*"):
                file_left.unlink()


MOUNTS = r"""
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:27 / /srv rw - xfs /dev/vdb rw
31 30 0:28 / /srv/share\040one rw shared:1 master:2 - nfs4 server:/x rw
32 30 0:29 / /srv/cover rw - ext4 /dev/vdc rw
33 32 0:30 / /srv/cover rw - cifs //server/x rw
34 30 0:31 / /srv/shell rw - fuse.sshfs server: rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/lastbit.db", "ext4"),
        ("/srv/lastbit.db", "xfs"),
        ("/srv/share one/a/lastbit.db", "nfs4"),
        ("/srv/share", "xfs"),
        ("/srv/cover/lastbit.db", "cifs"),
        ("/srv/shell/lastbit.db", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_path_is_the_innermost_mount(path: str, kind: str) -> None:
    """By whole names, with blanks; the later one of two at the same place."""
    assert file_system(Path(path), MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_a_file_on_a_network_is_unsafe(kind: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's locks and flushes may not work there."""
    monkeypatch.setattr(sqlite, "file_system", lambda *_: kind)
    with Database(sqlite_url) as database:
        schema.migrate(database)
        findings = troubles(database)
    assert findings.keys() == {"file_system"}
    assert kind in findings["file_system"].says


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("api", "check", *arguments)


def test_the_command_prints_text_or_json(mariadb_url: str) -> None:
    """Exit status 1 until everything is fine; a check creates and changes nothing."""
    refusal = run("--database-url", mariadb_url)
    assert refusal.returncode == 1
    assert "broken  schema" in refusal.stdout
    with Database(mariadb_url) as database:
        schema.migrate(database)
    success = run("--database-url", mariadb_url, "--json")
    assert success.returncode == 0
    output: dict[str, Any] = json.loads(success.stdout)
    assert output["ok"] is True
    assert {
        "about": "durability",
        "verdict": "fine",
        "says": "the server flushes its log at each commit",
        "do": None,
    } in output["findings"]


def test_an_unreachable_database_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that doesn't answer; a missing file, which is named with its folder and isn't created."""
    unreachable = run("--database-url", "mysql://lastbit:secret@127.0.0.1:1/lastbit")
    assert (unreachable.returncode, unreachable.stderr) == (1, "")
    assert "broken  database" in unreachable.stdout
    assert "secret" not in unreachable.stdout
    monkeypatch.chdir(tmp_path)
    with Database("sqlite:///none.db") as database:
        finding = troubles(database)["database"]
    assert (finding.verdict, finding.says) == (Verdict.BROKEN, f"there is no file {tmp_path}/none.db")
    assert not (tmp_path / "none.db").exists()


def test_a_locked_file_is_broken(sqlite_url: str) -> None:
    """As a writer would find it."""
    with Database(sqlite_url) as database:
        schema.migrate(database)
        path = str(database.url.database)
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute("BEGIN IMMEDIATE")
            assert troubles(database)["writes"].verdict is Verdict.BROKEN
