"""Sends the requests of a client to the service's code in this process, as `_httpx` sends them to a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlencode

from lastbit import errors
from lastbit._protocol import Answer, Failure, Request, Service
from lastbit._server import program


@dataclass(frozen=True, slots=True)
class EmbeddedService(Service):
    """The service in this process. Its `url` names the database."""

    unreachable: ClassVar[type[errors.ServiceUnreachable]] = errors.DatabaseUnreachable


class Sender:
    """Sends the requests of one client. `running` gives what answers them in the calling process, or raises
    `ClientClosed`."""

    def __init__(self, running: Callable[[], Any], service: Service) -> None:
        self._running = running
        self._request = program("api.in_process").Request
        self._prefix = len(service.url)
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True

    async def close_async(self) -> None:
        self._is_closed = True

    def send(self, request: Request) -> Answer | Failure:
        running = self._answering()
        try:
            return _answer(running.request(self._in_process(request), request.timeout))
        except _expected() as error:
            return _failure(error, running, request)

    async def send_async(self, request: Request) -> Answer | Failure:
        running = self._answering()
        try:
            return _answer(await running.request_async(self._in_process(request), request.timeout))
        except _expected() as error:
            return _failure(error, running, request)

    def _answering(self) -> Any:
        if self._is_closed:
            raise errors.ClientClosed
        return self._running()

    def _in_process(self, request: Request) -> Any:
        target = request.url[self._prefix :]
        if request.params:
            target = f"{target}?{urlencode(request.params)}"
        return self._request(request.method, target, request.headers, request.body or b"")


def _answer(response: Any) -> Answer:
    return Answer(response.status, response.headers, response.content)


def _expected() -> tuple[type[Exception], ...]:
    """The errors of requests that have no response."""
    in_process, core = program("api.in_process"), program("core.errors")
    return in_process.Closed, in_process.TimedOut, core.Misconfigured, core.Unavailable


def _failure(error: Exception, running: Any, request: Request) -> Failure:
    """What became of a request that has no response. Raises `ClientClosed`, `SchemaMismatch`."""
    in_process, core = program("api.in_process"), program("core.errors")
    if isinstance(error, in_process.Closed):
        raise errors.ClientClosed from None
    if isinstance(error, in_process.TimedOut):
        return Failure(f"no answer within {request.timeout:g} s")
    if isinstance(error, core.Misconfigured):
        raise errors.SchemaMismatch(str(error)) from None
    return Failure(running.explain(error), sent=isinstance(error, core.OutcomeUnknown))
