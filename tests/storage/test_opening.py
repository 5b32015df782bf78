"""A database that can't be used is a one-line message and exit status 1, from each program that opens it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from core import errors
from core.storage import schema
from core.storage.database import Database
from tests.mutants import mutant
from tests.support.servers import ROOT, MariaDB, free_port, run_module

PROGRAMS = {
    "serve": ("api", "serve"),
    "migrate": ("api", "migrate"),
    "janitor": ("jobs.janitor",),
    "dispatcher": ("jobs.dispatcher", "--once"),
}


def sentence(program: str, url: str) -> str:
    """The program's only line of output, without the name before it."""
    module, *arguments = PROGRAMS[program]
    process = run_module(
        module, *arguments, "--database-url", url, environment={**os.environ, "LASTBIT_PORT": str(free_port())}
    )
    assert process.returncode == 1, process.stderr
    (line,) = process.stderr.splitlines()
    assert "secret" not in line
    return line.partition(": ")[2]


def account(mariadb: MariaDB, user: str, privileges: str) -> str:
    """The URL of a new database, for a new user with these privileges on it."""
    url = mariadb.new_database()
    database = sa.make_url(url).database
    with contextlib.closing(mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE OR REPLACE USER '{user}'@'127.0.0.1' IDENTIFIED BY 'secret'")
        if privileges:
            cursor.execute(f"GRANT {privileges} ON {database}.* TO '{user}'@'127.0.0.1'")
    return f"mysql://{user}:secret@127.0.0.1:{mariadb.port}/{database}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_server_that_cannot_be_used_is_named_with_what_to_do(mariadb: MariaDB, program: str) -> None:
    """Closed port, unknown host, wrong password, no such database, no access, too few privileges."""
    server = f"127.0.0.1:{mariadb.port}"
    reader = account(mariadb, f"reader_{program}", "SELECT")
    stranger = account(mariadb, f"stranger_{program}", "")
    root = f"mysql://root:secret@{server}/nowhere"
    assert sentence(program, "mysql://me:secret@127.0.0.1:1/books").startswith(
        "no database server can be reached at 127.0.0.1:1 (database 'books', user 'me'): "
    )
    assert sentence(program, "mysql://me:secret@nowhere.invalid/books").startswith(
        "no database server can be reached at nowhere.invalid:3306 (database 'books', user 'me'): "
    )
    assert sentence(program, reader.replace(":secret@", ":secret2@")).startswith(
        f"the database server at {server} refuses the user 'reader_{program}'"
    )
    assert sentence(program, root.replace(":secret", "")).startswith(
        f"the server at {server} has no database 'nowhere'"
    )
    assert sentence(program, stranger).startswith(f"the user 'stranger_{program}' has no access to the database ")
    lacking = sentence(program, reader)
    if program == "migrate":
        assert lacking.startswith(f"the user 'reader_{program}' lacks a privilege on the database ")
        assert "with the account that may change the schema" in lacking
    else:
        assert "run `python -m api migrate`, with the account that may change the schema" in lacking


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://lastbit:secret/lastbit", "the database URL can't be read"),
        ("mysql://me:secret@127.0.0.1:1/books?colour=grey", "the options of the database URL can't be used"),
        ("mysql://me:secret@127.0.0.1:1/books?ssl_ca=/none", "the options of the database URL can't be used"),
    ],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_malformed_url_is_reported_without_its_password(program: str, url: str, words: str) -> None:
    """A forgotten host, an unknown option, a missing file of certificates."""
    assert sentence(program, url).startswith(words)


@pytest.mark.parametrize(
    ("arguments", "environment", "source"),
    [
        (["api"], {"LASTBIT_PORT": "tcp://10.0.0.1:80"}, "LASTBIT_PORT"),
        (["api", "--workers", "0"], {"LASTBIT_WORKERS": "2"}, "--workers"),
        (["jobs.dispatcher", "--threads", "0"], {}, "--threads"),
        (["api"], {"LASTBIT_SESSION_KEY": "secret"}, "LASTBIT_SESSION_KEY"),
    ],
)
def test_an_invalid_setting_is_named_as_it_was_given(
    arguments: list[str], environment: dict[str, str], source: str
) -> None:
    """The variable or the flag, with exit status 2, and without a secret."""
    process = run_module(*arguments, environment={**os.environ, **environment})
    assert process.returncode == 2
    line = process.stderr.splitlines()[-1]
    assert f" error: {source}: " in line
    assert "secret" not in line


def test_a_password_may_have_any_characters(mariadb: MariaDB) -> None:
    """In UTF-8, as in the statement that created the account, also those that Latin-1 has."""
    database = sa.make_url(mariadb.new_database()).database
    with contextlib.closing(mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE OR REPLACE USER polyglot@'127.0.0.1' IDENTIFIED BY 'naïve-…-ключ'")
        cursor.execute(f"GRANT ALL ON {database}.* TO polyglot@'127.0.0.1'")
    with Database(f"mysql://polyglot:naïve-…-ключ@127.0.0.1:{mariadb.port}/{database}") as opened_database:
        schema.migrate(opened_database)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_help_of_each_program_has_examples_with_its_options(program: str) -> None:
    """In lines of at most 80 columns."""
    module = PROGRAMS[program][0]
    text = run_module(module, "--help", environment={**os.environ, "COLUMNS": "80"}).stdout
    assert max(map(len, text.splitlines())) <= 80
    options, _, lines = text.partition("Examples:\n")
    assert lines
    for line in lines.splitlines():
        assert line.startswith(f"  python -m {module}"), line
        assert set(re.findall(r"--[a-z-]+", line)) <= set(re.findall(r"--[a-z-]+", options)), line


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_file_that_cannot_be_used_is_named_with_what_to_do(tmp_path: Path, program: str) -> None:
    """No folder, a folder in the file's place, a file of another kind."""
    text = tmp_path / "text.db"
    text.write_text("no database, but longer than the header of one. " * 40)
    assert sentence(program, f"sqlite:///{tmp_path}/none/lastbit.db") == (
        f"the folder {tmp_path}/none for the SQLite file doesn't exist: create it, or choose another folder"
    )
    assert sentence(program, f"sqlite:///{tmp_path}").startswith(f"{tmp_path} is a folder, not an SQLite file")
    assert sentence(program, f"sqlite:///{text}").startswith(f"{text} is not an SQLite database")
    assert text.read_text().startswith("no database")


def test_a_file_in_a_removed_working_folder_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(errors.Misconfigured, match=r"the folder for .* doesn't exist any more: change to another"):
        Database("sqlite:///lastbit.db")


@pytest.mark.parametrize("program", ["janitor", "dispatcher"])
def test_a_job_creates_no_file(tmp_path: Path, program: str) -> None:
    """It would work on an empty database, without an error, if its crontab doesn't set the URL."""
    assert sentence(program, f"sqlite:///{tmp_path}/lastbit.db") == (
        f"there is no SQLite file {tmp_path}/lastbit.db: set LASTBIT_DATABASE_URL or --database-url to the service's "
        "database"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", ["serve", "janitor", "dispatcher"])
def test_an_account_that_may_only_read_is_named_with_what_to_do(mariadb: MariaDB, program: str) -> None:
    """With a current schema, so that nothing else is wrong."""
    url = account(mariadb, f"current_{program}", "SELECT")
    with Database(f"mysql://root@127.0.0.1:{mariadb.port}/{sa.make_url(url).database}") as database:
        schema.migrate(database)
    line = sentence(program, url)
    assert line.startswith(f"the user 'current_{program}' lacks a privilege on the database "), line


@pytest.mark.parametrize(
    ("program", "case"),
    [("serve", "unreadable"), ("migrate", "locked"), ("janitor", "unwritable"), ("dispatcher", "unreadable")],
)
def test_a_file_without_permissions_is_named_with_what_to_do(tmp_path: Path, program: str, case: str) -> None:
    """Unreadable, unwritable, or new in a locked folder. Root has every permission unless it drops that."""
    file = tmp_path / case / "lastbit.db"
    file.parent.mkdir()
    if case != "locked":
        with Database(f"sqlite:///{file}") as database:
            schema.migrate(database)
        file.chmod(0o000 if case == "unreadable" else 0o444)
    if case != "unreadable":
        file.parent.chmod(0o555)
    limits = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command = [*limits, sys.executable, "-m", *PROGRAMS[program], "--database-url", f"sqlite:///{file}"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert process.returncode == 1, process.stderr
    (line,) = process.stderr.splitlines()
    assert f"the SQLite file {file} can't be opened for writing: give this process's user write access to it" in line


@mutant("a-new-file-can-be-read-by-others", "core.storage.dialects.sqlite:_create", "0o600", "0o644")
def test_a_new_file_can_be_read_by_its_account_alone(tmp_path: Path) -> None:
    """It has the secrets of webhooks, and so have the files beside it. The mode of an existing file stays."""
    files = [tmp_path / f"lastbit.db{suffix}" for suffix in ("", "-wal", "-shm")]
    before = os.umask(0o022)
    try:
        for mode in (0o600, 0o640):
            with Database(f"sqlite:///{files[0]}") as database:
                schema.migrate(database)
                assert [file.stat().st_mode & 0o777 for file in files] == [mode] * 3
            files[0].chmod(0o640)
    finally:
        os.umask(before)


def test_check_gives_the_same_advice(mariadb: MariaDB) -> None:
    for name, quoted in (("nowhere", "`nowhere`"), ("no`where", "`no``where`")):
        process = run_module("api", "check", "--database-url", f"mysql://root@127.0.0.1:{mariadb.port}/{name}")
        assert process.returncode == 1
        assert f"the server at 127.0.0.1:{mariadb.port} has no database '{name}' (user 'root')" in process.stdout
        assert f"→ create it with CREATE DATABASE {quoted} CHARACTER SET utf8mb4, or name another" in process.stdout
