"""Admission control: a queue in front of a simulated disk, in simulated time, overloaded for a minute."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from core.acks.call import AckResult, Call, Outcome, Unit
from core.batches.lifecycle import Verb
from core.commits.admission import LONES, LONG, SHORT, Admission
from core.commits.combiner import Combiner
from core.commits.lanes import FLUSH_COST, FLUSH_UNITS
from core.commits.operation import Done
from core.commits.pending import Pending
from core.commits.shedding import AFTER, CALM, CROWD, LEAST
from core.feed import Append
from tests.mutants import mutant


@dataclass
class Disk:
    """A disk on which a flush of n units takes `lone` + n * `unit` seconds."""

    lone: float
    unit: float

    @property
    def throughput(self) -> float:
        """Units a second under continuous flushes."""
        return 1 / self.unit


@dataclass
class Queue:
    """A simulation of the combiner's lane with an even stream of arrivals."""

    disk: Disk
    admission: Admission = field(default_factory=Admission)
    now: float = 0.0
    waiting: deque[float] = field(default_factory=deque)
    """The arrival time of each waiting unit."""
    took: list[tuple[float, float]] = field(default_factory=list)
    """(time of the answer, duration) of each admitted unit."""
    refused: list[float] = field(default_factory=list)
    _next: float = 0.0

    def offer(self, rate: float, seconds: float) -> Queue:
        end = self.now + seconds
        self._next = max(self._next, self.now)
        while self.now < end:
            self._come(rate, self.now)
            if not self.waiting:
                self.now = self._next
                continue
            start = self.now
            before = self.admission.limit
            self.admission.taking(start, start - self.waiting[0])
            limit = self.admission.limit
            while before is None and limit is not None and len(self.waiting) > limit:
                self.waiting.popleft()
                self.refused.append(start)
            count = min(len(self.waiting), self.admission.flush_limit(start, FLUSH_UNITS))
            arrivals = [self.waiting.popleft() for _ in range(count)]
            seconds_taken = self.disk.lone + count * self.disk.unit
            self.now += seconds_taken
            self._come(rate, min(self.now, end))
            self.took += [(self.now, self.now - arrival) for arrival in arrivals]
            self.admission.flushed(self.now, count, seconds_taken)
        return self

    def _come(self, rate: float, until: float) -> None:
        while self._next <= until:
            limit = self.admission.limit
            if limit is not None and len(self.waiting) >= limit:
                self.admission.refused(self._next)
                self.refused.append(self._next)
            else:
                self.waiting.append(self._next)
            self._next += 1 / rate

    def p99(self, since: float, until: float = float("inf")) -> float:
        waits = sorted(wait for time, wait in self.took if since <= time < until)
        return waits[len(waits) * 99 // 100]


DISKS = [Disk(0.001, 0.0002), Disk(0.004, 0.002), Disk(0.03, 0.0005), Disk(0.0005, 0.0005)]


@pytest.mark.parametrize("disk", DISKS, ids=["usual", "random groups", "slow", "large calls"])
def test_under_tenfold_overload_admitted_calls_are_answered_soon(disk: Disk) -> None:
    """During a minute of overload, the 99th percentile of admitted waits stays within five times that of a sustainable
    load and most of the disk's throughput is used; afterwards everything is admitted again at once."""
    queue = Queue(disk).offer(0.01 / disk.lone, 5)  # a lone call now and then
    start = queue.now
    queue.offer(0.7 * disk.throughput, 10)
    assert not queue.refused
    calm, flood_start = queue.p99(start), queue.now
    queue.offer(10 * disk.throughput, 60)
    flood_end = queue.now
    # Large calls may also take as long as two flushes of the units that are always admitted, plus a lone flush.
    allowance = 2 * (disk.lone + LEAST * disk.unit) + disk.lone + disk.unit
    assert queue.p99(flood_start, flood_end) <= max(5 * calm, 0.05, allowance)
    answers = sum(1 for time, _ in queue.took if flood_start <= time < flood_end)
    assert answers >= 0.7 * disk.throughput * (flood_end - flood_start)
    assert answers + sum(1 for time in queue.refused if time < flood_end) >= 0.99 * 10 * disk.throughput * (
        flood_end - flood_start
    )
    queue.offer(0.7 * disk.throughput, 10)
    assert not [time for time in queue.refused if time > flood_end + 1]
    assert queue.admission.limit is None
    assert queue.p99(flood_end + 1) <= 1.5 * calm


def test_a_burst_is_admitted_in_full() -> None:
    """Long waits are refused only if they last."""
    queue = Queue(Disk(0.001, 0.00005)).offer(100, 1)
    queue.offer(1_000_000, 0.004)
    queue.offer(100, 5)
    assert len(queue.took) > 4000
    assert not queue.refused


def test_a_disk_that_becomes_slow_gets_larger_flushes() -> None:
    """With a fixed bound, the larger flushes that could carry the load would be refused: once slow, it would stay slow
    forever."""
    queue = Queue(Disk(0.001, 0.00005)).offer(14_000, 5)
    queue.disk = Disk(0.02, 0.00005)
    queue.offer(14_000, 10)
    settled_at = queue.now
    queue.offer(14_000, 5)
    assert not [time for time in queue.refused if time > settled_at]
    queue.disk = Disk(0.001, 0.00005)
    queue.offer(14_000, 5)
    assert queue.p99(queue.now - 3) < SHORT * 2


def test_consumers_with_one_call_under_way_are_not_refused() -> None:
    """However long a flush takes: each client has one call under way, so their number is bounded."""
    admission = Admission()
    now = 0.0
    for _ in range(100):
        admission.taking(now, 2.0)
        count = min(LEAST, admission.flush_limit(now, FLUSH_UNITS))
        assert admission.limit is None or admission.limit >= LEAST
        now += 2.0
        admission.flushed(now, count, 2.0)


@pytest.mark.parametrize("disk", [Disk(0.001, 0.00007), Disk(0.004, 0.00007)], ids=["usual", "slower"])
def test_a_thousand_consumers_with_one_call_under_way_are_served(disk: Disk) -> None:
    """As for one hot batch, whose consumers each ack their next item after the previous answer. The disk's whole
    throughput is used, and no call is refused."""
    admission = Admission()
    now, answers = 0.0, 0
    waiting = deque([0.0] * 1000)
    while now < 20:
        admission.taking(now, now - waiting[0])
        assert admission.limit is None
        count = min(len(waiting), admission.flush_limit(now, FLUSH_UNITS))
        for _ in range(count):
            waiting.popleft()
        seconds = disk.lone + count * disk.unit
        now += seconds
        answers += count
        waiting += [now] * count
        admission.flushed(now, count, seconds)
    assert answers >= 0.8 * 20 * disk.throughput


def test_without_overload_there_is_no_bound_and_no_lone_flush() -> None:
    """A quiet service must not pay for either."""
    admission = Admission()
    for step in range(1000):
        admission.taking(step * 0.01, SHORT / 2)
        assert admission.limit is None
        assert admission.flush_limit(step * 0.01, 4096) == 4096
        admission.flushed(step * 0.01, 100, SHORT / 2)


def test_the_target_lies_between_the_short_and_the_long_bound() -> None:
    """And is a multiple of the quickest recent lone flush, so that one slow flush doesn't raise it."""
    admission = Admission()
    assert admission.target == SHORT
    for seconds, target in ((0.0001, SHORT), (1.0, SHORT), (0.01, SHORT)):
        admission.flushed(0, 1, seconds)
        assert admission.target == target
    for seconds in (0.03, 0.01, 0.02, 0.02, 0.02):
        admission.flushed(0, 1, seconds)
    assert admission.target == pytest.approx(LONES * 0.01)
    for _ in range(5):
        admission.flushed(0, 1, 3.0)
    assert admission.target == LONG


def test_the_start_and_the_end_of_refusals_are_reported() -> None:
    """Refusals start once waits have been long for a while; they end once waits are short and the last refusal is a
    while ago."""
    decisions: list[bool] = []
    admission = Admission(AFTER, decisions.append)
    admission.taking(0, 1)
    admission.taking(AFTER * 0.9, 1)
    assert admission.limit is None
    admission.taking(AFTER * 1.1, 1)
    assert decisions == [True]
    assert admission.limit is not None
    admission.refused(1)
    admission.taking(1 + CALM / 2, 0)
    assert decisions == [True]
    admission.taking(1 + CALM * 2, 0)
    assert decisions == [True, False]
    assert admission.limit is None


@mutant(
    "the-units-of-a-call-are-taken-for-a-crowd",
    "core.commits.lanes:MainLane._admitted",
    "self.waiting_calls > LEAST",
    "self.waiting > LEAST",
)
def test_a_call_for_many_batches_is_no_crowd() -> None:
    """Its units wait for each other, and for those of two such calls more; nobody else calls."""
    changes: list[bool] = []
    pause = threading.Event()

    def commit(units: Sequence[Unit], *, lock_waits: int) -> list[Outcome]:
        pause.wait(0.02 + 20e-6 * len(units))  # a slow database
        return [Outcome() for _ in units]

    combiner = Combiner(commit, admission=Admission(after=0.05, on_change=changes.append))

    def call(first: int) -> Exception | None:
        finished: list[Pending[AckResult]] = []
        done = threading.Event()
        items = [(batch, 0, 0) for batch in range(first, first + 5000)]

        def receive(pending: Pending[AckResult]) -> None:
            finished.append(pending)
            done.set()

        combiner.submit(Call.of(Verb.ACK, items), receive)
        assert done.wait(60)
        return finished[0].error

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(call, [1, 10_000, 20_000])) == [None] * 3
    combiner.stop()
    assert changes == []


@mutant(
    "a-few-large-calls-that-wait-long-are-an-overload",
    "core.commits.lanes:MainLane._admitted",
    "wait if self.waiting_calls > LEAST else 0.0",
    "wait",
)
def test_a_few_large_calls_that_wait_long_are_no_overload() -> None:
    """Sixteen callers, and two of their calls fill a flush: none would be refused, so none is reported as refused."""
    changes: list[bool] = []
    pause = threading.Event()

    def commit(units: Sequence[Append], *, lock_waits: int) -> list[Done]:
        pause.wait(0.03)  # a slow database
        assert len(units) <= 2
        return [Done() for _ in units]

    combiner = Combiner(commit, admission=Admission(after=0.05, on_change=changes.append), what="writes")

    def call(_: int) -> float:
        start = time.monotonic()
        done = threading.Event()
        combiner.submit(Append(events=[], cost=FLUSH_COST // 2), lambda pending: done.set())
        assert done.wait(30)
        return time.monotonic() - start

    with ThreadPoolExecutor(16) as pool:
        waits = list(pool.map(call, range(64)))
    combiner.stop()
    assert max(waits) > CROWD
    assert changes == []
