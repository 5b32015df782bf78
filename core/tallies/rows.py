"""The sub-counters' rows: lock them, and write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from sqlalchemy.engine import Connection

from core.storage import dialects, statements
from core.storage.statements import Pipeline, inserts, packets
from core.tallies.model import Counter, Row

_PRIMARY_KEY: Final = ("tally", "tally_key", "topic", "partition_no", "generation")


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


def lock(pipeline: Pipeline, literals: Mapping[Counter, str]) -> dict[Counter, Row]:
    """Lock the existing rows of these sub-counters, which are in primary-key order."""
    tx = pipeline.tx
    counters = list(literals)
    parts = list(packets([f"({place},{literal})" for place, literal in enumerate(literals.values())]))
    rows: dict[Counter, Row] = {}
    for record in pipeline.query(*(_select(tx, part) for part in parts)).records():
        place, offset, child, value = map(int, record)
        rows[counters[place]] = (offset, child), value
    return rows


def _select(tx: Connection, rows: Sequence[str]) -> str:
    """The guards and values of sub-counters, each with its place. They are looked up one by one: as a condition on
    ranges, a thousand primary keys take the server's optimizer longer than the reads."""
    dialect = dialects.of(tx)
    source = dialect.look_up(tx, "tallies", _PRIMARY_KEY, rows) + dialect.lock_looked_up("tallies")
    return statements.select(tx, ("place", "high_offset", "high_child", "value"), source, len(rows))


_VALUES: Final = ("high_offset", "high_child", "value")


def store(
    pipeline: Pipeline,
    after: Mapping[Counter, Row],
    rows: Mapping[Counter, Row],
    literals: Mapping[Counter, str],
) -> None:
    """Write the changed rows, in primary-key order. Only the existing ones are replaced: if another transaction has
    inserted the row of a new sub-counter, the transaction begins again."""
    old: list[str] = []
    new: list[str] = []
    for counter, literal in literals.items():
        if row := after.get(counter):
            (offset, child), value = row
            (old if counter in rows else new).append(f"({literal},{offset},{child},{value})")
    upsert = dialects.of(pipeline.tx).upsert(_PRIMARY_KEY, _VALUES)
    columns = ", ".join((*_PRIMARY_KEY, *_VALUES))
    pipeline.later(*inserts("tallies", columns, old, upsert), *inserts("tallies", columns, new))
