"""The standard library's driver of the flows: for executors of a cluster, where this package's zip is all there is.

It opens a connection for each request. The requests of a Spark job are few and large, so that costs little; who sends
many small ones uses `Client`, which keeps a pool. Proxies are taken from the environment, as urllib does.
"""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlencode

from lastbit import __version__
from lastbit._protocol import Answer, Emit, Failure, Flow, Outcome, Pause, Request, Service
from lastbit.retry import Retry

T = TypeVar("T")

_AGENT = f"lastbit/{__version__} (urllib)"


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach the service, as it travels to executors: each makes a `service` of its own from it."""

    url: str
    token: str | None = field(repr=False)
    timeout: float
    retry: Retry

    @classmethod
    def named(
        cls, url: str | None = None, token: str | None = None, timeout: float = 30.0, retry: Retry | None = None
    ) -> Connection:
        """What is None is taken from LASTBIT_URL and LASTBIT_TOKEN, here and not on the executors. Raises
        `InvalidArgument`."""
        service = Service.named(url, token, timeout, retry)
        return cls(service.url, service.token, service.timeout, service.retry)

    def service(self) -> Service:
        return Service(self.url, self.token, self.retry, self.timeout)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The service never redirects; whatever does must not be sent the token."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def run(flow: Flow[T], emit: Callable[[Any], object] | None = None) -> T:
    """Drive a flow to its end and return its value; what it emits on the way is handed to `emit`."""
    outcome: Outcome = None
    while True:
        try:
            step = flow.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result
        outcome = None
        if isinstance(step, Request):
            outcome = _send(step)
        elif isinstance(step, Pause):
            time.sleep(step.seconds)
        elif emit is not None:
            emit(step.value)


def iterate(flow: Flow[None]) -> Iterator[Any]:
    """What a flow emits, as it is asked for."""
    outcome: Outcome = None
    while True:
        try:
            step = flow.send(outcome)
        except StopIteration:
            return
        outcome = None
        if isinstance(step, Request):
            outcome = _send(step)
        elif isinstance(step, Pause):
            time.sleep(step.seconds)
        else:
            assert isinstance(step, Emit)
            yield step.value


def _send(request: Request) -> Answer | Failure:
    url = f"{request.url}?{urlencode(request.params)}" if request.params else request.url
    headers = {"user-agent": _AGENT, **request.headers}
    try:
        asked = urllib.request.Request(url, data=request.body, headers=headers, method=request.method)  # noqa: S310  # base_url takes http and https alone
        with _opener.open(asked, timeout=request.timeout) as answer:
            return _answer(answer.status, answer)
    except urllib.error.HTTPError as error:
        with error:
            try:
                return _answer(error.code, error)
            except (OSError, http.client.HTTPException) as cut:
                return _failure(cut, request)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _failure(error, request)


def _answer(status: int, answer: Any) -> Answer:
    return Answer(status, {name.lower(): value for name, value in answer.headers.items()}, answer.read())


def _failure(error: Exception, request: Request) -> Failure:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return Failure(f"nothing came within {request.timeout:g} s")
    lasting = isinstance(cause, ssl.SSLCertVerificationError | http.client.InvalidURL | ValueError)
    return Failure(str(cause) or type(cause).__name__, lasting and not isinstance(cause, ConnectionError))
