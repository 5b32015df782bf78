"""Which schema the database has, and bringing it up to date. The steps are Alembic's, in `migrations/`.

Each migration serves the release before it, so that old and new code can run side by side during an upgrade. Hence a
schema that is *newer* than this code is fine; an older one is not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection

from core import errors
from core.db import Database

_MIGRATIONS: Final = Path(__file__).resolve().parent.parent / "migrations"


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    return config


@cache
def _known() -> tuple[str, frozenset[str]]:
    """The newest revision that this code knows, and all that it knows."""
    script = ScriptDirectory.from_config(_config())
    head = script.get_current_head()
    assert head is not None
    return head, frozenset(revision.revision for revision in script.walk_revisions())


def current(tx: Connection) -> str | None:
    """The revision that the database has."""
    return MigrationContext.configure(tx).get_current_revision()


def check(tx: Connection) -> None:
    """Raise `errors.Misconfigured` where the schema is missing or older than this code."""
    revision = current(tx)
    newest, all_known = _known()
    if revision == newest or (revision is not None and revision not in all_known):
        return
    was = "no schema" if revision is None else f"the schema of revision {revision}"
    raise errors.Misconfigured(
        f"the database has {was}, this release needs revision {newest}: run `python -m api migrate` (with the same "
        "LASTBIT_DATABASE_URL or --database-url), then start again"
    )


def migrate(database: Database, revision: str = "head") -> None:
    """Bring the schema to `revision`; with an older one, back to it. One at a time: others wait.

    Raises `errors.Unavailable` where the database is away, or another migration takes longer than a minute.
    """
    with database.connection() as connection:
        if database.is_sqlite:
            connection = connection.execution_options(lastbit_begin="IMMEDIATE")
            _migrate(connection, revision)
            return
        # Data definition commits by itself on MariaDB; a lock by name keeps two from migrating at once.
        if connection.exec_driver_sql("SELECT GET_LOCK('lastbit_migrate', 60)").scalar() != 1:
            raise errors.Unavailable("another migration of this database is under way")
        try:
            _migrate(connection, revision)
        finally:
            connection.exec_driver_sql("SELECT RELEASE_LOCK('lastbit_migrate')")


def _migrate(connection: Connection, revision: str) -> None:
    was = current(connection)
    if was is not None and was not in _known()[1]:
        return  # a newer release was here; it serves this one
    config = _config()
    config.attributes["connection"] = connection
    if revision == "head" or was is None or not _is_behind(revision, was):
        command.upgrade(config, revision)
    else:
        command.downgrade(config, revision)
    connection.commit()


def _is_behind(revision: str, current: str) -> bool:
    if revision == "base":
        return True
    script = ScriptDirectory.from_config(_config())
    return any(r.revision == revision for r in script.iterate_revisions(current, "base"))
