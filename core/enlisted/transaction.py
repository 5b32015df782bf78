"""A caller's transaction, as core's statements need it.

The connection is the caller's, with a session that it has set up in its own way: the search path, the time zone, the
SQL mode, the kind of rows. So tables are named with their schema, statements depend on no setting, and none is changed.
Each statement is sent by itself. An error of the driver goes to the caller as it is, and nothing is tried again: only
the caller can repeat its transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from core.storage.dialects import Rows, of_callers


class _Dialect(NamedTuple):
    """The part of SQLAlchemy's that core's statements need."""

    name: str
    is_mariadb: bool


class Transaction:
    """Passed to core's functions in place of a `Connection`, but only to those that execute nothing but text. `execute`
    executes statements and returns the rows of each, as tuples. `schema` is where the tables are; None: where the
    connection looks first."""

    def __init__(
        self,
        backend: str,
        execute: Callable[[Sequence[str]], list[Rows]],
        schema: str | None = None,
        *,
        is_mariadb: bool = False,
    ) -> None:
        self.dialect: Final = _Dialect(of_callers(backend), is_mariadb)
        self.info: Final[dict[str, Any]] = {}
        self.execute: Final = execute
        self.schema: Final = schema
