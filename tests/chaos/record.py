"""The record that actors write: each request before it is sent, and its answer. It outlives a killed actor.

A line is JSON with `t` (the machine's monotonic clock, the same in all processes) and `n`, which links an answer to its
request within a file. A request has `m`ethod, `p`ath, `k`ey and `b`ody; an answer has `s`tatus and `a`; an unanswered
request has `x`.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

from lastbit import _urllib
from lastbit._protocol import Answer, Failure, Request

ENLISTED = "tx-"
"""The keys of calls in transactions of callers begin with this."""


class Record:
    def __init__(self, folder: Path, actor: str) -> None:
        self.actor = actor
        path = folder / f"{actor}.{os.getpid()}.{uuid.uuid4().hex[:6]}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._numbers = itertools.count(1)

    def ask(self, method: str, path: str, key: str | None, body: Any) -> int:
        """Record a request; `body` is a JSON value or its bytes. Returns the request's number."""
        number = next(self._numbers)  # threads may share the record
        if isinstance(body, bytes):
            body = json.loads(body) if body else None
        self._write({"n": number, "m": method, "p": path, "k": key, "b": body})
        return number

    def answered(self, number: int, status: int, body: Any) -> None:
        if isinstance(body, bytes):
            try:
                body = json.loads(body) if body else None
            except ValueError:
                body = repr(body)
        self._write({"n": number, "s": status, "a": body})

    def lost(self, number: int, cause: str) -> None:
        self._write({"n": number, "x": cause})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps({"t": time.monotonic(), **line}, separators=(",", ":"))
        os.write(self._file, text.encode() + b"\n")


class Recording(httpx.BaseTransport):
    """For `Client`."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._real = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        number = _asked(self._record, request)
        try:
            response = self._real.handle_request(request)
            self._record.answered(number, response.status_code, response.read())
        except httpx.TransportError as error:
            self._record.lost(number, repr(error))
            raise
        return response

    def close(self) -> None:
        self._real.close()


class AsyncRecording(httpx.AsyncBaseTransport):
    """For `AsyncClient`."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._real = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        number = _asked(self._record, request)
        try:
            response = await self._real.handle_async_request(request)
            self._record.answered(number, response.status_code, await response.aread())
        except httpx.TransportError as error:
            self._record.lost(number, repr(error))
            raise
        return response

    async def aclose(self) -> None:
        await self._real.aclose()


def _asked(record: Record, request: httpx.Request) -> int:
    return record.ask(
        request.method, request.url.raw_path.decode(), request.headers.get("idempotency-key"), request.content
    )


def record_urllib(record: Record) -> None:
    """Record all further requests that this process sends with the transport of Spark's executors."""
    send = _urllib._send

    def recorded(request: Request) -> Answer | Failure:
        path = "/" + request.url.split("/", 3)[3]
        number = record.ask(request.method, path, request.headers.get("idempotency-key"), request.body)
        outcome = send(request)
        if isinstance(outcome, Answer):
            record.answered(number, outcome.status, outcome.body)
        else:
            record.lost(number, outcome.cause)
        return outcome

    _urllib._send = recorded
