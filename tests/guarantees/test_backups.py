"""A backup taken under load, by the commands of docs/backups.md, restores to a consistent service."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from core.batches.batch import Opening
from core.commits.combiner import Inline
from core.service import Service
from core.storage import checks, schema
from core.storage.checks import Verdict
from core.storage.database import Database
from lastbit import Client, Source
from lastbit.streams import Assignment, ConsumerGroup
from tests.guarantees.drivers.load import Load, check, open_shared
from tests.support.postgresql import PostgreSQL
from tests.support.servers import ROOT, MariaDB, run_module, running_service
from tests.test_docs import blocks

NEXT_ID = 1_000_000
"""The first id in the restored database, as docs/backups.md sets it."""

pytestmark = pytest.mark.timeout(600)


def needs(program: str) -> pytest.MarkDecorator:
    """Skip the test if the program is missing; in CI, run it and let it fail."""
    missing = shutil.which(program) is None and "CI" not in os.environ
    return pytest.mark.skipif(missing, reason=f"{program} is not installed")


def documented(heading: str) -> list[str]:
    """The commands below a heading of the page, one string a block: the backup, then the restore."""
    page = (ROOT / "docs/backups.md").read_text()
    section = re.search(rf"^## {heading}\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL)
    assert section, heading
    return re.findall(r"^```sh\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL)


def run(
    commands: str, folder: Path, places: Mapping[str, str], variables: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Run the commands in the folder; `places` maps the page's paths to this machine's."""
    for page_path, local_path in places.items():
        commands = commands.replace(page_path, local_path)
    environment = {**os.environ, "HOME": str(folder), **variables}
    process = subprocess.run(["sh", "-euc", commands], cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, f"{commands}\n{process.stderr}"


@dataclass
class Before:
    """The acks that were answered before the backup started."""

    shared: int
    acked: int
    """The number of acks in the shared batch."""
    finished: list[int]


def back_up_under_load(url: str, back_up: Callable[[], None]) -> Before:
    with Database(url) as database:
        schema.migrate(database)
        shared_batch = open_shared(database)
    with running_service(url) as running:
        with Load(running.url, shared_batch) as load:
            load.reaches(100)
            before = Before(shared_batch, len(load.acked[shared_batch]), list(load.finished))
            back_up()
            load.reaches(50)  # the backup blocked no one
        with Database(url) as database:
            check(load, database)
        running.stop(signal.SIGKILL)  # SIGKILL, not the gentler stop that `make coverage` uses
    assert before.finished
    return before


def assert_restored(url: str, before: Before) -> None:
    """Everything answered before the backup is there, all batches are consistent, and no id is reused."""
    with Database(url) as database:
        findings = {finding.about: finding for finding in checks.check(database) if finding.verdict is Verdict.BROKEN}
        assert findings == {}
        service = Service(database, combiner=Inline)
        for batch in before.finished:
            assert service.batches.get(batch).succeeded
        assert service.batches.get(before.shared).acked >= before.acked
        events = service.feed.read(None, 1000).events
        assert [event.position for event in events] == list(range(1, len(events) + 1))
    with running_service(url) as running:
        environment = {**os.environ, "LASTBIT_URL": running.url}
        process = run_module("lastbit", "verify", "--all", "--json", environment=environment)
        assert process.returncode == 0, process.stdout + process.stderr
        report: dict[str, Any] = json.loads(process.stdout)
        assert report["ok"]
        assert report["batches"] > len(before.finished)
        assert httpx.post(f"{running.url}/v1/batches", json={}).json()["id"] >= NEXT_ID


@needs("sqlite3")
def test_a_backup_of_sqlite_restores(tmp_path: Path) -> None:
    """VACUUM INTO reads one snapshot, and the log that a killed service leaves is not applied to the restored file."""
    back_up, restore = documented("SQLite")
    url = f"sqlite:///{tmp_path}/lastbit.db"
    before = back_up_under_load(url, lambda: run(back_up, tmp_path, {}))
    assert (tmp_path / "lastbit.db-wal").exists()
    run(restore, tmp_path, {})
    assert_restored(url, before)


@needs("sqlite3")
def test_a_backup_of_sqlite_without_a_batch_restores(tmp_path: Path) -> None:
    """The batches opened since it was made are lost, and late acks of them must not count for new ones."""
    back_up, restore = documented("SQLite")
    url = f"sqlite:///{tmp_path}/lastbit.db"
    with Database(url) as database:
        schema.migrate(database)
    run(back_up, tmp_path, {})
    run(restore, tmp_path, {})
    with Database(url) as database:
        assert Service(database, combiner=Inline).batches.open(Opening()).batch.id == NEXT_ID


def count(url: str, messages: int) -> int:
    """Run a worker that counts the messages from its partition's position on in a tally; return the total."""
    with Client(url) as client:
        client.groups.create("counting", partitions=1)
        group = ConsumerGroup(client, "counting", "w")
        tally = client.tally("messages")

        def source(assignment: Assignment) -> Iterator[tuple[int, int] | None]:
            yield from ((offset, offset) for offset in range(assignment.floor + 1, messages))
            while True:
                yield None

        def handle(offset: int) -> None:
            tally.apply([("all", 1, Source("messages", 0, offset))])
            if offset == messages - 1:
                group.stop()

        group.consume(source, handle, key=lambda _: 0, every=0.1)
        return tally.value("all")


@needs("sqlite3")
def test_after_a_restore_a_consumer_group_counts_the_lost_messages_again(tmp_path: Path) -> None:
    """The positions are restored with the totals."""
    back_up, restore = documented("SQLite")
    url = f"sqlite:///{tmp_path}/lastbit.db"
    with running_service(url) as running:
        assert count(running.url, 20) == 20
        run(back_up, tmp_path, {})
        assert count(running.url, 50) == 50
    run(restore, tmp_path, {})
    with running_service(url) as running, Client(running.url) as client:
        assert client.tally("messages").value("all") == 20
        assert count(running.url, 60) == 60


@contextlib.contextmanager
def another_server() -> Iterator[MariaDB]:
    server = MariaDB()
    try:
        yield server
    finally:
        server.remove()


def as_client(folder: Path, server: MariaDB) -> None:
    """Write the server's address and account as in an operator's ~/.my.cnf."""
    (folder / ".my.cnf").write_text(
        f"[client]\nhost=127.0.0.1\nprotocol=tcp\nport={server.port}\nuser=root\n[mariadbd]\ndatadir={server.folder}/data\n"
    )


@pytest.mark.mariadb
def test_a_dump_of_mariadb_restores(mariadb: MariaDB, mariadb_url: str, tmp_path: Path) -> None:
    """The dump is one transaction, and another server can load it."""
    back_up, restore = documented("MariaDB and MySQL: a dump")
    name = mariadb_url.rpartition("/")[2]
    as_client(tmp_path, mariadb)
    # The page calls the database and its files lastbit.
    back_up = back_up.replace(" lastbit ", f" {name} ")
    before = back_up_under_load(mariadb_url, lambda: run(back_up, tmp_path, {}))
    with another_server() as server:
        server.install()
        server.start()
        as_client(tmp_path, server)
        run(restore, tmp_path, {})
        assert_restored(f"mysql://root@127.0.0.1:{server.port}/lastbit", before)


@pytest.mark.mariadb
@needs("mariadb-backup")
def test_a_physical_backup_of_mariadb_restores(mariadb: MariaDB, mariadb_url: str, tmp_path: Path) -> None:
    """The files themselves, made consistent, replace those of another server."""
    back_up, restore = documented("MariaDB: its files")
    name = mariadb_url.rpartition("/")[2]
    as_client(tmp_path, mariadb)
    places = {"/backups": str(tmp_path)}
    before = back_up_under_load(mariadb_url, lambda: run(back_up, tmp_path, places))
    with another_server() as server:
        as_client(tmp_path, server)
        copy_back, _, after = restore.partition("systemctl start mariadb\n")
        places |= {
            "/var/lib/mysql": f"{server.folder}/data",
            "systemctl stop mariadb": "",
            "mysql:mysql": str(os.getuid()),
        }
        run(copy_back, tmp_path, places)
        server.start()
        run(after.replace(" lastbit ", f" {name} "), tmp_path, places)
        assert_restored(f"mysql://root@127.0.0.1:{server.port}/{name}", before)


@contextlib.contextmanager
def another_postgresql() -> Iterator[PostgreSQL]:
    server = PostgreSQL()
    try:
        yield server
    finally:
        server.remove()


def client_of(server: PostgreSQL) -> dict[str, str]:
    """The server's address and account as in an operator's environment."""
    variables = {"PGHOST": "127.0.0.1", "PGPORT": str(server.port), "PGUSER": server.user, "PGDATABASE": "postgres"}
    return {**variables, "PATH": f"{server.bin}:{os.environ['PATH']}"}


def test_a_dump_of_postgresql_restores(postgresql: PostgreSQL, postgresql_url: str, tmp_path: Path) -> None:
    """The dump is one snapshot, and another server can load it."""
    back_up, restore = documented("PostgreSQL: a dump")
    # The page calls the database and its file lastbit.
    back_up = back_up.replace(" lastbit\n", f" {postgresql_url.rpartition('/')[2]}\n")
    before = back_up_under_load(postgresql_url, lambda: run(back_up, tmp_path, {}, client_of(postgresql)))
    with another_postgresql() as server:
        server.install()
        server.start()
        run(restore, tmp_path, {}, client_of(server))
        assert_restored(f"postgresql://{server.user}@127.0.0.1:{server.port}/lastbit", before)


def test_after_a_dump_is_restored_the_accounts_of_the_page_can_migrate_and_serve(tmp_path: Path) -> None:
    """The owner of the tables and the grants are those of docs/database.md."""
    back_up, restore = documented("PostgreSQL: a dump")
    creation, grants, *_ = blocks(ROOT / "docs/database.md", "sql")
    with another_postgresql() as server:
        server.install()
        server.start()
        for script, database in ((creation, "postgres"), (grants, "lastbit")):
            with contextlib.closing(server.connect(database)) as connection:
                for statement in script.strip().removesuffix(";").split(";"):
                    connection.execute(statement.encode())
        owner_url, service_url = (
            f"postgresql://{account}@127.0.0.1:{server.port}/lastbit" for account in ("lastbit_migrate", "lastbit")
        )
        assert run_module("api", "migrate", "--database-url", owner_url).returncode == 0
        run(back_up, tmp_path, {}, client_of(server))
        run("dropdb lastbit", tmp_path, {}, client_of(server))
        run(restore, tmp_path, {}, client_of(server))
        migration = run_module("api", "migrate", "--finish", "--database-url", owner_url)
        assert migration.returncode == 0, migration.stderr
        with Database(owner_url) as database, database.engine.begin() as connection:
            connection.execute(sa.text("ALTER TABLE batches ADD COLUMN of_a_later_release INT"))
        with running_service(service_url) as running:
            assert httpx.post(f"{running.url}/v1/batches", json={}).json()["id"] == NEXT_ID


def test_a_physical_backup_of_postgresql_restores(postgresql: PostgreSQL, postgresql_url: str, tmp_path: Path) -> None:
    """A copy of the files, with the WAL that was written meanwhile, replaces those of another server."""
    back_up, restore = documented("PostgreSQL: its files")
    name = postgresql_url.rpartition("/")[2]
    places = {"/backups": str(tmp_path)}
    before = back_up_under_load(postgresql_url, lambda: run(back_up, tmp_path, places, client_of(postgresql)))
    stop = "pg_ctl stop --pgdata=/var/lib/postgresql/data\n"
    start = "pg_ctl start --wait --pgdata=/var/lib/postgresql/data\n"
    with another_postgresql() as server:
        server.install()
        assert restore.startswith(stop)
        copy, _, after = restore.removeprefix(stop).partition(start)
        run(copy, tmp_path, {**places, "/var/lib/postgresql/data": str(server.data)})
        if os.getuid() == 0:
            run(f"chown -R {server.account} {server.data}", tmp_path, {})
        server.start()
        run(after.replace("=lastbit ", f"={name} "), tmp_path, {}, client_of(server))
        assert_restored(f"postgresql://{server.user}@127.0.0.1:{server.port}/{name}", before)
