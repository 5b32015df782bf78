"""Rates of tokens: a call over the rate is refused with the time until a retry and has no effect, and other tokens
don't notice."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from api import app
from api.limits.rates import Bucket, Rates
from lastbit import AsyncClient, Client, RateLimited, Retry, tokens
from lastbit.tokens import Role, Token
from tests.http.test_fast_path import JSON, Wire, request
from tests.mutants import mutant
from tests.sdk.test_cli import Lastbit
from tests.support.exposition import eventually
from tests.support.servers import ServiceProcess, running_service, sqlite_file

ALL = (Role.READ, Role.PRODUCE, Role.CONSUME)
FREE, FEW_CALLS, FEW_ITEMS = tokens.new(), tokens.new(), tokens.new()
LINES = [
    tokens.known(FREE, "free", ALL).line(),
    tokens.known(FEW_CALLS, "few-calls", ALL, requests=2).line(),
    tokens.known(FEW_ITEMS, "few-items", ALL, items=10).line(),
]


@pytest.fixture(scope="module")
def rated() -> Iterator[ServiceProcess]:
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS=";".join(LINES)) as running:
        yield running


def caller(running: ServiceProcess, token: str) -> httpx.Client:
    return httpx.Client(base_url=running.url, headers={"Authorization": f"Bearer {token}"}, timeout=60)


def open_batch(running: ServiceProcess, items: int) -> int:
    with caller(running, FREE) as client:
        batch: int = client.post("/v1/batches", json={"items": items}).json()["id"]
        return batch


def until_refused(call: Callable[[], httpx.Response]) -> httpx.Response:
    """On any machine, some call in a fast series exceeds the rate."""
    for _ in range(1000):
        reply = call()
        if reply.status_code == 429:
            return reply
        assert reply.status_code in (200, 201)
    raise AssertionError("a thousand calls, and none was refused")


def test_a_bucket_holds_a_second_and_debts_are_worked_off() -> None:
    """Exactly to the call; a refused call costs nothing."""
    bucket = Bucket(5)
    assert [bucket.take(1, 100.0) for _ in range(5)] == [0] * 5
    assert bucket.take(1, 100.0) == pytest.approx(0.2)
    assert bucket.take(1, 100.1) == pytest.approx(0.1)
    assert bucket.take(1, 100.25) == 0
    assert bucket.take(1, 100.25) > 0
    bucket = Bucket(100)
    assert bucket.take(10_000, 100.0) == 0
    assert bucket.take(1, 100.0) == pytest.approx(99.01)
    assert bucket.take(1, 199.0) == pytest.approx(0.01)
    assert bucket.take(1, 199.1) == 0
    assert bucket.take(10**6, 10**6) == 0  # after a long pause it holds at most a second's worth
    assert bucket.take(1, 10**6 + 1) > 0


def test_buckets_of_removed_tokens_are_dropped_and_the_others_stay() -> None:
    """A reload doesn't refill a bucket, unless the rate changes."""
    rates = Rates()
    first, second = (Token(name, frozenset(ALL), name.encode(), requests=1) for name in ("one", "two"))
    rates.charge_call(first)
    rates.charge_call(second)
    rates.retain({b"one"})
    rates.charge_call(second)
    for entry in (first, second):
        with pytest.raises(Exception, match="1 requests a second"):
            rates.charge_call(entry)
    rates.charge_call(Token("one", frozenset(ALL), b"one", requests=7))
    rates.charge_call(Token("free", frozenset(ALL), b"free"))
    rates.charge_items(first, 10**9)


@pytest.mark.timeout(60)
def test_a_hang_up_in_the_middle_of_a_charge_does_not_lock_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of the signal interrupts the event loop, which holds the lock that a reload needs."""
    rates, take = Rates(), Bucket.take
    token = Token("one", frozenset(ALL), b"one", requests=1)

    def interrupted(bucket: Bucket, amount: int, now: float) -> float:
        signal.raise_signal(signal.SIGHUP)
        return take(bucket, amount, now)

    async def main() -> None:
        is_reloaded = threading.Event()

        def reload() -> None:
            rates.retain([])
            is_reloaded.set()

        with app._on_hang_up(asyncio.get_running_loop(), reload):
            monkeypatch.setattr(Bucket, "take", interrupted)
            rates.charge_call(token)
            monkeypatch.undo()
            assert await asyncio.to_thread(is_reloaded.wait, 30)

    asyncio.run(main())
    rates.charge_call(token)  # its bucket was dropped


def test_too_many_calls_are_refused_on_every_route(rated: ServiceProcess) -> None:
    """With the seconds until another call is possible; calls with other tokens are answered meanwhile."""
    with caller(rated, FEW_CALLS) as client, caller(rated, FREE) as other:
        for call in (
            lambda: client.get("/v1/batches"),
            lambda: client.post("/v1/batches", json={}),
            lambda: client.post("/v1/acks", json={"items": []}),
            lambda: client.post("/v1/failures?", json={"items": []}),
        ):
            refusal = until_refused(call)
            assert refusal.json()["code"] == "rate_limited"
            assert refusal.json()["detail"] == "the token few-calls has a rate of 2 requests a second"
            assert refusal.headers["Retry-After"] == "1"
            assert other.get("/v1/batches").status_code == 200
            assert client.get("/healthz").status_code == 200
        metrics = other.get("/metrics").text
        assert 'lastbit_refused_total{cause="rate"} 4.0' in metrics
        assert 'lastbit_ack_requests_total{status="429",verb="ack"} 1.0' in metrics


def test_the_fast_path_has_the_same_rates(rated: ServiceProcess) -> None:
    """Also for a head that the server recognizes; the connection stays open."""
    batch = open_batch(rated, 1000)
    wire = Wire(rated.port)
    headers = f"{JSON}Authorization: Bearer {FEW_CALLS}\r\n"
    counts: dict[int, int] = {}
    index = 0
    while 429 not in counts or counts[429] < 3:
        wire.send(request([f"{batch}:0:{index}"], headers=headers))
        status, headers_, _ = wire.answer()
        counts[status] = counts.get(status, 0) + 1
        assert status == 200 or headers_["retry-after"] == "1"
        index += 1
        assert index < 1000
    with caller(rated, FREE) as client:
        assert client.get(f"/v1/batches/{batch}").json()["acked"] == counts.get(200, 0)
    wire.close()


@mutant(
    "large-calls-over-the-rate-are-parsed",
    "api.limits.rates:Rates.require_items",
    "self._take(caller, 'items', caller.items, 0)",
    "pass",
)
def test_items_are_counted_and_a_refused_call_applies_nothing(rated: ServiceProcess) -> None:
    """By id, by mask, in events and in tallies; one large call is accepted, and the next must wait for it."""
    batch = open_batch(rated, 8192 * 2)
    with caller(rated, FEW_ITEMS) as client:
        big = client.post("/v1/acks", json={"items": [f"{batch}:0:{n}" for n in range(200)]})
        assert big.json()["applied"] == 200
        entry = {"key": "k", "delta": 1, "source": {"topic": "t", "partition": 0, "offset": 1}}
        for path, body in (
            ("/v1/acks", {"items": [f"{batch}:0:200"]}),
            ("/v1/failures", {"groups": [{"batch": batch, "group": 1, "bits": "/w=="}]}),
            ("/v1/events", {"events": [{"id": "mine", "type": "mine"}]}),
            ("/v1/tallies/rated/apply", {"entries": [entry]}),
        ):
            refusal = client.post(path, json=body)
            assert (refusal.status_code, refusal.json()["code"]) == (429, "rate_limited")
            assert "10 items a second" in refusal.json()["detail"]
            assert 5 <= int(refusal.headers["Retry-After"]) <= 20
        # Calls without items are accepted, and so is an empty call.
        assert client.get(f"/v1/batches/{batch}").json()["acked"] == 200
        assert client.post("/v1/acks", json={"items": []}).json()["applied"] == 0
        assert client.post("/v1/batches", json={"items": 10**6}).status_code == 201
        assert client.get("/v1/events", params={"type": "mine"}).json()["events"] == []
        assert client.post("/v1/acks", json={"items": ["x"]}).status_code == 422
        # A large call is refused before it is parsed.
        for path in ("/v1/acks", "/v1/failures?", "/v1/events", "/v1/tallies/t/apply"):
            no_json = client.post(path, content=b"[" * 5000, headers={"Content-Type": "application/json"})
            assert (no_json.status_code, no_json.json()["code"]) == (429, "rate_limited")
        assert client.get("/v1/tallies/rated/k").json()["value"] == 0


def test_the_settings_have_a_rate_for_tokens_without_one(tmp_path: Path) -> None:
    """A rate in a token's own line has priority; reloading the file applies new rates."""
    own_token, other = tokens.new(), tokens.new()
    file = tmp_path / "tokens"
    file.write_text(
        f"{tokens.known(own_token, 'mine', ALL).line()}\n{tokens.known(other, 'other', ALL, requests=100_000).line()}\n"
    )
    settings = {"LASTBIT_TOKENS_FILE": str(file), "LASTBIT_TOKEN_REQUESTS": "1"}
    with sqlite_file() as url, running_service(url, **settings) as running:
        with caller(running, own_token) as client:
            assert "1 requests a second" in until_refused(lambda: client.get("/v1/batches")).json()["detail"]
        with caller(running, other) as client:
            assert {client.get("/v1/batches").status_code for _ in range(20)} == {200}
            file.write_text(f"{tokens.known(other, 'other', ALL, requests=1).line()}\n")
            until_refused(lambda: client.get("/v1/batches"))


def test_a_service_without_tokens_has_no_rates() -> None:
    """It has no tokens to distinguish."""
    with sqlite_file() as url, running_service(url, LASTBIT_TOKEN_REQUESTS="1") as running:
        assert {httpx.get(f"{running.url}/v1/batches").status_code for _ in range(10)} == {200}


def test_clients_wait_for_retry_after_and_continue(rated: ServiceProcess) -> None:
    """Client, acker and command line: everything is done in the end, at the token's rate."""
    batch = open_batch(rated, 100)
    start = time.monotonic()
    with Client(rated.url, token=FEW_CALLS) as client:
        for index in range(5):
            assert client.ack(f"{batch}:0:{index}").applied == 1
        with client.acker() as acker:
            replies = [acker.ack(f"{batch}:0:{index}") for index in range(5, 20)]
            assert [future.result(60) for future in replies] == [None] * 15

    async def with_tasks() -> int:
        async with AsyncClient(rated.url, token=FEW_CALLS) as client:
            answers = await asyncio.gather(*(client.ack(f"{batch}:0:{index}") for index in range(20, 26)))
            return sum(answer.applied for answer in answers)

    assert asyncio.run(with_tasks()) == 6
    line = Lastbit(rated.url)
    for index in range(26, 29):
        process = line("ack", f"{batch}:0:{index}", "--token", FEW_CALLS)
        assert process.returncode == 0, process.stderr
    with caller(rated, FREE) as client_:
        assert client_.get(f"/v1/batches/{batch}").json()["acked"] == 29
    assert time.monotonic() - start >= 14 / 2 - 1


def test_a_client_that_may_not_wait_gets_an_error(rated: ServiceProcess) -> None:
    """By a specific error, with the seconds."""
    with Client(rated.url, token=FEW_CALLS, retry=Retry(attempts=1)) as client:

        def insist() -> None:
            for _ in range(1000):
                list(client.batches())

        with pytest.raises(RateLimited) as refusal:
            insist()
    assert refusal.value.retry_after == 1


def test_bytes_of_bodies_are_counted_also_those_that_are_refused() -> None:
    """Declared or chunked, on the fast path and the ordinary one. A call without a body needs none."""
    secret = tokens.new()
    line = tokens.known(secret, "few-bytes", ALL, body_bytes=1000).line()
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS=line) as running, caller(running, secret) as client:
        blanks = b" " * 2000
        json_type = {"Content-Type": "application/json"}
        bodies: list[tuple[str, Callable[[], bytes | Iterator[bytes]], int]] = [
            ("/v1/acks", lambda: b'{"items": []%b}' % blanks, 200),
            ("/v1/acks?", lambda: iter([b'{"items": [', blanks, b"]}"]), 200),
            ("/v1/batches", lambda: b"{%b}" % blanks, 201),
            ("/v1/batches", lambda: b"[%b]" % blanks, 422),
            ("/v1/events", lambda: iter([b'{"events": [', blanks, b"]}"]), 200),
        ]
        for path, body, status in bodies:
            # The bucket fills again.
            eventually(lambda: client.post(path, content=body(), headers=json_type).status_code, status)  # noqa: B023
            refusal = client.post(path, json={"items": []})
            assert (refusal.status_code, refusal.json()["code"]) == (429, "rate_limited")
            assert "1,000 bytes a second" in refusal.json()["detail"]
            assert client.get("/v1/batches").status_code == 200
