"""A driver that uses only the standard library, for cluster executors, which have only this package's zip.

It opens a connection for each request. A Spark job sends few large requests, so that costs little. For many small
requests use `Client`, which has a connection pool. urllib takes proxies from the environment.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from lastbit import __version__
from lastbit._drivers import Driver
from lastbit._protocol import Answer, Failure, Request, Service, obstacle
from lastbit.retry import Retry

_AGENT = f"lastbit/{__version__} (urllib)"


@dataclass(frozen=True, slots=True)
class Connection:
    """The connection settings that are sent to executors. Each executor makes its own driver from them."""

    url: str
    token: str | None = field(repr=False)
    timeout: float
    retry: Retry

    @classmethod
    def named(
        cls, url: str | None = None, token: str | None = None, timeout: float = 30.0, retry: Retry | None = None
    ) -> Connection:
        """The settings for a service. By default, `url` and `token` come from LASTBIT_URL and LASTBIT_TOKEN of the
        calling process, Spark's driver, not of the executors."""
        service = Service.named(url, token, timeout, retry)
        return cls(service.url, service.token, service.timeout, service.retry)

    def driver(self) -> Driver:
        return Driver(Service(self.url, self.token, self.retry, self.timeout), _send)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: the service never redirects, and other servers must not receive the token."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def _send(request: Request) -> Answer | Failure:
    url = f"{request.url}?{urlencode(request.params)}" if request.params else request.url
    headers = {"user-agent": _AGENT, **request.headers}
    try:
        urllib_request = urllib.request.Request(url, data=request.body, headers=headers, method=request.method)  # noqa: S310  # base_url takes http and https alone
        with _opener.open(urllib_request, timeout=request.timeout) as answer:
            return _answer(answer.status, answer)
    except urllib.error.HTTPError as error:
        with error:
            try:
                return _answer(error.code, error)
            except (OSError, http.client.HTTPException) as read_error:
                return _failure(read_error, request)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _failure(error, request)


def _answer(status: int, answer: Any) -> Answer:
    return Answer(status, {name.lower(): value for name, value in answer.headers.items()}, answer.read())


def _failure(error: Exception, request: Request) -> Failure:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return Failure(f"no response within {request.timeout:g} s")
    lasting = isinstance(cause, ssl.SSLCertVerificationError | http.client.InvalidURL | ValueError)
    is_sent = not (lasting or isinstance(cause, ConnectionRefusedError | socket.gaierror))
    lasting = lasting and not isinstance(cause, ConnectionError)
    return Failure(str(cause) or type(cause).__name__, lasting, is_sent, obstacle(error))
