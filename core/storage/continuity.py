"""Detects that a connection may lead to another database, or to an older state of this one. Caches are then invalid.

After an outage, a database may lack commits: it was restored from a backup, its machine crashed before its disk was
flushed, or a replica that lagged behind took over. Its rows don't show that. So all cached data is in doubt

* when a connection breaks, or is discarded because its server is read-only or not in its cluster;
* when a new connection leads to another server, another file, or the same server after a restart. This check is needed
  because connections that are replaced for their age don't break, even if the server was restarted.

Another connection to the same server, not restarted since, raises no doubt.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Engine

Origin = tuple[Any, ...]
"""Identifies the server or file behind a connection."""

_NAMES: Final = ("hostname", "port", "server_id", "server_uid", "server_uuid")
"""Variables that identify a server. Each kind of server has some of these."""


def server(driver: Any) -> Origin:
    """The MariaDB or MySQL server behind a connection, and its start time. That is its clock minus its uptime; setting
    the clock moves both. Uses only SHOW: a node outside its cluster refuses anything else."""
    with contextlib.closing(driver.cursor()) as cursor:

        def show(subject: str) -> dict[str, str]:
            cursor.execute(f"SHOW {subject}")
            return dict(cursor.fetchall())

        names = ", ".join(f"'{name}'" for name in (*_NAMES, "timestamp"))
        for _ in range(3):
            variables = show(f"VARIABLES WHERE Variable_name IN ({names})")
            uptime = int(show("GLOBAL STATUS LIKE 'Uptime'")["Uptime"])
            now = int(float(show("VARIABLES LIKE 'timestamp'")["timestamp"]))
            if now == int(float(variables["timestamp"])):  # otherwise a second boundary passed in between
                break
    return *(variables.get(name) for name in _NAMES), now - uptime


def postgresql_server(driver: Any) -> Origin:
    """The PostgreSQL server behind a connection: its identifier, its start, and its timeline, which changes when a
    standby is promoted or a backup restored."""
    timeline = "CASE WHEN pg_is_in_recovery() THEN '' ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END"
    with contextlib.closing(driver.cursor()) as cursor:
        cursor.execute(f"SELECT system_identifier, pg_postmaster_start_time(), {timeline} FROM pg_control_system()")  # noqa: S608
        origin: Origin = cursor.fetchone()
    driver.rollback()
    return origin


def file(driver: Any) -> Origin:
    """The SQLite file behind a connection."""
    return identity(path(driver)) or ()


def path(driver: Any) -> Path:
    """The absolute path of the SQLite file that a connection has opened."""
    return Path(driver.execute("PRAGMA database_list").fetchone()[2])


def identity(path: Path) -> Origin | None:
    """The file that is now at `path`; None if there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def watch(engine: Engine, origin_of: Callable[[Any], Origin], doubt: Callable[[], None]) -> None:
    """Call `doubt` as described above, before anything is read through the new connection."""
    last: Origin | None = None
    lock = threading.Lock()

    @sa.event.listens_for(engine, "connect")
    def compare(driver: Any, _: object) -> None:
        nonlocal last
        origin = origin_of(driver)
        with lock:  # held until the doubt is reported, so that no other new connection is used before
            if origin != last:
                doubt()
            last = origin

    @sa.event.listens_for(engine, "invalidate")
    def broken(_: object, __: object, error: BaseException | None) -> None:
        if not isinstance(error, sa.exc.DisconnectionError):  # raised to replace old connections, see `engines`
            doubt()
