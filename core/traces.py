"""Traces: the W3C Trace Context that an open brings, and the spans that belong to it.

A batch outlives the request that opened it, often by hours. So the context is stored with the batch, and each event of
the batch, and each attempt to deliver one, becomes a span in the trace of the open (decision 0026).

The spans use the API of OpenTelemetry. Without that package, or without an SDK, there are none. They are created after
the commit, by the process that committed, so no transaction and no lock waits for them.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import structlog

try:
    from opentelemetry import trace as otel
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    HAS_API: Final = False
else:
    HAS_API: Final = True  # type: ignore[misc]  # one of the two

log = structlog.get_logger(__name__)

HEADERS: Final = (b"traceparent", b"tracestate")
LONGEST_TRACESTATE: Final = 512
"""Maximum characters of a `tracestate`. A longer one is ignored, but not its `traceparent`."""
FLUSH: Final = 5000
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MEMBER: Final = r"[a-z0-9][a-z0-9_*/@-]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_TRACESTATE: Final = re.compile(rf"{_MEMBER}([ \t]*,[ \t]*{_MEMBER}){{0,31}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A valid `traceparent`, of version 00, and the `tracestate` that came with it."""

    traceparent: str
    tracestate: str | None = None

    def headers(self) -> dict[str, str]:
        """The headers of the specification, which are also the names in an event's data."""
        headers = {"traceparent": self.traceparent}
        if self.tracestate is not None:
            headers["tracestate"] = self.tracestate
        return headers


def parsed(traceparents: Sequence[str], tracestates: Sequence[str] = ()) -> TraceContext | None:
    """The context in the values of these headers; None if there is no valid one. As the specification demands, invalid
    headers are ignored."""
    if len(traceparents) != 1:
        return None
    match = _TRACEPARENT.fullmatch(traceparents[0].strip(" \t"))
    if match is None:
        return None
    version, trace, parent, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None) or not trace.strip("0") or not parent.strip("0"):
        return None
    if version != "00":
        # Of a later version, only these fields and the flag "sampled" are known.
        flags = f"{int(flags, 16) & 1:02x}"
    state = ",".join(part for part in (text.strip(" \t") for text in tracestates) if part)
    is_valid = len(state) <= LONGEST_TRACESTATE and _TRACESTATE.fullmatch(state) is not None
    return TraceContext(f"00-{trace}-{parent}-{flags}", state if is_valid else None)


def in_headers(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """The context that a request brings. The names are in lower case."""
    values: dict[bytes, list[str]] = {name: [] for name in HEADERS}
    for name, value in headers:
        if name in HEADERS:
            values[name].append(value.decode("latin-1"))
    return parsed(*(values[name] for name in HEADERS))


def stored(facts: Mapping[str, Any]) -> TraceContext | None:
    """The context in the data of a batch's event, or in a batch's columns."""
    traceparent, tracestate = facts.get("traceparent"), facts.get("tracestate")
    if not isinstance(traceparent, str):
        return None
    return parsed([traceparent], [tracestate] if isinstance(tracestate, str) else [])


@dataclass(frozen=True, slots=True)
class Happening:
    """An event of a batch, as its span describes it. `trigger` is the context of the request that caused it."""

    type: str
    id: str
    position: int
    batch: int | None
    key: str | None
    context: TraceContext
    trigger: TraceContext | None = None

    def attributes(self) -> dict[str, str | int]:
        values = {
            "lastbit.batch.id": self.batch,
            "lastbit.batch.key": self.key,
            "lastbit.event.type": self.type,
            "lastbit.event.id": self.id,
            "lastbit.event.position": self.position,
        }
        return {name: value for name, value in values.items() if value is not None}


def has_sdk() -> bool:
    """Whether spans go anywhere. An SDK sets the provider when it is configured."""
    return HAS_API and not isinstance(otel.get_tracer_provider(), otel.ProxyTracerProvider)


def record(happenings: Sequence[Happening], started: int) -> None:
    """Create a span for each event, from the time `started`, in nanoseconds since 1970, until now. Never raises: the
    transaction has committed. Needs an SDK."""
    try:
        for happening in happenings:
            _tracer().start_span(
                happening.type,
                _remote(happening.context),
                links=_links(happening),
                attributes=happening.attributes(),
                start_time=started,
            ).end()
    except Exception:  # a bug of an SDK, or of one of its plugins
        log.exception("span_failed")


@dataclass(slots=True)
class Delivery:
    """The span of an attempt to send a webhook. `headers` let the receiver continue the trace."""

    headers: dict[str, str]
    span: Any = field(default=None, repr=False)

    def end(self, status: int | None, error: str | None) -> None:
        """Add the result. `error` is why there is no complete response."""
        if self.span is None:
            return
        with contextlib.suppress(Exception):
            if status is not None:
                self.span.set_attribute("http.response.status_code", status)
            if error is not None or status is None or not 200 <= status < 300:
                self.span.set_status(otel.StatusCode.ERROR, error or f"the receiver answered {status}")


@contextlib.contextmanager
def delivering(happening: Happening | None, webhook: int) -> Iterator[Delivery]:
    """A span around the attempt to deliver this event; none for an event without a context."""
    delivery = _begin(happening, webhook) if happening is not None else Delivery({})
    try:
        yield delivery
    finally:
        if delivery.span is not None:
            with contextlib.suppress(Exception):
                delivery.span.end()


def _begin(happening: Happening, webhook: int) -> Delivery:
    headers = happening.context.headers()
    if not has_sdk():
        return Delivery(headers)  # then the receiver continues the trace of the open
    try:
        span = _tracer().start_span(
            f"webhook {happening.type}",
            _remote(happening.context),
            kind=otel.SpanKind.CLIENT,
            attributes={**happening.attributes(), "lastbit.webhook.id": webhook, "http.request.method": "POST"},
        )
        TraceContextTextMapPropagator().inject(headers, otel.set_span_in_context(span))
    except Exception:  # a webhook must not depend on an SDK
        log.exception("span_failed")
        return Delivery(headers)
    return Delivery(headers, span)


@cache
def _tracer() -> Any:
    return otel.get_tracer("lastbit")


def _remote(context: TraceContext) -> Any:
    """The context as the parent of a span."""
    return TraceContextTextMapPropagator().extract(context.headers())


def _links(happening: Happening) -> list[Any]:
    if happening.trigger is None:
        return []
    span = otel.get_current_span(_remote(happening.trigger))
    return [otel.Link(span.get_span_context(), {"lastbit.link": "request"})]


def flush() -> None:
    """Export the spans that an SDK still holds. A service that is stopped by a signal runs none of its exit handlers.
    Waits for at most `FLUSH` milliseconds."""
    if has_sdk():
        with contextlib.suppress(Exception):
            force_flush = getattr(otel.get_tracer_provider(), "force_flush", None)
            if force_flush is not None:
                force_flush(FLUSH)


def now() -> int:
    """The time for `record`."""
    return time.time_ns()
