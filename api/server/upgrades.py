"""uvicorn's protocol, restricted to HTTP/1.1.

A client may offer to switch to another protocol (`Upgrade`), and a server may ignore the offer (RFC 9110, 7.8). Java's
HttpClient offers HTTP/2 in this way with each request over plain HTTP. But httptools assumes that the other protocol
follows such a head: it reads no body, and discards the bytes after the head. So this module gives such a head to
another parser without the offer, and then the bytes after it, which are parsed as HTTP/1.1.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.problems import Problem

_CODING: Final = "header Transfer-Encoding: expected chunked alone; other transfer codings are not supported"


class Http1Protocol(HttpToolsProtocol):
    """See the module."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = _Parser(self)
        self.plain_head = b""
        """The current request's head without its `Upgrade` header; empty if it has none."""
        self.fault: Problem | None = None
        """The response to a head that is refused, if it is not simply malformed."""

    def on_message_begin(self) -> None:
        self.plain_head = b""
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._check_version(self.parser.get_http_version())
        if self.parser.should_upgrade():
            self.plain_head = self._head_without_offer()
            return
        if not self._is_coding_known():
            raise self.refusal(Problem("not_implemented", _CODING))
        super().on_headers_complete()
        self._ignore_trailers()

    def refusal(self, problem: Problem) -> Exception:
        """The parser's error for a head that gets `problem` as its response."""
        self.fault = problem
        return httptools.HttpParserError(problem.detail)

    def _check_version(self, version: str) -> None:
        """The parser accepts these two as well, and reads them as HTTP/1."""
        if version == "0.9":
            raise httptools.HttpParserError("a request without headers, as before HTTP/1.0")
        if version == "2.0":
            raise self.refusal(Problem("http_version_not_supported", "expected HTTP/1.1 or HTTP/1.0"))

    def on_message_complete(self) -> None:
        if not self.plain_head:
            super().on_message_complete()

    def _ignore_trailers(self) -> None:
        """The parser appends trailers to `headers`, which the application may still have to read. A new list keeps them
        apart."""
        self.headers = []

    def _is_coding_known(self) -> bool:
        """Whether the body has no transfer coding other than `chunked`. The parser also accepts `gzip, chunked`, and
        passes on the compressed bytes as the body."""
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        return not codings or [
            coding.strip() for coding in b",".join(codings).lower().split(b",") if coding.strip()
        ] == [b"chunked"]

    def _head_without_offer(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError("CONNECT is not supported")
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class _Parser(httptools.HttpRequestParser):
    """A parser that calls its protocol as if no request had an `Upgrade` header."""

    def __init__(self, protocol: Http1Protocol) -> None:
        super().__init__(protocol)
        # uvicorn sets the same option on its own parser. If a client sends data after a request with `Connection:
        # close`, that request still gets its response.
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._protocol = protocol

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        rest = memoryview(data)
        read = self._feed(rest)
        while read:
            rest = rest[read:]
            # A new one: after a head with an offer that is also the connection's last, a parser reads nothing more.
            parser = self._protocol.parser = _Parser(self._protocol)
            parser._feed(memoryview(self._protocol.plain_head))
            read = parser._feed(rest)

    def _feed(self, data: memoryview) -> int:
        """Parse `data` up to the end of the first head with an offer, and return that end; 0 if there is none."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return int(offer.args[0])
        return 0
