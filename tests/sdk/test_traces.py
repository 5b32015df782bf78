"""An open passes on the current span of OpenTelemetry; the command line passes on TRACEPARENT."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from lastbit import AsyncClient, Client
from tests.support.servers import ROOT, run_module

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextmanager
def span() -> Iterator[None]:
    """A current span, as an SDK would make it."""
    _, trace_id, span_id, _ = PARENT.split("-")
    context = SpanContext(
        int(trace_id, 16), int(span_id, 16), False, TraceFlags(TraceFlags.SAMPLED), TraceState([("rojo", "1")])
    )
    with trace.use_span(NonRecordingSpan(context)):
        yield


def test_an_open_passes_on_the_current_span(service_url: str) -> None:
    with Client(service_url) as client:
        with span():
            info = client.open(items=1).info
        assert (info.traceparent, info.tracestate) == (PARENT, "rojo=1")
        plain = client.open(items=1).info
        assert (plain.traceparent, plain.tracestate) == (None, None)


def test_an_asynchronous_open_passes_on_the_span_of_its_task(service_url: str) -> None:
    async def in_span(client: AsyncClient) -> str | None:
        with span():
            return (await client.open(items=1)).info.traceparent

    async def without(client: AsyncClient) -> str | None:
        return (await client.open(items=1)).info.traceparent

    async def both() -> list[str | None]:
        async with AsyncClient(service_url) as client:
            return await asyncio.gather(in_span(client), without(client))

    assert asyncio.run(both()) == [PARENT, None]


def test_a_program_without_spans_doesnt_import_opentelemetry(service_url: str) -> None:
    program = (
        "import sys, lastbit; info = lastbit.Client(sys.argv[1]).open(items=1).info; "
        "print(info.traceparent, any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, service_url], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout == "None False\n"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TRACEPARENT": PARENT, "TRACESTATE": "rojo=1"}, (PARENT, "rojo=1")),
        ({"TRACEPARENT": OTHER}, (OTHER, None)),
        ({"TRACESTATE": "rojo=1"}, (None, None)),
        ({"TRACEPARENT": "junk\n", "TRACESTATE": "é"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_the_command_line_passes_on_the_environments_context(
    service_url: str, variables: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("TRACEPARENT", "TRACESTATE")}
    environment = {**inherited, "LASTBIT_URL": service_url, **variables}
    result = run_module("lastbit", "open", "--items", "1", "--json", environment=environment)
    assert result.returncode == 0, result.stderr
    batch = json.loads(result.stdout)
    assert (batch["traceparent"], batch["tracestate"]) == expected
