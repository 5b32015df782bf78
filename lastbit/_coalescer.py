"""Which ids go into an acker's next call: the part of it that knows no thread, no task and no network.

Ids that wait are gathered by what is said of them: all acks in one call, failures in one call for each reason. What
could go wrong: an ack and a failure of the same item, given in this order, must reach the service in this order. So
the ids wait in *rounds*. Within a round no item waits under two kinds, hence its calls may go in any order; an id that
would break this opens the next round, and a round begins only when the one before it is taken. Such ids are rare, and
without them there is one round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from lastbit._masks import MOST_ITEMS
from lastbit.errors import ItemRejected
from lastbit.ids import ItemId
from lastbit.models import AckResult, Completed

F = TypeVar("F")

Verb = Literal["acks", "failures"]


class Kind(NamedTuple):
    """What is said of an item."""

    verb: Verb
    reason: str | None


Waiting = dict[str, list[F]]
"""Item id to the futures that wait for it: an id given twice is sent once, and both are told."""


@dataclass(slots=True)
class Call(Generic[F]):
    """The ids of one request and who waits for each."""

    kind: Kind
    waiting: Waiting[F]

    @property
    def items(self) -> list[str]:
        return list(self.waiting)

    @property
    def size(self) -> int:
        """Futures, not ids."""
        return sum(map(len, self.waiting.values()))

    def failed(self, error: BaseException) -> Iterator[tuple[F, BaseException]]:
        """The call as a whole failed: each future with the error."""
        for futures in self.waiting.values():
            for future in futures:
                yield future, error

    def outcomes(
        self, result: AckResult, raised: Mapping[int, BaseException]
    ) -> Iterator[tuple[F, Completed | BaseException | None]]:
        """Each future with what to tell it: the error that the caller's own `on_completed` raised for the item's batch,
        the rejection, the item's batch where that is complete, or None."""
        rejected = {rejection.item: rejection.reason for rejection in result.rejected if rejection.item is not None}
        completed = {done.batch: done for done in result.completed}
        for item, futures in self.waiting.items():
            outcome: Completed | BaseException | None = None
            if item in rejected:
                outcome = ItemRejected(item, rejected[item])
            elif completed:
                batch = ItemId.parse(item).batch
                # Not `or`: an exception may be false.
                outcome = raised[batch] if batch in raised else completed.get(batch)
            for future in futures:
                yield future, outcome


@dataclass(slots=True)
class _Round(Generic[F]):
    kinds: dict[Kind, Waiting[F]] = field(default_factory=dict)
    items: dict[str, Kind] = field(default_factory=dict)


class Coalescer(Generic[F]):
    """Takes ids one at a time and gives them back as calls of at most `most` ids."""

    def __init__(self, most: int = MOST_ITEMS) -> None:
        self._most = most
        self._rounds: deque[_Round[F]] = deque()

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def put(self, item: str, kind: Kind, future: F) -> None:
        if not self._rounds or self._rounds[-1].items.get(item, kind) != kind:
            self._rounds.append(_Round())
        last = self._rounds[-1]
        last.items[item] = kind
        last.kinds.setdefault(kind, {}).setdefault(item, []).append(future)

    def take(self) -> Call[F] | None:
        """The next call, or None where nothing waits. The kind that waited longest goes first; one that has more than
        fits goes to the end, so that a flood of acks does not hold failures back."""
        if not self._rounds:
            return None
        first = self._rounds[0]
        kind = next(iter(first.kinds))
        waiting = first.kinds.pop(kind)
        if len(waiting) > self._most:
            taken = {item: waiting.pop(item) for item in list(waiting)[: self._most]}
            first.kinds[kind] = waiting
        else:
            taken = waiting
        for item in taken:
            del first.items[item]
        if not first.kinds:
            self._rounds.popleft()
        return Call(kind, taken)
