"""The batches that a run will open. A plan depends only on the seed and its number, so another producer can start it
again."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any


class Fate(StrEnum):
    COMPLETE = "complete"
    WITHHELD = "withheld"
    """Some of its items are never published."""
    CANCELLED = "cancelled"
    """Unless its consumers completed it first."""
    EXCEEDED = "exceeded"
    """Its failures cancel it."""


class Do(StrEnum):
    """How a consumer resolves an item."""

    ACK = "ack"
    FAIL = "fail"
    REDRIVE = "redrive"
    """Fail it, then publish it again, to be acked."""


@dataclass(frozen=True)
class Plan:
    number: int
    group_size: int
    first: int
    """Items that the open itself issues."""
    pieces: tuple[int, ...]
    """Counts of the extends."""
    fate: Fate
    failing: float
    """Share of items that fail."""
    redriven: bool
    tolerated: int = 0
    """Failures with which it isn't cancelled yet; for `EXCEEDED`."""
    children: tuple[Plan, ...] = ()
    """Nested batches, one for each item."""

    @property
    def key(self) -> str:
        return f"plan-{self.number}"

    @property
    def items(self) -> int:
        return self.first + sum(self.pieces)

    @property
    def whole(self) -> Iterator[Plan]:
        """The plan, and those of all batches nested in it."""
        yield self
        for child in self.children:
            yield from child.whole

    def do(self, number: int) -> Do | None:
        """The action for the item of this number; None: it is withheld."""
        if self.fate is Fate.EXCEEDED:
            return Do.FAIL if number < self.items - 1 else None
        dice = zlib.crc32(f"{self.number}:{number}".encode()) % 1000 / 1000
        if self.fate is Fate.WITHHELD and (number == self.items - 1 or dice > 0.9):
            return None
        if dice >= self.failing:
            return Do.ACK
        return Do.REDRIVE if self.redriven else Do.FAIL

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        children = tuple(map(cls.from_json, data["children"]))
        return cls(**{**data, "pieces": tuple(data["pieces"]), "fate": Fate(data["fate"]), "children": children})


FATES = (Fate.COMPLETE, Fate.WITHHELD, Fate.CANCELLED)
"""Of batches that producers and consumers share."""
GROWING = 10**6
"""Plans with higher numbers grow in small steps."""
GROWING_SIZE = 64
"""Their group size."""


def growing(seed: int) -> Iterator[Plan]:
    """Batches that grow in many small steps: their last group is partly issued most of the time. Endless."""
    for number in itertools.count(GROWING + 1):
        dice = random.Random(f"{seed}-{number}")
        yield Plan(
            number,
            group_size=GROWING_SIZE,
            first=dice.randint(0, 70),
            pieces=tuple(dice.choice([1, 2, 5, 9, 20]) for _ in range(dice.randint(60, 120))),
            fate=dice.choices(FATES, weights=[10, 1, 1])[0],
            failing=dice.choice([0, 0.1, 0.3]),
            redriven=dice.random() < 0.5,
        )


def shared(seed: int) -> Iterator[Plan]:
    """Batches as those of both lanes, by turns. Endless."""
    kinds = itertools.cycle([drawn(seed), growing(seed)])
    for number, plans in enumerate(kinds, 4 * GROWING + 1):
        yield replace(next(plans), number=number)


def racing() -> Iterator[Plan]:
    """Batches whose last group is partly issued, and grows by at least a byte of its bitfield at a time. Endless."""
    for number in itertools.count(2 * GROWING + 1):
        yield Plan(
            number, GROWING_SIZE, 2 * GROWING_SIZE + 6, (12, 12, 12, 12), Fate.COMPLETE, failing=0, redriven=False
        )


def nested(seed: int) -> Iterator[Plan]:
    """Batches of three levels, of which some of the lowest are cancelled by their failures. Endless."""
    for number in itertools.count(3 * GROWING + 1):
        yield _nested(number, 2, random.Random(f"{seed}-{number}"))


def _nested(number: int, levels: int, dice: random.Random) -> Plan:
    """A plan with this many levels below it."""
    children = range(dice.randint(1, 3) if levels else 0)
    tolerated = dice.choice([0, 1, 3])
    fate = Fate.COMPLETE if levels or dice.random() < 0.6 else Fate.EXCEEDED
    items = tolerated + 3 if fate is Fate.EXCEEDED else dice.randint(1, 4)
    return Plan(
        number,
        GROWING_SIZE,
        first=len(children) or items,
        pieces=(),
        fate=fate,
        failing=0 if levels else dice.choice([0, 0, 0.3]),
        redriven=False,
        tolerated=tolerated,
        children=tuple(_nested(10 * number + place, levels - 1, dice) for place in children),
    )


def drawn(seed: int) -> Iterator[Plan]:
    """An endless sequence of plans."""
    for number in itertools.count(1):
        dice = random.Random(f"{seed}-{number}")
        sizes = [(0, 3), (4, 30), (30, 150), (150, 700)]
        low, high = dice.choices(sizes, weights=[2, 5, 10, 3])[0]
        pieces = [max(0, dice.randint(low, high) // count) for count in [dice.randint(1, 4)] for _ in range(count)]
        yield Plan(
            number,
            group_size=dice.choice([64, 64, 128, 8192]),
            first=pieces.pop() if dice.random() < 0.3 else 0,
            pieces=tuple(pieces),
            fate=dice.choices(FATES, weights=[8, 1, 1])[0],
            failing=dice.choice([0, 0, 0, 0.05, 0.3]),
            redriven=dice.random() < 0.5,
        )
