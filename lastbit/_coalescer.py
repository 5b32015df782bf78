"""Selects the ids of an acker's next call, without threads, tasks or network.

Waiting ids are grouped by kind: all acks in one call, failures and skips in one call per reason. What could go wrong:
an ack and a failure of the same item must reach the service in the order in which they were made. So the ids wait in
*rounds*. In a round, an item has only one kind, so the calls may go in any order. An id that would break this opens the
next round, and a round starts only when the previous one is empty. Such ids are rare; without them there is one round.

`put` may be interrupted anywhere by an exception of a signal handler. So rounds and kinds are inserted with their first
id, as `take` expects, and never before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Literal, NamedTuple, TypeVar

from lastbit._masks import MOST_ITEMS
from lastbit.errors import ItemRejected
from lastbit.ids import ItemId
from lastbit.models import AckResult, Completed

F = TypeVar("F")

Verb = Literal["acks", "failures", "skips"]


class Kind(NamedTuple):
    """How an item is resolved."""

    verb: Verb
    reason: str | None


@dataclass(slots=True)
class Waiting(Generic[F]):
    """The futures that wait for each item id. An id that was passed twice is sent once, and both futures get the
    result.

    Few ids have several futures. A list for each id would be one more object for the garbage collector, which costs
    more than everything else here.
    """

    first: dict[str, F] = field(default_factory=dict)
    others: dict[str, list[F]] = field(default_factory=dict)

    def add(self, item: str, future: F) -> None:
        if item in self.first:
            self.others.setdefault(item, []).append(future)
        else:
            self.first[item] = future

    def split(self, count: int) -> Waiting[F]:
        """Remove the first `count` ids, and return them."""
        items = list(islice(self.first, count))
        first = {item: self.first.pop(item) for item in items}
        return Waiting(first, {item: self.others.pop(item) for item in items if item in self.others})

    def __len__(self) -> int:
        """The number of ids."""
        return len(self.first)

    def futures(self) -> Iterator[tuple[str, F]]:
        """Each future with its item."""
        yield from self.first.items()
        for item, futures in self.others.items():
            for future in futures:
                yield item, future


@dataclass(slots=True)
class Call(Generic[F]):
    """The ids of one request, with the futures that wait for each."""

    kind: Kind
    waiting: Waiting[F]

    @property
    def items(self) -> list[str]:
        return list(self.waiting.first)

    @property
    def size(self) -> int:
        """Number of futures, not of ids."""
        return len(self.waiting) + sum(map(len, self.waiting.others.values()))

    def failed(self, error: BaseException) -> Iterator[tuple[list[F], BaseException]]:
        """All futures and the error, when the whole call failed."""
        yield [future for _, future in self.waiting.futures()], error

    def outcomes(
        self, result: AckResult, callback_errors: Mapping[int, BaseException]
    ) -> Iterator[tuple[list[F], Completed | BaseException | None]]:
        """All futures, together with those of the same outcome: the exception that `on_completed` raised for the item's
        batch, the rejection, the item's batch if it is complete, or None."""
        rejected = {rejection.item: rejection.reason for rejection in result.rejected if rejection.item is not None}
        completed = {completion.batch: completion for completion in result.completed}
        others: list[F] = []
        of_batches: dict[int, list[F]] = {batch: [] for batch in completed}
        for item, future in self.waiting.futures():
            if item in rejected:
                yield [future], ItemRejected(item, rejected[item])
            elif completed:
                of_batches.get(ItemId.parse(item).batch, others).append(future)
            else:
                others.append(future)
        for batch, completion in completed.items():
            yield of_batches[batch], callback_errors.get(batch, completion)
        yield others, None


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
            self._rounds.append(_Round({kind: Waiting({item: future})}, {item: kind}))
            return
        last = self._rounds[-1]
        last.items[item] = kind
        waiting = last.kinds.get(kind)
        if waiting is None:
            last.kinds[kind] = Waiting({item: future})
        else:
            waiting.add(item, future)

    def take(self) -> Call[F] | None:
        """The next call, or None if nothing waits. The kind that has waited longest is first. If it has too many ids
        for one call, it moves to the end of the queue, so that a flood of acks does not delay failures."""
        if not self._rounds:
            return None
        first = self._rounds[0]
        kind = next(iter(first.kinds))
        waiting = first.kinds.pop(kind)
        if len(waiting) > self._most:
            selected = waiting.split(self._most)
            first.kinds[kind] = waiting
        else:
            selected = waiting
        if first.kinds:
            for item in selected.first:
                del first.items[item]
        else:
            self._rounds.popleft()
        return Call(kind, selected)
