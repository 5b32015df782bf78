"""The final checks. They compare four independent sources: the batch's counts, its bits, the queue, and the responses
that the processes received."""

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
    """Rows of the batch's groups, bytes of their bits, and bytes of the whole database."""

    groups: int
    bits: int
    database: int


@dataclass
class Ledger:
    """The events of a demo, as observed from outside."""

    files: int
    batch: Batch | None = None
    verification: Verification | None = None
    queue: Statistics = field(default_factory=Statistics)
    metrics: dict[tuple[str, str], int] = field(default_factory=dict)
    completed_by: list[str] = field(default_factory=list)
    """The callers that got `newly: true`."""
    told_again: int = 0
    """Responses with `newly: false`."""
    promised: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Chunk → the first and last id that the producer got."""
    reissued: list[int] = field(default_factory=list)
    """Chunks for which the second producer got other ids than the first. There should be none."""
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
        """A sentence for each failed check."""
        batch, verification, repeat = self.batch, self.verification, self.once_more
        if batch is None or verification is None or repeat is None:
            return [*self.errors, "the batch did not end"]
        metrics = self.metrics
        applied = sum(count for (_, result), count in metrics.items() if result == "applied")
        resolved = batch.acked + batch.failed
        facts = [
            (batch.complete, f"the batch is {batch.state}, not complete"),
            (batch.items == self.files, f"{self.files:,} files, but the batch has {batch.items:,} items"),
            (batch.pending == 0, f"{batch.pending:,} items are pending"),
            (resolved == self.files, f"{self.files:,} files, and {resolved:,} items are resolved"),
            (verification.ok, "verify: the bits disagree with the counts"),
            (
                (verification.counted.acked, verification.counted.failed) == (batch.acked, batch.failed),
                f"counted {verification.counted}, and the batch says {batch.acked} acked, {batch.failed} failed",
            ),
            (applied == self.files, f"by the service's metrics, {applied:,} acks changed something"),
            (metrics.get(("ack", "rejected"), 0) == 0, "acks were rejected"),
            (metrics.get(("fail", "rejected"), 0) == 0, "failures were rejected"),
            (
                len(self.completed_by) == 1,
                f"`newly: true` went to {self.completed_by or 'no call'}, not to exactly one",
            ),
            (
                repeat.applied == 0 and repeat.repeated == 1 and len(repeat.completed) == 1,
                f"an ack of a resolved item changed something: {repeat}",
            ),
            (all(not completion.newly for completion in repeat.completed), "a later ack got `newly: true`"),
            (self.queue.items_done == self.files, f"the queue has {self.queue.items_done:,} confirmed items"),
            (self.queue.left == 0, f"{self.queue.left:,} messages are left in the queue"),
            (self.queue.duplicated > 0, "the queue duplicated nothing"),
            (self.held_by_the_killed > 0, "no consumer was killed while it had messages"),
            (self.queue.given_back > 0, "no messages of the killed consumer returned to the queue"),
            (self.producer_killed_at is not None, "the producer was not killed"),
            (self.resumed, "the second producer did not get the first one's batch"),
            (not self.reissued, f"the second producer got other ids for the chunks {self.reissued}"),
        ]
        return [*self.errors, *(fault for holds, fault in facts if not holds)]


def storage(database: Path, batch: int) -> Storage:
    """Read from the file while the service runs."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        groups, bits = connection.execute(
            "SELECT count(*), coalesce(sum(coalesce(length(resolved), 0) + coalesce(length(failed), 0)), 0) "
            "FROM item_groups WHERE batch_id = ?",
            (batch,),
        ).fetchone()
        pages, page_size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return Storage(groups, bits, pages * page_size)


def metrics(url: str) -> dict[tuple[str, str], int]:
    """(verb, result) → items, as counted by the service."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310  # our own address
        text = answer.read().decode()
    line = re.compile(r'^lastbit_acks_total\{result="(\w+)",verb="(\w+)"\} ([0-9.e+]+)$', re.MULTILINE)
    return {(verb, result): int(float(count)) for result, verb, count in line.findall(text)}


def closing_lines(ledger: Ledger, seconds: float) -> list[str]:
    """The summary of a demo without faults."""
    batch, counted, queue = ledger.batch, ledger.verification, ledger.queue
    assert batch is not None
    assert counted is not None
    failed = ""
    if batch.failed:
        failed = f"; {batch.failed:,} failed with a reason: these files are not valid Python 3, on purpose"
    rows = [
        ("items", f"{batch.items:,}, one for each file: {batch.acked:,} acked{failed}"),
        (
            "duplicates seen",
            f"{ledger.duplicates_seen:,} of {queue.deliveries:,} deliveries: {queue.duplicated:,} made by the queue, "
            f"{queue.given_back:,} returned by the killed consumer",
        ),
        ("completed by", f"{ledger.completed_by[0]}: the one call that got newly: true"),
        ("reported again", f"{ledger.told_again:,} × newly: false, for later acks of its items"),
        (
            "proof",
            f"verify ok: the bits have {counted.counted.acked:,} acked, {counted.counted.failed:,} failed, "
            f"{counted.pending:,} pending",
        ),
        (
            "storage",
            f"at most {ledger.most_bits:,} bytes of bits during the run, {ledger.storage.bits:,} now, in "
            f"{ledger.storage.groups} rows; the whole SQLite database {ledger.storage.database:,} bytes",
        ),
        ("time", f"{seconds:.1f} s"),
    ]
    return [f"  {name:<16} {value}" for name, value in rows]
