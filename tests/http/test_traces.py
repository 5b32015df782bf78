"""The trace context of an open: stored once, shown, passed on to receivers, and the parent of the batch's spans."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.callbacks import Callback
from core.batches.lifecycle import Verb
from core.commits.combiner import Inline
from core.service import Service
from core.storage.database import Database
from core.traces import TraceContext
from senders.webhooks import WebhookSender
from tests.guarantees.test_webhooks import once
from tests.mutants import mutant
from tests.support import templates, traces
from tests.support.receivers import Receiver, status
from tests.support.servers import ROOT

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
OTHER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
STATE = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"


def chunked(body: bytes) -> Iterator[bytes]:
    """A body without a length, which takes the ordinary path instead of the fast one."""
    yield body


def open_batch(http: httpx.Client, body: str = "{}", *headers: tuple[str, str], ordinary: bool = False) -> Any:
    content = body.encode()
    response = http.post(
        "/v1/batches",
        content=chunked(content) if ordinary else content,
        headers=[("content-type", "application/json"), *headers],
    )
    assert response.status_code == 201, response.text
    return response.json()


@mutant(
    "the-fast-path-forgets-the-context",
    "api.fast_path.verbs:_open",
    "opening_of(body.opening(), call.idempotency_key, trace=call.trace)",
    "opening_of(body.opening(), call.idempotency_key, trace=None)",
)
@mutant("events-forget-the-context", "core.batches.batch:events", "trace.headers() if trace is not None else {}", "{}")
@pytest.mark.parametrize("ordinary", [False, True])
def test_the_context_of_an_open_is_stored_and_shown(http: httpx.Client, ordinary: bool) -> None:
    """By the open, by reads and lists, and in the data of each event; a batch without one has null, and its events
    have no such field."""
    batch = open_batch(
        http, '{"items": 1, "sealed": true}', ("traceparent", PARENT), ("tracestate", STATE), ordinary=ordinary
    )
    plain = open_batch(http, ordinary=ordinary)
    assert http.post("/v1/acks", json={"items": [f"{batch['id']}:0:0"]}).json()["applied"] == 1
    read, listed = http.get(f"/v1/batches/{batch['id']}").json(), http.get("/v1/batches?limit=2").json()["batches"][1]
    for document in (batch, read, listed):
        assert (document["id"], document["traceparent"], document["tracestate"]) == (batch["id"], PARENT, STATE)
    assert (plain["traceparent"], plain["tracestate"]) == (None, None)
    events = http.get("/v1/events", params={"batch": batch["id"]}).json()["events"]
    assert [event["type"].partition(".")[2] for event in events] == ["opened", "sealed", "completed", "succeeded"]
    assert {(event["data"]["traceparent"], event["data"]["tracestate"]) for event in events} == {(PARENT, STATE)}
    (first_event,) = http.get("/v1/events", params={"batch": plain["id"]}).json()["events"]
    assert not {"traceparent", "tracestate"} & first_event["data"].keys()


@mutant(
    "a-replay-with-another-context-conflicts",
    "core.batches.writing:_replayed",
    "batch.open_hash != operation.opening.fingerprint()",
    "batch.open_hash != operation.opening.fingerprint() or batch.trace != operation.trace",
)
@mutant(
    "a-replay-shows-its-own-context",
    "core.batches.writing:_replayed",
    "Opened(batch, 0, batch.open_count, newly, replayed=True, callback=callback)",
    "Opened(replace(batch, traceparent=operation.trace and operation.trace.traceparent), 0, "
    "batch.open_count, newly, replayed=True, callback=callback)",
)
@pytest.mark.parametrize("ordinary", [False, True])
def test_a_replay_keeps_the_first_context_and_never_conflicts(http: httpx.Client, ordinary: bool) -> None:
    """Every try of a producer may have another span, so the context is no part of the request that a key stands for."""
    key = ("idempotency-key", f"trace-{ordinary}")
    first = open_batch(http, '{"items": 2}', key, ("traceparent", PARENT), ("tracestate", STATE), ordinary=ordinary)
    for headers in ([("traceparent", OTHER)], []):
        replay = open_batch(http, '{"items": 2}', key, *headers, ordinary=ordinary)
        assert (replay["id"], replay["traceparent"], replay["tracestate"]) == (first["id"], PARENT, STATE)
    bare_key = ("idempotency-key", f"bare-{ordinary}")
    bare = open_batch(http, "{}", bare_key, ordinary=ordinary)
    replay = open_batch(http, "{}", bare_key, ("traceparent", PARENT), ordinary=ordinary)
    assert (replay["id"], replay["traceparent"]) == (bare["id"], None)


@pytest.mark.parametrize("ordinary", [False, True])
@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "")],
        [("traceparent", "hello")],
        [("traceparent", PARENT.upper())],
        [("traceparent", PARENT + "-more")],
        [("traceparent", "ff" + PARENT[2:])],
        [("traceparent", PARENT.replace(TRACE, "0" * 32))],
        [("traceparent", f"00-{TRACE}-{'0' * 16}-01")],
        [("traceparent", b"00-\xff".decode("latin-1"))],
        [("traceparent", PARENT), ("traceparent", OTHER)],
        [("tracestate", STATE)],
    ],
)
def test_a_malformed_traceparent_is_ignored(
    sqlite_http: httpx.Client, headers: list[tuple[str, str]], ordinary: bool
) -> None:
    values = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    batch = open_batch(sqlite_http, "{}", *values, ordinary=ordinary)  # type: ignore[arg-type]  # httpx takes both
    assert (batch["traceparent"], batch["tracestate"]) == (None, None)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([STATE], STATE),
        (["a=1", "b=2"], "a=1,b=2"),
        (["a=1", ""], "a=1"),
        (["a=" + "x" * 254 + ",b=" + "y" * 253], "a=" + "x" * 254 + ",b=" + "y" * 253),
        (["a=" + "x" * 254 + ",b=" + "y" * 254], None),
        (["no equals sign"], None),
        ([",".join(f"k{n}=1" for n in range(33))], None),
        ([""], None),
    ],
)
def test_a_malformed_tracestate_is_ignored_alone(sqlite_http: httpx.Client, given: list[str], kept: str | None) -> None:
    """Longer than 512 characters, more than 32 members, or not a list of members: the traceparent stays."""
    batch = open_batch(sqlite_http, "{}", ("traceparent", PARENT), *(("tracestate", value) for value in given))
    assert (batch["traceparent"], batch["tracestate"]) == (PARENT, kept)


def test_a_later_version_is_read_as_version_00(sqlite_http: httpx.Client) -> None:
    """As far as it is known: the ids, and whether the trace is sampled."""
    batch = open_batch(sqlite_http, "{}", ("traceparent", f"01-{TRACE}-00f067aa0ba902b7-03-later"))
    assert batch["traceparent"] == PARENT


def test_only_an_open_stores_a_context(sqlite_http: httpx.Client) -> None:
    batch = open_batch(sqlite_http, '{"items": 1}')["id"]
    trace = {"traceparent": PARENT}
    assert sqlite_http.post("/v1/acks", json={"items": [f"{batch}:0:0"]}, headers=trace).status_code == 200
    assert sqlite_http.post(f"/v1/batches/{batch}/items", json={"count": 1}, headers=trace).status_code == 201
    assert sqlite_http.post(f"/v1/batches/{batch}/seal", headers=trace).status_code == 200
    assert sqlite_http.get(f"/v1/batches/{batch}", headers=trace).json()["traceparent"] is None


def test_without_an_sdk_a_webhook_has_the_stored_context(database: Database, receiver: Receiver) -> None:
    """The receiver can continue the trace. A webhook of a batch without a context has none."""
    service = Service(database, combiner=Inline, sender=WebhookSender(allow_private=True))
    context = TraceContext(PARENT, STATE)
    batches = [
        service.batches.open(
            Opening(items=1, sealed=True, callback=Callback(f"{receiver.url}/{name}", ("batch.completed",))),
            trace=trace,
        )
        for name, trace in (("traced", context), ("plain", None))
    ]
    for batch in batches:
        service.acks.ack(Call.of(Verb.ACK, [(batch.batch.id, 0, 0)])).result()
        assert batch.callback is not None
        receiver.secrets.append(batch.callback.secret)
    once(service)
    service.stop()
    traced, plain = sorted(receiver.got, key=lambda got: got.path.endswith("/plain"))
    assert traced.valid
    assert plain.valid
    assert (traced.headers["traceparent"], traced.headers["tracestate"]) == (PARENT, STATE)
    assert traced.json["data"]["data"]["traceparent"] == PARENT
    assert not {"traceparent", "tracestate"} & plain.headers.keys()


def test_the_service_needs_no_package_for_traces() -> None:
    """Without opentelemetry-api, there are no spans, and a webhook has the stored context."""
    program = f"""
import sys
sys.modules["opentelemetry"] = None  # as if it weren't installed
from core import traces
happening = traces.Happening("batch.completed", "batch:1:completed", 3, 1, None, traces.parsed([{PARENT!r}]))
assert not traces.has_sdk()
with traces.delivering(happening, 1) as delivery:
    delivery.end(204, None)
assert not traces.HAS_API
print(delivery.headers)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout == f"{{'traceparent': {PARENT!r}}}\n"


@pytest.mark.slow
def test_the_trace_of_an_open_has_its_events_and_webhooks(
    database_url: str, receiver: Receiver, tmp_path: Path
) -> None:
    """With an SDK that is configured by the standard variables. The completed batch's span links to the request of the
    completing ack; a webhook has its own span's id as the parent, and so does each try; what isn't sampled has no
    spans."""
    receiver.replies(status(500), status(204, Content_Length="0"))
    with Database(database_url) as database:
        templates.migrate(database)
        is_embedded = database.is_embedded
    settings = {
        "LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true",
        "LASTBIT_WEBHOOKS_FIRST_DELAY": "0",
        "LASTBIT_DISPATCHER_EVERY": "0.05",
    }
    spans = tmp_path / "spans"
    service = traces.TracedService(database_url, spans, **settings)
    try:
        service.start()
        with httpx.Client(base_url=service.url, timeout=60) as http:
            callback = f'{{"url": "{receiver.url}/hook", "types": ["batch.completed"]}}'
            body = f'{{"key": "k", "items": 1, "sealed": true, "callback": {callback}}}'
            batch = open_batch(http, body, ("traceparent", PARENT), ("tracestate", STATE))["id"]
            unsampled = open_batch(http, '{"sealed": true}', ("traceparent", OTHER))["id"]
            ack = {"items": [f"{batch}:0:0"]}
            (completed,) = http.post("/v1/acks", json=ack, headers={"traceparent": OTHER}).json()["completed"]
            assert completed["newly"]
            answer = http.post("/v1/acks", json=ack).json()
            assert not answer["completed"][0]["newly"]
        if not is_embedded:
            while len(receiver.got) < 2:
                traces.dispatch(database_url, spans, **settings)
        receiver.wait_for(2)
    finally:
        service.stop()
        service.remove()
    spans_read = traces.read(spans)
    assert unsampled not in {span["attributes"]["lastbit.batch.id"] for span in spans_read}
    assert {span["context"]["trace_id"] for span in spans_read} == {f"0x{TRACE}"}
    assert {span["parent_id"] for span in spans_read} == {"0x00f067aa0ba902b7"}
    events = {span["name"]: span for span in spans_read if span["name"].startswith("batch.")}
    assert events.keys() == {"batch.opened", "batch.sealed", "batch.completed", "batch.succeeded"}
    assert len(spans_read) == len(events) + 2
    attributes = events["batch.completed"]["attributes"]
    assert attributes["lastbit.batch.id"] == batch
    assert attributes["lastbit.batch.key"] == "k"
    assert attributes["lastbit.event.type"] == "batch.completed"
    assert attributes["lastbit.event.position"] > 0
    (link,) = events["batch.completed"]["links"]
    assert link["context"]["trace_id"] == "0x" + OTHER.split("-")[1]
    assert not events["batch.opened"]["links"]
    sends = sorted(
        (span for span in spans_read if span["name"] == "webhook batch.completed"), key=lambda span: span["start_time"]
    )
    statuses = [(send["attributes"]["http.response.status_code"], send["status"]["status_code"]) for send in sends]
    assert statuses == [(500, "ERROR"), (204, "UNSET")]
    assert [got.headers["traceparent"] for got in receiver.got] == [
        f"00-{TRACE}-{send['context']['span_id'][2:]}-01" for send in sends
    ]
    assert [got.headers["tracestate"] for got in receiver.got] == [STATE, STATE]
