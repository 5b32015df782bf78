"""Requests, answers and their retries, without a socket.

A *flow* is a generator that yields what it wants done (send this request, pause so long, hand this value to the caller)
and is sent what came of it. The clients are thin drivers: one does the steps blocking, one awaits them. So everything
that can be wrong about a request, its retries, paging and splitting is written once, and is tested without a network or
a clock.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from lastbit import _shapes, errors
from lastbit.models import Json
from lastbit.names import NO_NAMES
from lastbit.retry import RETRIED_STATUSES, Retry, retry_after_seconds

DEFAULT_URL = "http://127.0.0.1:8000"

_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What parsing and decoding raise for an answer that is not one of the contract."""

Params = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request, ready to be sent. `timeout` is in seconds, for each of connecting, sending and reading."""

    method: str
    url: str
    params: Params
    headers: Mapping[str, str]
    body: bytes | None
    timeout: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """No answer came. `lasting` failures come again however often the request is sent, like a URL that can't be one."""

    cause: str
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Emit:
    """A value for the caller while the flow goes on: an element of a page, a batch that is waited for."""

    value: Any


Step = Request | Pause | Emit
Outcome = Answer | Failure | None
T = TypeVar("T")
Flow = Generator[Step, Outcome, T]


def visible_ascii(name: str, text: str, longest: int) -> str:
    """`text` if it can be a header's value: 1 to `longest` visible ASCII characters. Raises `InvalidArgument`."""
    if not isinstance(text, str) or not 1 <= len(text) <= longest or any(not "!" <= char <= "~" for char in text):
        raise errors.InvalidArgument(f"{name} is 1 to {longest} visible ASCII characters without blanks, not {text!r}")
    return text


def utf8(name: str, text: str) -> str:
    """`text` if it is one that can travel: Python makes others too, of names of files for instance. Raises
    `InvalidArgument`."""
    try:
        text.encode()
    except (UnicodeEncodeError, AttributeError) as cause:
        raise errors.InvalidArgument(f"{name} is a text that has a UTF-8 form, not {text!r}") from cause
    return text


def seconds(name: str, value: float) -> float:
    """`value` if it is a time to wait for an answer. Raises `InvalidArgument`."""
    if not isinstance(value, int | float) or not 0 < value <= threading.TIMEOUT_MAX:
        raise errors.InvalidArgument(f"{name} is a number of seconds above 0, not {value!r}")
    return value


def in_path(name: str, text: str) -> str:
    """`text` if it can be a part of a path. Raises `InvalidArgument`."""
    if text in NO_NAMES:
        raise errors.InvalidArgument(f"{name} is a text other than . and .., not {text!r}")
    return utf8(name, text)


def resource(*parts: str) -> str:
    """The path of /v1 and, below it, these names. Raises `InvalidArgument`."""
    return "/".join(["/v1", *(quote(in_path("a name", part), safe="") for part in parts)])


def encoded(body: Json) -> bytes:
    """`body` as JSON. Raises `InvalidArgument`."""
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as cause:
        raise errors.InvalidArgument(f"what was given has no JSON form: {cause}") from cause


def base_url(text: str) -> str:
    """The service's address without a trailing slash. Raises `InvalidArgument`."""
    try:
        parts = urlsplit(text)
        fits = parts.scheme in {"http", "https"} and parts.hostname and (parts.port or True)
    except (ValueError, AttributeError):
        fits = False
    if not fits or parts.query or parts.fragment:
        raise errors.InvalidArgument(f"{text!r} is no address of a service: expected a URL like {DEFAULT_URL}")
    return text.rstrip("/")


@dataclass(frozen=True, slots=True)
class Service:
    """The service as a client knows it: where it is, who asks, and how patient it is with it."""

    url: str
    token: str | None = field(default=None, repr=False)
    retry: Retry = field(default_factory=Retry)
    timeout: float = 30.0
    now: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random

    @classmethod
    def named(cls, url: str | None, token: str | None, timeout: float, retry: Retry | None) -> Service:
        """The service at `url`; what is None is taken from LASTBIT_URL and LASTBIT_TOKEN. Raises `InvalidArgument`."""
        token = os.environ.get("LASTBIT_TOKEN") if token is None else token
        return cls(
            base_url(os.environ.get("LASTBIT_URL") or DEFAULT_URL if url is None else url),
            visible_ascii("a token", token, 8192) if token else None,
            retry or Retry(),
            seconds("a timeout", timeout),
        )

    def call(
        self,
        method: str,
        path: str,
        *,
        params: Params = (),
        body: Json | None = None,
        idempotency_key: str | None = None,
        hold: float = 0.0,
        within: float | None = None,
    ) -> Flow[Answer]:
        """Send a request until it is answered; the flow's value is a 2xx answer.

        `hold`: seconds for which the service may hold the answer back (a long poll). `within`: seconds after which no
        retry begins any more, where that is sooner than the retry policy's deadline. Raises `InvalidArgument`,
        `ServiceError`, `ServiceUnreachable`, `UnexpectedAnswer`.
        """
        for name, value in params:
            utf8(name, value)
        headers = {"accept": "application/json, application/problem+json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        if method == "POST":
            # Fixed before the first attempt: that is what makes the later ones safe.
            headers["idempotency-key"] = idempotency_key or uuid.uuid4().hex
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = encoded(body)
        request = Request(method, self.url + path, params, headers, content, self.timeout + hold)
        named = f"{method} {path}"

        started = troubled = self.now()
        attempt = 0
        while True:
            attempt += 1
            outcome = yield request
            assert isinstance(outcome, Answer | Failure), "the driver answers each request"
            if isinstance(outcome, Answer) and outcome.status not in RETRIED_STATUSES:
                if 200 <= outcome.status < 300:
                    return outcome
                if method == "DELETE" and outcome.status == 404 and attempt > 1:
                    # An earlier attempt whose answer was lost has deleted it: that is what was asked for.
                    return Answer(204, outcome.headers, b"")
                raise self.error(named, outcome)
            now = self.now()
            if hold and attempt == 1:
                # What was held back was no trouble: a long poll that breaks at its end still has all of the patience.
                troubled = now
            elapsed = now - started
            retry_after = retry_after_seconds(outcome.headers) if isinstance(outcome, Answer) else None
            pause = None
            if not (isinstance(outcome, Failure) and outcome.lasting):
                # Who is told to go slower has not failed, and may go on so until the deadline.
                told = isinstance(outcome, Answer) and outcome.status == 429
                failed = min(attempt, max(1, self.retry.attempts - 1)) if told else attempt
                pause = self.retry.pause(failed, now - troubled, retry_after, self.chance())
            if pause is None or (within is not None and elapsed + pause > within):
                if isinstance(outcome, Answer):
                    raise self.error(named, outcome)
                raise errors.ServiceUnreachable(self.url, named, outcome.cause, attempt, elapsed)
            yield Pause(pause)

    def error(self, named: str, answer: Answer) -> errors.LastbitError:
        """What an answer that is not a 2xx says."""
        retry_after = retry_after_seconds(answer.headers)
        try:
            problem = json.loads(answer.body)
            code, places = problem["code"], problem.get("errors")
            detail = problem.get("detail") or problem.get("title") or code
            if not isinstance(code, str) or not isinstance(detail, str):
                raise TypeError("a problem's code and detail are texts")
        except _UNREADABLE:
            if answer.status < 400:
                return errors.UnexpectedAnswer(self.url, named, answer.status, "Lastbit never answers so")
            # Not the service's own words: a gateway in front of it, or something else at this address.
            detail = f"{self.url} answered {answer.status} to {named} without saying why; a Lastbit service does"
            return errors.service_error(answer.status, f"http_{answer.status}", detail, (), retry_after)
        found = [place for place in places if isinstance(place, dict)] if isinstance(places, list) else []
        return errors.service_error(answer.status, code, detail, found, retry_after)

    def decoded(self, named: str, answer: Answer, decode: Callable[[Any], T]) -> T:
        """The answer's body through `decode`. Raises `UnexpectedAnswer`."""
        try:
            value = decode(json.loads(answer.body))
            _shapes.check(value)
        except _UNREADABLE as cause:
            found = (
                "not with JSON"
                if isinstance(cause, json.JSONDecodeError)
                else f"without what it asks for ({cause!r:.300})"
            )
            raise errors.UnexpectedAnswer(self.url, named, answer.status, found) from cause
        return value
