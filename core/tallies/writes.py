"""Calls that add to tallies, in the transaction that they share; see the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core import errors
from core.commits.kind import Kind
from core.commits.operation import Done, Operation
from core.consumer_groups.positions import Fence
from core.storage import faults
from core.storage.statements import Pipeline
from core.tallies import limits, rows
from core.tallies.entries import EntriesCall
from core.tallies.limits import Others
from core.tallies.model import EMPTY, Call, Counter, Entry, Judged, Key, SourceId, Stored
from core.tallies.ranges import Range, RangesCall


@dataclass(slots=True, eq=False, kw_only=True)
class Apply(Operation):
    """Add entries to a tally, all or none; with a `fence`, only if it holds. Its result is an `Applied`. Errors:
    `InvalidRequest`, `OutOfOrder`, `SourceConflict`, `StaleEpoch`, `ConsumerGroupNotFound`."""

    tally: str
    entries: Sequence[Entry]
    fence: Fence | None = None

    def call(self) -> Call:
        """Raises `errors.InvalidRequest`."""
        return EntriesCall.of(self.tally, self.entries)


@dataclass(slots=True, eq=False, kw_only=True)
class ApplyRanges(Operation):
    """Add ranges to a tally; with a `fence`, only if it holds. Its result has a `Counted` for each range. Errors, with
    which none is added: `InvalidRequest`, `SourceConflict`, `StaleEpoch`, `ConsumerGroupNotFound`."""

    tally: str
    ranges: Sequence[Range]
    fence: Fence | None = None

    def call(self) -> Call:
        """Raises `errors.InvalidRequest`."""
        return RangesCall.of(self.tally, self.ranges)


class Additions(Kind):
    """Entries and ranges for tallies."""

    handles = (Apply, ApplyRanges)
    locks = ("tally_sources", "tallies")

    def fences(self) -> list[Fence]:
        return [operation.fence for operation in self.operations if operation.fence is not None]

    def judge(self, refused: Mapping[Fence, errors.CoreError]) -> None:
        self.refuse(refused)
        calls: dict[Operation, Call] = {}
        for operation in self.remaining():
            try:
                calls[operation] = operation.call()
            except errors.CoreError as error:
                self.outcomes[operation] = Done(error=error)
        for operation, result in zip(calls, write(self.pipeline, list(calls.values())), strict=True):
            self.outcomes[operation] = Done(error=result) if isinstance(result, errors.CoreError) else Done(result)


def write(pipeline: Pipeline, calls: Sequence[Call]) -> list[Any]:
    """Apply the calls in their order. The last statements wait in the pipeline.

    A call that can't be applied changes nothing. Its outcome is the reason, a `CoreError`; that of others is their
    result. Raises `faults.BeginAgain` if the transaction must be run again.
    """
    counters = set[Counter]().union(*[call.counters for call in calls])
    sources = set[SourceId]().union(*[call.sources for call in calls])
    literals = rows.literals_of(pipeline.tx, sorted(counters))
    table_rows = rows.lock(pipeline, literals, sorted(sources))
    others: dict[Key, Others] = {}
    judged = _judge(calls, table_rows, others)
    while judged.notable:
        pipeline.later("SAVEPOINT tallies")
        rows.store(pipeline, judged.after, table_rows, literals)
        earlier, others = others, limits.read_others(pipeline, judged, literals, table_rows, others)
        rejudged = _judge(calls, table_rows, others) if others else judged
        if rejudged.refused == judged.refused:
            return judged.outcomes
        if others.keys() == earlier.keys():
            raise faults.BeginAgain
        pipeline.later("ROLLBACK TO SAVEPOINT tallies")
        judged = rejudged
    rows.store(pipeline, judged.after, table_rows, literals)
    return judged.outcomes


def _judge(calls: Sequence[Call], table_rows: Stored, others: Mapping[Key, Others]) -> Judged:
    """Apply the calls one after the other, in memory. A call is refused if it brings a total of `others` beyond the
    limit."""
    judged = Judged()
    after = judged.after
    for call in calls:
        changes: dict[Key, int] = {}
        notable: set[Key] = set()
        try:
            (steps, positions), result = call.effect(table_rows, after)
            for counter, (_, value) in steps.items():
                _, before = after.counters.get(counter) or table_rows.counters.get(counter, EMPTY)
                key = counter[:2]
                changes[key] = changes.get(key, 0) + value - before
                if limits.is_notable(before, value):
                    notable.add(key)
            judged.notable |= notable
            for key in sorted(notable & others.keys()):
                others[key].check(key, changes[key], steps, after.counters, call)
        except errors.CoreError as error:
            judged.outcomes.append(error)
            continue
        after.counters.update(steps)
        after.positions.update(positions)
        for key in judged.notable & changes.keys():
            judged.moved[key] = judged.moved.get(key, 0) + abs(changes[key])
        judged.outcomes.append(result)
    return judged
