"""The database of a job: one that a service uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from core import errors
from core.settings import Settings
from core.storage import opening, schema
from core.storage.database import Database


@contextlib.contextmanager
def opened(settings: Settings) -> Iterator[Database]:
    """The database of the settings. Raises `errors.Misconfigured` if it can't be used, lacks this release's schema, or
    is a SQLite file that doesn't exist. SQLite would create it, and the job would work on an empty database: that is
    what happens if LASTBIT_DATABASE_URL is not set in a crontab."""
    with opening.opened(settings.database_url, settings.database_schema) as database:
        file = Path(database.url.database or "").absolute()
        if database.is_embedded and file.parent.is_dir() and not file.exists():
            raise errors.Misconfigured(
                f"there is no SQLite file {file}: set LASTBIT_DATABASE_URL or --database-url to the service's database"
            )
        database.read(schema.check)
        yield database
