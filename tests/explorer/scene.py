"""The small world in which every schedule starts, and the outcome that is compared at its end.

The operations concern batch 2: two groups of 64, the second one partly issued. It is the last pending item of batch 1,
and one of its own items is batch 3, which has completed and still owes it an ack. There are also a consumer group, a
tally, a process with an instance, a feed with old events, and a webhook with deliveries.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from bitarray import bitarray
from bitarray.util import zeros

from core import tallies
from core.batches.lifecycle import State
from core.bits import bitfield, journal
from core.processes import definitions, outbox
from core.storage import tables
from lastbit.streams.snapshot import Snapshot
from tests.explorer.accesses import NEW_IDS
from tests.explorer.sessions import LATER, OLD, OLDER, normalized

SIZE: Final = 64
ITEMS: Final = SIZE + 8
VARIANTS: Final = ("cold", "warm", "journaled", "journaled-warm")
HISTORY: Final = b"\0\0\0\1\0"
"""Of a batch that is opened in the explorer, where the clock of histories stands still: no point is ever due."""
MIXED: Final = "mixed"
"""Batch 2 isn't journaled yet, but every session except the last one takes it as journaled."""


@dataclass(frozen=True)
class Scene:
    """`growing`: batch 2 is open and has few resolved items. `fresh`: likewise, but no item of its second group was
    acked, so the group has no row; it seals itself with 20 more items; and batch 3 stands alone, so that batch 2 can
    expire and batch 3 can be removed.
    `ending`: batch 2 is sealed, and two items are pending. `complete`: none is, and batch 3 stands alone. One more
    failure passes the tolerance of batch 2 when it is sealed, and cancels it in `ending`."""

    name: str
    variant: str = "cold"

    @property
    def is_open(self) -> bool:
        return self.name in ("growing", "fresh")

    @property
    def is_nested(self) -> bool:
        """Whether batch 3 is an item of batch 2, and owes it an ack. A flush locks a parent's row earlier than that of
        another batch."""
        return self.name in ("growing", "ending") and self.variant not in ("cold", MIXED)

    @property
    def journaled(self) -> bool:
        return self.variant.startswith("journaled")

    @property
    def warm(self) -> bool:
        """Whether sessions start with the bitfields of batch 2 in their caches."""
        return self.variant.endswith("warm")

    def __str__(self) -> str:
        return f"{self.name}/{self.variant}"


_FIRST: Final = (Scene("growing", "cold"), Scene("fresh", "cold"), Scene("ending", "journaled-warm"))
SCENES: Final = (
    *_FIRST,
    Scene("fresh", "journaled"),
    Scene("growing", MIXED),
    Scene("complete", "cold"),
    *(
        scene
        for scene in itertools.starmap(Scene, itertools.product(("growing", "ending"), VARIANTS))
        if scene not in _FIRST
    ),
)
"""All scenes, the most different ones first."""


def empty(names: Collection[str] | None = None) -> list[str]:
    """Statements that clear these tables after a schedule; None means all tables."""
    table_names = [table.name for table in tables.metadata.sorted_tables if table.name not in _KEPT]
    statements = [f"DELETE FROM {name}" for name in table_names if names is None or name in names]
    if names is None or "feed_head" in names:
        statements.append("UPDATE feed_head SET position = 3, trimmed = 0 WHERE id = 1")
    return statements


_KEPT: Final = ("callback_cursor", "feed_head", "schema_support", "commit_marks")


def lay(scene: Scene, names: Collection[str] | None = None) -> list[str]:
    """Statements that write the scene to these tables, which are empty; None means all tables."""
    rows = [*_batches(scene), *_companions()]
    return [_insert(table, values) for table, values in rows if names is None or table.name in names]


def groups_of(scene: Scene) -> dict[int, tuple[set[int], set[int]]]:
    """The resolved and the failed indexes in the rows of batch 2's groups."""
    if scene.is_open:
        return {0: ({3, 9}, {9}), **({} if scene.name == "fresh" else {1: ({5}, set())})}
    if scene.name == "complete":
        return {0: (set(range(SIZE)), {9}), 1: (set(range(8)), set())}
    groups = {0: (set(range(SIZE)) - {63}, {9}), 1: (set(range(7)), set[int]())}
    if scene.journaled:
        groups[0][0].discard(20)
    return groups


def _named(scene: Scene) -> list[int]:
    """The numbers that are in batch 2's journal but not in its groups."""
    if not scene.journaled:
        return []
    if scene.is_open:
        return [11] if scene.name == "fresh" else [11, SIZE + 6]
    return [20]


def _batches(scene: Scene) -> Iterator[tuple[sa.Table, dict[str, Any]]]:
    groups, entries = groups_of(scene), _named(scene)
    failed = sum(len(failed) for _, failed in groups.values())
    resolved = sum(len(resolved) for resolved, _ in groups.values()) + len(entries)
    yield tables.batches, _batch(1, "sealed", items=8, acked=7, deadline=OLD, children=1)
    yield tables.item_groups, _group(1, 0, set(range(8)) - {5}, set())
    state = {"ending": "sealed", "complete": "complete"}.get(scene.name, "open")
    ended_at = OLD if state == "complete" else None
    parent = {"parent_batch": 1, "parent_number": 5, "parent_group_size": SIZE, "children": int(scene.is_nested)}
    counts = {"items": ITEMS, "acked": resolved - failed, "failed": failed}
    policy = {"tolerated_failures": 2, "tolerated_failure_percentage": 2, "on_exceeded": "continue"}
    if scene.name == "fresh":
        policy["seal_at"] = ITEMS + 20
    if scene.name == "ending":
        policy = {"tolerated_failures": 1, "on_exceeded": "cancel"}
    yield (
        tables.batches,
        _batch(2, state, ended_at=ended_at, journal_next=2 if scene.journaled else 0, **parent, **counts, **policy),
    )
    for number, (bits, given_up) in groups.items():
        yield tables.item_groups, _group(2, number, bits, given_up)
    if scene.journaled:
        yield tables.ack_journal, {"batch_id": 2, "entry_no": 1, "numbers": journal.encode(entries)}
    yield tables.failures, {"batch_id": 2, "number": 9, "reason": "broken", "failed_at": OLD}
    parent = {"parent_batch": 2, "parent_number": SIZE + 7, "parent_group_size": SIZE, "parent_due": "ack"}
    nesting = parent if scene.is_nested else {}
    yield tables.batches, _batch(3, "complete", items=1, acked=1, ended_at=OLD, **nesting)
    yield tables.item_groups, _group(3, 0, {0}, set())


def _batch(id: int, state: str, **values: Any) -> dict[str, Any]:
    facts = {"labels": "{}", "group_size": SIZE, "failed": 0, "full_prefix": 0, "open_count": 0}
    times = {"created_at": OLD, "updated_at": OLD, "history": HISTORY}
    return {"id": id, "batch_key": f"job-{id}", "state": state, **times, **facts, **values}


def _group(batch: int, number: int, resolved: set[int], failed: set[int]) -> dict[str, Any]:
    issued = {1: 8, 2: ITEMS - number * SIZE, 3: 1}[batch]
    columns = _bits(resolved, failed).dump(min(issued, SIZE))
    return {"batch_id": batch, "group_no": number, **columns._asdict()}


def _bits(resolved: set[int], failed: set[int]) -> bitfield.Group:
    group = bitfield.Group.empty(SIZE)
    for index in failed:
        group.fail_one(index)
    for index in resolved - failed:
        group.ack_one(index)
    return group


def warm(scene: Scene) -> dict[tuple[int, int], bitfield.Group]:
    """The groups of batch 2 as in the cache of the process that has just written them."""
    bits = {}
    for number, (resolved, failed) in groups_of(scene).items():
        issued = min(ITEMS - number * SIZE, SIZE)
        bits[2, number] = bitfield.Group.load(_bits(resolved, failed).dump(issued), SIZE)
    return bits


GROUP: Final = "workers"
PROCESS: Final = "ship"
TALLY: Final = "screws"


def _companions() -> Iterator[tuple[sa.Table, dict[str, Any]]]:
    for name in (GROUP, definitions.group_of(PROCESS)):
        facts = {"partition_of": "crc32", "ttl_ms": 60_000, "release_ms": 30_000, "first_epoch": 0, "created_at": OLD}
        yield tables.consumer_groups, {"name": name, "partitions": 2, **facts}
        lease_times = {"started_at": OLD, "last_seen": OLD, "lease_until": LATER}
        yield tables.consumers, {"group_name": name, "worker": "w1", "session": "s1", "replaced": "", **lease_times}
        for partition in (0, 1):
            window = Snapshot(1, 1)
            yield (
                tables.positions,
                {
                    "group_name": name,
                    "partition_no": partition,
                    "owner": "w1",
                    "epoch": 1,
                    "owned_since": OLD,
                    "floor": 1,
                    "high": 1,
                    "outstanding": window.encode(),
                    "outstanding_count": 0,
                },
            )
    counter = {"tally": TALLY, "tally_key": "m4", "topic": "parts", "partition_no": 0, "generation": 0}
    yield tables.tallies, {**counter, "high_offset": 10, "high_child": 0, "value": 5}
    source = {"topic": "bolts", "partition_no": 0, "generation": 0}
    yield tables.tally_sources, {"tally": TALLY, **source, "position": b"9"}
    guard = dict(zip(("high_offset", "high_child"), tallies.BY_RANGES, strict=True))
    yield tables.tallies, {"tally": TALLY, "tally_key": "m4", **source, **guard, "value": 3}
    yield tables.process_definitions, {"name": PROCESS, "pruned": 0, "created_at": OLD}
    times = {"created_at": OLD, "updated_at": OLD}
    yield (
        tables.processes,
        {"name": PROCESS, "instance": "o1", "state": "{}", "version": 1, "status": "running", **times},
    )
    finished = {"state": "{}", "version": 3, "status": "finished", **times, "finished_at": OLDER}
    yield tables.processes, {"name": PROCESS, "instance": "o9", **finished}
    command = {
        "command_id": outbox.command_id(PROCESS, "o9", "step"),
        "position": 0,
        "type": "ship",
        "created_at": OLDER,
    }
    yield tables.outbox, {"name": PROCESS, "instance": "o9", "step": "step", **command}
    handled = {"status": "parked", "error": "no", "event": "{}", "handled_at": OLD}
    yield tables.inbox, {"name": PROCESS, "instance": "o1", "event_id": "e1", "position": 1, **handled}
    due = {"token": "t1", "due_at": OLD, "data": None}
    yield tables.timers, {"name": PROCESS, "instance": "o1", "timer": "late", **due}
    for position in (1, 2, 3):
        event = {"event_id": f"e{position}", "type": "paid", "event_key": "o1", "data": None, "appended_at": OLD}
        yield tables.feed, {"position": position, **event}
    hook = {"url": "http://127.0.0.1/", "secret": "whsec_", "state": "active", "position": 2, "created_at": OLD}
    yield tables.webhooks, {"id": 1, **hook}
    for id in (1, 2):
        delivery = {"webhook_id": 1, "position": id, "state": "pending", "attempts": 0, "due_at": OLD}
        yield tables.deliveries, {"id": id, **delivery, "token": b"claimed-claimed-" if id == 2 else None}


def _insert(table: sa.Table, values: Mapping[str, Any]) -> str:
    return f"INSERT INTO {table.name} ({', '.join(values)}) VALUES ({', '.join(map(_literal, values.values()))})"


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return f"'{value}'" if isinstance(value, str) else str(value)


# The outcome.

_HIDDEN: Final = {
    "batches": {"completed_by", "succeeded_by", "full_prefix", "journal_next", "no_journal", "open_hash"},
    "count_outbox": {"id"},
    "event_outbox": {"id"},
    "deliveries": {"token"},
    "timers": {"token"},
    "delivery_attempts": {"id"},
}
"""Columns that are random, or that may differ between equal outcomes."""
COMPARED: Final = [
    table
    for table in tables.metadata.sorted_tables
    if table.name not in ("item_groups", "ack_journal", "schema_support", "commit_marks")
]

BITS: Final = ("batches", "item_groups", "ack_journal", "count_outbox")
"""The tables from which the bits in an outcome, and its errors, are computed."""


def _columns(table: sa.Table) -> list[str]:
    hidden_columns = _HIDDEN.get(table.name, set())
    return [c.name for c in table.columns if c.name not in hidden_columns and not isinstance(c.type, tables.Timestamp)]


QUERIES: Final = [
    *(
        f"SELECT {', '.join(_columns(table))} FROM {table.name} ORDER BY {', '.join(c.name for c in table.primary_key)}"
        for table in COMPARED
    ),
    "SELECT id, full_prefix FROM batches",
    f"SELECT batch_id, group_no, {', '.join(bitfield.Columns._fields)} FROM item_groups ORDER BY 1, 2",
    "SELECT batch_id, entry_no, numbers FROM ack_journal ORDER BY batch_id, entry_no",
    "SELECT batch_id, acked, failed, skipped FROM count_outbox",
]
"""The statements that read the state at the end of a schedule; `outcome` gets their rows."""


def outcome(results: Sequence[Sequence[Sequence[Any]]]) -> tuple[dict[str, list[str]], list[str]]:
    """The outcome of a schedule: the rows by table, without times, and each batch's bits, wherever they are stored; and
    the errors that no schedule may have, as text. A row that the database numbers has its number before its transaction
    has its turn, so the numbers of two are no order."""
    rows = {
        table.name: (sorted if table.name in NEW_IDS else list)(normalized(repr(tuple(row))) for row in part)
        for table, part in zip(COMPARED, results, strict=False)
    }
    *_, prefixes, groups, entries, waiting = results
    bits, trouble = _recount(results[COMPARED.index(tables.batches)], dict(prefixes), groups, entries, waiting)
    rows["bits"] = bits
    return rows, trouble


def _recount(
    batch_rows: Sequence[Any],
    prefixes: Mapping[int, int],
    groups: Sequence[Any],
    entries: Sequence[Any],
    waiting: Sequence[Any],
) -> tuple[list[str], list[str]]:
    trouble: list[str] = []
    batches = {row[0]: dict(zip(_columns(tables.batches), row, strict=True)) for row in batch_rows}
    resolved: dict[tuple[int, int], bitarray] = {}
    failed: dict[tuple[int, int], bitarray] = {}
    skipped: dict[tuple[int, int], bitarray] = {}
    for batch, number, *columns in groups:
        position = f"batch {batch}, group {number}"
        if batch not in batches:
            trouble.append(f"{position}: its batch is missing")
            continue
        group = bitfield.Group.load(bitfield.Columns(*columns), SIZE)
        try:
            group.check(max(0, min(SIZE, batches[batch]["items"] - number * SIZE)))
        except bitfield.Inconsistent as error:
            trouble.append(f"{position}: {error}")
        resolved[batch, number] = group.resolved
        failed[batch, number] = group.failed if group.failed is not None else zeros(SIZE, bitfield.ENDIAN)
        skipped[batch, number] = group.skipped if group.skipped is not None else zeros(SIZE, bitfield.ENDIAN)
        if ((failed[batch, number] | skipped[batch, number]) & ~group.resolved).any():
            trouble.append(f"{position}: failed or skipped items are not resolved")
        if (failed[batch, number] & skipped[batch, number]).any():
            trouble.append(f"{position}: items are both failed and skipped")
    for batch, recent in _journaled(entries).items():
        if batch not in batches:
            trouble.append(f"batch {batch}: its journal was left behind")
        for number, indexes in recent.items():
            for index in indexes:
                resolved.setdefault((batch, number), zeros(SIZE, bitfield.ENDIAN))[index] = 1
    shown_batches = []
    for id, batch in sorted(batches.items()):
        acked_bits = [(number, bits) for (owner, number), bits in sorted(resolved.items()) if owner == id]
        given_up = [(number, bits) for (owner, number), bits in sorted(failed.items()) if owner == id and bits.any()]
        not_needed = [(number, bits) for (owner, number), bits in sorted(skipped.items()) if owner == id and bits.any()]
        failures, skips = (sum(bits.count() for _, bits in groups) for groups in (given_up, not_needed))
        counted = sum(bits.count() for _, bits in acked_bits) - failures - skips, failures, skips
        counts = batch["acked"], batch["failed"], batch["skipped"] or 0
        left = [row[1:] for row in waiting if row[0] == id]
        if tuple(map(sum, zip(counts, *left, strict=True))) != counted:
            trouble.append(f"batch {id}: counts say {counts}, bits say {counted}")
        pending = batch["items"] - sum(counts)
        if (batch["state"] == State.COMPLETE and pending) or (batch["state"] == State.SEALED and not pending):
            trouble.append(f"batch {id}: it is {batch['state']} with {pending} pending")
        if any(not resolved.get((id, number), zeros(SIZE, bitfield.ENDIAN)).all() for number in range(prefixes[id])):
            trouble.append(f"batch {id}: a group below its full prefix is not full")
        shown_batches.append(
            f"{id}: resolved {_text(acked_bits)}, failed {_text(given_up)}, skipped {_text(not_needed)}"
        )
    return sorted(normalized(batch) for batch in shown_batches), trouble


def _journaled(entries: Sequence[Any]) -> dict[int, dict[int, Sequence[int]]]:
    columns: dict[int, journal.JournalState] = {}
    for batch, entry, numbers in entries:
        columns.setdefault(batch, journal.JournalState(0)).take_in(entry, numbers, SIZE)
    return {batch: {g: entry.indexes for g, entry in state.unfolded.items()} for batch, state in columns.items()}


def _text(groups: Sequence[tuple[int, bitarray]]) -> str:
    return " ".join(f"{number}:{bits.tobytes().hex()}" for number, bits in groups)
