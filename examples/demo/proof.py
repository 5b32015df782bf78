"""What must add up in the end, from four sides that don't know of each other: the batch's counts, its bits, the queue,
and what the processes were told."""

from __future__ import annotations

import re
import sqlite3
import urllib.request
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from examples.demo.broker import Statistics
from lastbit import AckResult, Batch, Verification


@dataclass(frozen=True, slots=True)
class Storage:
    """Of the one batch: rows of its groups and bytes of their bits; and the bytes of the whole database."""

    groups: int
    bits: int
    database: int


@dataclass
class Ledger:
    """What happened, as it was seen from outside."""

    files: int
    batch: Batch | None = None
    verification: Verification | None = None
    queue: Statistics = field(default_factory=Statistics)
    metrics: dict[tuple[str, str], int] = field(default_factory=dict)
    completed_by: list[str] = field(default_factory=list)
    """Who was told `newly: true`."""
    told_again: int = 0
    promised: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Chunk → first and last id, as the producer was given them."""
    reissued: list[int] = field(default_factory=list)
    """Chunks that the second producer was given other ids for than the first: none, it is hoped."""
    producer_killed_at: int | None = None
    resumed: bool = False
    held_by_the_killed: int = 0
    once_more: AckResult | None = None
    storage: Storage = Storage(0, 0, 0)
    most_bits: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def duplicates_seen(self) -> int:
        return self.queue.deliveries - self.queue.items_done

    def faults(self) -> list[str]:
        """All that does not add up, in words."""
        batch, counted, again = self.batch, self.verification, self.once_more
        if batch is None or counted is None or again is None:
            return [*self.errors, "the batch did not come to its end"]
        metrics = self.metrics
        applied = sum(count for (_, result), count in metrics.items() if result == "applied")
        resolved = batch.acked + batch.failed
        facts = [
            (batch.complete, f"the batch is {batch.state}, not complete"),
            (batch.items == self.files, f"{self.files:,} files, and the batch has {batch.items:,} items"),
            (batch.pending == 0, f"{batch.pending:,} items are pending"),
            (resolved == self.files, f"{self.files:,} files, and {resolved:,} items are resolved"),
            (counted.ok, "verify: the bits disagree with the counts"),
            (
                (counted.counted.acked, counted.counted.failed) == (batch.acked, batch.failed),
                f"counted {counted.counted}, and the batch says {batch.acked} acked, {batch.failed} failed",
            ),
            (applied == self.files, f"the service's metrics say that {applied:,} acks changed something"),
            (metrics.get(("ack", "rejected"), 0) == 0, "acks were rejected"),
            (metrics.get(("fail", "rejected"), 0) == 0, "failures were rejected"),
            (len(self.completed_by) == 1, f"told `newly: true`: {self.completed_by or 'nobody'}; expected exactly one"),
            (
                again.applied == 0 and again.repeated == 1 and len(again.completed) == 1,
                f"an ack of a resolved item changed something: {again}",
            ),
            (all(not done.newly for done in again.completed), "a later ack was told that it completed the batch"),
            (self.queue.items_done == self.files, f"the queue is done with {self.queue.items_done:,} items"),
            (self.queue.left == 0, f"{self.queue.left:,} messages are left in the queue"),
            (self.queue.duplicated > 0, "the queue duplicated nothing"),
            (self.held_by_the_killed > 0, "no consumer was killed while it held messages"),
            (self.queue.given_back > 0, "nothing came back from the consumer that was killed"),
            (self.producer_killed_at is not None, "the producer was not killed"),
            (self.resumed, "the second producer did not get the first one's batch"),
            (not self.reissued, f"the second producer was given other ids for the chunks {self.reissued}"),
        ]
        return [*self.errors, *(fault for holds, fault in facts if not holds)]


def storage(database: Path, batch: int) -> Storage:
    """Read from beside the running service."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        groups, bits = connection.execute(
            "SELECT count(*), coalesce(sum(coalesce(length(resolved), 0) + coalesce(length(failed), 0)), 0) "
            "FROM item_groups WHERE batch_id = ?",
            (batch,),
        ).fetchone()
        pages, page_size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return Storage(groups, bits, pages * page_size)


def metrics(url: str) -> dict[tuple[str, str], int]:
    """(verb, result) → items, as the service counted its answers."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310  # our own address
        text = answer.read().decode()
    line = re.compile(r'^lastbit_acks_total\{result="(\w+)",verb="(\w+)"\} ([0-9.e+]+)$', re.MULTILINE)
    return {(verb, result): int(float(count)) for result, verb, count in line.findall(text)}


def closing_lines(ledger: Ledger, seconds: float) -> list[str]:
    """The end of a demo in which all adds up."""
    batch, counted, queue = ledger.batch, ledger.verification, ledger.queue
    assert batch is not None
    assert counted is not None
    failed = ""
    if batch.failed:
        failed = f"; {batch.failed:,} failed, each with its reason: they are no Python 3, on purpose"
    rows = [
        ("items", f"{batch.items:,}, one for each file: {batch.acked:,} acked{failed}"),
        (
            "duplicates seen",
            f"{ledger.duplicates_seen:,} of {queue.deliveries:,} deliveries: {queue.duplicated:,} made by the queue, "
            f"{queue.given_back:,} given back by the consumer that was killed",
        ),
        ("completed by", f"{ledger.completed_by[0]}: the one call that was told newly: true"),
        ("told again", f"{ledger.told_again:,} × newly: false, to whoever brought one of its items afterwards"),
        (
            "proof",
            f"verify ok: the bits say {counted.counted.acked:,} acked, {counted.counted.failed:,} failed, "
            f"{counted.pending:,} pending",
        ),
        (
            "storage",
            f"at most {ledger.most_bits:,} bytes of bits on the way, {ledger.storage.bits:,} now, in "
            f"{ledger.storage.groups} rows; the whole SQLite database {ledger.storage.database:,} bytes",
        ),
        ("time", f"{seconds:.1f} s"),
    ]
    return [f"  {name:<16} {value}" for name, value in rows]
