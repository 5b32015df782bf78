"""Calls in transactions of callers, and `once`: an effect and its ack in one transaction."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from lastbit import _calls, _masks, errors
from lastbit._drivers import Driver
from lastbit._protocol import Answer, Failure, Request, Service
from lastbit._server import program
from lastbit.embedded._connections import caller_of
from lastbit.ids import ItemId
from lastbit.models import AckResult
from lastbit.retry import Retry

T = TypeVar("T")

Effect = Callable[[Any], object]
"""Gets the transaction: a connection as the caller's code uses it elsewhere."""
AsyncEffect = Callable[[Any], Awaitable[object]]
NEVER_AGAIN: Final = Retry(attempts=1)


class _Undo(Exception):  # leaves the block of a transaction, which rolls it back; never leaves this module
    """The item was resolved by somebody else, or can't be."""


class Enlisted:
    """The calls of one transaction of a caller. `service`: for the requests; `running`: what carries them out."""

    def __init__(self, running: Any, service: Service, connection: Any) -> None:
        caller = caller_of(connection)
        _check_database(caller.backend, caller.database, running.database)
        transaction = program("core.enlisted.transaction").Transaction(
            caller.backend, caller.execute, _schema_of(running.database), is_mariadb=caller.is_mariadb
        )
        self._enlisting = program("api.in_transaction").Enlisting(running.service, transaction)
        self._prefix = len(service.url)
        self.driver: Final = Driver(service, self._send)

    def resolve(self, verb: str, ids: _calls.Ids, reason: str | None) -> AckResult:
        return self.driver.run(_calls.resolve, verb, _masks.pieces(ids), reason)

    def seal(self, batch: int) -> None:
        self.driver.run(lambda service: service.call("POST", f"/v1/batches/{batch}/seal", body={}))

    def is_resolved(self, item: str) -> bool:
        answer = self.driver.run(lambda service: service.call("GET", item))
        return bool(json.loads(answer.body))

    def settled(self) -> AckResult:
        """After the commit."""
        return AckResult.from_json(json.loads(self._enlisting.settled()))

    def _send(self, request: Request) -> Answer | Failure:
        in_process, core = program("api.in_process"), program("core.errors")
        target = request.url[self._prefix :]
        try:
            answer = self._enlisting.request(
                in_process.Request(request.method, target, request.headers, request.body or b"")
            )
        except core.Misconfigured as error:
            raise errors.InvalidArgument(str(error)) from None
        except core.Unavailable as error:
            return Failure(str(error), sent=False)
        return Answer(answer.status, answer.headers, answer.content)


def _schema_of(database: Any) -> str | None:
    """The schema with which a caller's statements name tables. On MariaDB the connection may be one to any database."""
    name: str | None = database.url.database if database.url.get_backend_name() == "mysql" else database.schema
    return name


def _check_database(backend: str, name: str | None, database: Any) -> None:
    """Raise `InvalidArgument` for a connection to another database than Lastbit's."""
    own = database.url.get_backend_name()
    kinds = {"mariadb": "mysql"}
    if kinds.get(backend, backend) != kinds.get(own, own):
        raise errors.InvalidArgument(f"this connection is one to {backend}, but Lastbit's database is {own}")
    if own != "postgresql" or name is None or name == database.url.database:
        return
    raise errors.InvalidArgument(
        f"this connection is one to the database {name!r}, but Lastbit's tables are in {database.url.database!r}"
    )


def once(enlist: Callable[[Any], Enlisted], item: str | ItemId, effect: Effect, begin: Callable[[], Any]) -> AckResult:
    """Run the effect and ack the item in one transaction, which `begin` begins: a context manager that commits. If the
    item is acked already, or can't be, nothing of the effect remains."""
    text = _masks.checked(item)
    enlisted: Enlisted | None = None
    with contextlib.suppress(_Undo), begin() as connection:
        enlisted = enlist(connection)
        if not enlisted.is_resolved(text):
            effect(connection)
        result = enlisted.resolve("acks", text, None)
        if not result.applied:
            raise _Undo
    return _known(enlisted).settled()


async def in_sync(connection: Any, call: Callable[[Any], T]) -> T:
    """Call with the synchronous form of an asynchronous connection, in which the driver's calls are awaited. Raises
    `InvalidArgument`."""
    if not hasattr(connection, "run_sync"):
        raise errors.InvalidArgument(
            f"expected an AsyncConnection or AsyncSession of SQLAlchemy, got {type(connection).__name__}"
        )
    result: T = await connection.run_sync(call)
    return result


async def once_async(
    enlist: Callable[[Any], Enlisted], item: str | ItemId, effect: AsyncEffect, begin: Callable[[], Any]
) -> AckResult:
    """`once`, awaited."""
    import asyncio

    text = _masks.checked(item)
    enlisted: Enlisted | None = None
    with contextlib.suppress(_Undo):
        async with begin() as connection:
            enlisted = await in_sync(connection, enlist)
            if not await in_sync(connection, lambda _: _known(enlisted).is_resolved(text)):
                await effect(connection)
            result = await in_sync(connection, lambda _: _known(enlisted).resolve("acks", text, None))
            if not result.applied:
                raise _Undo
    return await asyncio.to_thread(_known(enlisted).settled)


def _known(enlisted: Enlisted | None) -> Enlisted:
    assert enlisted is not None
    return enlisted
