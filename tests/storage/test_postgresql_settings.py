"""PostgreSQL: `check` names unsafe settings; a database that can't be used is one line with advice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from core import errors, feed
from core.storage import opening, schema
from core.storage.checks import Finding, Verdict, check
from core.storage.database import Database
from tests.support import templates
from tests.support.postgresql import PASSWORD_USER, PostgreSQL, running_postgresql


@pytest.fixture
def migrated_url(postgresql_url: str) -> str:
    with Database(postgresql_url) as database:
        templates.migrate(database)
    return postgresql_url


def troubles(url: str, *, workers: int = 1) -> dict[str, Finding]:
    """The findings that aren't fine, by subject. Each has advice."""
    with Database(url) as database:
        findings = [finding for finding in check(database, workers=workers) if finding.verdict is not Verdict.FINE]
    assert all(finding.do for finding in findings)
    return {finding.about: finding for finding in findings}


def test_a_server_at_its_defaults_is_fine(migrated_url: str) -> None:
    """Each rule has run, and none has advice."""
    with Database(migrated_url) as database:
        findings = check(database, workers=2)
    assert {finding.about for finding in findings if finding.verdict is not Verdict.FINE} == set()
    subjects = "version encoding schema replica read_only writes durability fsync full_page_writes isolation session"
    assert {*subjects.split(), "connections", "clock"} <= {finding.about for finding in findings}


@pytest.mark.parametrize(
    ("setting", "subject", "verdict"),
    [
        ("synchronous_commit = off", "durability", Verdict.UNSAFE),
        ("default_transaction_read_only = on", "read_only", Verdict.BROKEN),
    ],
)
def test_an_unsafe_setting_is_named(
    postgresql: PostgreSQL, migrated_url: str, setting: str, subject: str, verdict: Verdict
) -> None:
    """It may be set for the database alone. The service's own settings override others."""
    name = migrated_url.rpartition("/")[2]
    with contextlib.closing(postgresql.connect()) as connection:
        connection.execute(f"ALTER DATABASE {name} SET {setting}")
    findings = troubles(migrated_url)
    assert findings.pop(subject).verdict is verdict
    # Nothing else is wrong, except that nothing can be written if writing is off.
    assert set(findings) <= ({"writes"} if subject == "read_only" else set())


def test_a_limit_of_the_database_is_named(postgresql: PostgreSQL, migrated_url: str) -> None:
    """The service gets no more connections than its database or its account, whatever the server allows."""
    name = migrated_url.rpartition("/")[2]
    with contextlib.closing(postgresql.connect()) as connection:
        connection.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 3")
    findings = troubles(migrated_url)
    assert findings.keys() == {"connections"}
    assert "limited to 3" in findings["connections"].says


@pytest.mark.parametrize(
    ("statement", "subject"),
    [
        ("SET default_transaction_isolation = 'serializable'", "isolation"),
        ("SET lock_timeout = 0", "session"),
        ("SET statement_timeout = '5s'", "session"),
        ("SET idle_in_transaction_session_timeout = 0", "session"),
        ("SET timezone = 'Europe/Berlin'", "session"),
    ],
)
def test_a_session_that_something_else_changed_is_named(migrated_url: str, statement: str, subject: str) -> None:
    with Database(migrated_url) as database:

        @sa.event.listens_for(database.engine, "connect")
        def change(connection: object, _: object) -> None:
            connection.execute(statement)  # type: ignore[attr-defined]
            connection.commit()  # type: ignore[attr-defined]

        findings = {finding.about: finding for finding in check(database) if finding.verdict is not Verdict.FINE}
    assert findings.keys() == {subject}
    assert findings[subject].verdict is Verdict.BROKEN


def test_unsafe_start_options_are_named() -> None:
    """No flushes, pages that can't be repaired, too few connections."""
    with running_postgresql(options=["fsync=off", "full_page_writes=off", "max_connections=40"]) as server:
        findings = troubles(server.new_database())
    assert findings.keys() == {"schema", "fsync", "full_page_writes", "connections"}
    assert "python -m api migrate" in str(findings["schema"].do)


def test_another_encoding_is_named(postgresql: PostgreSQL) -> None:
    with contextlib.closing(postgresql.connect()) as connection:
        connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0")
        try:
            findings = troubles(f"postgresql://postgres@127.0.0.1:{postgresql.port}/latin")
        finally:
            connection.execute("DROP DATABASE latin WITH (FORCE)")
    assert findings.keys() == {"encoding", "schema"}


@pytest.fixture
def reader_url(postgresql: PostgreSQL, migrated_url: str) -> Iterator[str]:
    """The same database, with an account that may only read, and needs a password."""
    name = migrated_url.rpartition("/")[2]
    with contextlib.closing(postgresql.connect(name)) as connection:
        connection.execute(f"CREATE ROLE {PASSWORD_USER} LOGIN PASSWORD 'secret'")
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {PASSWORD_USER}")
        try:
            yield migrated_url.replace("postgres@", f"{PASSWORD_USER}:secret@")
        finally:
            connection.execute(f"DROP OWNED BY {PASSWORD_USER}")
            connection.execute(f"DROP ROLE {PASSWORD_USER}")


def refusal(url: str) -> str:
    """The message to a program that opens the database and checks it."""

    def start() -> None:
        with opening.opened(url) as database:
            database.read(schema.check)
            opening.check_privileges(database)

    with pytest.raises(errors.Misconfigured) as info:
        start()
    assert "secret" not in str(info.value)
    assert "\n" not in str(info.value)
    return str(info.value)


def test_a_program_starts_while_the_server_accepts_no_writes(postgresql: PostgreSQL, migrated_url: str) -> None:
    """It may accept them later; only a missing privilege ends the start."""
    with postgresql.read_only(), opening.opened(migrated_url) as database:
        opening.check_privileges(database)
        assert database.read(feed.head) == 0


def test_a_database_that_cannot_be_used_is_named_with_what_to_do(
    postgresql: PostgreSQL, migrated_url: str, reader_url: str
) -> None:
    """Closed port, unknown host, wrong or no password, no such user, no such database, no access, no privilege."""
    server, name = f"127.0.0.1:{postgresql.port}", migrated_url.rpartition("/")[2]
    assert refusal("postgresql://me:secret@127.0.0.1:1/books").startswith(
        "no database server can be reached at 127.0.0.1:1 (database 'books', user 'me'): "
    )
    assert refusal("postgresql://me:secret@nowhere.invalid/books").startswith(
        "no database server can be reached at nowhere.invalid:5432 (database 'books', user 'me'): "
    )
    for credentials in (f"{PASSWORD_USER}:secret2", PASSWORD_USER, "stranger"):
        user = credentials.partition(":")[0]
        assert refusal(f"postgresql://{credentials}@{server}/{name}").startswith(
            f"the database server at {server} refuses the user '{user}' (database '{name}'): check the password"
        )
    missing = refusal(f'postgresql://postgres@{server}/no"where')
    assert missing.startswith(f"the server at {server} has no database 'no\"where' (user 'postgres'): ")
    assert 'CREATE DATABASE "no""where" ENCODING \'UTF8\'' in missing
    lacking = f"the user '{PASSWORD_USER}' lacks a privilege on the database '{name}' at {server}: "
    assert refusal(reader_url).startswith(f"{lacking}permission denied for table ")
    findings = troubles(reader_url)
    assert findings.keys() == {"writes"}
    assert findings["writes"].verdict is Verdict.BROKEN
    with contextlib.closing(postgresql.connect()) as connection:
        connection.execute(f"REVOKE CONNECT ON DATABASE {name} FROM PUBLIC")
    assert refusal(reader_url).startswith(f"the user '{PASSWORD_USER}' has no access to the database '{name}' at ")


def test_an_account_needs_no_privilege_on_sequences(postgresql: PostgreSQL, migrated_url: str) -> None:
    """Ids are identity columns, so the four privileges on tables are enough to open a batch."""
    name = migrated_url.rpartition("/")[2]
    with contextlib.closing(postgresql.connect(name)) as connection:
        connection.execute("CREATE ROLE writer LOGIN")
        connection.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO writer")
        try:
            assert troubles(migrated_url.replace("postgres@", "writer@")) == {}
            connection.execute("SET ROLE writer")
            connection.execute(
                "INSERT INTO webhooks (url, secret, state, position, created_at) VALUES ('u', 's', 'active', 0, now())"
            )
        finally:
            connection.execute("RESET ROLE")
            connection.execute("DROP OWNED BY writer")
            connection.execute("DROP ROLE writer")


def test_a_standby_is_named(postgresql: PostgreSQL, migrated_url: str) -> None:
    """It accepts no writes, and its data may be old."""
    standby = PostgreSQL()
    try:
        primary = f"host=127.0.0.1 port={postgresql.port} user=postgres"
        standby.run(
            "pg_basebackup",
            "--pgdata",
            str(standby.data),
            "--dbname",
            primary,
            "--write-recovery-conf",
            "--no-sync",
            "--checkpoint=fast",
        )
        standby.start()
        findings = troubles(migrated_url.replace(f":{postgresql.port}/", f":{standby.port}/"))
    finally:
        standby.remove()
    assert {name: finding.verdict for name, finding in findings.items()} == {
        "replica": Verdict.BROKEN,
        "writes": Verdict.BROKEN,
    }
