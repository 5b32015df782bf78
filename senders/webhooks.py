"""Sends webhooks: one POST on its own connection, to an address that was checked.

It follows no redirects, uses no cookies and no proxies from the environment, and keeps no connections open. At most a
few kilobytes of the response's body are read, to check whether it is complete, and discarded.

Error texts are our own, because those of the resolver and the socket may contain addresses of our network.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

import httpcore

from core.webhooks.addresses import NOT_PUBLIC, Target, Unfit, is_public, parse
from core.webhooks.sender import SendResult
from lastbit import __version__
from senders.connection import Deadline, Pinned

READ: Final = 4096
"""Maximum bytes of a response's body to read."""
AGENT: Final = f"Lastbit/{__version__}"

Resolve = Callable[[str, int], Sequence[str]]
"""The addresses of a host. Raises `OSError`."""


def resolve(host: str, port: int) -> list[str]:
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(result[4][0]) for result in results))


class WebhookSender:
    """A `core.webhooks.sender.Sender`. `timeout` limits the whole request, in seconds."""

    def __init__(
        self,
        *,
        timeout: float = 15.0,
        allow_private: bool = False,
        resolve: Resolve = resolve,
        certificates: ssl.SSLContext | None = None,
    ) -> None:
        self._timeout = timeout
        self._allow_private = allow_private
        self._resolve = resolve
        self._certificates = certificates or ssl.create_default_context()

    def check(self, url: str) -> None:
        """Check the URL and the addresses that its host resolves to now. Raises `Unfit`."""
        self._addresses(parse(url), Deadline(self._timeout))

    def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        """POST `body`. The `SendResult` contains errors of the network or the receiver."""
        start = time.monotonic()
        status: int | None = None
        error: str | None = None
        retry_after: float | None = None
        try:
            deadline = Deadline(self._timeout)
            target = parse(url)
            addresses = self._addresses(target, deadline)
            with (
                httpcore.ConnectionPool(
                    ssl_context=self._certificates, network_backend=Pinned(addresses, deadline), max_connections=1
                ) as pool,
                pool.stream("POST", _url(target), headers=_headers(target, headers), content=body) as answer,
            ):
                status = answer.status
                received_headers = {name.lower(): value for name, value in answer.headers}
                retry_after = _seconds(received_headers.get(b"retry-after"), received_headers.get(b"date"))
                size = 0
                for part in answer.iter_stream():
                    size += len(part)
                    if size >= READ:
                        break
        except Unfit as cause:
            error = f"not sent: {cause}"
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as cause:
            error = self._words(cause, status)
        if error is None and status is not None and 300 <= status < 400:
            error = "a redirect, which is not followed"
        return SendResult(status, error, round((time.monotonic() - start) * 1000), retry_after)

    def _addresses(self, target: Target, deadline: Deadline) -> Sequence[str]:
        """All addresses of the host, each checked. Raises `Unfit`."""
        outcome: queue.SimpleQueue[Sequence[str] | None] = queue.SimpleQueue()

        def look_up() -> None:
            addresses: Sequence[str] | None = None
            with contextlib.suppress(OSError, UnicodeError):
                addresses = self._resolve(target.host, target.port)
            outcome.put(addresses)

        # In a thread, as the time-out of the system's resolver is longer and can't be changed.
        threading.Thread(target=look_up, daemon=True).start()
        try:
            addresses = outcome.get(timeout=deadline.left())
        except queue.Empty:
            addresses = None
        if not addresses:
            raise Unfit("the host can't be resolved")
        if not self._allow_private and not all(map(is_public, addresses)):
            raise Unfit(f"the host is {NOT_PUBLIC}")
        return addresses

    def _words(self, cause: Exception, status: int | None) -> str:
        if isinstance(cause, httpcore.TimeoutException):
            return f"no complete response within {self._timeout:g} s"
        if isinstance(cause, httpcore.ConnectError):
            return str(cause)  # our own text, see `connection`
        if status is not None:
            return "the connection was closed in the middle of the response"
        if isinstance(cause, httpcore.ProtocolError) and "disconnected" not in str(cause):
            return "the response is not HTTP"
        return "the connection was closed before the response"


def _url(target: Target) -> httpcore.URL:
    return httpcore.URL(
        scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path.encode()
    )


def _headers(target: Target, signature_headers: dict[str, str]) -> list[tuple[str, str]]:
    own_headers = {"Host": target.authority, "User-Agent": AGENT, "Content-Type": "application/json", "Accept": "*/*"}
    return [*own_headers.items(), *signature_headers.items(), ("Connection", "close")]


def _seconds(retry_after: bytes | None, sent_at: bytes | None) -> float | None:
    """The seconds in a Retry-After header, which contains seconds or a date. None if it can't be parsed. A date is
    compared with the response's own Date, so that a wrong clock on either side makes no difference."""
    if retry_after is None:
        return None
    text = retry_after.decode("ascii", "replace").strip()
    if text.isdecimal() and text.isascii():
        return float(text[:12])
    until = _date(text)
    if until is None:
        return None
    now = None if sent_at is None else _date(sent_at.decode("ascii", "replace"))
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())


def _date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC)
