"""Turns of the event loop: a burst is parsed whole; a flood of large calls is cut to what leaves turns short."""

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

from api.acks import refusals
from api.acks.fast_path import AckProtocol
from api.acks.parse_budget import FEWEST, LARGE, SHARES, ParseBudget
from bench import load
from core.acks.admission import CALM, CROWD, LEAST
from tests.fuzz.wire import Connection, Served, answers, served
from tests.http.test_overload import Answer, answer
from tests.support.servers import ServiceProcess

AFTER = 0.3
BURST = 140
"""Calls of a millisecond each that may be parsed in one turn."""
SENT_AWAY = 30e-6
"""Seconds that it takes to send one away."""


class Loop:
    """An event loop whose time is what its calls take."""

    def __init__(self, after: float = AFTER) -> None:
        self.now = 100.0
        self.callbacks: list[Callable[[], object]] = []
        self.budget = ParseBudget(after, self.callbacks.append, lambda: self.now)

    def turn(self, calls: int, seconds: float, rest: float = 0.0) -> int:
        """So many callers have sent something that takes so long to parse, and there is something else to do: how many
        of them are let in."""
        let_in = 0
        for _ in range(calls):
            if self.budget.is_full():
                self.now += SENT_AWAY
                continue
            start = self.budget.begin()
            self.now += seconds
            self.budget.end(start)
            let_in += 1
        self.now += rest
        due, self.callbacks[:] = list(self.callbacks), []
        for callback in due:
            callback()
        return let_in

    def flood(self, seconds: float = 0.001) -> None:
        """Large calls, until some are sent away."""
        assert any(self.turn(2000, seconds) < 2000 for _ in range(3))


def test_a_burst_is_parsed_whole() -> None:
    """As long as turns may be long on end; and again when they were short in between."""
    loop = Loop()
    for _ in range(10):
        assert loop.turn(BURST, 0.001) == BURST
        assert loop.turn(10, 0.001) == 10


def test_a_burst_that_takes_longer_is_cut_within_its_turn() -> None:
    """Five thousand who are heard in one turn would wait for five seconds, all of them."""
    loop = Loop()
    assert loop.turn(5000, 0.001) == pytest.approx(150, abs=1)
    assert loop.turn(5000, 0.001) < 100


def test_turns_that_are_long_on_end_are_cut_though_none_of_them_is_too_long_alone() -> None:
    """After the time that they may take together; a short iteration between them resets that time."""
    loop = Loop()
    assert [loop.turn(BURST, 0.001) for _ in range(4)] == [BURST, BURST, BURST, 1000 * SHARES[0]]
    loop = Loop()
    assert [loop.turn(calls, 0.001) for calls in (BURST, 10) * 4] == [BURST, 10] * 4


def test_a_flood_of_large_calls_is_cut() -> None:
    """Two thousand connections that always have something to say: turns become short, and a third of the time goes
    into those who are let in."""
    loop = Loop()
    loop.flood()
    for _ in range(20):
        start = loop.now
        let_in = loop.turn(2000, 0.001)
        seconds = loop.now - start
        assert seconds < CROWD
        assert let_in * 0.001 / seconds > 0.3


def test_a_flood_of_those_who_wait_before_they_come_again_has_shorter_turns() -> None:
    """So many of them come as it takes time to hear the others: the less is parsed in a turn, the sooner all are
    answered, and most of the time goes into parsing all the same."""
    loop = Loop()
    loop.flood()
    seconds = CROWD
    for _ in range(20):
        start = loop.now
        let_in = loop.turn(round(11_000 * seconds), 0.001)
        seconds = loop.now - start
    assert seconds < 1.6 * SHARES[0]
    assert let_in * 0.001 / seconds > 0.6


def test_a_few_calls_are_parsed_however_long_they_take() -> None:
    """A few of a crowd; and all where no more come than may always wait."""
    loop = Loop()
    loop.flood()
    loop.turn(2000, 0.02)
    assert loop.turn(2000, 0.02) == FEWEST
    loop.turn(LEAST, 0.02)
    assert loop.turn(LEAST, 0.02) == LEAST


@pytest.mark.parametrize(("calls", "seconds"), [(2000, 15e-6), (1000, 50e-6), (LEAST, 0.02)])
def test_a_crowd_is_no_flood(calls: int, seconds: float) -> None:
    """Neither many small calls, nor a few consumers who each wait for the answer to a very large one."""
    loop = Loop()
    for _ in range(200):
        assert loop.turn(calls, seconds) == calls


@pytest.mark.parametrize(("crowd", "share"), [(2000, 0.028), (5000, SHARES[1]), (500, SHARES[0])])
def test_medium_calls_have_half_of_what_the_rest_takes(crowd: int, share: float) -> None:
    """More than the fewest are let in, where so many are parsed soon; within bounds."""
    loop = Loop()
    loop.flood()
    for _ in range(10):
        let_in = loop.turn(crowd, 0.0002)
    assert let_in * 0.0002 == pytest.approx(share, rel=0.02)


def test_it_is_over_when_nobody_had_to_be_sent_away_for_a_while() -> None:
    """Not sooner, or a flood would be let in whole every few turns."""
    loop = Loop()
    loop.flood()
    loop.turn(20, 0.001)
    assert loop.turn(BURST, 0.001) < BURST
    start = loop.now
    while loop.now - start < CALM + AFTER:
        loop.turn(20, 0.001)
        loop.now += 0.01
    assert loop.turn(BURST, 0.001) == BURST


def test_a_flood_that_is_never_committed_is_told_to_come_back(sqlite_url: str, tmp_path: Path) -> None:
    """Calls with a wrong id among many cost nothing but parsing. The service stands still while they are sent, so that
    it hears all of them in one turn."""
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


def test_it_is_said_once_when_somebody_is_sent_away_and_once_when_it_is_over() -> None:
    """Not where turns are long and nobody is sent away, as with many small calls."""
    loop = Loop()
    with structlog.testing.capture_logs() as output:
        for _ in range(100):
            assert loop.turn(2000, 20e-6, rest=CROWD) == 2000
        assert output == []
        loop.flood()
        for _ in range(20):
            loop.turn(2000, 0.001)
        assert [entry["event"] for entry in output] == ["acks_shed"]
        assert output[0]["turn"] > CROWD
        for _ in range(200):
            loop.turn(20, 0.001)
        assert [entry["event"] for entry in output] == ["acks_shed", "acks_shed_no_more"]


def test_zero_sends_nobody_away() -> None:
    """As `LASTBIT_SHED_AFTER=0` says."""
    loop = Loop(after=0)
    for _ in range(20):
        assert loop.turn(2000, 0.001) == 2000


class Flooded:
    """A service in this process that is full when it is told so. All bytes that arrive between two runs of its event
    loop arrive in one iteration."""

    def __init__(self, running: Served) -> None:
        self.loop = running.loop
        self.app: Any = running.app
        self._running = running
        self.full(False)

    def full(self, full: bool) -> None:
        self.app.is_full = lambda: full

    def parse_takes(self, seconds: float) -> None:
        """Each call, by the clock of its turns."""
        self.app.state.parse_budget = ParseBudget(AFTER, self.loop.call_soon, itertools.count(0, seconds).__next__)

    def connect(self) -> Connection:
        return self._running.connect(AckProtocol)

    def until_committed(self) -> None:
        """The event loop has not been told yet."""
        while not self.app.finished:
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
def test_who_is_sent_away_is_told_after_a_pause(flooded: Flooded, request_: bytes) -> None:
    """Each after its own delay, and two of one connection one after the other, on every path through the code."""
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
    assert pause_start - start >= refusals.SECONDS
    second.feed(request_)
    for connection, count in ((second, 1), (first, 2)):
        replies = connection.until_answered(count)
        assert [entry.status for entry in replies] == [503] * count
        for entry in replies:
            assert entry.headers["retry-after"] == "1"
            assert (entry.headers["x-request-id"] == "mine") is (b"mine" in request_)
        assert flooded.loop.time() - pause_start >= refusals.SECONDS


@pytest.mark.parametrize("full", [False, True], ids=["let in", "sent away"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_answers_do_not_wait_until_all_were_heard(flooded: Flooded, large: bool, full: bool) -> None:
    """A commit is over while the event loop is busy with others: the next of them makes it known. Only where calls are
    small, and those who are let in heard soon, their answers have time."""
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


def test_who_is_to_be_told_may_be_gone_by_then_or_the_service_stop(flooded: Flooded) -> None:
    """Nothing is written to the one; the other's connection ends with the answer."""
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
