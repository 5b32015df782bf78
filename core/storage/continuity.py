"""Detects that a connection may lead to another database, or to an older state of this one. Caches are then invalid.

After an outage, a database may lack commits: it was restored from a backup, its machine crashed before its disk was
flushed, or a replica that lagged behind took over. Its rows don't show that. So all cached data is in doubt

* when a connection breaks, or is discarded because its server is read-only or not in its cluster;
* when a new connection leads to another server, another file, or the same server after a restart. This check is needed
  because connections that are replaced for their age don't break, even if the server was restarted.

Another connection to the same server, not restarted since, raises no doubt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine

Origin = tuple[Any, ...]
"""Identifies the server or file behind a connection."""


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
