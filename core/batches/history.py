"""How a batch got on: a line of at most 64 points (time, resolved, failed) in its own row, from which one sees when the
batch was fast, slow or stuck.

A flush that changes the counts writes a point if the interval since the last one has passed, together with the other
columns of the row. If there would be too many points, the interval doubles, and those that are closer to each other are
left out.

*A point is what the row said before the change*, with the time of the change before it. So a batch in which nothing
happened for an hour has a point from the beginning of the hour, and the next one from its end.

*Between two points that are farther apart than the interval, the counts changed within one interval before the second.*
For a change later than that would have written a point. So a pause is read as a pause, not as slow work. The same holds
for what happened after the last point, whatever else has changed the row since: an extend, the seal, or the end.

The column begins with the time from which the next point is due, so that the database compares it as bytes and sends
the points only when they are written. That time is by the clock of the service's machine: if it is wrong, the points
are closer to each other, or farther, and pauses are less exact.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.batches.batch import Batch
from core.batches.lifecycle import LIVE
from core.storage import tables
from core.storage.dialects import Dialect
from core.storage.statements import LIST, chunks

POINTS: Final = 64
"""Maximum points of a batch."""
BYTES: Final = 600
"""Maximum bytes of the column."""
_HEAD: Final = struct.Struct(">IB")
"""The second (since 1970) from which the next point is due, and the interval as a power of two, in seconds."""
clock: Callable[[], float] = time.time
"""The machine's clock, in seconds since 1970."""
_START: Final = (0, 0, 0)
"""What the first point differs from."""
_LATEST: Final = 2**32 - 1
_TICKS: Final = 10
"""Times are stored in tenths of a second."""


class Point(NamedTuple):
    """The counts of a batch at a time. `resolved` includes `failed`."""

    at: datetime
    resolved: int
    failed: int


def _second() -> int:
    """The machine's time in the range of the column, however wrong it is: no ack may fail for it."""
    return min(max(int(clock()), 0), _LATEST - 1)


def begun() -> bytes:
    """The column of a new batch."""
    return _HEAD.pack(_second() + 1, 0)


def is_due(dialect: Dialect) -> str:
    """The condition that the next point of a row is due. The rows of earlier releases have no points."""
    until = dialect.blob((_second() + 1).to_bytes(4, "big").hex())
    return f"history IS NULL OR history < {until}"


def extended(history: bytes | None, point: Point) -> bytes:
    """The column with one more point, if its counts are new, and without those that are too close to others now."""
    exponent = 0 if history is None else _HEAD.unpack_from(history)[1]
    ticks = [] if history is None else _decoded(history)
    if point[1:] != (ticks[-1] if ticks else _START)[1:]:
        ticks.append(_in_ticks(_changed(history, point)))
    while True:
        # Also without doubling: a point may come too soon, if a clock is wrong.
        ticks = _thinned(ticks, _TICKS << exponent)
        content = _encoded(ticks)
        if len(ticks) <= POINTS and len(content) <= BYTES - _HEAD.size:
            break
        exponent += 1
    return _HEAD.pack(min(_second() + (1 << exponent), _LATEST), exponent) + content


def of_batches(tx: Connection, batches: Sequence[Batch]) -> dict[int, list[Point]]:
    """How each of these batches got on (see `line`). Without a lock."""
    columns = tables.batches.c
    query = sa.select(columns.id, columns.history, tables.utc_now().label("now"))
    by_id = {batch.id: batch for batch in batches}
    rows = [row for ids in chunks(sorted(by_id), LIST) for row in tx.execute(query.where(columns.id.in_(ids)))]
    return {row.id: line(by_id[row.id], row.history, row.now) for row in rows}


def line(batch: Batch, history: bytes | None, now: datetime) -> list[Point]:
    """How the batch got on, from its open until it ended, or until `now`. From each point to the next, its counts
    changed steadily, as far as is known. At most 2 · (`POINTS` + 2)."""
    end = now if batch.state in LIVE else max(batch.ended_at or batch.updated_at, batch.updated_at)
    last = Point(batch.updated_at, batch.resolved, batch.failed)
    line_ = [Point(batch.created_at, 0, 0)]
    interval = timedelta(seconds=1 if history is None else 1 << _HEAD.unpack_from(history)[1])
    for point in (*points(history), _changed(history, last), last._replace(at=end)):
        before = line_[-1]
        point = point._replace(at=max(point.at, before.at))  # stored times are rounded down
        if point.at - before.at > interval and point[1:] != before[1:]:
            line_.append(before._replace(at=point.at - interval))
        if point != line_[-1]:
            line_.append(point)
    return line_


def _changed(history: bytes | None, point: Point) -> Point:
    """The point as it was reached at the latest: after the next one is due, a change of its counts writes it."""
    if history is None:
        return point
    (due, _) = _HEAD.unpack_from(history)
    return point._replace(at=min(point.at, datetime.fromtimestamp(due, UTC)))


def points(history: bytes | None) -> list[Point]:
    """The points of a column, by time."""
    if history is None:
        return []
    return [Point(datetime.fromtimestamp(tick / _TICKS, UTC), *counts) for tick, *counts in _decoded(history)]


def _in_ticks(point: Point) -> tuple[int, int, int]:
    return int(point.at.timestamp() * _TICKS), point.resolved, point.failed


def _thinned(ticks: Sequence[tuple[int, int, int]], interval: int) -> list[tuple[int, int, int]]:
    """The points without each whose neighbours would be at most `interval` apart. So the points at both ends of a pause
    stay."""
    kept = list(ticks[:1])
    for point, following in pairwise(ticks[1:]):
        if following[0] - kept[-1][0] > interval:
            kept.append(point)
    return [*kept, *ticks[1:][-1:]]


def _encoded(ticks: Sequence[tuple[int, int, int]]) -> bytes:
    """Each number as its difference from the one of the point before: zigzag, seven bits to a byte, lowest first, as in
    Protocol Buffers."""
    content = bytearray()
    before = _START
    for point in ticks:
        for old, new in zip(before, point, strict=True):
            value = (new - old) * 2 if new >= old else (old - new) * 2 - 1
            while value > 127:
                content.append(value & 127 | 128)
                value >>= 7
            content.append(value)
        before = point
    return bytes(content)


def _decoded(history: bytes) -> list[tuple[int, int, int]]:
    ticks = []
    numbers = _numbers(history[_HEAD.size :])
    moment = resolved = failed = 0
    for difference in numbers:
        moment, resolved, failed = moment + difference, resolved + next(numbers), failed + next(numbers)
        ticks.append((moment, resolved, failed))
    return ticks


def _numbers(content: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in content:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value >> 1 if value % 2 == 0 else -(value + 1 >> 1)
            value = shift = 0
