"""Sends webhooks: one POST, over a connection to an address that was checked.

It follows no redirects, uses no cookies and no proxies from the environment. At most a few kilobytes of the response's
body are read, to check whether it is complete, and discarded.

Each send looks up the host, for at most `LOOKUP` seconds, and checks every address. It uses a connection that is still
open only if that leads to one of them. A receiver may close such a connection at any time. If it does so before any
part of a response, the request is sent again at once, over a new connection: the receiver has either not seen it or
recognizes the repeat by its id.

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

import h11
import structlog

from core.webhooks.addresses import NOT_FOUND, NOT_PUBLIC, Target, Unfit, is_address, is_private, is_public, parse
from core.webhooks.sender import SendResult
from lastbit import __version__
from senders.connection import Broken, Connection, Deadline, Kept, connect

READ: Final = 4096
"""Maximum bytes of a response's body to read."""
LOOKUP: Final = 2.0
"""Maximum seconds of a lookup. The threads that send must not all wait for a resolver that has died."""
AGENT: Final = f"Lastbit/{__version__}"

log = structlog.get_logger(__name__)

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
        self._certificates.set_alpn_protocols(["http/1.1"])
        self._kept = Kept()

    def check(self, url: str) -> None:
        """Check the URL, without a lookup. Raises `Unfit`."""
        self._refuse_private(parse(url))

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
            connection, response = self._response(target, addresses, _request(target, headers, body), body, deadline)
            with contextlib.ExitStack() as stack:
                stack.callback(connection.close)
                status = response.status_code
                received_headers = dict(response.headers)
                retry_after = _seconds(received_headers.get(b"retry-after"), received_headers.get(b"date"))
                size = 0
                for part in connection.body(deadline):
                    size += part
                    if size >= READ:
                        break
                if connection.reset():
                    stack.pop_all()
                    self._kept.keep(connection)
        except Unfit as cause:
            error = f"not sent: {cause}"
        except TimeoutError:
            error = f"no complete response within {self._timeout:g} s"
        except Broken as cause:
            error = str(cause) if status is None else "the connection was closed in the middle of the response"
        if error is None and status is not None and 300 <= status < 400:
            error = "a redirect, which is not followed"
        return SendResult(status, error, round((time.monotonic() - start) * 1000), retry_after)

    def _response(
        self, target: Target, addresses: Sequence[str], request: h11.Request, body: bytes, deadline: Deadline
    ) -> tuple[Connection, h11.Response]:
        """The head of the response, and its connection."""
        origin = target.scheme, target.host, target.port
        connection = self._kept.take(origin, addresses)
        if connection is not None:
            try:
                return connection, connection.request(request, body, deadline)
            except BaseException as error:
                connection.close()
                if connection.was_answered or not isinstance(error, Broken):
                    raise
        connection = connect(origin, addresses, deadline, self._certificates)
        try:
            return connection, connection.request(request, body, deadline)
        except BaseException:
            connection.close()
            raise

    def _refuse_private(self, target: Target) -> None:
        if not self._allow_private and is_private(target.host):
            raise Unfit(f"the host is {NOT_PUBLIC}")

    def _addresses(self, target: Target, deadline: Deadline) -> Sequence[str]:
        """All addresses of the host, each checked. Raises `Unfit`."""
        self._refuse_private(target)
        if is_address(target.host):
            return [target.host]
        addresses = self._look_up(target, deadline)
        if not addresses:
            log.warning("host_refused", host=target.host, cause="it can't be resolved")
        elif not self._allow_private and not all(map(is_public, addresses)):
            log.warning("host_refused", host=target.host, cause="it has an address that is not public")
        else:
            return addresses
        raise Unfit("the host can't be resolved" if self._allow_private else NOT_FOUND)

    def _look_up(self, target: Target, deadline: Deadline) -> Sequence[str]:
        outcome: queue.SimpleQueue[Sequence[str] | None] = queue.SimpleQueue()

        def look_up() -> None:
            addresses: Sequence[str] | None = None
            with contextlib.suppress(OSError, UnicodeError):
                addresses = self._resolve(target.host, target.port)
            outcome.put(addresses)

        # In a thread, as the time-out of the system's resolver is longer and can't be changed.
        threading.Thread(target=look_up, daemon=True).start()
        try:
            return outcome.get(timeout=min(LOOKUP, deadline.left())) or ()
        except queue.Empty:
            return ()


def _request(target: Target, signature_headers: dict[str, str], body: bytes) -> h11.Request:
    own_headers = {"Host": target.authority, "User-Agent": AGENT, "Content-Type": "application/json", "Accept": "*/*"}
    headers = [*own_headers.items(), ("Content-Length", str(len(body))), *signature_headers.items()]
    return h11.Request(method="POST", target=target.path, headers=headers)


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
