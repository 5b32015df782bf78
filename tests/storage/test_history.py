"""How batches got on: the points in their rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.acks.call import Call
from core.batches import history
from core.batches.batch import Opening
from core.batches.history import BYTES, POINTS, Point
from core.batches.lifecycle import Verb
from core.commits.combiner import Inline
from core.service import Service
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.mutants import mutant
from tests.support.clocks import START, Clock

PAUSES = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.floats(0, 10**6))
STEPS = st.lists(st.tuples(PAUSES, st.integers(-3, 10**10), st.integers(-3, 10**8)), min_size=1, max_size=400)


@mutant("a-history-without-an-end", "core.batches.history:extended", "len(ticks) <= POINTS", "True")
@mutant(
    "a-history-that-outgrows-its-column", "core.batches.history:extended", "len(content) <= BYTES - _HEAD.size", "True"
)
@mutant(
    "a-pause-is-smeared",
    "core.batches.history:_thinned",
    "following[0] - kept[-1][0] > interval",
    "point[0] - kept[-1][0] > interval",
)
@given(STEPS)
@example([(1.0, 1, 0)] * 300)
@example([(1.0, 10**9, 10**8)] * 100)
def test_any_line_keeps_its_shape_in_few_bytes(steps: list[tuple[float, int, int]]) -> None:
    """Each point that is left was written, the last one is the newest, and both ends of each long pause are left."""
    column = history.begun()
    written = []
    at, resolved, failed = START, 10**5, 0
    for pause, more, more_failed in steps:
        at += timedelta(seconds=pause)
        at = at.replace(microsecond=at.microsecond // 100_000 * 100_000)
        resolved, failed = max(0, resolved + more), max(0, failed + more_failed)
        written.append(Point(at, resolved, failed))
        column = history.extended(column, written[-1])
        assert len(column) <= BYTES
    left = history.points(column)
    assert len(left) <= POINTS
    assert left[-1] == written[-1]
    places = iter(written)
    assert all(point in places for point in left), "in their order, each of them was written"
    # The interval is at most twice the mean distance of the points that would be too many.
    longest = 2 * max(1.0, (written[-1].at - written[0].at).total_seconds() / 24)
    for point, following in pairwise(written):
        if (following.at - point.at).total_seconds() > longest:
            assert point in left
            assert following in left


@pytest.fixture
def clock(database: Database, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of the database, and of the machine."""
    clock_ = Clock(database)
    monkeypatch.setattr(history, "_second", lambda: int(clock_.now.timestamp()))
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
    "Point(row.updated_at, before.acked + before.failed, before.failed)",
    "Point(row.updated_at, change.acked + change.failed, change.failed)",
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
    assert points[:2] == [(0, 0, 0), (10.75, 4, 0)] or points[:2] == [(0, 0, 0), (10.7, 4, 0)]
    assert points[-3:] == [(20, 41, 0), (3620, 43, 2), (3627, 43, 2)]
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
    assert line(timed_service, batch) == [(0, 0, 0), (5, 1, 0), (10, 2, 0)]


@mutant(
    "one-ack-writes-a-history",
    "core.acks.completion:_judge",
    "row.updated_at is not None and (not (transition.completed and before.acked + before.failed == 0))",
    "row.updated_at is not None",
)
def test_a_batch_that_ends_at_once_has_no_points(timed_service: Service, clock: Clock, database: Database) -> None:
    """Most batches of a service are small: their rows don't grow."""
    batch = timed_service.batches.open(Opening(items=2, sealed=True)).batch.id
    clock.go(60)
    resolve(timed_service, Verb.ACK, batch, 0, 1)
    with database.engine.begin() as tx:
        (stored,) = tx.exec_driver_sql("SELECT LENGTH(history) FROM batches").one()
    assert stored == 5
    assert line(timed_service, batch) == [(0, 0, 0), (60, 2, 0)]
