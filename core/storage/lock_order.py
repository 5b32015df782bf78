"""The order in which every transaction takes its locks. Two that follow it can't wait for each other in a circle.

`ORDER` is the order of the tables. Rows of one table are locked in the ascending order of their primary keys. The last
lock that transactions share is the row of `feed_head`. What is written after it, only its holder writes, and in the end
the transaction's own mark.

*Rows that don't exist yet* can't be locked, so the order doesn't apply to an INSERT: nobody else may insert the same
row at the same time. `UNDER` has the tables whose rows are inserted only by the holder of another lock: the row of a
group of items, for example, under the lock of its batch. Other tables number their rows.

*Rows that are locked only together with another row* need no place in the order. `UNDER` has these tables too: a
batch's journal is written by the holder of the batch's row. So are its rows of the outboxes removed, which anybody may
insert, as they are numbered (see `core.enlisted`).

*Parked events* are changed only under the lock of their instance's partition, so their rows in the inbox need no place
either.

*The groups of a journaled batch* are written under the lock of its row, which comes after them in the order: only the
holder of that row writes them. A process that doesn't know yet that the batch is journaled locks its groups first, and
then waits for the row. If its holder wants one of these groups, they wait for each other until the database or the lock
wait ends one of the two transactions, which begins again and knows. That happens at most once to a process and a batch.
To find it out earlier would cost each first ack of a batch another round trip.

*A statement that skips locked rows* never waits, so it may come anywhere.

*Rows of what is deleted*: a batch, an event or a command whose removal was committed before is unknown to all others,
who wait for none of its rows while they hold another one. So its row may be deleted last.

*Unique keys* are no locks in this sense. Two transactions that insert the same open keys in different orders are a
conflict, which the database resolves; so are two that count for the same large total (see `tallies`). On MariaDB, an
INSERT of a row that another transaction has just inserted also waits for whoever has locked it since.

The lock of the head says nothing about a batch: whoever waits for it would wait in any other transaction too. Its
statement waits for as long as the session allows, however briefly the transaction waits for other rows, and a time-out
is a fault of its own (`errors.Fault.HEAD_WAIT`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar

ORDER: Final = (
    *("consumer_groups", "positions", "process_definitions", "inbox", "processes", "timers"),
    *("tally_sources", "tallies", "schema_support", "item_groups", "batches"),
    *("callback_cursor", "deliveries", "webhooks"),
    *("feed_head", "commit_marks"),
)
"""The tables with rows that transactions lock."""
UNDER: Final = {
    "consumers": ("consumer_groups",),
    "process_definitions": ("consumer_groups",),
    "positions": ("consumer_groups",),
    "inbox": ("positions",),
    "processes": ("positions",),
    "timers": ("positions",),
    "outbox": ("positions",),
    "item_groups": ("batches",),
    "ack_journal": ("batches",),
    "extends": ("batches",),
    "failures": ("item_groups", "batches"),
    "skips": ("item_groups", "batches"),
    "deliveries": ("callback_cursor", "webhooks"),
    "delivery_attempts": ("deliveries",),
    "feed": ("feed_head",),
}
"""For each table, where the lock is under which its rows are inserted."""

HEAD: Final = "SELECT position, trimmed FROM feed_head WHERE id = 1"
LOCK_HEAD: Final = f"{HEAD} FOR UPDATE"
"""The statement that locks the head on a server. It is recognized by its text, so there is no other one."""


class Locker(Protocol):
    """A part of a transaction. `locks` has the tables in which it locks rows, in their order."""

    @property
    def locks(self) -> Sequence[str]: ...


T = TypeVar("T", bound=Locker)


def sort(parts: Iterable[T]) -> list[T]:
    """The parts of a transaction in the order in which they must lock. One that locks nothing comes first. Raises
    `ValueError` if there is no such order: two parts would have to lock in turns."""
    ordered = sorted(parts, key=lambda part: [ORDER.index(table) for table in part.locks])
    ranks = [ORDER.index(table) for part in ordered for table in part.locks]
    if ranks != sorted(ranks):
        raise ValueError(f"these locks have no order: {[part.locks for part in ordered]}")
    return ordered
