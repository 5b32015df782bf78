"""The combinations of operations, and what each of their operations touches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.explorer.accesses import Access, clashes
from tests.explorer.operations import OPERATIONS
from tests.explorer.scene import Scene

if TYPE_CHECKING:
    from tests.explorer.arena import Arena


@dataclass(frozen=True)
class Combination:
    """Operations, one a session, in a scene."""

    scene: Scene
    operations: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.scene}:{'+'.join(self.operations)}"

    @property
    def ends_beside_a_caller(self) -> bool:
        """Whether a failure ends the batch while another caller's transaction takes it for live. That one keeps its
        item, though the end didn't see it (see `core.enlisted.acks`), and no order of the transactions has that."""
        redrives = {"enlisted-ack", "enlisted-skip"}
        return (
            self.scene.name == "ending" and "enlisted-fail" in self.operations and bool(redrives & {*self.operations})
        )


def parse(text: str) -> tuple[Combination, list[int]]:
    """A schedule as it is printed: SCENE/VARIANT:OPERATION+OPERATION:STEPS."""
    place, names, *steps = text.split(":")
    operations = tuple(names.split("+"))
    if unknown_names := set(operations) - OPERATIONS.keys():
        raise ValueError(f"no such operation: {', '.join(sorted(unknown_names))}")
    return Combination(Scene(*place.split("/")), operations), [int(step) for step in "".join(steps)]


class Profile:
    """The accesses of one operation of a combination: those that the search assumes, and those observed so far."""

    def __init__(self, accesses: Collection[Access] = (), parts: int = 0) -> None:
        self.accesses = frozenset(accesses)
        self.parts = parts
        """Its transactions; statements after the last one count as another."""
        self.observed: set[Access] = set()
        self.observed_parts = 0
        self._later: dict[str, list[Access]] = {}
        self._answers: dict[Access, bool] = {}

    def beside(self, profiles: Iterable[Profile]) -> None:
        """Set the profiles of the other operations in the combination."""
        self._answers = {}
        self._later = {}
        for access in frozenset().union(*(other.accesses for other in profiles)):
            self._later.setdefault(access.table, []).append(access)

    def concerns(self, accesses: Collection[Access]) -> bool:
        """Whether one of these accesses doesn't commute with an access of the other operations."""
        return any(self._concerns(access) for access in accesses)

    def _concerns(self, access: Access) -> bool:
        if access not in self._answers:
            self._answers[access] = clashes(access, self._later.get(access.table, ()))
        return self._answers[access]

    def grow(self) -> bool:
        """Assume the observed accesses too; return whether any of them is new."""
        if self.observed <= self.accesses and self.observed_parts <= self.parts:
            return False
        self.accesses |= self.observed
        self.parts = max(self.parts, self.observed_parts)
        return True


class Footprints:
    """The accesses of operations: alone, in each scene, and in the current combination."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._alone: dict[tuple[Scene, str], Profile] = {}
        self._combination: Combination | None = None
        self._profiles: list[Profile] = []

    def _of(self, scene: Scene, operation: str) -> Profile:
        key = scene, operation
        if key not in self._alone:
            self._arena.run(Combination(scene, (operation,)), lambda ready: ready[0])
            error = self._arena.sessions[0].error
            if error is not None:  # it would touch nothing, and be left out of every combination
                raise error
            session = self._arena.sessions[0]
            self._alone[key] = Profile(session.accesses, session.parts)
        return self._alone[key]

    def of(self, combination: Combination) -> list[Profile]:
        """The profiles, in the order of the operations. Observations of the previous combination are discarded."""
        if len(combination.operations) == 1:
            return [Profile()]
        if combination != self._combination:
            profiles = [self._of(combination.scene, operation) for operation in combination.operations]
            self._combination = combination
            self._profiles = [Profile(profile.accesses, profile.parts) for profile in profiles]
            self._acquaint()
        return self._profiles

    def grow(self, combination: Combination) -> bool:
        """Assume the accesses observed in the combination too; return whether any of them is new."""
        growths = [profile.grow() for profile in self.of(combination)]
        self._acquaint()
        return any(growths)

    def _acquaint(self) -> None:
        for number, profile in enumerate(self._profiles):
            profile.beside(self._profiles[:number] + self._profiles[number + 1 :])

    def accesses(self, scene: Scene, operation: str) -> frozenset[Access]:
        """What the operation touches alone in the scene."""
        return self._of(scene, operation).accesses

    def promise(self, combination: Combination) -> float:
        """A rank of combinations: the share of accesses that don't commute with the other operations. Races need them.
        The more transactions, the longer the search; the square root keeps those of several transactions from being the
        last."""
        alone = [self._of(combination.scene, operation) for operation in combination.operations]
        profiles = [Profile(profile.accesses) for profile in alone]
        for number, profile in enumerate(profiles):
            profile.beside(profiles[:number] + profiles[number + 1 :])
        concerned = sum(profile.concerns([access]) for profile in profiles for access in profile.accesses)
        total = sum(len(profile.accesses) for profile in profiles)
        return concerned / total / math.sqrt(sum(profile.parts for profile in alone))


def combinations(
    arena: Arena, size: int, places: Sequence[Scene], *, in_one: bool = False, excluded_names: Collection[str] = ()
) -> Iterator[Combination]:
    """All combinations of `size` operations, including an operation with itself, in the first scene, then in the next:
    few races need one certain scene. A combination that touches no item group is left out in scenes where its
    operations touch the same rows as in an earlier one. With `in_one`, each combination in one scene only, and the next
    combination in the next scene. Operations in `excluded_names` are left out, and what `ends_beside_a_caller`."""
    footprints = arena.footprints
    names = [name for name in OPERATIONS if name not in excluded_names]
    touch_groups = {
        name
        for name in names
        if any(access.table == "item_groups" for place in places for access in footprints.accesses(place, name))
    }
    earlier: set[object] = set()
    for place, scene in enumerate(places):
        for number, operations in enumerate(itertools.combinations_with_replacement(names, size)):
            if in_one:
                if number % len(places) != place:
                    continue
            elif touch_groups.isdisjoint(operations):
                touched = operations, tuple(footprints.accesses(scene, name) for name in operations)
                if touched in earlier:
                    continue
                earlier.add(touched)
            combination = Combination(scene, operations)
            if not combination.ends_beside_a_caller:
                yield combination
