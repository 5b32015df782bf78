"""Collects the workers' reports, and compares owners and moves with the arithmetic of equal shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any


def equal_shares(partitions: int, workers: int) -> list[int]:
    """Each worker's number of partitions when assignments are settled, largest first. The numbers differ by at most
    one."""
    share, larger = divmod(partitions, workers)
    return [share + (place < larger) for place in range(workers)]


def most_moves_of_a_join(partitions: int, workers: int) -> int:
    """The most moves when a worker joins `workers` others: its own share, and no moves between the others."""
    return -(-partitions // (workers + 1))


def ranges(numbers: list[int]) -> str:
    """The numbers as ranges: `0-3, 7`."""
    pairs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in pairs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True, slots=True)
class Move:
    partition: int
    giver: str | None
    """None: the partition had no owner."""
    taker: str


@dataclass
class Step:
    """The change from one settled state to the next: the event, the moves and the time."""

    what: str
    most_moves: int
    most_seconds: float
    givers: set[str] | None = None
    """The only workers that may give partitions; None: any may."""
    moves: list[Move] = field(default_factory=list)
    seconds: float = 0.0
    held: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The step as text: the moves of partitions between workers."""
        head = f"{self.what}: {len(self.moves)} partitions move (at most {self.most_moves})"
        lines = [f"[bold]{head}[/] in {self.seconds:.2f} s (at most {self.most_seconds:g} s)"]
        pairs = sorted({(move.giver or "", move.taker) for move in self.moves})
        for giver, taker in pairs:
            partitions = [move.partition for move in self.moves if (move.giver or "", move.taker) == (giver, taker)]
            lines.append(f"    {giver or 'nobody'} → {taker}: {ranges(partitions)}")
        return [*lines, f"    now {', '.join(f'{name} {count}' for name, count in sorted(self.held.items()))}"]

    def faults(self) -> list[str]:
        """A sentence for each failed check of this step."""
        wrong_givers = sorted({str(move.giver) for move in self.moves if self.givers and move.giver not in self.givers})
        facts = [
            (len(self.moves) <= self.most_moves, f"{len(self.moves)} partitions moved, not at most {self.most_moves}"),
            (self.seconds <= self.most_seconds, f"it took {self.seconds:.2f} s, not at most {self.most_seconds:g} s"),
            (max(self.held.values()) - min(self.held.values()) <= 1, f"the shares are not equal: {self.held}"),
            (not wrong_givers, f"{', '.join(wrong_givers)} had no reason to give partitions"),
        ]
        return [f"{self.what}: {fault}" for holds, fault in facts if not holds]


@dataclass
class Tenure:
    """One worker's ownership of a partition under one epoch. Times are those of the machine's monotonic clock."""

    worker: str
    partition: int
    epoch: int
    found: int
    """The floor at its start."""
    left: int
    began: float
    ended: float | None = None
    lost: bool = False


@dataclass
class Ledger:
    """All tenures, as reported by the workers."""

    partitions: int
    tenures: dict[tuple[int, int], Tenure] = field(default_factory=dict)
    """By partition and epoch."""
    dead: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    _told: int = 0

    def assigned(self, worker: str, facts: dict[str, Any]) -> None:
        key = (facts["assigned"], facts["epoch"])
        if key in self.tenures:
            self.errors.append(f"{worker} and {self.tenures[key].worker} had partition {key[0]} at epoch {key[1]}")
        self.tenures[key] = Tenure(worker, *key, facts["found"], facts["left"], facts["at"])

    def released(self, facts: dict[str, Any]) -> None:
        tenure = self.tenures[facts["released"], facts["epoch"]]
        tenure.ended, tenure.lost = facts["at"], facts["lost"]

    def held(self, workers: list[str]) -> dict[str, int]:
        """Worker → its number of partitions."""
        return {name: sum(tenure.worker == name for tenure in self._current()) for name in workers}

    def at_rest(self, workers: list[str]) -> bool:
        """Whether each partition has one of these workers, and their shares are equal."""
        current = self._current()
        if len(current) != self.partitions or len({tenure.partition for tenure in current}) != self.partitions:
            return False
        return sorted(self.held(workers).values(), reverse=True) == equal_shares(self.partitions, len(workers))

    def take_moves(self) -> list[Move]:
        """The moves since the last call."""
        new_tenures = list(self.tenures.values())[self._told :]
        self._told += len(new_tenures)
        moves = []
        for tenure in new_tenures:
            before = self._before(tenure)
            moves.append(Move(tenure.partition, before.worker if before else None, tenure.worker))
        return moves

    def latest(self) -> dict[int, int]:
        """Partition → its last epoch."""
        return dict(sorted(self.tenures))

    def faults(self) -> list[str]:
        """A sentence for each failed check of all tenures."""
        faults = list(self.errors)
        for tenure in self.tenures.values():
            before, name = self._before(tenure), f"partition {tenure.partition} came to {tenure.worker}"
            if tenure.lost:
                faults.append(f"{tenure.worker} lost partition {tenure.partition}")
            if tenure.found != (before.left if before else -1):
                faults.append(
                    f"{name} at floor {tenure.found}, not where {before.worker if before else 'nobody'} left it"
                )
            if before and before.worker not in self.dead and (before.ended is None or before.ended > tenure.began):
                faults.append(f"{name} before {before.worker} had given it back")
        return faults

    def _current(self) -> list[Tenure]:
        return [tenure for tenure in self.tenures.values() if tenure.ended is None and tenure.worker not in self.dead]

    def _before(self, tenure: Tenure) -> Tenure | None:
        earlier = [epoch for partition, epoch in self.tenures if partition == tenure.partition and epoch < tenure.epoch]
        return self.tenures[tenure.partition, max(earlier)] if earlier else None
