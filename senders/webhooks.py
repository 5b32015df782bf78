"""Sending webhooks: one POST, on a connection of its own, to an address that was judged.

Nothing is followed, nothing is remembered: no redirects, cookies, proxies of the environment, or connections that are
kept. The answer's body is read as far as a few kilobytes, to see whether it is whole, and thrown away.

What went wrong is said in words of our own. Those of the resolver and the socket may name addresses of our network.
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
from core.webhooks.subscriptions import Answer
from lastbit import __version__
from senders.connection import Deadline, Pinned

READ: Final = 4096
"""Bytes of an answer's body that are waited for."""
AGENT: Final = f"Lastbit/{__version__}"

Resolve = Callable[[str, int], Sequence[str]]
"""The addresses of a host. Raises `OSError`."""


def resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


class WebhookSender:
    """A `core.webhooks.subscriptions.Sender`. `timeout` is for all of a request, in seconds."""

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
        """Whether a webhook may lead there, as its host resolves now. Raises `Unfit`."""
        self._addresses(parse(url), Deadline(self._timeout))

    def send(self, url: str, headers: dict[str, str], body: bytes) -> Answer:
        """Raises nothing for what the network or the receiver does."""
        began = time.monotonic()
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
                said = {name.lower(): value for name, value in answer.headers}
                retry_after = _seconds(said.get(b"retry-after"), said.get(b"date"))
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
        return Answer(status, error, round((time.monotonic() - began) * 1000), retry_after)

    def _addresses(self, target: Target, deadline: Deadline) -> Sequence[str]:
        """All of them, each judged. Raises `Unfit`."""
        outcome: queue.SimpleQueue[Sequence[str] | None] = queue.SimpleQueue()

        def look_up() -> None:
            found: Sequence[str] | None = None
            with contextlib.suppress(OSError, UnicodeError):
                found = self._resolve(target.host, target.port)
            outcome.put(found)

        # The system's resolver has patience of its own, which is longer.
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
            return f"no whole answer within {self._timeout:g} s"
        if isinstance(cause, httpcore.ConnectError):
            return str(cause)  # ours, see `connection`
        if status is not None:
            return "the connection was closed in the middle of the answer"
        if isinstance(cause, httpcore.ProtocolError) and "disconnected" not in str(cause):
            return "the answer is not HTTP"
        return "the connection was closed before the answer"


def _url(target: Target) -> httpcore.URL:
    return httpcore.URL(
        scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path.encode()
    )


def _headers(target: Target, signed: dict[str, str]) -> list[tuple[str, str]]:
    own = {"Host": target.authority, "User-Agent": AGENT, "Content-Type": "application/json", "Accept": "*/*"}
    return [*own.items(), *signed.items(), ("Connection", "close")]


def _seconds(retry_after: bytes | None, sent: bytes | None) -> float | None:
    """Of a Retry-After header: seconds, or a date. None where it can't be read. A date is compared with the answer's
    own, so that a clock that is off on either side makes no difference."""
    if retry_after is None:
        return None
    text = retry_after.decode("ascii", "replace").strip()
    if text.isdecimal() and text.isascii():
        return float(text[:12])
    until = _date(text)
    if until is None:
        return None
    now = None if sent is None else _date(sent.decode("ascii", "replace"))
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())


def _date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC)
