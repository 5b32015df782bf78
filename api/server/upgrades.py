"""HTTP/1.1 and nothing else, over uvicorn's protocol.

A request may offer to go on in another protocol (`Upgrade`), and a server that doesn't care for it answers as if it had
not been asked (RFC 9110, 7.8). Java's HttpClient offers HTTP/2 so with each request that it sends in the clear. The
parser, though, believes that what follows such a head is of the other protocol: it reads no body there, and gives up
what came with it. Here a head with an offer is said to the parser again, without it, and all that follows is read as
HTTP has it.
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
        # As uvicorn has it of its own parser: the first of two requests is answered, though it closes.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.plain_head = b""
        """Of the request that made an offer, in the place of its head."""
        self.unknown_coding = False
        """The parser gave up for that reason."""

    def on_message_begin(self) -> None:
        self.plain_head = b""
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self.plain_head = self._head_without_offer()
            return
        if not self._is_coding_known():
            self.unknown_coding = True
            raise httptools.HttpParserError("a transfer coding that is not known here")
        super().on_headers_complete()
        self._ignore_trailers()

    def on_message_complete(self) -> None:
        if not self.plain_head:
            super().on_message_complete()

    def _ignore_trailers(self) -> None:
        """The parser reports them as headers, at a time when the application may not have read those yet."""
        self.headers = []

    def _is_coding_known(self) -> bool:
        """Whether the body has no transfer coding but chunks. The parser reads `gzip, chunked` too, and passes on what
        is compressed as the body."""
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        return not codings or [
            coding.strip() for coding in b",".join(codings).lower().split(b",") if coding.strip()
        ] == [b"chunked"]

    def _head_without_offer(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError("no tunnel is opened here")
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class _Parser(httptools.HttpRequestParser):
    """It tells its protocol of requests as if none of them had made an offer."""

    def __init__(self, protocol: Http1Protocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._go_on(memoryview(data), offer.args[0])

    def _go_on(self, data: memoryview, read: int) -> None:
        """`data`, of which `read` bytes are a head with an offer, and what was before it."""
        while read:
            data = data[read:]
            super().feed_data(self._protocol.plain_head)
            try:
                super().feed_data(data)
                read = 0
            except httptools.HttpParserUpgrade as offer:
                read = offer.args[0]
