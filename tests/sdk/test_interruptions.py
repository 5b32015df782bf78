"""An acker, a tally's buffer and a window go on after an exception of a signal handler, wherever it interrupts them."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from lastbit import Acker, Source
from lastbit._drivers import Driver
from lastbit._protocol import Answer, Request, Service
from lastbit.acker import ItemResult
from lastbit.streams import AckWindow
from lastbit.tallies.buffer import TallyBuffer
from tests.mutants import mutant
from tests.support.interruptions import Interrupter, interrupters

SECONDS = 20


class Gated:
    """A service that answers each call when its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.was_called = threading.Event()
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()
        self.driver = Driver(Service("http://lastbit.invalid"), self._send)

    def _send(self, request: Request) -> Answer:
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        self.was_called.set()
        assert self.gate.wait(SECONDS)
        with self._lock:
            self._running -= 1
        answer = {"applied": 1, "repeated": 0, "completed": [], "rejected": []}
        return Answer(200, {}, json.dumps(answer).encode())


@pytest.fixture
def ended_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors that have ended threads."""
    ended: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda hook: ended.append(repr(hook.exc_value)))
    return ended


def ends(call: Callable[[], object], interrupter: Interrupter) -> None:
    """Assert that the call ends."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), interrupter.place


@pytest.fixture
def earlier() -> frozenset[threading.Thread]:
    """The threads from before the test: another test may have left one of the same name."""
    return frozenset(threading.enumerate())


def works_alone(
    thread: threading.Thread | None, earlier: frozenset[threading.Thread], interrupter: Interrupter
) -> None:
    """Assert that other threads of this name end, as those of earlier objects of the test have."""
    assert thread is not None
    for other in threading.enumerate():
        if other.name == thread.name and other is not thread and other.is_alive() and other not in earlier:
            other.join(SECONDS)
            assert not other.is_alive(), interrupter.place


def first(acker: Acker, service: Gated) -> list[Future[ItemResult]]:
    """Its thread isn't started yet."""
    return []


def idle(acker: Acker, service: Gated) -> list[Future[ItemResult]]:
    acker.ack("7:0:1").result(SECONDS)
    while acker._wake_at == math.inf:  # until its thread waits
        pass
    return []


def busy(acker: Acker, service: Gated) -> list[Future[ItemResult]]:
    """A call is in progress."""
    service.gate.clear()
    future = acker.ack("7:0:1")
    assert service.was_called.wait(SECONDS)
    return [future]


def waited_for(acker: Acker, service: Gated) -> list[Future[ItemResult]]:
    """The item waits already."""
    return [*busy(acker, service), acker.ack("7:0:2")]


@mutant(
    "an-interrupted-acker-keeps-an-empty-round",
    "lastbit._coalescer:Coalescer.put",
    "self._rounds.append(_Round({kind: Waiting({item: future})}, {item: kind}))\nreturn",
    "self._rounds.append(_Round())",
)
@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("verb", ["ack", "fail"])
@pytest.mark.parametrize("begin", [first, idle, busy, waited_for])
def test_an_interrupted_acker_finishes_every_future(
    begin: Callable[[Acker, Gated], list[Future[ItemResult]]],
    verb: str,
    goes_on: bool,
    earlier: frozenset[threading.Thread],
    ended_threads: list[str],
) -> None:
    """Later items are sent at once, in one call at a time, and `close` returns."""
    for interrupter in interrupters():
        service = Gated()
        acker = Acker(service.driver)
        futures = begin(acker, service)
        interrupter.run(lambda: getattr(acker, verb)("7:0:2"))  # noqa: B023
        service.gate.set()
        if goes_on:
            for number in range(3, 6):
                futures.append(acker.ack(f"7:0:{number}"))
                futures[-1].result(SECONDS)
            works_alone(acker._thread, earlier, interrupter)
        ends(acker.close, interrupter)
        assert all(future.done() for future in futures), interrupter.place
        assert service.most_at_once <= 1, interrupter.place
        assert ended_threads == [], interrupter.place


@mutant(
    "a-thread-whose-start-was-interrupted-works",
    "lastbit.tallies.buffer:TallyBuffer._work",
    "self._thread is not threading.current_thread()",
    "False",
)
@pytest.mark.parametrize("is_busy", [True, False])
@pytest.mark.parametrize("most", [1, 1000])
def test_an_interrupted_buffer_flushes_everything(
    most: int, is_busy: bool, earlier: frozenset[threading.Thread], ended_threads: list[str]
) -> None:
    """`flush` waits for all messages, also for those after the interrupted one, and calls are made one at a time."""
    for interrupter in interrupters():
        service = Gated()
        window = AckWindow()
        for offset in range(10):
            window.track(offset)
        buffer = TallyBuffer(service.driver, "screws", window, 60.0, most)
        if is_busy:
            service.gate.clear()
            for offset in range(2):
                buffer.add({"steel": 1}, Source("screws", 0, offset))
            flushing = threading.Thread(target=buffer.flush, daemon=True)
            flushing.start()
            assert service.was_called.wait(SECONDS)
        interrupter.run(lambda: buffer.add({"steel": 1}, Source("screws", 0, 2)))  # noqa: B023
        service.gate.set()

        def go_on(buffer: TallyBuffer = buffer, window: AckWindow = window) -> None:
            for offset in range(3, 6):
                buffer.add({"steel": 1}, Source("screws", 0, offset))
                buffer.flush()
                assert offset not in window.outstanding

        ends(go_on, interrupter)
        works_alone(buffer._thread, earlier, interrupter)
        ends(buffer.close, interrupter)
        assert service.most_at_once == 1, interrupter.place
        assert ended_threads == [], interrupter.place


@mutant(
    "an-interrupted-track-leaves-half-an-offset",
    "lastbit.streams.window:AckWindow.track",
    "del self._offsets[places:], self._since[places:], self._resolved[places:]",
    "pass",
)
@mutant(
    "an-interrupted-ack-holds-the-floor",
    "lastbit.streams.window:AckWindow.ack",
    "self._advance()\nraise",
    "pass\nraise",
)
@pytest.mark.parametrize("acks", [(), (10,), (10, 11), (11,)])
@pytest.mark.parametrize("verb", ["track", "ack"])
def test_an_interrupted_window_stays_right(verb: str, acks: tuple[int, ...]) -> None:
    """Its snapshots can be restored and contain every outstanding offset, and its floor moves on."""
    for interrupter in interrupters():
        window = AckWindow(capacity=4)
        for offset in (10, 11, 12):
            window.track(offset)
        for offset in acks:
            window.ack(offset)
        before = window.outstanding
        interrupted = {"track": lambda: window.track(13), "ack": lambda: window.ack(10 if 10 in before else 12)}[verb]  # noqa: B023
        interrupter.run(interrupted)
        for offset in range(14, 24):
            assert AckWindow.restore(window.snapshot()).outstanding == window.outstanding, interrupter.place
            for outstanding in window.outstanding:
                window.ack(outstanding)
            assert window.floor == window.high, interrupter.place
            window.track(offset)
            assert window.outstanding == (offset,), interrupter.place
