"""Reading totals, and removing a tally."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.storage import tables
from core.tallies.limits import SUMS, total_of
from core.tallies.model import BY_RANGES, LONGEST, Source, Value

CHUNK: Final = 1000
"""Rows in one transaction of a deletion."""

_tallies = tables.tallies.c
_sources = tables.tally_sources.c


def get(tx: Connection, tally: str, key: str) -> Value:
    """The total of a key and its sub-counters; 0 if nothing was ever added."""
    same_source = sa.and_(
        *(_sources[name] == _tallies[name] for name in ("tally", "topic", "partition_no", "generation"))
    )
    rows = tx.execute(
        sa.select(tables.tallies, _sources.position)
        .select_from(tables.tallies.outerjoin(tables.tally_sources, same_source))
        .where(_tallies.tally == tally, _tallies.tally_key == key)
        .order_by(_tallies.topic, _tallies.partition_no, _tallies.generation)
    )
    sources = tuple(_source(row) for row in rows)
    return Value(key, sum(source.value for source in sources), sources)


def _source(row: Any) -> Source:
    source = row.topic, row.partition_no, row.generation
    if (row.high_offset, row.high_child) == BY_RANGES:
        # The row of the source is only missing beside a deletion.
        position = "" if row.position is None else bytes(row.position).decode()
        return Source(*source, None, None, position, row.value)
    return Source(*source, row.high_offset, row.high_child, None, row.value)


def page(tx: Connection, tally: str, prefix: str, after: str | None, limit: int) -> list[Value]:
    """The totals of at most `limit` keys that begin with `prefix` and are above `after`, ordered by the keys' bytes."""
    query = (
        sa.select(_tallies.tally_key, *map(sa.literal_column, SUMS))
        .where(_tallies.tally == tally)
        .group_by(_tallies.tally_key)
        .order_by(_tallies.tally_key)
        .limit(limit)
    )
    if prefix:
        # Up to the highest key with this prefix.
        query = query.where(_tallies.tally_key.between(prefix, prefix.ljust(LONGEST, "\U0010ffff")))
    if after is not None:
        query = query.where(_tallies.tally_key > after)
    return [Value(key, total_of(*sums)) for key, *sums in tx.execute(query)]


def remove_chunk(tx: Connection, tally: str) -> bool:
    """Remove a chunk of a tally's rows, lowest keys first. Return whether there may be more. The positions of its
    sources go with its last rows, so that no source is counted from its start while sums of it are still stored."""
    columns = (_tallies.tally_key, _tallies.topic, _tallies.partition_no, _tallies.generation)
    last = tx.execute(
        sa.select(*columns).where(_tallies.tally == tally).order_by(*columns).offset(CHUNK - 1).limit(1)
    ).first()
    query = sa.delete(tables.tallies).where(_tallies.tally == tally)
    if last is not None:
        query = query.where(_tallies.tally_key <= last.tally_key)
    else:
        tx.execute(sa.delete(tables.tally_sources).where(_sources.tally == tally))
    tx.execute(query)
    return last is not None
