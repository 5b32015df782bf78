"""Sends the requests of a client with httpx. `_urllib` does so with the standard library alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from lastbit import __version__, errors
from lastbit._in_flight import LIMITS, InFlight, Trace
from lastbit._protocol import Answer, Failure, Request, obstacle
from lastbit._request_log import demoted

_AGENT = {"user-agent": f"lastbit/{__version__}"}


def pool(transport: httpx.BaseTransport | None) -> httpx.Client:
    """The connections of a `Client`. Raises `InvalidArgument`."""
    with _environment():
        return httpx.Client(transport=transport, headers=_AGENT, cookies=_no_cookies())


def async_pool(transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
    """The connections of an `AsyncClient`. Raises `InvalidArgument`."""
    with _environment():
        return httpx.AsyncClient(transport=transport, headers=_AGENT, cookies=_no_cookies(), limits=LIMITS)


def _no_cookies() -> CookieJar:
    """Reject all cookies. The service sets none, and an invalid one from a gateway would make every later request
    fail."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=()))


@contextmanager
def _environment() -> Iterator[None]:
    """httpx reads the names of proxies and certificates from the environment. Raises `InvalidArgument` if it can't use
    them."""
    try:
        yield
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        raise errors.InvalidArgument(
            f"a proxy or certificate that the environment names can't be used: {error} (see ALL_PROXY, HTTP_PROXY, "
            "HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE and SSL_CERT_DIR)"
        ) from error


def send(http: httpx.Client, request: Request) -> Answer | Failure:
    try:
        with demoted():
            return _answer(http.request(**_arguments(request)))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _failure(error, request)
    except RuntimeError:
        _require_open(http)
        raise


async def send_async(http: httpx.AsyncClient, in_flight: InFlight, request: Request) -> Answer | Failure:
    async def attempt(trace: Trace) -> httpx.Response:
        with demoted():
            return await http.request(**_arguments(request), extensions={"trace": trace})

    try:
        return _answer(await in_flight.run(attempt, request.timeout))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _failure(error, request)
    except RuntimeError:
        _require_open(http)
        raise


async def close_async(http: httpx.AsyncClient, in_flight: InFlight) -> None:
    try:
        await in_flight.close()
    finally:
        await http.aclose()


def _require_open(http: httpx.Client | httpx.AsyncClient) -> None:
    """Raises `ClientClosed`. httpx raises a bare `RuntimeError`, also for other causes."""
    if http.is_closed:
        raise errors.ClientClosed from None


def _answer(response: httpx.Response) -> Answer:
    return Answer(response.status_code, dict(response.headers), response.content)


def _failure(error: httpx.HTTPError | httpx.InvalidURL, request: Request) -> Failure:
    message = str(error)
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return Failure(f"no connection within {request.timeout:g} s", sent=False)
    if isinstance(error, httpx.TimeoutException):
        return Failure(f"no response within {request.timeout:g} s")
    lasting = isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError | httpx.InvalidURL)
    is_sent = not isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol | httpx.InvalidURL)
    lasting = lasting or "CERTIFICATE_VERIFY_FAILED" in message
    return Failure(message or type(error).__name__, lasting, is_sent, obstacle(error))


def _arguments(request: Request) -> dict[str, Any]:
    """The arguments of httpx's `request`."""
    return {
        "method": request.method,
        "url": request.url,
        "params": request.params,
        "headers": dict(request.headers),
        "content": request.body,
        "timeout": request.timeout,
    }
