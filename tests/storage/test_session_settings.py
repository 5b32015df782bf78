"""Settings of a server or an account that belong to somebody else: nothing of ours depends on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from core.storage import schema
from core.storage.checks import Verdict, check
from core.storage.database import Database
from tests.conftest import KINDS, running_server
from tests.guarantees.drivers.life import live
from tests.mutants import mutant
from tests.support.servers import MariaDB

MARIADB = (
    "--lower-case-table-names=1",
    "--sql-mode=ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES,NO_ZERO_DATE,ONLY_FULL_GROUP_BY,IGNORE_SPACE",
    "--character-set-server=latin1",
    "--collation-server=latin1_german2_ci",
    "--skip-character-set-client-handshake",
    "--default-storage-engine=MyISAM",
    "--transaction-isolation=SERIALIZABLE",
    "--completion-type=CHAIN",
    "--default-time-zone=+13:00",
    "--group-concat-max-len=4",
    "--autocommit=OFF",
    "--div-precision-increment=0",
    "--lock-wait-timeout=1",
    "--innodb-lock-wait-timeout=1",
)
"""Options of the server."""
MARIADB_GLOBALS = (
    "sql_select_limit = 2",
    "sql_safe_updates = ON",
    "sql_big_selects = OFF, GLOBAL max_join_size = 1",
    "max_statement_time = 0.0005",
    "unique_checks = OFF",
)
POSTGRESQL = (
    "search_path = nowhere, public",
    "default_transaction_isolation = serializable",
    "default_transaction_deferrable = on",
    "statement_timeout = '1s'",
    "lock_timeout = '1ms'",
    "idle_in_transaction_session_timeout = '1ms'",
    "TimeZone = 'Pacific/Auckland'",
    "DateStyle = 'SQL, DMY'",
    "IntervalStyle = sql_standard",
    "bytea_output = escape",
    "client_encoding = LATIN1",
    "standard_conforming_strings = off",
    "backslash_quote = off",
    "client_min_messages = error",
    "extra_float_digits = -15",
    "transform_null_equals = on",
    "quote_all_identifiers = on",
    "array_nulls = off",
    "jit_above_cost = 0",
    "enable_indexscan = off",
)
"""Settings of the database, for every account."""

ENGINES = sa.text("SELECT engine FROM information_schema.tables WHERE table_schema = DATABASE()")


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != "sqlite"])
def hostile_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a user's database on a server with unusual settings."""
    with running_server(options=MARIADB if request.param == "mariadb" else ()) as server:
        url = server.new_database()
        if isinstance(server, MariaDB):
            with contextlib.closing(server.connect()) as connection, connection.cursor() as cursor:
                for setting in MARIADB_GLOBALS:
                    cursor.execute(f"SET GLOBAL {setting}")
        else:
            with contextlib.closing(server.connect()) as administrator:
                for setting in POSTGRESQL:
                    administrator.execute(f"ALTER DATABASE {url.rpartition('/')[2]} SET {setting}".encode())
        yield url


@mutant(
    "a-limit-of-rows-stays",
    "core.storage.dialects.mariadb:_session",
    'f"sql_select_limit = {UNLIMITED}"',
    '"autocommit = 0"',
    only="mariadb",
)
@mutant(
    "large-selects-are-refused",
    "core.storage.dialects.mariadb:_session",
    '"sql_big_selects = 1"',
    '"autocommit = 0"',
    only="mariadb",
)
@mutant(
    "updates-without-a-key-are-refused",
    "core.storage.dialects.mariadb:_session",
    '"sql_safe_updates = 0"',
    '"autocommit = 0"',
    only="mariadb",
)
@mutant(
    "keys-need-not-be-unique",
    "core.storage.dialects.mariadb:_session",
    '"unique_checks = 1"',
    '"autocommit = 0"',
    only="mariadb",
)
@mutant(
    "a-transaction-follows-each-commit",
    "core.storage.dialects.mariadb:_session",
    '"completion_type = NO_CHAIN"',
    '"autocommit = 0"',
    only="mariadb",
)
@mutant(
    "tables-need-not-be-transactional",
    "core.storage.dialects.mariadb:_session",
    '"default_storage_engine = InnoDB"',
    '"autocommit = 0"',
    only="mariadb",
)
@mutant(
    "statements-are-ended-early",
    "core.storage.dialects.mariadb:_session",
    '"max_statement_time = 0"',
    '"autocommit = 0"',
    only="mariadb",
)
@mutant(
    "statements-end-after-the-accounts-time",
    "core.storage.dialects.postgresql:_session",
    '"SET statement_timeout = 0"',
    '"SELECT 1"',
    only="postgresql",
)
@mutant(
    "warnings-are-not-sent",
    "core.storage.dialects.postgresql:_session",
    '"SET client_min_messages = warning"',
    '"SELECT 1"',
    only="postgresql",
)
@mutant(
    "backslashes-are-escapes",
    "core.storage.dialects.postgresql:_session",
    '"SET standard_conforming_strings = on"',
    '"SELECT 1"',
    only="postgresql",
)
@mutant(
    "dates-are-written-otherwise",
    "core.storage.dialects.postgresql:_session",
    "\"SET datestyle = 'ISO'\"",
    '"SELECT 1"',
    only="postgresql",
)
@mutant(
    "texts-are-latin",
    "core.storage.dialects.postgresql:_session",
    "\"SET client_encoding = 'UTF8'\"",
    '"SELECT 1"',
    only="postgresql",
)
@pytest.mark.mariadb
@pytest.mark.parametrize("name", ["Lastbit", None])
def test_settings_of_others_change_nothing(hostile_url: str, name: str | None) -> None:
    """With a schema, and without one."""
    with Database(hostile_url, schema=name) as database:
        schema.migrate(database)
        schema.finish(database)
        live(database)
        findings = [finding for finding in check(database) if finding.verdict is Verdict.BROKEN]
        with database.engine.connect() as connection:
            engines = set(connection.scalars(ENGINES)) if connection.dialect.name == "mysql" else {"InnoDB"}
    assert findings == []
    assert engines == {"InnoDB"}
