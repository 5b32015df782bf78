"""uvicorn's protocol, restricted to HTTP/1.1.

A client may offer to switch to another protocol (`Upgrade`), and a server may ignore the offer (RFC 9110, 7.8). Java's
HttpClient offers HTTP/2 in this way with each request over plain HTTP. But httptools assumes that the other protocol
follows such a head: it reads no body, and discards the bytes after the head. So this module gives such a head to the
parser a second time without the offer, and then the bytes after it, which are parsed as HTTP/1.1.
"""

from __future__ import annotations

from array import array
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Http1Protocol(HttpToolsProtocol):
    """See the module."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = _Parser(self)
        # uvicorn sets the same option on its own parser. If a client sends data after a request with `Connection:
        # close`, that request still gets its response.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.plain_head = b""
        """The current request's head without its `Upgrade` header; empty if it has none."""
        self.unknown_coding = False
        """Whether a request was refused because of its transfer coding."""

    def on_message_begin(self) -> None:
        self.plain_head = b""
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self.plain_head = self._head_without_offer()
            return
        if not self._is_coding_known():
            self.unknown_coding = True
            raise httptools.HttpParserError("unsupported transfer coding")
        super().on_headers_complete()
        self._ignore_trailers()

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
        self._protocol = protocol

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._resume(memoryview(data), offer.args[0])

    def _resume(self, data: memoryview, read: int) -> None:
        """Parse the rest of `data`. Its first `read` bytes end with the head of a request with an offer."""
        while read:
            data = data[read:]
            super().feed_data(self._protocol.plain_head)
            try:
                super().feed_data(data)
                read = 0
            except httptools.HttpParserUpgrade as offer:
                read = offer.args[0]
