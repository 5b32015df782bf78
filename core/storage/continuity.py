"""Whether the database is still the one that was read before. What is kept in memory is of no use for another one.

A database that comes back may lack commits: it was restored from a backup, its machine crashed before its disk was
flushed, or another server took over that lagged behind. Nothing in its rows shows that. So everything that was read is
in doubt

* when a connection breaks, or is given up because its server takes no writes or is not in its cluster;
* when a new connection leads elsewhere than the one before it: to another server, to the same one after a restart, or
  to another file. Connections that are replaced because of their age are not found broken, even if the server was
  restarted meanwhile.

A connection that is made because more are needed, to the same server since the same start, is not a sign of anything.
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
"""What a connection leads to; equal for two that lead to the same."""

_NAMES: Final = ("hostname", "port", "server_id", "server_uid", "server_uuid")
"""Each server has some of these."""


def server(driver: Any) -> Origin:
    """Of a connection to MariaDB or MySQL: the server, and when it was started by its own clock, which may be set: the
    uptime moves with it. Nothing but SHOW: a node outside its cluster refuses anything else."""
    with contextlib.closing(driver.cursor()) as cursor:

        def show(what: str) -> dict[str, str]:
            cursor.execute(f"SHOW {what}")
            return dict(cursor.fetchall())

        listed = ", ".join(f"'{name}'" for name in (*_NAMES, "timestamp"))
        for _ in range(3):
            variables = show(f"VARIABLES WHERE Variable_name IN ({listed})")
            uptime = int(show("GLOBAL STATUS LIKE 'Uptime'")["Uptime"])
            now = int(float(show("VARIABLES LIKE 'timestamp'")["timestamp"]))
            if now == int(float(variables["timestamp"])):  # else a second has ended between them
                break
    return *(variables.get(name) for name in _NAMES), now - uptime


def file(driver: Any) -> Origin:
    """Of a connection to SQLite."""
    path = driver.execute("PRAGMA database_list").fetchone()[2]
    status = Path(path).stat()
    return status.st_dev, status.st_ino


def watch(engine: Engine, origin_of: Callable[[Any], Origin], doubt: Callable[[], None]) -> None:
    """Call `doubt` as described above, before anything is read through the new connection."""
    last: Origin | None = None
    lock = threading.Lock()

    @sa.event.listens_for(engine, "connect")
    def compare(driver: Any, _: object) -> None:
        nonlocal last
        origin = origin_of(driver)
        with lock:  # until it is reported, so that no other new connection is used before
            if origin != last:
                doubt()
            last = origin

    @sa.event.listens_for(engine, "invalidate")
    def broken(_: object, __: object, error: BaseException | None) -> None:
        if not isinstance(error, sa.exc.DisconnectionError):  # how `database` replaces old connections
            doubt()
