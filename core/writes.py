"""The transaction that writing verbs share: opens, extends and seals of batches, appends to the feed, handlings of
process managers, tally entries and positions.

Calls that arrive during a transaction share the next one (see `commits`). Each has its own outcome: a refused operation
doesn't affect the others, as it changes nothing. Only an open with a parent has a transaction of its own, as it reads
the parent's bits. The verbs come in the order of their locks (see `lock_order`). A new one becomes an `Operation`, and
a line in `flush`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from sqlalchemy.engine import Connection

from core import errors, feed, tallies
from core.batches import batch as batches
from core.batches import writing
from core.batches.writing import Extend, Open, Seal
from core.commits import operation as calls
from core.commits.operation import Done
from core.consumer_groups import positions
from core.processes import handling
from core.processes.handling import Handle, HandleMany
from core.storage.database import Database
from core.storage.statements import Pipeline


@dataclass(slots=True, eq=False, kw_only=True)
class Append(calls.Operation):
    """Append the events whose ids are new; with a `fence`, only if it holds. Its result is a list of `feed.Appended`,
    one for each event. Errors: `StaleEpoch`, `ConsumerGroupNotFound`."""

    events: Sequence[feed.NewEvent]
    fence: positions.Fence | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Apply(calls.Operation):
    """Add entries to a tally, all or none; with a `fence`, only if it holds. Its result is a `tallies.Applied`. Errors:
    `InvalidRequest`, `OutOfOrder`, `StaleEpoch`, `ConsumerGroupNotFound`."""

    tally: str
    entries: Sequence[tallies.Entry]
    fence: positions.Fence | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class CommitPositions(calls.Operation):
    """Commit positions. Its result is a list of a `positions.Committed` or an error for each: `StaleEpoch`,
    `ConsumerGroupNotFound`."""

    commits: Sequence[positions.Commit]


Operation: TypeAlias = Open | Extend | Seal | Append | Handle | HandleMany | Apply | CommitPositions


def flush(tx: Connection, operations: Sequence[Operation]) -> list[Done]:
    """Apply the operations. The caller commits. Raises `faults.BeginAgain` if the transaction must be run again."""
    pipeline = Pipeline(tx)
    appends = [operation for operation in operations if isinstance(operation, Append)]
    applies = [operation for operation in operations if isinstance(operation, Apply)]
    commits = [operation for operation in operations if isinstance(operation, CommitPositions)]
    calls_of_many = [operation for operation in operations if isinstance(operation, HandleMany)]
    handles = [
        handle
        for operation in operations
        if isinstance(operation, Handle | HandleMany)
        for handle in ([operation] if isinstance(operation, Handle) else operation.handles)
    ]
    changes = [operation for operation in operations if isinstance(operation, Open | Extend | Seal)]
    fences = handling.fences(pipeline, handles)
    fenced: list[Append | Apply] = [*appends, *applies]
    fences |= {operation: operation.fence for operation in fenced if operation.fence is not None}
    committing = [commit for operation in commits for commit in operation.commits]
    refusals = positions.lock(pipeline, {*fences.values(), *(commit.fence for commit in committing)})
    committed = positions.Commits(pipeline, committing)
    handlings = handling.Handlings(pipeline, handles)
    refused = refusals()
    handlings.apply(fences, refused)
    outcomes = {operation: Done(error=refused[fence]) for operation, fence in fences.items() if fence in refused}
    results = iter(committed.write(refused))
    outcomes |= {operation: Done(list(islice(results, len(operation.commits)))) for operation in commits}
    appends = [append for append in appends if append not in outcomes]
    applies = [apply for apply in applies if apply not in outcomes]
    applied = tallies.write(pipeline, [(apply.tally, apply.entries) for apply in applies])
    writes = writing.write(pipeline, changes)

    def own(position: int) -> list[feed.NewEvent]:
        events = writes.finish()
        handlings.finish(position + len(events))
        return [*events, *handlings.events()]

    if writes.has_events() or handlings.events() or any(append.events for append in appends):
        answers = feed.write(pipeline, own, [append.events for append in appends])
    else:
        handlings.finish(0)
        answers = [[] for _ in appends]
    pipeline.finish()
    outcomes |= {append: Done(answer) for append, answer in zip(appends, answers, strict=True)}
    outcomes |= writes.outcomes | handlings.outcomes
    outcomes |= {call: Done([outcomes[handle] for handle in call.handles]) for call in calls_of_many}
    for apply, result in zip(applies, applied, strict=True):
        outcomes[apply] = Done(error=result) if isinstance(result, errors.CoreError) else Done(result)
    return [outcomes[operation] for operation in operations]


def commit(
    database: Database, operations: Sequence[Operation], *, lock_waits: int = 4, lock_wait: float | None = None
) -> list[Done]:
    """Apply the operations in one transaction and commit it. The parameters and exceptions are those of
    `Database.write`; a `LockTimeout` names the batches whose rows are locked."""
    try:
        return database.write(flush, operations, lock_waits=lock_waits, lock_wait=lock_wait)
    except errors.LockTimeout as error:
        error.batches = database.read(batches.locked, {operation.batch for operation in operations})
        raise
