"""Engines that would break a promise in silence are refused: by their names, and by what they do.

The engines themselves are not at hand. A proxy changes the statements on their way to a real server, so that the
server does what such an engine does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa

from core import errors
from core.acks.commit import check_merging
from core.storage import checks, opening, promises, refusals, schema
from core.storage.checks import Verdict
from core.storage.database import Database
from tests.conftest import Server, running_mariadb
from tests.support.postgresql import PostgreSQL
from tests.support.proxies import proxied

Rewrite = Callable[[bytes], bytes]


def replaced(pattern: bytes, by: bytes) -> Rewrite:
    """Replaces what matches by as many bytes."""
    return lambda data: re.sub(pattern, lambda match: by.ljust(len(match[0])), data)


def another_digit(pattern: bytes, *, after: int) -> Rewrite:
    """The digit at the end of what matches becomes another one, once that has arrived this number of times. It is far
    from those of the next rows."""
    arrivals: Counter[bytes] = Counter()

    def changed(match: re.Match[bytes]) -> bytes:
        arrivals[match[0]] += 1
        last = int(match[0][-1:])
        return match[0][:-1] + b"%d" % (last if arrivals[match[0]] <= after else (last + 5) % 10)

    return lambda data: re.sub(pattern, changed, data)


INSERT = rb"INSERT INTO commit_marks \(writer, mark, marked_at\) VALUES \(\d+"
WAIT = rb"innodb_lock_wait_timeout = 2|lock_timeout = '2(?=s)|ob_trx_lock_timeout = 2(?=0)"

IMITATIONS: dict[str, tuple[Rewrite, str]] = {
    "FOR UPDATE locks nothing": (replaced(rb" FOR UPDATE(?! SKIP)", b""), "SELECT … FOR UPDATE waits"),
    "SKIP LOCKED locks nothing": (replaced(rb" FOR UPDATE SKIP LOCKED", b""), "SKIP LOCKED leaves out"),
    "SKIP LOCKED waits": (replaced(rb" SKIP LOCKED", b""), "SKIP LOCKED leaves out"),
    "a duplicate doesn't wait": (another_digit(INSERT, after=1), "an INSERT waits"),
    "an error doesn't end a packet": (another_digit(INSERT + rb"(?=[^;]*;UPDATE)", after=0), "none is executed after"),
    "advisory locks don't lock": (replaced(rb"pg_advisory_xact_lock\(", b"abs("), "pg_advisory_xact_lock"),
    "a lock wait doesn't end": (
        lambda data: re.sub(WAIT, lambda match: match[0][:-1] + b"9", data),
        "a wait for a lock",
    ),
}
"""By what the engine does: how the proxy changes statements, and the promise that is broken."""


@contextmanager
def imitated(server: Server, url: str, rewrite: Rewrite) -> Iterator[str]:
    """The URL of the database on an imitation of another engine."""
    with proxied(server.port) as proxy:
        proxy.rewrite = rewrite
        yield sa.make_url(url).set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)


def test_a_server_keeps_its_promises(server_database: Database) -> None:
    assert promises.broken(server_database, thorough=True) == []
    with server_database.connection() as tx:
        assert tx.exec_driver_sql("SELECT COUNT(*) FROM commit_marks WHERE mark = 2").scalar_one() == 0


@pytest.mark.parametrize("name", IMITATIONS)
def test_an_engine_that_breaks_a_promise_is_found(server: Server, server_database: Database, name: str) -> None:
    if name.startswith("advisory") and server_database.url.get_backend_name() != "postgresql":
        pytest.skip("only PostgreSQL has them")
    rewrite, promise = IMITATIONS[name]
    url = server_database.url.render_as_string(hide_password=False)
    with imitated(server, url, rewrite) as changed, Database(changed) as database:
        broken = promises.broken(database, thorough="wait for a lock" in promise)
    assert [says for says in broken if promise in says]


def test_neither_service_nor_check_accepts_it(server: Server, server_database: Database) -> None:
    rewrite, promise = IMITATIONS["SKIP LOCKED locks nothing"]
    url = server_database.url.render_as_string(hide_password=False)
    with imitated(server, url, rewrite) as changed, Database(changed) as database:
        with pytest.raises(errors.Misconfigured, match=promise):
            opening.check_promises(database)
        [finding] = [finding for finding in checks.check(database) if finding.about == "promises"]
    assert (finding.verdict, promise in finding.says) == (Verdict.BROKEN, True)


def test_check_finds_a_refusal_to_merge(server: Server, server_database: Database) -> None:
    """An engine that has the rows of two batches in two places, and refuses to lock both at once."""
    assert check_merging(server_database).verdict is Verdict.FINE
    url = server_database.url.render_as_string(hide_password=False)
    with imitated(server, url, replaced(rb"IN \(\d+,\d+\)", b"IN (?)")) as changed, Database(changed) as database:
        finding = check_merging(database)
    assert (finding.about, finding.verdict, finding.do) == ("merging", Verdict.BROKEN, refusals.INSTEAD)


@pytest.mark.parametrize(
    ("variables", "engine"),
    [
        ({"version": "10.11.6-MariaDB-0+deb12u1", "version_comment": "Debian 12"}, None),
        ({"version": "8.4.3", "version_comment": "MySQL Community Server - GPL"}, None),
        ({"version": "8.0.32", "version_comment": "Source distribution", "greeting": "8.0.mysql_aurora.3.08.0"}, None),
        ({"version": "5.7.25-OceanBase-v4.3.5.0", "version_comment": "OceanBase 4.3.5.0"}, None),
        ({"version": "8.0.11-TiDB-v8.5.0", "version_comment": "TiDB Server (Apache License 2.0)"}, "TiDB"),
        ({"version": "8.0.36", "version_comment": "", "greeting": "8.0.30-Vitess"}, "Vitess"),
        ({"version": "5.7.32", "version_comment": "", "memsql_version": "8.7.10"}, "SingleStore"),
    ],
)
def test_engines_with_mysqls_protocol_are_told_apart(variables: dict[str, str], engine: str | None) -> None:
    assert refusals.of_mysql(variables) == engine


@pytest.mark.parametrize(
    ("version", "is_distributed", "engine"),
    [
        ("PostgreSQL 17.2 (Debian 17.2-1) on x86_64-pc-linux-gnu", False, None),
        ("PostgreSQL 15.4 on x86_64-pc-linux-gnu", True, "Citus with distributed tables"),
        ("CockroachDB CCL v25.1.0 (x86_64-pc-linux-gnu)", False, "CockroachDB"),
    ],
)
def test_engines_with_postgresqls_protocol_are_told_apart(
    version: str, is_distributed: bool, engine: str | None
) -> None:
    assert refusals.of_postgresql(version, is_distributed=is_distributed) == engine


def test_a_refused_engine_is_named(postgresql: PostgreSQL, postgresql_url: str) -> None:
    """A database whose extension says that a table is distributed; and one that names itself in the answer to our
    question."""
    with Database(postgresql_url) as database:
        schema.migrate(database)
        with database.connection() as tx:
            tx.exec_driver_sql("SET allow_system_table_mods = on")
            tx.exec_driver_sql('CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass, partmethod "char")')
            tx.exec_driver_sql("INSERT INTO pg_dist_partition VALUES ('batches', 'n'), ('feed', 'n')")
            tx.commit()
    with Database(postgresql_url) as database:  # tables that Citus knows, and leaves where they are
        database.read(schema.check)
    with Database(postgresql_url) as database, database.connection() as tx:
        tx.exec_driver_sql("INSERT INTO pg_dist_partition VALUES ('item_groups', 'h')")
        tx.commit()
    with Database(postgresql_url) as database:
        with pytest.raises(errors.Misconfigured, match="the database is Citus with distributed tables, on which"):
            schema.migrate(database)
        [finding] = checks.check(database)
    assert (finding.about, finding.verdict, finding.do) == ("server", Verdict.BROKEN, refusals.INSTEAD)
    question = rb"SELECT version\(\), .* IS NOT NULL"
    answer = replaced(question, b"SELECT 'CockroachDB CCL v25.1.0', false")
    named = pytest.raises(errors.Misconfigured, match="the database is CockroachDB, on which")
    with imitated(postgresql, postgresql_url, answer) as changed, Database(changed) as database, named:
        database.read(schema.check)


def test_a_refused_engine_is_named_before_migrate() -> None:
    with (
        running_mariadb(options=["--version=8.0.11-TiDB-v8.5.0"]) as server,
        Database(server.new_database()) as database,
        pytest.raises(errors.Misconfigured, match="the database is TiDB, on which Lastbit would break"),
    ):
        schema.migrate(database)
