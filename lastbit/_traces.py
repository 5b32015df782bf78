"""The trace context that an open passes on to the service: that of OpenTelemetry's current span."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

HEADERS: Final = ("traceparent", "tracestate")
_inherited: ContextVar[Mapping[str, str]] = ContextVar("lastbit.inherited", default={})  # noqa: B039  # never changed


def current() -> dict[str, str]:
    """The headers of the current span, or else those of the environment within `from_environment`."""
    headers: dict[str, str] = {}
    # A program that has not imported the API has no span.
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(headers)
    return headers or dict(_inherited.get())


@contextmanager
def from_environment() -> Iterator[None]:
    """Within it, opens without a current span pass on TRACEPARENT and TRACESTATE."""
    variables = {name: os.environ.get(name.upper(), "") for name in HEADERS}
    # Other characters can't be sent in a header, and are in no valid context.
    valid = {name: value for name, value in variables.items() if value.isascii() and value.isprintable() and value}
    token = _inherited.set(valid if "traceparent" in valid else {})
    try:
        yield
    finally:
        _inherited.reset(token)
