"""The rows of sub-counters, and of the sources that have ranges: lock them, and write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from sqlalchemy.engine import Connection

from core.storage import dialects, statements
from core.storage.statements import Pipeline, inserts, packets
from core.tallies.model import Counter, Row, SourceId, Stored

_SOURCE_KEY: Final = ("tally", "topic", "partition_no", "generation")
_PRIMARY_KEY: Final = ("tally", "tally_key", "topic", "partition_no", "generation")
_VALUES: Final = ("high_offset", "high_child", "value")


def literals_of(tx: Connection, counters: Iterable[Counter]) -> dict[Counter, str]:
    """The SQL of the sub-counters' primary keys, in the same order."""
    text = dialects.of(tx).text
    names: dict[str, str] = {}
    literals: dict[Counter, str] = {}
    for counter in counters:
        tally, key, topic, partition, generation = counter
        for name in (tally, topic):
            if name not in names:
                names[name] = text(name.encode().hex())
        literals[counter] = f"{names[tally]},{text(key.encode().hex())},{names[topic]},{partition},{generation}"
    return literals


def lock(pipeline: Pipeline, literals: Mapping[Counter, str], sources: Sequence[SourceId]) -> Stored:
    """Lock the existing rows of these sources and sub-counters, which are in primary-key order."""
    tx = pipeline.tx
    counters = list(literals)
    parts = list(packets([f"({place},{literal})" for place, literal in enumerate(literals.values())]))
    positions = pipeline.query(*([_select_positions(tx, sources)] if sources else []))
    values = pipeline.query(*(_select(tx, part) for part in parts))
    rows: dict[Counter, Row] = {}
    for record in values.records():
        place, offset, child, value = map(int, record)
        rows[counters[place]] = (offset, child), value
    return Stored(rows, {sources[int(place)]: bytes(position).decode() for place, position in positions.rows()})


def _select_positions(tx: Connection, sources: Sequence[SourceId]) -> str:
    dialect = dialects.of(tx)
    rows = [dialect.row((place, *source)) for place, source in enumerate(sources)]
    source = dialect.look_up(tx, "tally_sources", _SOURCE_KEY, rows) + dialect.lock_looked_up("tally_sources")
    return f"SELECT place, position FROM {source}"  # noqa: S608


def _select(tx: Connection, rows: Sequence[str]) -> str:
    """The guards and values of sub-counters, each with its place. They are looked up one by one: as a condition on
    ranges, a thousand primary keys take the server's optimizer longer than the reads."""
    dialect = dialects.of(tx)
    source = dialect.look_up(tx, "tallies", _PRIMARY_KEY, rows) + dialect.lock_looked_up("tallies")
    return statements.select(tx, ("place", "high_offset", "high_child", "value"), source, len(rows))


def store(pipeline: Pipeline, after: Stored, rows: Stored, literals: Mapping[Counter, str]) -> None:
    """Write the changed rows, in primary-key order. Only the existing ones are replaced: if another transaction has
    inserted the row of a new source or sub-counter, the transaction begins again."""
    dialect = dialects.of(pipeline.tx)
    old: list[str] = []
    new: list[str] = []
    for source in sorted(after.positions):
        values = dialect.row((*source, after.positions[source].encode()))
        (old if source in rows.positions else new).append(values)
    _insert(pipeline, "tally_sources", _SOURCE_KEY, ("position",), old, new)
    old, new = [], []
    for counter, literal in literals.items():
        if row := after.counters.get(counter):
            (offset, child), value = row
            (old if counter in rows.counters else new).append(f"({literal},{offset},{child},{value})")
    _insert(pipeline, "tallies", _PRIMARY_KEY, _VALUES, old, new)


def _insert(
    pipeline: Pipeline, table: str, key: Sequence[str], values: Sequence[str], old: Sequence[str], new: Sequence[str]
) -> None:
    upsert = dialects.of(pipeline.tx).upsert(key, values)
    columns = ", ".join((*key, *values))
    pipeline.later(*inserts(table, columns, old, upsert), *inserts(table, columns, new))
