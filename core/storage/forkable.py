"""A database in a process that may fork while threads use it.

SQLite keeps, for the whole process, what its connections have locked of a file. A child inherits that without the locks
themselves: it would wait forever for a transaction of its parent, and its parent could remove the log that the child
writes to. So while a process forks, none of its threads is in a transaction, and all connections to a file are closed.
Connections to a server are sockets, which the child leaves alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar, TypeVarTuple, Unpack

from sqlalchemy.engine import Connection

from core.storage.database import Database

PATIENCE: Final = 30.0
"""Maximum seconds that a fork waits for transactions."""

T = TypeVar("T")
Args = TypeVarTuple("Args")


class ForkableDatabase(Database):
    def __init__(self, url: str, *, schema: str | None = None, connections: int) -> None:
        super().__init__(url, schema=schema, connections=connections)
        self._changed = threading.Condition()
        self._forks = 0
        """The number of threads that are forking."""
        self._users = 0
        """The number of threads in a transaction."""
        self._mine = threading.local()

    def pause(self) -> bool:
        """Before a fork: let no thread begin, wait for those in a transaction, and close the connections to a file.
        Returns whether a child may use the database."""
        with self._changed:
            self._forks += 1
            is_quiet = self._changed.wait_for(lambda: not self._users, PATIENCE)
        if is_quiet and self.is_embedded:
            self.engine.dispose()
        return is_quiet or not self.is_embedded

    def resume(self) -> None:
        """In the parent, after `pause` and the fork."""
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def write(
        self,
        work: Callable[[Connection, Unpack[Args]], T],
        *args: *Args,
        lock_waits: int = 4,
        lock_wait: float | None = None,
    ) -> T:
        with self._in_use():
            return super().write(work, *args, lock_waits=lock_waits, lock_wait=lock_wait)

    def _reading(self, first: str, work: Callable[[Connection, Unpack[Args]], T], *args: *Args) -> T:
        with self._in_use():
            return super()._reading(first, work, *args)

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        with self._in_use(), super().connection() as connection:
            yield connection

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        if getattr(self._mine, "is_user", False):
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self._users += 1
        self._mine.is_user = True
        try:
            yield
        finally:
            self._mine.is_user = False
            with self._changed:
                self._users -= 1
                if not self._users:
                    self._changed.notify_all()
