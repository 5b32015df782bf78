"""The sums of a batch and all of its descendants (see `nesting`).

An item that a child stands for doesn't count: the items of the child do. So the bits of these items are read, and each
is left out of the counts of its batch, whatever it is: pending while the child runs, or failed since an earlier end.

The tree is read level by level, and at most `MOST` batches of it, so that a sum takes bounded time. An item whose child
was not read counts like others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sqlalchemy.engine import Connection

from core.batches import batch as batches
from core.batches.lifecycle import State
from core.bits import bitfield, group_rows, journal
from core.bits.cache import Key
from core.storage import dialects, statements, tables
from core.storage.row_codec import RowCodec
from core.storage.statements import LIST, chunks

MOST: Final = 10_000
"""Maximum batches of a sum."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The sums of the items that no child stands for, and the number of batches in each state. `truncated`: the tree
    has more batches than these."""

    items: int
    acked: int
    failed: int
    skipped: int
    pending: int
    batches: Mapping[State, int]
    truncated: bool


class _Node(NamedTuple):
    """The columns of a batch that matter here."""

    id: int
    state: State
    group_size: int
    items: int
    acked: int
    failed: int
    skipped: int
    parent_batch: int | None
    parent_number: int | None
    journal_next: int


_ROWS: Final = RowCodec(_Node, tables.batches)


def progress(tx: Connection, batch: int) -> Progress:
    """`tx` must be a snapshot. Raises `errors.BatchNotFound`."""
    batches.get(tx, batch)
    nodes = {node.id: node for node in _read(tx, "id", [batch], 1)}
    level = list(nodes.values())
    children: list[_Node] = []
    while level and len(children) < MOST:
        level = _read(tx, "parent_batch", [node.id for node in level], MOST - len(children))
        children += level
    is_truncated = len(children) == MOST
    nodes |= {node.id: node for node in children[: MOST - 1]}
    held_items = _held(tx, nodes)
    items = sum(node.items for node in nodes.values()) - (len(nodes) - 1)
    acked = sum(node.acked for node in nodes.values()) - held_items.acked
    failed = sum(node.failed for node in nodes.values()) - held_items.failed
    skipped_count = sum(node.skipped for node in nodes.values()) - held_items.skipped
    states = Counter(node.state for node in nodes.values())
    by_state: dict[State, int] = {state: states[state] for state in State if state is not State.DELETING}
    return Progress(items, acked, failed, skipped_count, items - acked - failed - skipped_count, by_state, is_truncated)


def _read(tx: Connection, column: str, ids: Sequence[int], limit: int) -> list[_Node]:
    """At most `limit` batches whose `column` has one of these values."""
    dialect = dialects.of(tx)
    nodes: list[_Node] = []
    for part in chunks(sorted(ids), LIST):
        source = f"batches WHERE {column} IN ({','.join(map(str, part))}) AND state <> '{State.DELETING}'"
        text = f"{dialect.select(_ROWS.expressions(dialect), source, 0)} LIMIT {limit - len(nodes)}"
        for rows in statements.run(tx, text):
            nodes += map(_ROWS.from_record, dialect.records(rows))
        if len(nodes) == limit:
            break
    return nodes


@dataclass(slots=True)
class _Held:
    acked: int = 0
    failed: int = 0
    skipped: int = 0


def _held(tx: Connection, nodes: Mapping[int, _Node]) -> _Held:
    """How many of the items that one of these batches stands for are acked, failed, and skipped."""
    indexes: dict[Key, list[int]] = {}
    for node in nodes.values():
        parent = nodes.get(node.parent_batch or 0)
        if parent is not None and node.parent_number is not None:
            number, index = divmod(node.parent_number, parent.group_size)
            indexes.setdefault((parent.id, number), []).append(index)
    held_items = _Held()
    for keys in chunks(sorted(indexes), LIST):
        groups = _groups(tx, keys, nodes)
        for key, group in groups.items():
            acked = group.acked()
            held_items.acked += sum(acked[index] for index in indexes[key])
            held_items.failed += 0 if group.failed is None else sum(group.failed[index] for index in indexes[key])
            held_items.skipped += 0 if group.skipped is None else sum(group.skipped[index] for index in indexes[key])
    return held_items


def _groups(tx: Connection, keys: Sequence[Key], nodes: Mapping[int, _Node]) -> dict[Key, bitfield.Group]:
    """The bits of these groups."""
    groups = {key: bitfield.Group.empty(nodes[key[0]].group_size) for key in keys}
    numbers: dict[int, list[int]] = {}
    for batch, number in keys:
        numbers.setdefault(batch, []).append(number)
    recent = journal.recent_by_batch(tx, {id: nodes[id].group_size for id in numbers if nodes[id].journal_next})
    columns = ", ".join(["batch_id", "group_no", *bitfield.Columns._fields])
    (rows,) = statements.run(tx, f"SELECT {columns} FROM item_groups WHERE {group_rows.among(numbers)}")  # noqa: S608
    for batch, number, *values in rows:
        groups[batch, number] = bitfield.Group.load(bitfield.Columns(*values), nodes[batch].group_size)
    for batch, indexes in recent.items():
        for number in numbers[batch]:
            journal.union(groups[batch, number], indexes.get(number, ()))
    return groups
