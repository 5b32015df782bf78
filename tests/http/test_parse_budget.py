"""The parse budget: all calls of a burst are parsed; of a flood of large calls, only as many as keep event-loop
iterations short."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from api.fast_path.protocol import FastProtocol
from api.limits import pause
from api.limits.parse_budget import FEWEST, LARGE, SHARES, ParseBudget
from bench import load
from core.commits.shedding import CALM, CROWD, LEAST
from tests.fuzz.wire import Connection, Served, answers, served
from tests.http.test_overload import Answer, answer
from tests.support.servers import ServiceProcess

AFTER = 0.3
BURST = 140
"""How many calls of a millisecond each may be parsed in one iteration."""
REFUSAL = 30e-6
"""Seconds that a refusal takes."""


class Loop:
    """An event loop with a simulated clock, which only calls advance."""

    def __init__(self, after: float = AFTER) -> None:
        self.now = 100.0
        self.callbacks: list[Callable[[], object]] = []
        self.budget = ParseBudget(after, self.callbacks.append, lambda: self.now)

    def iterate(self, calls: int, seconds: float, rest: float = 0.0) -> int:
        """Run an iteration in which `calls` arrive that each take `seconds` to parse, and in which other work takes
        `rest` seconds. Returns how many calls were admitted."""
        admitted_calls = 0
        for _ in range(calls):
            if self.budget.is_full():
                self.now += REFUSAL
                continue
            start = self.budget.begin()
            self.now += seconds
            self.budget.end(start)
            admitted_calls += 1
        self.now += rest
        due, self.callbacks[:] = list(self.callbacks), []
        for callback in due:
            callback()
        return admitted_calls

    def flood(self, seconds: float = 0.001) -> None:
        """Send large calls until some are refused."""
        assert any(self.iterate(2000, seconds) < 2000 for _ in range(3))


def test_all_calls_of_a_burst_are_parsed() -> None:
    """Also repeatedly, if short iterations lie in between."""
    loop = Loop()
    for _ in range(10):
        assert loop.iterate(BURST, 0.001) == BURST
        assert loop.iterate(10, 0.001) == 10


def test_a_burst_that_takes_longer_is_cut_within_its_iteration() -> None:
    """Parsing all five thousand in one iteration would delay every response by five seconds."""
    loop = Loop()
    assert loop.iterate(5000, 0.001) == pytest.approx(150, abs=1)
    assert loop.iterate(5000, 0.001) < 100


def test_consecutive_long_iterations_are_cut_although_each_alone_is_within_bounds() -> None:
    """They are cut once their total exceeds the bound; a short iteration in between resets the total."""
    loop = Loop()
    assert [loop.iterate(BURST, 0.001) for _ in range(4)] == [BURST, BURST, BURST, 1000 * SHARES[0]]
    loop = Loop()
    assert [loop.iterate(calls, 0.001) for calls in (BURST, 10) * 4] == [BURST, 10] * 4


def test_a_flood_of_large_calls_is_cut() -> None:
    """Two thousand connections that always have a call ready: iterations become short, and a third of the time is spent
    on admitted calls."""
    loop = Loop()
    loop.flood()
    for _ in range(20):
        start = loop.now
        admitted_calls = loop.iterate(2000, 0.001)
        seconds = loop.now - start
        assert seconds < CROWD
        assert admitted_calls * 0.001 / seconds > 0.3


def test_a_flood_of_clients_that_wait_before_they_retry_has_shorter_iterations() -> None:
    """The number of arrivals grows with the length of an iteration, so parsing less in each answers all clients
    earlier, and most of the time is still spent on parsing."""
    loop = Loop()
    loop.flood()
    seconds = CROWD
    for _ in range(20):
        start = loop.now
        admitted_calls = loop.iterate(round(11_000 * seconds), 0.001)
        seconds = loop.now - start
    assert seconds < 1.6 * SHARES[0]
    assert admitted_calls * 0.001 / seconds > 0.6


def test_a_few_calls_are_parsed_however_long_they_take() -> None:
    """The fewest of a crowd; or all, if no more arrive than may always wait."""
    loop = Loop()
    loop.flood()
    loop.iterate(2000, 0.02)
    assert loop.iterate(2000, 0.02) == FEWEST
    loop.iterate(LEAST, 0.02)
    assert loop.iterate(LEAST, 0.02) == LEAST


@pytest.mark.parametrize(("calls", "seconds"), [(2000, 15e-6), (1000, 50e-6), (LEAST, 0.02)])
def test_a_crowd_is_not_a_flood(calls: int, seconds: float) -> None:
    """Neither many small calls nor a few very large ones, one per consumer, count as a flood."""
    loop = Loop()
    for _ in range(200):
        assert loop.iterate(calls, seconds) == calls


@pytest.mark.parametrize(("crowd", "share"), [(2000, 0.028), (5000, SHARES[1]), (500, SHARES[0])])
def test_medium_calls_get_half_of_the_time_that_all_other_work_takes(crowd: int, share: float) -> None:
    """Calls that parse quickly are admitted beyond the minimum, within bounds."""
    loop = Loop()
    loop.flood()
    for _ in range(10):
        admitted_calls = loop.iterate(crowd, 0.0002)
    assert admitted_calls * 0.0002 == pytest.approx(share, rel=0.02)


def test_a_flood_ends_after_a_while_without_refusals() -> None:
    """Ending it earlier would admit the whole flood every few iterations."""
    loop = Loop()
    loop.flood()
    loop.iterate(20, 0.001)
    assert loop.iterate(BURST, 0.001) < BURST
    start = loop.now
    while loop.now - start < CALM + AFTER:
        loop.iterate(20, 0.001)
        loop.now += 0.01
    assert loop.iterate(BURST, 0.001) == BURST


def test_a_flood_of_invalid_calls_is_refused_with_retry_after(sqlite_url: str, tmp_path: Path) -> None:
    """Calls with an invalid id cost parsing and no commit. The service is stopped while they are sent, so that it
    receives all of them in one iteration."""
    crowd = 300
    content = json.dumps({"items": [f"1:0:{n}" for n in range(1999)] + ["wrong"]}).encode()
    request = load.encoded("/v1/acks", content)
    running = ServiceProcess(sqlite_url, log=tmp_path / "log", environment={"LASTBIT_SHED_AFTER": "0.001"})
    running.start()
    assert running.process is not None
    with contextlib.ExitStack() as stack:
        stack.callback(running.stop, signal.SIGKILL)
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(crowd)]
        replies: list[Answer] = []
        for _ in range(10):
            os.kill(running.process.pid, signal.SIGSTOP)
            for entry in sockets:
                entry.settimeout(60)
                entry.sendall(request)
            os.kill(running.process.pid, signal.SIGCONT)
            answers = [answer(entry) for entry in sockets]
            assert {status for status, _, _ in answers} <= {422, 503}
            replies = [entry for entry in answers if entry[0] == 503]
            if replies:
                break
        assert 0 < len(replies) <= crowd - FEWEST
        for _, headers, problem in replies:
            assert headers["retry-after"]
            assert problem["code"] == "unavailable"
        output = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert [entry["turn"] > CROWD for entry in output if entry["event"] == "acks_shed"] == [True]


def test_the_start_and_the_end_of_refusals_are_logged_once() -> None:
    """Long iterations without refusals, as with many small calls, log nothing."""
    loop = Loop()
    with structlog.testing.capture_logs() as output:
        for _ in range(100):
            assert loop.iterate(2000, 20e-6, rest=CROWD) == 2000
        assert output == []
        loop.flood()
        for _ in range(20):
            loop.iterate(2000, 0.001)
        assert [entry["event"] for entry in output] == ["acks_shed"]
        assert output[0]["turn"] > CROWD
        for _ in range(200):
            loop.iterate(20, 0.001)
        assert [entry["event"] for entry in output] == ["acks_shed", "acks_shed_no_more"]


def test_zero_refuses_nothing() -> None:
    """`LASTBIT_SHED_AFTER=0` switches the budget off."""
    loop = Loop(after=0)
    for _ in range(20):
        assert loop.iterate(2000, 0.001) == 2000


class Flooded:
    """A service in this process whose `is_full` the test sets. All bytes that arrive between two runs of its event loop
    arrive in one iteration."""

    def __init__(self, running: Served) -> None:
        self.loop = running.loop
        self.app: Any = running.app
        self._running = running
        self.full(False)

    def full(self, full: bool) -> None:
        self.app.state.acks.is_full = lambda: full

    def parse_takes(self, seconds: float) -> None:
        """Each call takes this long by the budget's clock."""
        self.app.state.limits.parse_budget = ParseBudget(
            AFTER, self.loop.call_soon, itertools.count(0, seconds).__next__
        )

    def connect(self) -> Connection:
        return self._running.connect(FastProtocol)

    def until_committed(self) -> None:
        """Wait for the commit, which the event loop hasn't noticed yet."""
        while self.app.state.acks.finished.is_empty:
            time.sleep(0)


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with served() as result:
        yield result


@pytest.fixture
def flooded(running: Served) -> Flooded:
    return Flooded(running)


REQUEST = load.encoded("/v1/acks", {"items": ["1:0:1"]})
CHUNK = REQUEST[REQUEST.index(b"\r\n\r\n") + 4 :]
CHUNKED = b"".join(
    [
        b"POST /v1/acks HTTP/1.1\r\nHost: lastbit\r\nContent-Type: application/json\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(CHUNK), CHUNK),
    ]
)


@pytest.mark.parametrize(
    "request_",
    [REQUEST, REQUEST.replace(b"\r\n", b"\r\nX-Request-Id: mine\r\n", 1), CHUNKED],
    ids=["", "named", "chunked"],
)
def test_a_refusal_is_sent_after_a_delay(flooded: Flooded, request_: bytes) -> None:
    """Each refusal has its own delay, and two on one connection are sent one after the other, on every code path."""
    first, second = flooded.connect(), flooded.connect()
    first.feed(request_)
    assert [entry.status for entry in first.until_answered()] == [200]
    first.transport.written = b""
    flooded.full(True)
    start = flooded.loop.time()
    first.feed(request_, request_)
    assert first.transport.written == b""
    assert len(first.until_answered()) == 1
    pause_start = flooded.loop.time()
    assert pause_start - start >= pause.SECONDS
    second.feed(request_)
    for connection, count in ((second, 1), (first, 2)):
        replies = connection.until_answered(count)
        assert [entry.status for entry in replies] == [503] * count
        for entry in replies:
            assert entry.headers["retry-after"] == "1"
            assert (entry.headers["x-request-id"] == "mine") is (b"mine" in request_)
        assert flooded.loop.time() - pause_start >= pause.SECONDS


@pytest.mark.parametrize("full", [False, True], ids=["admitted", "refused"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_responses_do_not_wait_until_all_requests_are_read(flooded: Flooded, large: bool, full: bool) -> None:
    """A commit ends while the event loop reads other requests: the next of them sends the response. Only small calls,
    which are read quickly, may delay it."""
    flooded.parse_takes(1.1 * LARGE if large else 0.9 * LARGE)
    admitted, others = flooded.connect(), flooded.connect()
    admitted.protocol.data_received(REQUEST)
    flooded.until_committed()
    assert admitted.transport.written == b""
    flooded.full(full)
    others.protocol.data_received(REQUEST)
    replies = [answer.status for answer in answers(admitted.transport.written)]
    assert replies == ([200] if large or full else [])
    assert [entry.status for entry in others.until_answered()] == [503 if full else 200]


def test_a_connection_may_close_or_the_service_stop_before_the_refusal_is_sent(flooded: Flooded) -> None:
    """Nothing is written to a closed connection; a stopping service closes the other after its response."""
    leaver, stopped = flooded.connect(), flooded.connect()
    flooded.full(True)
    for entry in (leaver, stopped):
        entry.protocol.data_received(REQUEST)
    leaver.transport.close()
    leaver.lose()
    stopped.protocol.shutdown()
    replies = stopped.until_answered()
    assert [(entry.status, entry.headers["connection"]) for entry in replies] == [(503, "close")]
    assert stopped.transport.closed
    assert leaver.transport.written == b""
