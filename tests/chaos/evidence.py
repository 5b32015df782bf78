"""The evidence after a run: each actor's requests and answers, and the stored state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from core.storage import tables
from core.storage.database import Database
from tests.chaos.plans import Plan
from tests.chaos.record import ENLISTED
from tests.support.receivers import Got


@dataclass(slots=True)
class Ask:
    """One attempt of a request, and its outcome: a `status` with its `answer`, or unknown."""

    actor: str
    place: str
    """File and line of the request."""
    at: float
    method: str
    path: str
    key: str | None
    body: Any
    status: int | None = None
    answer: Any = None
    answered_at: float = float("inf")
    lost: str | None = None

    @property
    def enlisted(self) -> bool:
        """Whether it was a call in a transaction of the caller, which is counted after its commit."""
        return self.key is not None and self.key.startswith(ENLISTED)

    @property
    def good(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    def __str__(self) -> str:
        answer = f"{self.status} {json.dumps(self.answer)}" if self.status else f"lost: {self.lost or 'the asker died'}"
        after = f"{self.answered_at - self.at:.3f} s later " if self.status else ""
        request = f"{self.method} {self.path} {json.dumps(self.body)}"
        return f"{self.at:.3f} {self.place} {self.key} {_cut(request)}\n        → {after}{_cut(answer)}"


def _cut(text: str, longest: int = 600) -> str:
    return text if len(text) <= longest else f"{text[:longest]} …"


def asks(folder: Path) -> list[Ask]:
    """All recorded requests, by time. An incomplete line is left out: its writer died before it sent the request."""
    requests: list[Ask] = []
    for path in sorted(folder.glob("*.jsonl")):
        actor = path.name.partition(".")[0]
        by_number: dict[int, Ask] = {}
        with path.open() as lines:
            for number, text in enumerate(lines, 1):
                if not text.endswith("\n"):
                    continue
                line = json.loads(text)
                if "m" in line:
                    position = f"{path.name}:{number}"
                    by_number[line["n"]] = Ask(actor, position, line["t"], line["m"], line["p"], line["k"], line["b"])
                elif "x" in line:
                    by_number[line["n"]].lost = line["x"]
                else:
                    ask = by_number[line["n"]]
                    ask.status, ask.answer, ask.answered_at = line["s"], line["a"], line["t"]
        requests += by_number.values()
    return sorted(requests, key=lambda ask: ask.at)


def left_to_the_sweep(log: Path) -> set[int]:
    """The nested batches whose payment the service has given up, by its log."""
    with log.open() as lines:
        entries = [json.loads(line) for line in lines if '"parents_left_to_the_sweep"' in line]
    return {child for entry in entries for child in entry.get("children", ())}


@dataclass(frozen=True, slots=True)
class Group:
    resolved: int
    """Bits."""
    failed: int


@dataclass
class Stored:
    """The database, read without the code under test."""

    batches: dict[int, Any]
    groups: dict[tuple[int, int], Group]
    feed: list[Any]

    @classmethod
    def read(cls, database: Database) -> Stored:
        with database.engine.connect() as tx:
            batches = {row.id: row for row in tx.execute(sa.select(tables.batches))}
            rows = tx.execute(sa.select(tables.item_groups)).all()
            journal = tx.execute(sa.select(tables.ack_journal)).all()
            feed = list(tx.execute(sa.select(tables.feed).order_by(tables.feed.c.position)))
        groups: dict[tuple[int, int], Group] = {}
        for row in rows:
            first = (1 << row.resolved_count) - 1
            resolved = first if row.resolved is None else int.from_bytes(row.resolved, "little")
            failed = 0 if row.failed is None else int.from_bytes(row.failed, "little")
            groups[row.batch_id, row.group_no] = Group(resolved, failed)
        for entry in journal:
            size = batches[entry.batch_id].group_size
            for place in range(0, len(entry.numbers), 4):
                number = int.from_bytes(entry.numbers[place : place + 4], "little")
                if number >= 1 << 31:
                    continue  # a mark that the group was written; groups are read anyway
                group, index = divmod(number, size)
                before = groups.get((entry.batch_id, group), Group(0, 0))
                groups[entry.batch_id, group] = Group(before.resolved | 1 << index, before.failed)
        return cls(batches, groups, feed)

    def state(self, batch: int, number: int) -> str:
        """`acked`, `failed` or `pending`."""
        group, index = divmod(number, self.batches[batch].group_size)
        bits = self.groups.get((batch, group), Group(0, 0))
        if bits.failed >> index & 1:
            return "failed"
        return "acked" if bits.resolved >> index & 1 else "pending"


@dataclass
class Evidence:
    asks: list[Ask]
    stored: Stored
    plans: Sequence[Plan]
    """The plans that producers took."""
    got: Sequence[Got]
    """The webhooks that arrived."""
    webhook_from: int
    """Each event above this position must have been sent."""
    verified: Any
    """The output of `lastbit verify --all --json`."""
    left: int = 0
    """Messages and plans that were unfinished at the end."""
    owing: Sequence[int] = ()
    """Nested batches that had not paid their parents at the end."""
    left_to_the_sweep: Collection[int] = ()
    """Nested batches whose payment a worker has given up, and said so."""
    effects: Sequence[tuple[str, str]] = ()
    """The items that had an effect, each with the key of the call that left it."""
    waiting: int = 0
    """Rows of the outboxes that nobody has moved."""
    recounted: str | None = None
    """The error of a recount of all bits."""
    differences: list[str] = field(default_factory=list)
    """Differences between the servers of the database."""
    crashed: list[str] = field(default_factory=list)
    """Processes that ended although nothing stopped them."""

    def about(self, batch: int, item: str | None = None) -> list[Ask]:
        """The requests that name the batch, or the item."""
        return list(itertools.islice((ask for ask in self.asks if _names(ask, batch, item)), 12))


def _names(ask: Ask, batch: int, item: str | None) -> bool:
    if item is None:
        answer = ask.answer if isinstance(ask.answer, dict) else {}
        if ask.path.startswith(f"/v1/batches/{batch}/") or (ask.path == "/v1/batches" and answer.get("id") == batch):
            return True
        return any(entry["batch"] == batch for entry in answer.get("completed", ()))
    if ask.path not in ("/v1/acks", "/v1/failures"):
        return False
    group = item.rpartition(":")[0]
    masks = (f"{mask['batch']}:{mask['group']}" for mask in ask.body.get("groups", ()))
    return item in ask.body.get("items", ()) or item in ask.body.get("failed", ()) or group in masks
