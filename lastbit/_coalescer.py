"""Selects the ids of an acker's next call, without threads, tasks or network.

Waiting ids are grouped by kind: all acks in one call, failures in one call per reason. What could go wrong: an ack and
a failure of the same item must reach the service in the order in which they were made. So the ids wait in *rounds*. In
a round, an item has only one kind, so the calls may go in any order. An id that would break this opens the next round,
and a round starts only when the previous one is empty. Such ids are rare; without them there is one round.
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
    """How an item is resolved."""

    verb: Verb
    reason: str | None


Waiting = dict[str, list[F]]
"""Item id → the futures that wait for it. An id that was passed twice is sent once, and both futures get the result."""


@dataclass(slots=True)
class Call(Generic[F]):
    """The ids of one request, with the futures that wait for each."""

    kind: Kind
    waiting: Waiting[F]

    @property
    def items(self) -> list[str]:
        return list(self.waiting)

    @property
    def size(self) -> int:
        """Number of futures, not of ids."""
        return sum(map(len, self.waiting.values()))

    def failed(self, error: BaseException) -> Iterator[tuple[F, BaseException]]:
        """Pairs of a future and the error, when the whole call failed."""
        for futures in self.waiting.values():
            for future in futures:
                yield future, error

    def outcomes(
        self, result: AckResult, callback_errors: Mapping[int, BaseException]
    ) -> Iterator[tuple[F, Completed | BaseException | None]]:
        """Each future with its outcome: the exception that `on_completed` raised for the item's batch, the rejection,
        the item's batch if it is complete, or None."""
        rejected = {rejection.item: rejection.reason for rejection in result.rejected if rejection.item is not None}
        completed = {completion.batch: completion for completion in result.completed}
        for item, futures in self.waiting.items():
            outcome: Completed | BaseException | None = None
            if item in rejected:
                outcome = ItemRejected(item, rejected[item])
            elif completed:
                batch = ItemId.parse(item).batch
                # Not `or`: an exception may be false.
                outcome = callback_errors[batch] if batch in callback_errors else completed.get(batch)
            for future in futures:
                yield future, outcome


@dataclass(slots=True)
class _Round(Generic[F]):
    kinds: dict[Kind, Waiting[F]] = field(default_factory=dict)
    items: dict[str, Kind] = field(default_factory=dict)


class Coalescer(Generic[F]):
    """Collects single ids into calls of at most `most` ids."""

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
        """The next call, or None if nothing waits. The kind that has waited longest is first. If it has too many ids
        for one call, it moves to the end of the queue, so that a flood of acks does not delay failures."""
        if not self._rounds:
            return None
        first = self._rounds[0]
        kind = next(iter(first.kinds))
        waiting = first.kinds.pop(kind)
        if len(waiting) > self._most:
            selected = {item: waiting.pop(item) for item in list(waiting)[: self._most]}
            first.kinds[kind] = waiting
        else:
            selected = waiting
        for item in selected:
            del first.items[item]
        if not first.kinds:
            self._rounds.popleft()
        return Call(kind, selected)
