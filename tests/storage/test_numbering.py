"""Lastbits side by side: which numbers are ids of batches is chosen at the first migrate, and stays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from core import errors, writes
from core.batches.batch import Opening
from core.batches.writing import BatchWrites
from core.service import Service
from core.service.batches import opening_of
from core.storage import checks, schema
from core.storage.checks import Verdict
from core.storage.database import Database
from core.storage.numbering import Numbering
from lastbit.embedded import Lastbit
from lastbit.errors import InvalidArgument, SchemaMismatch
from lastbit.ids import ItemId
from tests.conftest import KINDS
from tests.guarantees.enlisted import callers
from tests.mutants import mutant
from tests.support import templates
from tests.support.servers import run_module

THREADS = 6
OPENS = 9
"""Batches that each thread opens."""
LARGE = 40
"""Batches whose rows don't fit into one INSERT."""


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URLs of two empty databases."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/one.db", f"sqlite:///{tmp_path}/two.db"
        return
    server = request.getfixturevalue(request.param)
    urls = server.new_database(), server.new_database()
    yield urls
    for url in urls:
        server.drop_database(url)


def ids_of_concurrent_opens(database: Database) -> list[int]:
    """Opens of threads, some of which share transactions, nested ones, and many in one transaction."""
    service = Service(database)

    def open_some(thread: int) -> list[int]:
        ids = []
        for number in range(OPENS):
            opening = Opening(items=1)
            if number % 3 == 2:
                opening = Opening(items=1, parent=ItemId(ids[-1], 0, 0))
            ids.append(service.batches.open(opening, f"{thread}-{number}" if number % 2 else None).batch.id)
        return ids

    with ThreadPoolExecutor(THREADS) as pool:
        ids = [id for part in pool.map(open_some, range(THREADS)) for id in part]
    service.stop()
    return ids + ids_of_one_transaction(database)


def ids_of_one_transaction(database: Database) -> list[int]:
    opens = [opening_of(Opening(labels={"text": f"{number:016000}"})) for number in range(LARGE)]

    def work(tx: sa.Connection) -> list[int]:
        return [outcome.value.batch.id for outcome in writes.flush(tx, opens, [BatchWrites])]

    return database.write(work)


def ids_in_transactions_of_a_caller(database: Database) -> list[int]:
    service = Service(database)
    engine = callers.engine_of(database)
    ids = []
    for _ in range(3):
        with callers.transaction(engine) as tx:
            ids += [service.enlisted.open(tx, opening_of(Opening(items=1))).batch.id for _ in range(2)]
    engine.dispose()
    service.stop()
    return ids


@mutant(
    "each-insert-continues-after-the-last-transaction",
    "core.storage.dialects.sqlite:SQLite.insert_batches",
    "f\"(SELECT coalesce(max(seq), 0) FROM {self.name(tx, 'sqlite_sequence')} WHERE name = 'batches')\"",
    "self.run(tx, [\"SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'batches'\"])[0][0][0]",
    only="sqlite",
)
@mutant(
    "ids-of-the-session",
    "core.storage.dialects.mariadb:MariaDB.insert_batches",
    "numbers = self._numbers(tx)",
    "numbers = None",
    only="mariadb",
)
@mutant(
    "the-sequence-counts-by-one",
    "core.storage.dialects.postgresql:PostgreSQL.number_batches",
    'f"ALTER COLUMN id SET START {first} SET INCREMENT {distance} RESTART"',
    'f"ALTER COLUMN id SET START {first} RESTART"',
    only="postgresql",
)
@pytest.mark.mariadb
def test_two_side_by_side_never_give_the_same_id(pair: tuple[str, str]) -> None:
    all_ids: set[int] = set()
    for url, text in zip(pair, ("3/7", "0/7"), strict=True):
        numbering = Numbering.parse(text)
        with Database(url) as database:
            schema.migrate(database, ids=numbering)
            ids = ids_of_concurrent_opens(database) + ids_in_transactions_of_a_caller(database)
            schema.migrate(database)  # as an upgrade does
            ids += ids_of_one_transaction(database)
        assert {id % 7 for id in ids} == {numbering.remainder}
        assert min(ids) == numbering.first
        assert len(ids) == len(set(ids))
        assert all_ids.isdisjoint(ids)
        all_ids.update(ids)


@pytest.mark.mariadb
@pytest.mark.parametrize(
    ("increment", "offset"),
    [(3, 1), (3, 3), (1, 5)],
    ids=["a-first-node", "a-last-node", "an-offset-that-the-server-ignores"],
)
@pytest.mark.parametrize("ids", ["3/7", "0/1000"])
def test_each_node_of_a_cluster_has_some_of_the_ids(mariadb_url: str, increment: int, offset: int, ids: str) -> None:
    """Galera gives the sessions of its nodes such settings."""
    numbering = Numbering.parse(ids)
    with Database(mariadb_url) as database:
        schema.migrate(database, ids=numbering)

    with Database(mariadb_url) as database:

        @sa.event.listens_for(database.engine, "connect")
        def of_node(connection: Any, _: object) -> None:
            with connection.cursor() as cursor:
                cursor.execute(f"SET SESSION auto_increment_increment = {increment}, auto_increment_offset = {offset}")

        batch_ids = ids_of_one_transaction(database) + ids_of_one_transaction(database)
    distance = numbering.divisor * increment
    remainder = numbering.first + numbering.divisor * ((offset - 1) % increment)
    assert {id % distance for id in batch_ids} == {remainder % distance}
    assert len(batch_ids) == len(set(batch_ids))


TABLE = [
    ("3/7", "3/7", None),
    ("3/7", None, None),
    ("3/7", "3/8", "the database has the ids 3/7, not 3/8"),
    ("3/7", "4/7", "the database has the ids 3/7, not 4/7"),
    (None, "3/7", "the database gives batches all numbers as ids, not 3/7"),
]


@pytest.mark.mariadb
@pytest.mark.parametrize(("first", "later", "refusal"), TABLE)
def test_ids_are_chosen_once(database_url: str, first: str | None, later: str | None, refusal: str | None) -> None:
    """Before anything is opened, too: another one may have given ids of that kind already."""

    def migrate(ids: str | None) -> None:
        schema.migrate(database, ids=None if ids is None else Numbering.parse(ids))

    with Database(database_url) as database:
        migrate(first)
        if refusal is None:
            migrate(later)
        else:
            with pytest.raises(errors.Misconfigured, match=refusal):
                migrate(later)
        [finding] = [found for found in checks.check(database) if found.about == "ids"]
        assert finding.verdict is Verdict.FINE
        assert finding.says.endswith("all numbers as ids" if first is None else f"({first})")
        assert Service(database).batches.open(Opening()).batch.id == (1 if first is None else 3)


@pytest.mark.parametrize("text", ["", "3", "3/", "/7", "7/7", "0/1", "-1/7", "3/1001", "3 / 7", "03/7", "3/7 ", "²/7"])
def test_ids_that_can_not_be_read_are_refused(text: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/lastbit.db"
    with pytest.raises(errors.Misconfigured, match="K/N such as 3/16"):
        Numbering.parse(text)
    with Lastbit(url) as lastbit, pytest.raises(InvalidArgument, match="K/N such as 3/16"):
        lastbit.migrate(ids=text)


def test_the_command_and_the_embedded_client_choose_ids(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/lastbit.db"
    assert run_module("api", "migrate", "--database-url", url, "--ids", "3/16").returncode == 0
    other_ids = run_module("api", "migrate", "--database-url", url, "--ids", "4/16")
    assert (other_ids.returncode, "has the ids 3/16, not 4/16" in other_ids.stderr) == (1, True), other_ids.stderr
    unread = run_module("api", "migrate", "--database-url", url, "--ids", "16")
    assert (unread.returncode, "K/N such as 3/16" in unread.stderr) == (2, True), unread.stderr
    report = run_module("api", "check", "--database-url", url)
    assert "ids that leave 3 when they are divided by 16 (3/16)" in report.stdout
    to_serve = run_module("api", "serve", "--database-url", url, "--ids", "3/16")
    assert (to_serve.returncode, "--ids is an option of migrate" in to_serve.stderr) == (2, True)
    with Lastbit(url) as lastbit:
        lastbit.migrate(ids="3/16")
        assert [lastbit.client().open(items=1).id for _ in range(2)] == [3, 19]
        with pytest.raises(SchemaMismatch, match="has the ids 3/16, not 4/16"):
            lastbit.migrate(ids="4/16")


@mutant(
    "the-ids-are-recorded-at-the-end",
    "core.storage.schema:_create",
    "None if ids is None else str(ids)",
    "None",
    only="mariadb",
)
@pytest.mark.mariadb
def test_a_first_migration_that_was_killed_has_chosen(mariadb_url: str) -> None:
    """On MariaDB it leaves a part of the schema, which a migration without the option completes."""

    def kill(*event: Any) -> None:
        if "CREATE TABLE batches" in event[2]:
            raise KeyboardInterrupt

    with Database(mariadb_url) as database:
        sa.event.listen(database.engine, "after_cursor_execute", kill)
        with pytest.raises(KeyboardInterrupt):
            schema.migrate(database, ids=Numbering(3, 7))
    with Database(mariadb_url) as database:
        with pytest.raises(errors.Misconfigured, match="has the ids 3/7, not 4/7"):
            schema.migrate(database, ids=Numbering(4, 7))
        schema.migrate(database)
        assert Service(database).batches.open(Opening()).batch.id == 3


@pytest.mark.skipif("postgresql" not in KINDS, reason="only a sequence can be restored to a wrong number")
def test_postgresql_refuses_other_ids(postgresql_url: str) -> None:
    with Database(postgresql_url) as database:
        schema.migrate(database, ids=Numbering(3, 7))
        with database.engine.begin() as tx:
            tx.exec_driver_sql("ALTER TABLE batches ALTER COLUMN id RESTART WITH 1000")
        with pytest.raises(DBAPIError, match="batches_ids"):
            Service(database).batches.open(Opening())
        with database.engine.begin() as tx:
            tx.exec_driver_sql("ALTER TABLE batches ALTER COLUMN id SET INCREMENT 1")
        with pytest.raises(errors.Misconfigured, match=r"should be 7 apart, but the sequence of batches\.id adds 1"):
            database.read(schema.check)


@pytest.mark.mariadb
def test_a_copy_keeps_its_ids(pair: tuple[str, str]) -> None:
    """As a backup of each kind does: a file, or the statements of a dump."""
    with Database(pair[0]) as original, Database(pair[1]) as copy:
        schema.migrate(original, ids=Numbering(3, 7))
        before = ids_of_one_transaction(original)
        if original.is_embedded:
            original.dispose()
            Path(copy.url.database or "").write_bytes(Path(original.url.database or "").read_bytes())
        elif original.url.get_backend_name() == "postgresql":
            with contextlib.closing(psycopg.connect(pair[1], autocommit=True)) as connection:
                connection.execute("\n".join(templates.dump(original)).encode())
        else:
            with copy.engine.begin() as transaction:
                for statement in templates.dump(original):
                    transaction.exec_driver_sql(statement.replace("%", "%%"))
        copy.read(schema.check)
        after = ids_of_one_transaction(copy)
    assert min(after) > max(before)
    assert {id % 7 for id in after} == {3}
