"""How batches got on: the points in their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.acks.call import Call
from core.batches import history
from core.batches.batch import Batch, Opening
from core.batches.history import BYTES, POINTS, Point
from core.batches.lifecycle import State, Verb
from core.batches.tolerance import OnExceeded
from core.commits.combiner import Inline
from core.service import Service
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.mutants import mutant
from tests.support.clocks import START, Clock

BATCH = Batch(
    id=1,
    key=None,
    labels={},
    group_size=64,
    items=10**12,
    state=State.OPEN,
    on_exceeded=OnExceeded.CONTINUE,
    open_count=10**12,
    created_at=START,
    updated_at=START,
)
CHANGES = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.01, 0.3, 1.0, 7.0]), st.floats(0.001, 10**6)),
        st.one_of(st.sampled_from([0, 0, 1, 50]), st.integers(0, 10**10)),
    ),
    min_size=1,
    max_size=300,
)
"""(seconds since the last change, items that were resolved): without items, something else has changed the row."""


@mutant("a-history-without-an-end", "core.batches.history:extended", "len(ticks) <= POINTS", "True")
@mutant(
    "a-history-that-outgrows-its-column",
    "core.batches.history:extended",
    "len(content) <= BYTES - _HEAD.size",
    "True",
)
@mutant(
    "a-pause-is-lost-when-points-are-left-out",
    "core.batches.history:_thinned",
    "following[0] - kept[-1][0] > interval",
    "point[0] - kept[-1][0] > interval",
)
@mutant("a-pause-is-read-as-slow-work", "core.batches.history:line", "point.at - before.at > interval", "False")
@mutant(
    "an-extend-moves-a-point",
    "core.batches.history:_changed",
    "min(point.at, datetime.fromtimestamp(due, UTC))",
    "point.at",
)
@given(CHANGES)
@example([(1.0, 1)] * 300)
@example([(1.0, 10**10)] * 100)
@example([(0.1, 9), (0.1, 9), (5000.0, 0), (1.0, 0), (1.0, 5)])
@settings(max_examples=300)
def test_a_line_is_true_to_one_interval(changes: list[tuple[float, int]]) -> None:
    """At any time, the batch had resolved what the line says for a moment at most one interval away."""
    now, column, resolved, updated_at = START, b"", 0, START
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(history, "clock", lambda: now.timestamp())
        column = history.begun()
        truth = [(START, 0)]
        for pause, items in changes:
            now += timedelta(seconds=pause)
            if items and column[:4] < (int(now.timestamp()) + 1).to_bytes(4, "big"):
                column = history.extended(column, Point(updated_at, resolved, resolved // 3))
                assert len(column) <= BYTES
                assert len(history.points(column)) <= POINTS
            resolved, updated_at = resolved + items, now
            truth.append((now, resolved))
    batch = replace(BATCH, acked=resolved - resolved // 3, failed=resolved // 3, updated_at=updated_at)
    line = history.line(batch, column, now + timedelta(seconds=100))
    assert (line[0], line[-1]) == (Point(START, 0, 0), Point(now + timedelta(seconds=100), resolved, resolved // 3))
    assert line == sorted(line)
    # The clock of the column has whole seconds, and times are stored in tenths.
    interval = timedelta(seconds=(1 << column[4]) + 1.2)
    for (moment, before), (_, after) in pairwise([(START, 0), *truth]):
        assert resolved_at(line, moment - interval) <= after
        assert before <= resolved_at(line, moment + interval)


def resolved_at(line: list[Point], moment: datetime) -> float:
    """What the line says for this time."""
    preceding = [point for point in line if point.at <= moment]
    following = [point for point in line if point.at > moment]
    if not preceding or not following:
        return preceding[-1].resolved if preceding else 0
    share = (moment - preceding[-1].at) / (following[0].at - preceding[-1].at)
    return preceding[-1].resolved + share * (following[0].resolved - preceding[-1].resolved)


@pytest.fixture
def clock(database: Database, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of the database, and of the machine."""
    clock_ = Clock(database)
    monkeypatch.setattr(history, "clock", lambda: clock_.now.timestamp())
    return clock_


@pytest.fixture
def timed_service(database: Database, clock: Clock) -> Iterator[Service]:
    service = Service(database, combiner=Inline)
    yield service
    service.stop()


def resolve(service: Service, verb: Verb, batch: int, *numbers: int) -> None:
    service.acks.ack(Call.of(verb, [ItemId(batch, 0, number) for number in numbers])).result()


def line(service: Service, batch: int) -> list[tuple[float, int, int]]:
    """The points of the batch, with their seconds since `START`."""
    _, points = service.batches.history(batch)
    return [((point.at - START).total_seconds(), point.resolved, point.failed) for point in points]


@mutant(
    "a-point-says-when-it-was-written",
    "core.acks.completion:_judge",
    "Point(row.updated_at, before.resolved, before.failed)",
    "Point(row.updated_at, change.resolved, change.failed)",
)
@mutant("a-point-is-written-by-every-flush", "core.batches.history:extended", "_second() + (1 << exponent)", "0")
def test_a_line_shows_when_a_batch_was_stuck(timed_service: Service, clock: Clock) -> None:
    """From the open until now: a point is what the batch was before a change."""
    batch = timed_service.batches.open(Opening(items=100)).batch.id
    assert line(timed_service, batch) == [(0, 0, 0)]
    clock.go(10)
    resolve(timed_service, Verb.ACK, batch, 0)
    for number in range(1, 41):
        clock.go(0.25)
        resolve(timed_service, Verb.ACK, batch, number)
    clock.go(3600)
    resolve(timed_service, Verb.FAIL, batch, 50, 51)
    clock.go(7)
    points = line(timed_service, batch)
    # Ten seconds without an ack, then four acks a second.
    assert points[:3] == [(0, 0, 0), (9.7, 0, 0), (10.7, 4, 0)]
    assert points[-4:] == [(20, 41, 0), (3619, 41, 0), (3620, 43, 2), (3627, 43, 2)]
    assert len(points) < 20
    timed_service.batches.cancel(batch)
    clock.go(1000)
    assert line(timed_service, batch)[-1] == (3627, 43, 2)


def test_a_batch_of_an_earlier_release_gets_points_too(
    timed_service: Service, clock: Clock, database: Database
) -> None:
    batch = timed_service.batches.open(Opening(items=9)).batch.id
    with database.engine.begin() as tx:
        tx.exec_driver_sql("UPDATE batches SET history = NULL")
    clock.go(5)
    resolve(timed_service, Verb.ACK, batch, 0)
    clock.go(5)
    resolve(timed_service, Verb.ACK, batch, 1)
    assert line(timed_service, batch) == [(0, 0, 0), (4, 0, 0), (5, 1, 0), (9, 1, 0), (10, 2, 0)]


@mutant(
    "a-point-without-a-change",
    "core.batches.history:extended",
    "point[1:] != (ticks[-1] if ticks else _START)[1:]",
    "True",
)
def test_a_batch_that_ends_at_once_has_no_points(timed_service: Service, clock: Clock, database: Database) -> None:
    """Most batches of a service are small: their rows don't grow."""
    batch = timed_service.batches.open(Opening(items=2, sealed=True)).batch.id
    clock.go(60)
    resolve(timed_service, Verb.ACK, batch, 0, 1)
    with database.engine.begin() as tx:
        (size,) = tx.exec_driver_sql("SELECT LENGTH(history) FROM batches").one()
    assert size == 5
    assert line(timed_service, batch) == [(0, 0, 0), (59, 0, 0), (60, 2, 0)]


@mutant(
    "acks-need-a-right-clock", "core.batches.history:_second", "min(max(int(clock()), 0), _LATEST - 1)", "int(clock())"
)
@pytest.mark.parametrize("seconds", [-1e9, 0.0, 1e11])
def test_a_machine_whose_clock_is_wrong_takes_acks(
    timed_service: Service, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """In whatever year it is."""
    batch = timed_service.batches.open(Opening(items=9)).batch.id
    resolve(timed_service, Verb.ACK, batch, 0)
    monkeypatch.setattr(history, "clock", lambda: seconds)
    for number in range(1, 5):
        resolve(timed_service, Verb.ACK, batch, number)
    other = timed_service.batches.open(Opening(items=1)).batch.id
    resolve(timed_service, Verb.ACK, other, 0)
    assert timed_service.batches.get(batch).acked == 5
    assert line(timed_service, batch)[-1][1:] == (5, 0)
