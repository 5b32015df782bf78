"""Requests, responses and retries, without sockets.

A *flow* is a generator that yields steps (send this request, pause for some seconds, pass this value to the caller) and
receives their outcomes. The clients are thin drivers: one runs the steps blocking, the other awaits them. So requests,
retries, paging and splitting are written once, and are tested without a network or a clock.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, urlsplit

from lastbit import _shapes, errors
from lastbit.models import Json
from lastbit.names import NO_NAMES
from lastbit.retry import RETRIED_STATUSES, Retry, retry_after_seconds

DEFAULT_URL = "http://127.0.0.1:8000"

_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""Exceptions of parsing and decoding when a response does not follow the contract."""

_PASSWORD = re.compile(r"(//[^/:@]*:)[^/]*@")

_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL"})
"""What releases of OpenSSL say of a server that answers without TLS."""

_NONE: Mapping[str, str] = {}
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
    """One HTTP response; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """No response arrived. A `lasting` failure is not retried, for example an invalid URL. `sent`: whether the request
    may have reached the service."""

    cause: str
    lasting: bool = False
    sent: bool = True
    obstacle: errors.Obstacle | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Emit:
    """Pass a value to the caller while the flow continues: an element of a page, the current state of a batch."""

    value: Any


Step = Request | Pause | Emit
Outcome = Answer | Failure | None
T = TypeVar("T")
Flow = Generator[Step, Outcome, T]


def obstacle(error: BaseException | None) -> errors.Obstacle | None:
    """What prevented the connection, if the error or one of its causes says so."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return "name"
        if isinstance(error, ssl.SSLError):
            return "plain" if error.reason in _NOT_TLS else "tls"
        error = error.__cause__ or error.__context__
    return None


def visible_ascii(name: str, text: str, longest: int, *, is_secret: bool = False) -> str:
    """`text` if it can be a header's value: 1 to `longest` visible ASCII characters. Raises `InvalidArgument`, without
    the text if it `is_secret`, as errors get into logs."""
    if not isinstance(text, str) or not 1 <= len(text) <= longest or any(not "!" <= char <= "~" for char in text):
        got = "" if is_secret else f", not {text!r}"
        raise errors.InvalidArgument(f"{name} is 1 to {longest} visible ASCII characters without blanks{got}")
    return text


def utf8(name: str, text: str) -> str:
    """`text` if it can be encoded as UTF-8. Python also makes strings that cannot, for example from file names. Raises
    `InvalidArgument`."""
    try:
        text.encode()
    except (UnicodeEncodeError, AttributeError) as cause:
        raise errors.InvalidArgument(f"{name} is a text that can be encoded as UTF-8, not {text!r}") from cause
    return text


def seconds(name: str, value: float) -> float:
    """`value` if it is a valid timeout. Raises `InvalidArgument`."""
    if not isinstance(value, int | float) or not 0 < value <= threading.TIMEOUT_MAX:
        raise errors.InvalidArgument(f"{name} is a number of seconds above 0, not {value!r}")
    return value


def in_path(name: str, text: str) -> str:
    """`text` if it can be a path segment. Raises `InvalidArgument`."""
    if text in NO_NAMES:
        raise errors.InvalidArgument(f"{name} is a text other than . and .., not {text!r}")
    return utf8(name, text)


def single(name: str, text: str) -> str:
    """`text` if it can be a whole path segment, which a slash would end. Raises `InvalidArgument`."""
    if not isinstance(text, str) or not text or "/" in text:
        raise errors.InvalidArgument(f"{name} is a text without slashes, not {text!r}")
    return text


def resource(*parts: str) -> str:
    """The path /v1/… made of these segments. Raises `InvalidArgument`."""
    return "/".join(["/v1", *(quote(in_path("a name", part), safe="") for part in parts)])


def _batch_of(path: str, params: Params, body: Json | None) -> str | None:
    """The id of the batch that a request concerns, or of the first one: proxies send the calls of one batch to one
    process. An open of a nested batch concerns its parent's."""
    match path.split("/", 4):
        case ["", "v1", "batches", batch, *_] if batch.isdecimal():
            return batch
        case ["", "v1", "acks" | "failures" | "skips"] if body and body.get("groups"):
            return str(body["groups"][0]["batch"])
        case ["", "v1", "acks" | "failures" | "skips"] if body and body.get("items"):
            return str(body["items"][0]).partition(":")[0]
        case ["", "v1", "batches"] if body and body.get("parent"):
            return str(body["parent"]).partition(":")[0]
        case _:
            return dict(params).get("batch")


def encoded(body: Json) -> bytes:
    """`body` as JSON. Raises `InvalidArgument`."""
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as cause:
        raise errors.InvalidArgument(f"the argument can't be encoded as JSON: {cause}") from cause


def base_url(text: str) -> str:
    """The service's address without a trailing slash. Raises `InvalidArgument`."""
    try:
        text.encode()  # some strings can't be encoded, see `utf8`
        parts = urlsplit(text)
        fits = parts.scheme in {"http", "https"} and parts.hostname and (parts.port or True)
    except (ValueError, AttributeError):
        fits = False
    if not fits or parts.query or parts.fragment:
        shown = masked(text) if isinstance(text, str) else text
        raise errors.InvalidArgument(f"{shown!r} is not the address of a service: expected a URL like {DEFAULT_URL}")
    return text.rstrip("/")


def masked(url: str) -> str:
    """The URL without its password, for messages."""
    return _PASSWORD.sub(r"\1***@", url)


@dataclass(frozen=True, slots=True)
class Service:
    """The service's address, with the client's token, timeout and retry policy."""

    url: str
    token: str | None = field(default=None, repr=False)
    retry: Retry = field(default_factory=Retry)
    timeout: float = 30.0
    now: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random
    is_patient: bool = False
    """Whether calls are retried until the policy's deadline, however many attempts that takes."""
    unreachable: ClassVar[type[errors.ServiceUnreachable]] = errors.ServiceUnreachable
    """The error of a call without a response."""

    @property
    def address(self) -> str:
        """The URL as messages show it."""
        return masked(self.url)

    def after_an_answer(self) -> Service:
        """The service for the next poll of an endless series: the address is right, so the service is only restarting
        when it doesn't answer."""
        return replace(self, is_patient=True)

    @classmethod
    def named(cls, url: str | None, token: str | None, timeout: float, retry: Retry | None) -> Service:
        """The service at `url`; by default `url` and `token` come from LASTBIT_URL and LASTBIT_TOKEN. Raises
        `InvalidArgument`."""
        token = os.environ.get("LASTBIT_TOKEN") if token is None else token
        return cls(
            base_url(os.environ.get("LASTBIT_URL") or DEFAULT_URL if url is None else url),
            visible_ascii("a token", token, 8192, is_secret=True) if token else None,
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
        headers: Mapping[str, str] = _NONE,
        hold: float = 0.0,
        within: float | None = None,
        repeatable: bool = True,
    ) -> Flow[Answer]:
        """Send a request, with retries. The flow's value is a 2xx response.

        `hold`: seconds for which the service may delay the response (a long poll). `within`: seconds after which no
        retry starts, if that is earlier than the retry policy's deadline; 0 for a request that must not be repeated.
        `repeatable`: False if a second call without an idempotency key would have another effect. Raises
        `InvalidArgument`, `ServiceError`, `ServiceUnreachable`, `UnexpectedAnswer`.
        """
        for name, value in params:
            utf8(name, value)
        headers = {"accept": "application/json, application/problem+json", **headers}
        batch = _batch_of(path, params, body)
        if batch is not None:
            headers["lastbit-batch"] = batch
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        if method in ("POST", "PATCH"):
            # Chosen before the first attempt, so that retries are safe.
            headers["idempotency-key"] = idempotency_key or uuid.uuid4().hex
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = encoded(body)
        request = Request(method, self.url + path, params, headers, content, self.timeout + hold)
        request_line = f"{method} {path}"

        repeatable = (repeatable or idempotency_key is not None) and within != 0
        is_sent = False
        start = first_trouble = self.now()
        attempt = 0
        while True:
            attempt += 1
            outcome = yield request
            assert isinstance(outcome, Answer | Failure), "the driver must return an outcome for each request"
            if isinstance(outcome, Answer) and outcome.status not in RETRIED_STATUSES:
                if 200 <= outcome.status < 300:
                    return outcome
                if method == "DELETE" and outcome.status == 404 and attempt > 1:
                    # An earlier attempt deleted it and its response was lost, so the request has succeeded.
                    return Answer(204, outcome.headers, b"")
                raise self.error(request_line, outcome)
            is_sent = is_sent or isinstance(outcome, Answer) or outcome.sent
            now = self.now()
            if hold and attempt == 1:
                # The time of a long poll does not count: if it breaks at its end, the full retry deadline remains.
                first_trouble = now
            elapsed = now - start
            retry_after = retry_after_seconds(outcome.headers) if isinstance(outcome, Answer) else None
            pause = None
            if not (isinstance(outcome, Failure) and outcome.lasting):
                # A rate-limited request has not failed, and is retried until the deadline.
                goes_on = self.is_patient or (isinstance(outcome, Answer) and outcome.status == 429)
                failed = min(attempt, max(1, self.retry.attempts - 1)) if goes_on else attempt
                pause = self.retry.pause(failed, now - first_trouble, retry_after, self.chance())
            if pause is None or (within is not None and elapsed + pause > within):
                if isinstance(outcome, Answer):
                    raise self.error(request_line, outcome)
                raise self.unreachable(
                    *(self.address, request_line, outcome.cause, attempt, elapsed, repeatable or not is_sent, is_sent),
                    obstacle=outcome.obstacle or ("response" if outcome.sent else None),
                )
            yield Pause(pause)

    def error(self, request_line: str, answer: Answer) -> errors.LastbitError:
        """The error for a response that is not a 2xx."""
        retry_after = retry_after_seconds(answer.headers)
        try:
            problem = json.loads(answer.body)
            code, places = problem["code"], problem.get("errors")
            detail = problem.get("detail") or problem.get("title") or code
            if not isinstance(code, str) or not isinstance(detail, str):
                raise TypeError("a problem's code and detail must be text")
        except _UNREADABLE:
            if answer.status < 400:
                return errors.UnexpectedAnswer(
                    self.address, request_line, answer.status, "Lastbit never sends this status"
                )
            # The response is not from the service, but from a gateway in front of it or from other software.
            detail = (
                f"{self.address} responded with {answer.status} to {request_line}, without the error document that a "
                "Lastbit service sends"
            )
            return errors.service_error(answer.status, f"http_{answer.status}", detail, (), retry_after)
        if code == "not_found" and self.url.endswith("/v1"):
            detail += f"; the client adds /v1 itself, so use the address {self.address.removesuffix('/v1')}"
        valid_places = [place for place in places if isinstance(place, dict)] if isinstance(places, list) else []
        return errors.service_error(answer.status, code, detail, valid_places, retry_after)

    def decoded(self, request_line: str, answer: Answer, decode: Callable[[Any], T]) -> T:
        """Decode the response's body. Raises `UnexpectedAnswer`."""
        try:
            value = decode(json.loads(answer.body))
            _shapes.check(value)
        except _UNREADABLE as cause:
            fault = (
                "the response is not JSON"
                if isinstance(cause, json.JSONDecodeError)
                else f"the response doesn't follow the contract ({cause!r:.300})"
            )
            raise errors.UnexpectedAnswer(self.address, request_line, answer.status, fault) from cause
        return value
