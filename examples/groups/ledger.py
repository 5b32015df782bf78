"""What the workers said, added up: who has what, what moved, and what the arithmetic of equal shares asks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any


def equal_shares(partitions: int, workers: int) -> list[int]:
    """Partitions of each worker at rest, the largest first: none has two more than another."""
    share, larger = divmod(partitions, workers)
    return [share + (place < larger) for place in range(workers)]


def most_moves_of_a_join(partitions: int, workers: int) -> int:
    """When one joins `workers` others: what it is to have, and nothing between the others."""
    return -(-partitions // (workers + 1))


def ranges(numbers: list[int]) -> str:
    """`0-3, 7`."""
    pairs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in pairs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True, slots=True)
class Move:
    partition: int
    giver: str | None
    """None: nobody had it."""
    taker: str


@dataclass
class Step:
    """From one rest to the next: what happened, what moved, in how many seconds."""

    what: str
    most_moves: int
    most_seconds: float
    givers: set[str] | None = None
    """Who alone may give; None: anybody may."""
    moves: list[Move] = field(default_factory=list)
    seconds: float = 0.0
    held: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Who gave what to whom."""
        head = f"{self.what}: {len(self.moves)} partitions move (at most {self.most_moves})"
        lines = [f"[bold]{head}[/] in {self.seconds:.2f} s (at most {self.most_seconds:g} s)"]
        pairs = sorted({(move.giver or "", move.taker) for move in self.moves})
        for giver, taker in pairs:
            moved = [move.partition for move in self.moves if (move.giver or "", move.taker) == (giver, taker)]
            lines.append(f"    {giver or 'nobody'} → {taker}: {ranges(moved)}")
        return [*lines, f"    now {', '.join(f'{name} {count}' for name, count in sorted(self.held.items()))}"]

    def faults(self) -> list[str]:
        """What does not hold of it, in words."""
        strangers = sorted({str(move.giver) for move in self.moves if self.givers and move.giver not in self.givers})
        facts = [
            (len(self.moves) <= self.most_moves, f"{len(self.moves)} partitions moved, not at most {self.most_moves}"),
            (self.seconds <= self.most_seconds, f"it took {self.seconds:.2f} s, not at most {self.most_seconds:g} s"),
            (max(self.held.values()) - min(self.held.values()) <= 1, f"the shares are not equal: {self.held}"),
            (not strangers, f"{', '.join(strangers)} had no reason to give"),
        ]
        return [f"{self.what}: {fault}" for holds, fault in facts if not holds]


@dataclass
class Tenure:
    """One worker's time with a partition, under one epoch. Times are the machine's monotonic clock."""

    worker: str
    partition: int
    epoch: int
    found: int
    """The floor that it began at."""
    left: int
    began: float
    ended: float | None = None
    lost: bool = False


@dataclass
class Ledger:
    """All tenures, as the workers told of them."""

    partitions: int
    tenures: dict[tuple[int, int], Tenure] = field(default_factory=dict)
    """By partition and epoch."""
    dead: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    _told: int = 0

    def assigned(self, worker: str, said: dict[str, Any]) -> None:
        key = (said["assigned"], said["epoch"])
        if key in self.tenures:
            self.errors.append(f"{worker} and {self.tenures[key].worker} had partition {key[0]} at epoch {key[1]}")
        self.tenures[key] = Tenure(worker, *key, said["found"], said["left"], said["at"])

    def released(self, said: dict[str, Any]) -> None:
        tenure = self.tenures[said["released"], said["epoch"]]
        tenure.ended, tenure.lost = said["at"], said["lost"]

    def held(self, workers: list[str]) -> dict[str, int]:
        """By worker, how many partitions it works on."""
        return {name: sum(each.worker == name for each in self._current()) for name in workers}

    def at_rest(self, workers: list[str]) -> bool:
        """Each partition has one of these workers, and their shares are equal."""
        current = self._current()
        if len(current) != self.partitions or len({each.partition for each in current}) != self.partitions:
            return False
        return sorted(self.held(workers).values(), reverse=True) == equal_shares(self.partitions, len(workers))

    def take_moves(self) -> list[Move]:
        """Those since it was last asked."""
        fresh = list(self.tenures.values())[self._told :]
        self._told += len(fresh)
        moves = []
        for tenure in fresh:
            before = self._before(tenure)
            moves.append(Move(tenure.partition, before.worker if before else None, tenure.worker))
        return moves

    def latest(self) -> dict[int, int]:
        """By partition, its last epoch."""
        return dict(sorted(self.tenures))

    def faults(self) -> list[str]:
        """What does not hold of all of them, in words."""
        found = list(self.errors)
        for each in self.tenures.values():
            before, name = self._before(each), f"partition {each.partition} came to {each.worker}"
            if each.lost:
                found.append(f"{each.worker} lost partition {each.partition}")
            if each.found != (before.left if before else -1):
                found.append(f"{name} at floor {each.found}, not where {before.worker if before else 'nobody'} left it")
            if before and before.worker not in self.dead and (before.ended is None or before.ended > each.began):
                found.append(f"{name} before {before.worker} had given it back")
        return found

    def _current(self) -> list[Tenure]:
        return [each for each in self.tenures.values() if each.ended is None and each.worker not in self.dead]

    def _before(self, tenure: Tenure) -> Tenure | None:
        earlier = [epoch for partition, epoch in self.tenures if partition == tenure.partition and epoch < tenure.epoch]
        return self.tenures[tenure.partition, max(earlier)] if earlier else None
