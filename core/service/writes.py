"""Writing verbs that share transactions: queued, merged, and answered after the commit (see `core.writes`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from core import writes
from core.batches.batch import Opened, Sealed
from core.commits.combiner import Commit, GroupCommit, Inline
from core.commits.operation import Done
from core.commits.pending import HERE, Mailbox, Receiver, settle
from core.processes import handling
from core.processes.handling import Handle, HandleMany
from core.service.acks import AckService
from core.storage.database import Database

LOCK_WAIT: Final = 0.25
"""Seconds that a merged transaction waits for a lock. Other transactions usually take less."""


class WriteService:
    def __init__(self, database: Database, acks: AckService, combiner: Callable[[Commit], GroupCommit]) -> None:
        self._database = database
        self._acks = acks
        self._combiner = combiner(self._commit)
        self._alone = Inline(self._commit)

    def run(self, operation: writes.Operation) -> Any:
        """Queue the operation, and return its result after the commit. Raises its error, `errors.Overloaded`,
        `errors.Unavailable`."""
        future: Future[Any] = Future()
        self.submit(operation, functools.partial(settle, future))
        return future.result()

    def submit(self, operation: writes.Operation, receiver: Receiver[Any], mailbox: Mailbox = HERE) -> None:
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

    def _commit(self, operations: Sequence[writes.Operation], *, lock_waits: int) -> list[Done]:
        if lock_waits:
            outcomes = writes.commit(self._database, operations, lock_waits=lock_waits - 1)
        else:
            outcomes = writes.commit(self._database, operations, lock_waits=0, lock_wait=LOCK_WAIT)
        for operation, outcome in zip(operations, outcomes, strict=True):
            if isinstance(operation, Handle):
                handling.report(operation, outcome)
            elif isinstance(operation, HandleMany) and outcome.error is None:
                for handle, handled in zip(operation.handles, outcome.value, strict=True):
                    handling.report(handle, handled)
            if isinstance(outcome.value, Opened | Sealed) and outcome.value.batch.parent_due is not None:
                outcome.paid = self._acks.payment(outcome.value.batch.id)
        return outcomes
