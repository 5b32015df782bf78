"""Two releases of the service on one schema: the upgrade under load, and the way back. See decision 0014.

The earlier release is real: a commit of this repository. A copy of this release with one more migration takes
the part of the next release.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from api import __main__ as api
from core import errors
from core.commits.combiner import Inline
from core.service import Service
from core.storage import schema
from core.storage.database import Database
from jobs import dispatcher, janitor
from tests.guarantees.drivers.releases import THIS, Everything, Release, assert_nothing_lost, earlier, later
from tests.support.servers import MariaDB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ADDITIVE = (
    "ALTER TABLE batches ADD COLUMN colour VARCHAR(16) NOT NULL DEFAULT 'grey'",
    "ALTER TABLE item_groups ADD COLUMN touched BIGINT",
    "CREATE INDEX batches_colour ON batches (colour, id)",
    "CREATE TABLE colours (id BIGINT PRIMARY KEY)",
)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return earlier(tmp_path_factory.mktemp("earlier"))


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return later(tmp_path_factory.mktemp("later"), *ADDITIVE)


@pytest.mark.mariadb
def test_an_upgrade_from_an_earlier_release_under_load_and_the_way_back(before: Release, mariadb_url: str) -> None:
    """The old processes serve while the schema moves, next to the new ones, and again after those have been stopped."""
    before.migrates(mariadb_url)
    with before.running(mariadb_url) as old, before.running(mariadb_url) as oldest, Everything(old, oldest) as load:
        load.reaches(30)
        assert janitor.main(["--database-url", mariadb_url]) == 1  # no jobs before the migration
        THIS.migrates(mariadb_url)
        load.reaches(30)
        assert set(load.statuses) == {200, 201}, "the migration caused refusals"
        with THIS.running(mariadb_url) as new:
            load.moves_to(old, oldest, new)
            load.moves_to(old, new, count=0)
            oldest.stop(signal.SIGTERM)
            load.moves_to(old, new)
            before.works_on(mariadb_url)
            load.moves_to(old, count=0)
            new.stop(signal.SIGTERM)
            load.reaches(30)
    assert_nothing_lost(load, mariadb_url)


def test_this_release_serves_beside_a_later_one_and_is_the_way_back_from_it(after: Release, database_url: str) -> None:
    """A later schema adds to the tables with the most writes. SQLite is migrated by the service that starts, while the
    other one runs."""
    with Database(database_url) as database:
        schema.migrate(database)
        sqlite = database.is_embedded
    with THIS.running(database_url) as old, Everything(old) as load:
        load.reaches(30)
        if not sqlite:
            after.migrates(database_url)
            load.reaches(30)
            assert set(load.statuses) == {200, 201}, "the migration caused refusals"
        with after.running(database_url) as new:
            load.moves_to(old, new)
            load.moves_to(new, count=0)
            old.stop(signal.SIGTERM)
            load.reaches(30)
            old.start()
            THIS.works_on(database_url)
            load.moves_to(old, new)
            load.moves_to(old, count=0)
            new.stop(signal.SIGTERM)
            load.reaches(30)
    assert_nothing_lost(load, database_url)
    with Database(database_url) as database, database.engine.connect() as connection:
        assert schema.current(connection) == "9999"


@pytest.mark.mariadb
def test_a_migration_that_waits_for_a_table_does_not_block_other_requests(
    after: Release, mariadb: MariaDB, mariadb_url: str
) -> None:
    """A dump holds a table for hours, and a migration of it waits; later requests must not wait for the migration."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    name = mariadb_url.rpartition("/")[2]
    waiting = f"SELECT 1 FROM information_schema.processlist WHERE db = '{name}' AND state LIKE '%metadata lock%'"
    with (
        THIS.running(mariadb_url) as running,
        Everything(running) as load,
        contextlib.closing(mariadb.connect(name)) as dump,
        contextlib.closing(mariadb.connect()) as look,
    ):
        load.reaches(20)
        dump.begin()
        dump.cursor().execute("SELECT COUNT(*) FROM batches")
        with after.migration(mariadb_url) as migration:
            load.wait_until(lambda: bool(look.cursor().execute(waiting)))
            load.reaches(100)
            assert migration.poll() is None
            dump.rollback()
            assert migration.wait(60) == 0
        load.reaches(20)
    assert_nothing_lost(load, mariadb_url)


def test_a_release_that_the_schema_no_longer_supports_reports_it(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A running service stops being ready, a new one refuses to start, and both report the reason and the remedy."""
    breaking = later(
        tmp_path, "UPDATE schema_support SET oldest = '9999'", "ALTER TABLE extends RENAME COLUMN start TO begin_at"
    )
    message = "which requires a release that knows revision 9999"
    with Database(database_url) as database:
        schema.migrate(database)
        service = Service(database, combiner=Inline)
        service.check_ready()
        breaking.migrates(database_url)
        with pytest.raises(errors.Misconfigured, match=message):
            service.check_ready()
    monkeypatch.setenv("LASTBIT_DATABASE_URL", database_url)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep this process's own handlers
    for main, arguments in (
        (api.main, ["serve"]),
        (api.main, ["migrate"]),
        (api.main, ["check"]),
        (janitor.main, []),
        (dispatcher.main, ["--once"]),
    ):
        assert main(arguments) == 1
        output = capsys.readouterr()
        assert message in output.out + output.err
