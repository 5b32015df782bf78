"""Lastbit without a service: the whole client on a database of your own, in your own process.

    from lastbit.embedded import Lastbit

    lastbit = Lastbit("postgresql://app@db/app")
    lastbit.migrate()
    client = lastbit.client()

`import lastbit` loads nothing of it, and the modules of the service are loaded when a `Lastbit` is made.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Any, Final, Self

from lastbit import errors
from lastbit._drivers import AsyncDriver, Driver, unpicklable
from lastbit._protocol import seconds
from lastbit._server import program
from lastbit.client import AsyncClient, Client
from lastbit.embedded._sending import EmbeddedService, Sender
from lastbit.embedded._urls import url_of
from lastbit.retry import Retry

__all__ = ["Lastbit"]

_all: Final[weakref.WeakSet[Lastbit]] = weakref.WeakSet()
_inherited: Final[list[Any]] = []
"""What answered calls in a parent process. It must not be closed here, nor be garbage: the connections are the
parent's."""


class Lastbit:
    """Lastbit on a database, without a service.

    `database`: a URL such as `postgresql://user@host/app`, `mysql://user@host/app` or `sqlite:///app.db`, or an
    engine of SQLAlchemy, of which only the URL is used: Lastbit has connections of its own, at most `connections` in
    each process. It connects when it is first used. Make one per process and share it between threads; a forked child
    makes its own connections. Raises `InvalidArgument`, and `MissingExtra` without `pip install 'lastbit[embedded]'`.

    Only what you call runs: no webhook is sent, no batch expires and no deadline passes unless the jobs of
    `lastbit-server` run on the same database.
    """

    def __init__(self, database: object, *, connections: int = 10) -> None:
        if not isinstance(connections, int) or isinstance(connections, bool) or connections < 1:
            raise errors.InvalidArgument(f"connections is a whole number above 0, not {connections!r}")
        self._in_process = program("api.in_process")
        url = url_of(database)
        self._url: str = url.render_as_string(hide_password=False)
        shown = url.set(drivername=url.get_backend_name(), query={})  # a query may have passwords too
        self._shown: str = shown.render_as_string().replace(":***@", "@")
        self._connections = connections
        self._lock = threading.Lock()
        self._running: Any = None
        self._is_closed = False
        self._paused: list[Any] = []
        """What is paused while this process forks, once for each thread that does."""
        self._is_forkable = True
        self._is_lost = False
        """Whether this process was forked during a transaction on a file that did not end."""
        _all.add(self)
        self._start()  # so that an unsupported database is refused here; it doesn't connect

    __reduce__ = unpicklable

    @property
    def url(self) -> str:
        """`embedded:` and the database's URL without its password, as clients show it."""
        return f"embedded:{self._shown}"

    def migrate(self) -> None:
        """Create the schema, or update that of an earlier release, as `lastbit-server migrate` does. Raises
        `DatabaseUnreachable`, `SchemaMismatch`."""
        core, running = program("core.errors"), self._answering()
        try:
            running.migrate()
        except core.Unavailable as error:
            cause = running.explain(error)
            raise errors.DatabaseUnreachable(self.url, "migrate", cause, 1, 0.0, sent=False) from error
        except core.Misconfigured as error:
            raise errors.SchemaMismatch(str(error)) from error

    def client(self, *, timeout: float = 30.0, retry: Retry | None = None) -> Client:
        """A client whose calls are carried out in this process. It has all methods of a `Client`, with the same errors.
        Calls raise `DatabaseUnreachable` for `ServiceUnreachable`, and `SchemaMismatch` before `migrate`."""
        service = self._service(timeout, retry)
        sender = Sender(self._answering, service)
        return Client.over(Driver(service, sender.send), sender.close)

    def async_client(self, *, timeout: float = 30.0, retry: Retry | None = None) -> AsyncClient:
        """As `client`, for the tasks of an event loop. The calls are carried out in threads."""
        service = self._service(timeout, retry)
        sender = Sender(self._answering, service)
        return AsyncClient.over(AsyncDriver(service, sender.send_async), sender.close_async)

    def close(self) -> None:
        """Finish the calls in progress, and close the connections. Later calls raise `ClientClosed`. Long polls end at
        once."""
        with self._lock:
            self._is_closed = True
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    def _service(self, timeout: float, retry: Retry | None) -> EmbeddedService:
        return EmbeddedService(self.url, retry=retry or Retry(), timeout=seconds("a timeout", timeout))

    def _answering(self) -> Any:
        """What answers the calls of this process. Raises `ClientClosed`."""
        return self._running or self._start()

    def _start(self) -> Any:
        with self._lock:
            if self._is_closed:
                raise errors.ClientClosed
            if self._is_lost:
                raise errors.UsedAfterFork("this Lastbit")
            if self._running is None:
                try:
                    self._running = self._in_process.InProcess(self._url, connections=self._connections)
                except program("core.errors").Misconfigured as error:
                    raise errors.InvalidArgument(str(error)) from error
            return self._running

    def _pause(self) -> None:
        """Before a fork."""
        running = self._running
        self._paused.append(running)
        self._is_forkable = running is None or running.database.pause()

    def _resume(self) -> None:
        """After it, in the parent."""
        paused = self._paused.pop() if self._paused else None  # empty if it was made during the fork
        if paused is not None:
            paused.database.resume()

    def _leave_to_parent(self) -> None:
        """After it, in the child: forget the connections and threads, and a lock that another thread may hold."""
        self._lock = threading.Lock()
        _inherited.append(self._running)
        self._running = None
        self._paused = []
        self._is_lost = self._is_lost or not self._is_forkable


def _before_a_fork() -> None:
    for lastbit in list(_all):
        lastbit._pause()


def _in_parent() -> None:
    for lastbit in list(_all):
        lastbit._resume()


def _in_child() -> None:
    for lastbit in list(_all):
        lastbit._leave_to_parent()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(before=_before_a_fork, after_in_parent=_in_parent, after_in_child=_in_child)
