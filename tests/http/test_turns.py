"""Turns of the event loop: a burst is parsed whole; a flood of large calls is cut to what leaves turns short."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from api.turns import SHARE, Turns
from bench import load
from core.admission import CALM, CROWD, LEAST
from tests.http.test_overload import Answer, answer
from tests.servers import ServiceProcess

AFTER = 0.3
SENT_AWAY = 30e-6
"""Seconds that it takes to send one away."""


class Loop:
    """An event loop whose time is what its calls take."""

    def __init__(self, after: float = AFTER) -> None:
        self.now = 100.0
        self.callbacks: list[Callable[[], object]] = []
        self.turns = Turns(after, self.callbacks.append, lambda: self.now)

    def turn(self, calls: int, seconds: float, rest: float = 0.0) -> int:
        """So many callers have sent something that takes so long to parse, and there is something else to do: how many
        of them are let in."""
        let_in = 0
        for _ in range(calls):
            if self.turns.is_full():
                self.now += SENT_AWAY
                continue
            begun = self.turns.begin()
            self.now += seconds
            self.turns.end(begun)
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
    """However long it takes, once; and again when turns were short in between."""
    loop = Loop()
    for _ in range(10):
        assert loop.turn(2000, 0.001) == 2000
        assert loop.turn(10, 0.001) == 10


def test_a_flood_of_large_calls_is_cut() -> None:
    """Two thousand connections that always have something to say: from the third turn on, turns are short, and half
    of the time goes into those who are let in."""
    loop = Loop()
    loop.flood()
    for _ in range(20):
        begun = loop.now
        let_in = loop.turn(2000, 0.001)
        took = loop.now - begun
        assert LEAST <= let_in <= LEAST + 1
        assert took < 1.5 * CROWD
        assert let_in * 0.001 / took > 0.45


@pytest.mark.parametrize(("calls", "seconds"), [(2000, 15e-6), (1000, 50e-6), (LEAST, 0.02)])
def test_a_crowd_is_no_flood(calls: int, seconds: float) -> None:
    """Neither many small calls, nor a few consumers who each wait for the answer to a very large one."""
    loop = Loop()
    for _ in range(200):
        assert loop.turn(calls, seconds) == calls


def test_medium_calls_have_half_a_turn() -> None:
    """More than the least are let in, where so many are parsed soon."""
    loop = Loop()
    loop.flood()
    let_in = loop.turn(2000, 0.0002)
    assert let_in == pytest.approx(SHARE / 0.0002, abs=1)


def test_it_is_over_when_nobody_had_to_be_sent_away_for_a_while() -> None:
    """Not sooner, or a flood would be let in whole every few turns."""
    loop = Loop()
    loop.flood()
    begun = loop.now
    while loop.now - begun < CALM + AFTER:
        loop.turn(20, 0.001)
        loop.now += 0.01
    assert loop.turn(2000, 0.001) == 2000
    loop.flood()
    loop.turn(20, 0.001)
    assert loop.turn(2000, 0.001) < 2000


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
        told: list[Answer] = []
        for _ in range(10):
            os.kill(running.process.pid, signal.SIGSTOP)
            for each in sockets:
                each.settimeout(60)
                each.sendall(request)
            os.kill(running.process.pid, signal.SIGCONT)
            answers = [answer(each) for each in sockets]
            assert {status for status, _, _ in answers} <= {422, 503}
            told = [each for each in answers if each[0] == 503]
            if told:
                break
        assert 0 < len(told) <= crowd - LEAST
        for _, headers, problem in told:
            assert headers["retry-after"]
            assert problem["code"] == "unavailable"
        said = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert [each["turn"] > CROWD for each in said if each["event"] == "acks_shed"] == [True]


def test_it_is_said_once_when_somebody_is_sent_away_and_once_when_it_is_over() -> None:
    """Not where turns are long and nobody is sent away, as with many small calls."""
    loop = Loop()
    with structlog.testing.capture_logs() as said:
        for _ in range(100):
            assert loop.turn(2000, 20e-6, rest=CROWD) == 2000
        assert said == []
        loop.flood()
        for _ in range(20):
            loop.turn(2000, 0.001)
        assert [each["event"] for each in said] == ["acks_shed"]
        assert said[0]["turn"] > CROWD
        for _ in range(200):
            loop.turn(20, 0.001)
        assert [each["event"] for each in said] == ["acks_shed", "acks_shed_no_more"]


def test_zero_sends_nobody_away() -> None:
    """As `LASTBIT_SHED_AFTER=0` says."""
    loop = Loop(after=0)
    for _ in range(20):
        assert loop.turn(2000, 0.001) == 2000
