"""Writing verbs that share transactions: queued, merged, and answered after the commit (see `core.writes`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from core import feed, tallies, writes
from core.batches.batch import Extended, Opened, Sealed
from core.batches.writing import BatchWrites
from core.commits.combiner import Commit, GroupCommit, Inline
from core.commits.kind import Kind
from core.commits.operation import Done, Operation
from core.commits.pending import HERE, Mailbox, Receiver, settle
from core.consumer_groups import positions
from core.processes import handling
from core.processes.handling import Handle, HandleMany
from core.service.acks import AckService
from core.storage import lock_order
from core.storage.database import Database

KINDS: Final[Sequence[type[Kind]]] = lock_order.sort(
    [BatchWrites, feed.Appends, handling.Handlings, positions.Commits, tallies.Additions]
)
"""All kinds of writing operations, in the order of their locks."""

LOCK_WAIT: Final = 0.25
"""Seconds that a merged transaction waits for a lock. Other transactions usually take less."""


class WriteService:
    def __init__(self, database: Database, acks: AckService, combiner: Callable[[Commit], GroupCommit]) -> None:
        self._database = database
        self._acks = acks
        self._combiner = combiner(self._commit)
        self._alone = Inline(self._commit)

    def run(self, operation: Operation) -> Any:
        """Queue the operation, and return its result after the commit. Raises its error, `errors.Overloaded`,
        `errors.Unavailable`."""
        future: Future[Any] = Future()
        self.submit(operation, functools.partial(settle, future))
        return future.result()

    def submit(self, operation: Operation, receiver: Receiver[Any], mailbox: Mailbox = HERE) -> None:
        """Queue the operation. When it is finished, it is put into the mailbox, with all that ended in the same commit.
        One that must have a transaction of its own is committed by the caller's thread, which then waits. Raises
        `errors.Overloaded`."""
        (self._alone if operation.must_be_alone else self._combiner).submit(operation, receiver, mailbox)

    def is_full(self) -> bool:
        """Whether `submit` would raise `errors.Overloaded` now."""
        return self._combiner.is_full()

    def stop(self) -> None:
        """Answer the operations in progress, and accept no more."""
        self._combiner.stop()

    def _commit(self, operations: Sequence[Operation], *, lock_waits: int) -> list[Done]:
        if lock_waits:
            outcomes = writes.commit(self._database, operations, KINDS, lock_waits=lock_waits - 1)
        else:
            outcomes = writes.commit(self._database, operations, KINDS, lock_waits=0, lock_wait=LOCK_WAIT)
        for operation, outcome in zip(operations, outcomes, strict=True):
            if isinstance(operation, Handle):
                handling.report(operation, outcome)
            elif isinstance(operation, HandleMany) and outcome.error is None:
                for handle, handled in zip(operation.handles, outcome.value, strict=True):
                    handling.report(handle, handled)
            if isinstance(outcome.value, Opened | Extended | Sealed) and outcome.value.batch.parent_due is not None:
                outcome.paid = self._acks.payment(outcome.value.batch.id)
        return outcomes
