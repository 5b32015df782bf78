"""Calls that add to tallies, in the transaction that they share; see the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core import errors
from core.commits.kind import Kind
from core.commits.operation import Done, Operation
from core.consumer_groups.positions import Fence
from core.storage import faults
from core.storage.statements import Pipeline
from core.tallies.entries import Places, advance, by_counter
from core.tallies.limits import Others, is_notable, read_others
from core.tallies.model import EMPTY, Applied, Counter, Entry, Judged, Key, Outcome, Row
from core.tallies.rows import literals_of, lock, store


@dataclass(slots=True, eq=False, kw_only=True)
class Apply(Operation):
    """Add entries to a tally, all or none; with a `fence`, only if it holds. Its result is an `Applied`. Errors:
    `InvalidRequest`, `OutOfOrder`, `StaleEpoch`, `ConsumerGroupNotFound`."""

    tally: str
    entries: Sequence[Entry]
    fence: Fence | None = None


class Additions(Kind):
    """Entries for tallies."""

    handles = (Apply,)
    locks = ("tallies",)

    def fences(self) -> list[Fence]:
        return [operation.fence for operation in self.operations if operation.fence is not None]

    def judge(self, refused: Mapping[Fence, errors.CoreError]) -> None:
        self.refuse(refused)
        operations = self.remaining()
        results = write(self.pipeline, [(operation.tally, operation.entries) for operation in operations])
        for operation, result in zip(operations, results, strict=True):
            self.outcomes[operation] = Done(error=result) if isinstance(result, errors.CoreError) else Done(result)


def write(pipeline: Pipeline, calls: Sequence[tuple[str, Sequence[Entry]]]) -> list[Outcome]:
    """Add the entries above their guards, in the order of the calls (a tally and its entries). The last statements wait
    in the pipeline.

    A call that can't be applied changes nothing. Its outcome is the reason: `errors.InvalidRequest` (an invalid key or
    topic, a sum beyond the limit, one message with two deltas for one key) or `errors.OutOfOrder`. Raises
    `faults.BeginAgain` if the transaction must be run again.
    """
    requests = [_Request(entries, by_counter(tally, entries)) for tally, entries in calls]
    valid = [places for _, places in requests if not isinstance(places, errors.CoreError)]
    literals = literals_of(pipeline.tx, sorted(set[Counter]().union(*valid)))
    rows = lock(pipeline, literals)
    others: dict[Key, Others] = {}
    judged = _judge(requests, rows, others)
    while judged.notable:
        pipeline.later("SAVEPOINT tallies")
        store(pipeline, judged.after, rows, literals)
        earlier, others = others, read_others(pipeline, judged, literals, rows, others)
        rejudged = _judge(requests, rows, others) if others else judged
        if rejudged.refused == judged.refused:
            return judged.outcomes
        if others.keys() == earlier.keys():
            raise faults.BeginAgain
        pipeline.later("ROLLBACK TO SAVEPOINT tallies")
        judged = rejudged
    store(pipeline, judged.after, rows, literals)
    return judged.outcomes


class _Request(NamedTuple):
    """A call, and where its entries belong; or why it is invalid."""

    entries: Sequence[Entry]
    places: Places | errors.CoreError


def _judge(requests: Sequence[_Request], rows: Mapping[Counter, Row], others: Mapping[Key, Others]) -> Judged:
    """Apply the calls one after the other, in memory. A call is refused if it brings a total of `others` beyond the
    limit."""
    judged = Judged()
    after = judged.after
    for entries, places in requests:
        if isinstance(places, errors.CoreError):
            judged.outcomes.append(places)
            continue
        count = 0
        steps: dict[Counter, Row] = {}
        changes: dict[Key, int] = {}
        notable: set[Key] = set()
        try:
            for counter, counter_places in places.items():
                before = after.get(counter) or rows.get(counter, EMPTY)
                row, added = advance(before, counter_places, entries)
                if not added:
                    continue
                count += added
                steps[counter] = row
                key = counter[:2]
                changes[key] = changes.get(key, 0) + row[1] - before[1]
                if is_notable(before[1], row[1]):
                    notable.add(key)
            judged.notable |= notable
            for key in sorted(notable & others.keys()):
                others[key].check(key, changes[key], steps, after, entries)
        except errors.CoreError as error:
            judged.outcomes.append(error)
            continue
        after |= steps
        for key in judged.notable & changes.keys():
            judged.moved[key] = judged.moved.get(key, 0) + abs(changes[key])
        judged.outcomes.append(Applied(count, len(entries) - count))
    return judged
