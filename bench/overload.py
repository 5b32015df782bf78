"""The behaviour when ten times as many acks arrive as can be committed. The load is an open loop: each request is sent
when it is due, whether or not earlier ones were answered.

The generator is a separate process that uses plain sockets and epoll. A request that is due takes an idle connection;
if there is none, it is counted as unsent. The benchmark first looks for the sustainable rate, the highest rate without
refused or unsent requests, in steps of a tenth of a closed loop's rate. Then it offers ten times that rate over open
connections, and then the sustainable rate again. Latencies count from the moment of sending. The delay between due and
sent is printed beside the rate, since the generator shares two cores with the service.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import multiprocessing
import random
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench import acks, load, measure
from bench.measure import Scale

STEPS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
"""Offered rates, relative to the closed loop's, in turn until one is not sustained."""
TRIES = 3
"""Attempts before a rate counts as not sustained: on a shared machine, other programs alone cause refusals now and
then."""
TIMES = 10


class Kind(NamedTuple):
    """The request of each call."""

    name: str
    ids: int
    in_order: bool
    """Whether each call has new items. Otherwise they are random, so most of them are repeats at the end."""
    consumers: int
    """Connections. Each has at most one request under way, so too few leave requests unsent; beyond what the machine
    can send and read, more of them only wait for each other."""


KINDS = (
    Kind("1,000 ids in order a call", 1000, in_order=True, consumers=5000),
    Kind("100 ids at random a call", 100, in_order=False, consumers=2000),
    Kind("one id a call", 1, in_order=False, consumers=2000),
)


FLOOD_RATES = {1000: 4_000, 100: 12_000, 1: 30_000}
"""Requests a second that no service on two cores admits, by the ids of a call."""


@dataclass(frozen=True)
class Shape:
    """The size of a case: seconds of each phase, and items."""

    calm: float
    flood: float
    items: int

    @classmethod
    def of(cls, scale: Scale) -> Shape:
        return cls(10, 60, scale.items) if scale.rounds > 2 else cls(2, 3, scale.items)


@dataclass
class Phase:
    """The figures of one phase. Times are seconds since its start."""

    seconds: float = 0.0
    sent: int = 0
    unsent: int = 0
    """Requests that were due while no connection was idle."""
    refused: int = 0
    with_retry_after: int = 0
    """Refusals with a Retry-After."""
    broken: int = 0
    """Requests whose connection closed before the response."""
    applied: int = 0
    took: list[float] = field(default_factory=list)
    """Latency of each admitted request."""
    ended: list[float] = field(default_factory=list)
    """Time of the response to each admitted request."""
    late: list[float] = field(default_factory=list)
    """Delay of each request between due and sent."""

    @property
    def sustained(self) -> bool:
        """Whether no request was refused, unsent or broken."""
        return not (self.refused or self.unsent or self.broken)

    def p(self, share: float, values: Sequence[float] | None = None) -> float:
        values = sorted(self.took if values is None else values)
        return values[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def offer(port: int, requests: Callable[[], bytes], rate: float, seconds: float, limit: int, ready: int = 0) -> Phase:
    """Send `rate` requests a second for `seconds` over at most `limit` connections, of which `ready` are opened before
    the start, and wait for the responses."""
    phase = Phase(seconds=seconds)
    idle = {connection.fileno(): connection for connection in _crowd(port, ready)} if ready else {}
    busy: dict[int, tuple[socket.socket, float]] = {}
    parts: dict[int, bytes] = {}
    poll = select.epoll()
    for connection in idle.values():
        poll.register(connection, select.EPOLLIN)
    clock = time.perf_counter
    gc.disable()
    start = clock()
    due = 0
    try:
        while True:
            now = clock() - start
            finished = now >= seconds
            if finished and (not busy or now >= seconds + 10):
                break
            missing = 0 if finished else int(now * rate) - due
            # A few at a time, so that answers are read in between.
            for _ in range(min(missing, 64)):
                if idle:
                    _, connection = idle.popitem()
                elif len(busy) < limit:
                    connection = _connected(port)
                    poll.register(connection, select.EPOLLIN)
                else:
                    phase.unsent += 1
                    due += 1
                    continue
                content = requests()
                sent_at = clock() - start
                connection.sendall(content)
                busy[connection.fileno()] = (connection, sent_at)
                phase.late.append(sent_at - due / rate)
                phase.sent += 1
                due += 1
            pause = 0.0 if missing > 64 else min(0.001, 1 / rate)
            for number, _ in poll.poll(pause):
                if number in idle:  # closed by the service
                    idle.pop(number).close()
                    continue
                connection, sent_at = busy[number]
                try:
                    data = parts.pop(number, b"") + connection.recv(262_144)
                except ConnectionResetError:
                    data = b""
                if not data:
                    phase.broken += 1
                elif not _whole(data):
                    parts[number] = data
                    continue
                else:
                    _count(phase, data, sent_at, clock() - start)
                del busy[number]
                if data:
                    idle[number] = connection
                else:
                    poll.unregister(connection)
                    connection.close()
        phase.broken += len(busy)
    finally:
        gc.enable()
        poll.close()
        for connection in (*idle.values(), *(connection for connection, _ in busy.values())):
            connection.close()
    return phase


def _crowd(port: int, consumers: int) -> list[socket.socket]:
    """Open this many connections and wait until the service has accepted all. It accepts them in order, so a response
    on the last one shows that."""
    connections = [_connected(port) for _ in range(consumers)]
    connections[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: lastbit\r\n\r\n")
    data = b""
    while not _whole(data):
        data += connections[-1].recv(65_536)
    return connections


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _whole(data: bytes) -> bool:
    end = data.find(b"\r\n\r\n")
    place = data.lower().find(b"content-length: ", 0, end)
    return place >= 0 and len(data) >= end + 4 + int(data[place + 16 : data.index(b"\r\n", place)])


def _count(phase: Phase, data: bytes, sent_at: float, now: float) -> None:
    if data.startswith(b"HTTP/1.1 200"):
        phase.took.append(now - sent_at)
        phase.ended.append(now)
        phase.applied += json.loads(data[data.index(b"\r\n\r\n") + 4 :])["applied"]
    elif data.startswith((b"HTTP/1.1 503", b"HTTP/1.1 429")):
        phase.refused += 1
        phase.with_retry_after += b"\r\nretry-after: " in data
    else:
        raise RuntimeError(f"answered: {data.decode(errors='replace')[:1000]}")


def _calls(kind: Kind, batch: int, size: int, items: int, first: int = 0) -> Callable[[], bytes]:
    """Returns a function that makes the next request; requests in order start at number `first`. Making a request is
    cheaper than sending it."""
    heads: dict[int, bytes] = {}

    def whole(content: bytes) -> bytes:
        head = heads.get(len(content))
        if head is None:
            head = heads[len(content)] = load.encoded("/v1/acks", content)[: -len(content)]
        return head + content

    def body(ids: Iterable[str]) -> bytes:
        return b'{"items":["%b"]}' % '","'.join(ids).encode()

    if kind.in_order:
        parts = [
            body(f"{batch}:#:{n}" for n in range(start, start + kind.ids))
            for start in range(0, size - kind.ids + 1, kind.ids)
        ]
        numbers = itertools.count(first)

        def following() -> bytes:
            group, part = divmod(next(numbers), len(parts))
            return whole(parts[part].replace(b"#", b"%d" % group))

        return following

    def any_ids() -> Iterator[str]:
        for n in random.sample(range(items), kind.ids):
            yield f"{batch}:{n // size}:{n % size}"

    bodies = itertools.cycle([whole(body(any_ids())) for _ in range(20_000 if kind.ids == 1 else 2_000)])
    return lambda: next(bodies)


def sustained(
    port: int, requests: Callable[[], bytes], loop: float, seconds: float, consumers: int
) -> tuple[float, list[Phase]]:
    """The highest sustained rate (the first one if none is), and the phases of all rates, that rate's last."""
    phases: list[Phase] = []
    best, calm = STEPS[0] * loop, None
    for share in STEPS:
        for _ in range(TRIES):
            phase = offer(port, requests, share * loop, seconds, consumers)
            phases.append(phase)
            if phase.sustained:
                break
        else:
            break
        best, calm = share * loop, phase
    phases.sort(key=lambda phase: phase is calm)
    return best, phases


def _generator(
    port: int, calls: tuple[Kind, int, int, int, int], loop: float, shape: Shape
) -> tuple[float, list[Phase], Phase, Phase]:
    """Runs in a separate process. Returns the sustainable rate, the phases that led to it, the flood, and a phase at
    the sustainable rate right after it."""
    following = _calls(*calls)
    consumers = min(calls[0].consumers, measure.allow_files(calls[0].consumers + 100) - 100)
    rate, steps = sustained(port, following, loop, shape.calm, consumers)
    flood = offer(port, following, TIMES * rate, shape.flood, consumers, ready=consumers)
    return rate, steps, flood, offer(port, following, rate, shape.calm, consumers)


def flood(port: int, calls: tuple[Kind, int, int, int, int], seconds: float) -> Phase:
    """Offer far more than the service can commit. Runs in a separate process."""
    kind = calls[0]
    consumers = min(kind.consumers, measure.allow_files(kind.consumers + 100) - 100)
    return offer(port, _calls(*calls), FLOOD_RATES[kind.ids], seconds, consumers, ready=consumers)


def generated(*arguments: Any) -> tuple[float, list[Phase], Phase, Phase]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_generator, arguments)


class Memory(threading.Thread):
    """The service's resident memory, twice a second."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._over = threading.Event()
        self.found: list[tuple[float, float]] = []

    def run(self) -> None:
        while not self._over.wait(0.5):
            self.found.append((time.monotonic(), measure.memory(self._process)))

    def stop(self) -> list[float]:
        self._over.set()
        self.join()
        return [megabytes for _, megabytes in self.found]


def admitted(phase: Phase, rate: float, start: float, end: float) -> float:
    """Requests admitted between these seconds, relative to those offered."""
    return sum(start <= moment < end for moment in phase.ended) / (rate * (end - start))


def full_speed(phase: Phase, rate: float) -> float:
    """Start of the first whole second in which at least nine tenths of the offered requests were admitted; infinite if
    there is none."""
    quarters = (number / 4 for number in range(int(4 * (phase.seconds - 1)) + 1))
    return next((start for start in quarters if admitted(phase, rate, start, start + 1) >= 0.9), math.inf)


def run(scale: Scale) -> None:
    shape = Shape.of(scale)
    with measure.mariadb() as server, measure.lastbit_on(server) as service:
        assert service.process is not None
        for kind in KINDS:
            rows, recovery, admitted_share = _case(service.port, service.process.pid, kind, scale, shape)
            measure.show(
                f"overload: {kind.name}; {TIMES} x for {shape.flood:.0f} s, one worker, MariaDB; full speed again "
                f"after {recovery:.2f} s; {admitted_share:.0%} from {shape.calm / 2:.0f} s on",
                ["", "offered/s", "admitted/s", "refused/s", "p50 ms", "p99 ms", "of the loop", "of calm", "RSS MB"],
                rows,
            )


def _case(port: int, process: int, kind: Kind, scale: Scale, shape: Shape) -> tuple[list[list[str]], float, float]:
    """Returns the rows of the table, the seconds until full speed, and the admitted share in the second half of the
    phase after the flood."""
    items = 10**9 if kind.in_order else shape.items
    batch, _ = acks.new_batch(port, items, [])
    size = measure.call(port, "GET", f"/v1/batches/{batch}")["group_size"]
    calls = scale.requests // (10 if kind.ids > 1 else 1)
    closed_loops = []
    applied = 0
    for number in range(scale.rounds):
        following = _calls(kind, batch, size, items, number * calls)
        figures, answers = load.drive(port, [following() for _ in range(calls)], scale.connections)
        closed_loops.append(figures)
        applied += load.total(answers, "applied")
    best = statistics.median(figures.rate for figures in closed_loops)
    p50, p99 = (statistics.median(getattr(figures, name) for figures in closed_loops) for name in ("p50", "p99"))
    memory = Memory(process)
    memory.start()
    rate, steps, flood, after = generated(port, (kind, batch, size, items, scale.rounds * calls), best, shape)
    resident = memory.stop()
    verification = measure.call(port, "GET", f"/v1/batches/{batch}/verify")
    seen_all = (*steps, flood, after)
    applied += sum(figures.applied for figures in seen_all)
    unanswered = sum(figures.broken for figures in seen_all)
    if (
        not verification["ok"]
        or verification["acked"] < applied
        or (verification["acked"] > applied and not unanswered)
    ):
        raise RuntimeError(f"{applied} items were applied, but the batch has {verification}")
    calm = steps[-1]
    loop = [f"{scale.connections} in a closed loop", "", f"{best:,.0f}", "", f"{p50 * 1e3:.1f}", f"{p99 * 1e3:.1f}"]
    lines = [[*loop, "1.0", "", ""]]
    share = f"{rate / best:.0%} of it"
    if not calm.sustained:
        share += ", not sustained"
    for name, phase in ((share, calm), (f"{TIMES} x", flood), ("as before", after)):
        refusals = f"{phase.refused / phase.seconds:,.0f}"
        if phase.with_retry_after != phase.refused or phase.broken or phase.unsent:
            without_retry_after = phase.refused - phase.with_retry_after
            refusals += f" ({without_retry_after} without Retry-After, {phase.broken} broken, {phase.unsent} unsent)"
        lines.append(
            [
                name,
                f"{phase.sent / phase.seconds:,.0f} ({phase.p(0.99, phase.late) * 1e3:.1f} ms late)",
                f"{len(phase.took) / phase.seconds:,.0f}",
                refusals,
                f"{phase.p(0.5) * 1e3:.1f}",
                f"{phase.p(0.99) * 1e3:.1f}",
                f"{phase.p(0.99) / p99:.1f}",
                f"{phase.p(0.99) / calm.p(0.99):.1f}",
                f"{min(resident):.0f} to {max(resident):.0f}",
            ]
        )
    return lines, full_speed(after, rate), admitted(after, rate, shape.calm / 2, shape.calm)


if __name__ == "__main__":
    measure.alone(run)
