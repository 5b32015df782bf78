"""The batches that a run will open. A plan depends only on the seed and its number, so another producer can start it
again."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Fate(StrEnum):
    COMPLETE = "complete"
    WITHHELD = "withheld"
    """Some of its items are never published."""
    CANCELLED = "cancelled"
    """Unless its consumers completed it first."""


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

    @property
    def key(self) -> str:
        return f"plan-{self.number}"

    @property
    def items(self) -> int:
        return self.first + sum(self.pieces)

    def do(self, number: int) -> Do | None:
        """The action for the item of this number; None: it is withheld."""
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
        return cls(**{**data, "pieces": tuple(data["pieces"]), "fate": Fate(data["fate"])})


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
            fate=dice.choices([*Fate], weights=[10, 1, 1])[0],
            failing=dice.choice([0, 0.1, 0.3]),
            redriven=dice.random() < 0.5,
        )


def racing() -> Iterator[Plan]:
    """Batches whose last group is partly issued, and grows by at least a byte of its bitfield at a time. Endless."""
    for number in itertools.count(2 * GROWING + 1):
        yield Plan(
            number, GROWING_SIZE, 2 * GROWING_SIZE + 6, (12, 12, 12, 12), Fate.COMPLETE, failing=0, redriven=False
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
            fate=dice.choices([*Fate], weights=[8, 1, 1])[0],
            failing=dice.choice([0, 0, 0, 0.05, 0.3]),
            redriven=dice.random() < 0.5,
        )
