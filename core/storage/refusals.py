"""Refuses engines that speak the protocol of a database that we support, and break a promise in silence.

They are told by what they say of themselves. `promises` finds others by what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from core import errors

REFUSED: Final = {
    "TiDB": "SELECT … FOR UPDATE SKIP LOCKED locks nothing there, so two processes would take the same rows",
    "CockroachDB": "its advisory locks don't lock, and FOR UPDATE may lose a lock",
    "Vitess": "it checks unique keys only within a shard, and refuses to lock rows of several batches at a time",
    "SingleStore": "it checks unique keys only within a shard",
    "Citus with distributed tables": "it refuses to lock rows of several batches at a time",
}
"""By engine, the promise that it breaks."""
INSTEAD: Final = "use MariaDB, MySQL, OceanBase or PostgreSQL, without anything in between that changes statements"


def of_mysql(variables: dict[str, str]) -> str | None:
    """The refused engine with these variables, by name in lower case. `greeting` is the version that the server names
    when a connection begins."""
    version = " ".join(variables.get(name, "") for name in ("version", "version_comment", "greeting")).lower()
    if "tidb" in version:
        return "TiDB"
    if "vitess" in version:
        return "Vitess"
    if "memsql_version" in variables or "singlestore" in version:
        return "SingleStore"
    return None


def of_postgresql(version: str, *, is_distributed: bool) -> str | None:
    """The refused engine with this version. `is_distributed`: Citus has distributed one of our tables."""
    if "cockroachdb" in version.lower():
        return "CockroachDB"
    return "Citus with distributed tables" if is_distributed else None


def watch(engine: Engine, refused: Callable[[Any], str | None]) -> None:
    """Ask `refused` once, at the engine's first connection, before SQLAlchemy asks for the version: it may not be able
    to read it. The connection then raises `errors.Misconfigured`."""
    is_known = False

    @sa.event.listens_for(engine, "connect", insert=True)
    def ask(driver: Any, _: object) -> None:
        nonlocal is_known
        name = None if is_known else refused(driver)
        if name is not None:
            raise errors.Misconfigured(
                f"the database is {name}, on which Lastbit would break its promises: {REFUSED[name]}: {INSTEAD}"
            )
        is_known = True
