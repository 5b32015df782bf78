"""Lastbit without a service: the whole client on a database of your own, in your own process.

    from lastbit.embedded import Lastbit

    lastbit = Lastbit("postgresql://app@db/app")
    lastbit.migrate()
    client = lastbit.client()

`import lastbit` loads nothing of it, and the modules of the service are loaded when a `Lastbit` is made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Self, Unpack, overload

from lastbit import _calls, errors
from lastbit._calls import Ids
from lastbit._drivers import AsyncDriver, Driver, unpicklable
from lastbit._protocol import seconds
from lastbit._server import program
from lastbit.batch import AsyncBatchHandle, BatchHandle
from lastbit.client import AsyncClient, Client
from lastbit.embedded import _transactions
from lastbit.embedded._beginnings import Begin, beginning, engine_of, of_django
from lastbit.embedded._sending import EmbeddedService, Sender
from lastbit.embedded._transactions import NEVER_AGAIN, AsyncEffect, Effect, Enlisted, in_sync
from lastbit.embedded._urls import url_of
from lastbit.ids import ItemId, ItemIds
from lastbit.models import AckResult, Opened, OpenOptions
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

    `schema`: where Lastbit's tables are, a schema of PostgreSQL or another database of MariaDB's or MySQL's server.
    Without it they are beside yours.

    Only what you call runs: no webhook is sent, no batch expires and no deadline passes unless the jobs of
    `lastbit-server` run on the same database.
    """

    def __init__(self, database: object, *, schema: str | None = None, connections: int = 10) -> None:
        if not isinstance(connections, int) or isinstance(connections, bool) or connections < 1:
            raise errors.InvalidArgument(f"connections is a whole number above 0, not {connections!r}")
        self._in_process = program("api.in_process")
        url = url_of(database)
        self._url: str = url.render_as_string(hide_password=False)
        shown = url.set(drivername=url.get_backend_name(), query={})  # a query may have passwords too
        self._shown: str = shown.render_as_string().replace(":***@", "@")
        self._connections = connections
        self._schema = schema
        self._begin: Begin | None = None
        """How `once` begins a transaction."""
        if hasattr(database, "begin") and not hasattr(database, "sync_engine"):
            self._begin = beginning(database)
        self._lock = threading.Lock()
        self._running: Any = None
        self._is_closed = False
        self._paused: list[Any] = []
        """The databases that are paused while this process forks; one entry for each thread that forks."""
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

    def migrate(self, *, ids: str | None = None) -> None:
        """Create the schema, or update that of an earlier release, as `lastbit-server migrate` does. `ids`: of several
        Lastbits side by side, the ids of this one's batches, chosen when the database is empty; `3/16` for those that
        leave 3 when they are divided by 16. Raises `DatabaseUnreachable`; `SchemaMismatch`, also if the database has
        other ids; `InvalidArgument`."""
        running = self._answering()
        try:
            numbering = None if ids is None else program("core.storage.numbering").Numbering.parse(ids)
        except program("core.errors").Misconfigured as error:
            raise errors.InvalidArgument(str(error)) from None
        with self._named(running, "migrate"):
            running.migrate(numbering)

    @contextlib.contextmanager
    def _named(self, running: Any, call: str) -> Iterator[None]:
        """Raises the errors of the database and its schema as this package's."""
        core = program("core.errors")
        try:
            yield
        except core.Unavailable as error:
            cause = running.explain(error)
            raise errors.DatabaseUnreachable(self.url, call, cause, 1, 0.0, sent=False) from error
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

    @classmethod
    def from_django(cls, alias: str = "default", *, schema: str | None = None, connections: int = 10) -> Self:
        """Lastbit on a database of Django's settings. `once` then begins `transaction.atomic`. Raises
        `InvalidArgument`."""
        url, begin = of_django(alias)
        lastbit = cls(url, schema=schema, connections=connections)
        lastbit._begin = begin
        return lastbit

    # In a transaction of the caller. Each `tx` is a Connection or Session of SQLAlchemy, a connection of Django in
    # `transaction.atomic`, or a connection of psycopg, psycopg2, PyMySQL, mysqlclient or sqlite3.

    def ack(self, tx: object, ids: Ids) -> AckResult:
        """Ack items in your transaction: they are acked if and only if you commit it. The result tells what was
        applied; its `completed` is empty, as what becomes of the batch is known after the commit. Of two transactions
        that ack one item, the second waits for the end of the first. Raises `MalformedItem`, `InvalidArgument`, and
        the errors of your driver, as they are."""
        return self._enlist(tx).resolve("acks", ids, None)

    def fail(self, tx: object, ids: Ids, reason: str | None = None) -> AckResult:
        """Mark items as failed in your transaction; otherwise like `ack`."""
        return self._enlist(tx).resolve("failures", ids, reason)

    def skip(self, tx: object, ids: Ids, reason: str | None = None) -> AckResult:
        """Mark items as not needed in your transaction; otherwise like `ack`."""
        return self._enlist(tx).resolve("skips", ids, reason)

    def open(self, tx: object, *, idempotency_key: str | None = None, **options: Unpack[OpenOptions]) -> BatchHandle:
        """Open a batch in your transaction: it exists if and only if you commit it. Its ids can be used at once. The
        options are those of `Client.open`, without `parent`. The handle's own methods work after the commit. Raises
        what `Client.open` does, `InvalidArgument`, and the errors of your driver."""
        result, replayed = self._open(tx, options, idempotency_key)
        return BatchHandle(self.client().driver, result.id, result, replayed)

    def _open(self, tx: object, options: OpenOptions, idempotency_key: str | None) -> tuple[Opened, bool]:
        return self._enlist(tx).driver.run(_calls.open_batch, options, idempotency_key)

    def extend(
        self,
        tx: object,
        batch: int,
        count: int,
        *,
        by: str | ItemId | None = None,
        idempotency_key: str | None = None,
    ) -> ItemIds:
        """Issue `count` more ids of a batch in your transaction. Unless it has also opened the batch, nobody can count
        items of the batch until you commit: do it last. `by` and `idempotency_key` are those of `BatchHandle.extend`.
        Raises what that does, `InvalidArgument`, and the errors of your driver."""
        return self._enlist(tx).driver.run(_calls.extend, batch, count, idempotency_key, None, by).ids

    def seal(self, tx: object, batch: int) -> None:
        """Seal a batch when you commit your transaction. If it has ended by then, it stays as it is. Raises
        `BatchNotFound`, `BatchEnded`, `InvalidArgument`, and the errors of your driver."""
        self._enlist(tx).seal(batch)

    @overload
    def once(self, item: str | ItemId, effect: Effect, *, using: object = None) -> AckResult: ...
    @overload
    def once(self, item: Callable[..., object], *, using: object = None) -> Callable[..., AckResult]: ...
    def once(self, item: Any, effect: Effect | None = None, *, using: object = None) -> Any:
        """Have an effect exactly once for an item: run `effect(tx)`, ack the item, and commit, in one transaction. If
        the item is acked already, or can't be, the effect leaves nothing: `applied` of the result is 0. The result also
        tells which batches are complete.

        `effect` writes with `tx` alone, which is a connection of the engine, or of Django, that Lastbit was made with.
        `using`: another engine or sessionmaker of SQLAlchemy, or a driver's connection without a transaction. An error
        of `effect`, or of the driver, rolls back and is raised as it is: send the message again. Nothing is tried
        again here. What `effect` does outside the database, such as a mail, may happen again.

        As a decorator, `@lastbit.once`, it makes a function whose first argument is the item, and passes the others on
        after `tx`. Raises `MalformedItem`, `InvalidArgument`."""
        if effect is None:
            return self._once_each(item, using)
        return _transactions.once(self._enlist, item, effect, self._beginning(using))

    # The same for `AsyncConnection`, `AsyncSession` and `AsyncEngine` of SQLAlchemy.

    async def async_ack(self, tx: Any, ids: Ids) -> AckResult:
        """`ack`, awaited."""
        return await in_sync(tx, lambda connection: self.ack(connection, ids))

    async def async_fail(self, tx: Any, ids: Ids, reason: str | None = None) -> AckResult:
        """`fail`, awaited."""
        return await in_sync(tx, lambda connection: self.fail(connection, ids, reason))

    async def async_skip(self, tx: Any, ids: Ids, reason: str | None = None) -> AckResult:
        """`skip`, awaited."""
        return await in_sync(tx, lambda connection: self.skip(connection, ids, reason))

    async def async_open(
        self, tx: Any, *, idempotency_key: str | None = None, **options: Unpack[OpenOptions]
    ) -> AsyncBatchHandle:
        """`open`, awaited."""
        result, replayed = await in_sync(tx, lambda connection: self._open(connection, options, idempotency_key))
        return AsyncBatchHandle(self.async_client().driver, result.id, result, replayed)

    async def async_extend(
        self,
        tx: Any,
        batch: int,
        count: int,
        *,
        by: str | ItemId | None = None,
        idempotency_key: str | None = None,
    ) -> ItemIds:
        """`extend`, awaited."""
        return await in_sync(
            tx, lambda connection: self.extend(connection, batch, count, by=by, idempotency_key=idempotency_key)
        )

    async def async_seal(self, tx: Any, batch: int) -> None:
        """`seal`, awaited."""
        await in_sync(tx, lambda connection: self.seal(connection, batch))

    async def async_once(self, item: str | ItemId, effect: AsyncEffect, *, using: Any) -> AckResult:
        """`once`, awaited. `using`: an `AsyncEngine` or an `async_sessionmaker` of SQLAlchemy."""
        return await _transactions.once_async(self._enlist, item, effect, using.begin)

    def _once_each(self, function: Callable[..., object], using: object) -> Callable[..., AckResult]:
        if not callable(function):
            raise errors.InvalidArgument("once needs an item and an effect, or as a decorator a function")

        @functools.wraps(function)
        def call(item: str | ItemId, *arguments: Any, **options: Any) -> AckResult:
            return _transactions.once(
                self._enlist, item, lambda tx: function(tx, *arguments, **options), self._beginning(using)
            )

        return call

    def _beginning(self, using: object) -> Begin:
        if using is not None:
            return beginning(using)
        if self._begin is None:
            self._begin = engine_of(import_module("sqlalchemy").make_url(self._url), self._connections).begin
        return self._begin

    def _enlist(self, tx: object) -> Enlisted:
        running = self._answering()
        with self._named(running, "a call in a transaction"):
            running.check_schema()
        service = EmbeddedService(self.url, retry=NEVER_AGAIN, timeout=30.0)
        return Enlisted(running, service, tx)

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
                    self._running = self._in_process.InProcess(
                        self._url, schema_name=self._schema, connections=self._connections
                    )
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
