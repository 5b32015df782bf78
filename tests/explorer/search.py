"""The search: which session continues at each step, and which outcomes are right.

*Which outcomes are right.* First the operations run in every order of their whole transactions. Those outcomes are
allowed; any other schedule must have one of them. Operations of several transactions, like a deletion in chunks, may be
interleaved between these, so the unit is the transaction and not the operation.

*Enumeration.* A schedule is the sequence of sessions that take a step. The search goes depth first: it runs a schedule
to its end, and at each step notes the other sessions that could have continued instead, within the bound on
preemptions. Each of those is another schedule, which starts again from the scene.

*Reductions.* Four kinds of schedules are left out, and none of them can hide an outcome:

- Two schedules meet where every session has seen the same results and each table was committed to in the same order;
  from there on they are equal, and one of them is enough.
- A session stops only before statements whose order relative to the others' makes a difference (`accesses`). The
  accesses of an operation are found by running it alone, and then in every schedule of the combination. When a schedule
  shows more accesses than were assumed, the search of the combination starts again with them.
- A session that holds no locks is not made to wait for a row that another one holds until its last COMMIT: the other
  one would continue at once, and afterwards the session can be chosen with no more preemptions.
- Combinations in which one operation touches nothing that another one writes or locks show nothing beyond what their
  parts show.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.explorer import scene as scenes
from tests.explorer.accesses import Access, Kind, clashes
from tests.explorer.databases import Explored
from tests.explorer.operations import OPERATIONS, shown
from tests.explorer.scene import Scene
from tests.explorer.sessions import BLOCKED, DONE, PAUSED, RUNNING, Session

MOST_STEPS: Final = 2000
"""A schedule with more steps is assumed never to end."""
PATIENCE: Final = 0.005
"""Seconds until the server is asked whether a session waits for a lock."""
SUSPICION: Final = 0.0003
"""The same, if another session has locked one of its rows."""
ATTEMPTS: Final = 5
"""How many times a combination is searched before schedules that don't repeat are reported as a finding."""
RESOLUTION: Final = 10.0
"""Seconds after which sessions that wait for each other are a finding."""
SILENCE: Final = 60.0
"""Seconds after which a session that neither reports nor waits for a lock is a finding."""


@dataclass(frozen=True)
class Combination:
    """Operations, one a session, in a scene."""

    scene: Scene
    operations: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.scene}:{'+'.join(self.operations)}"


def parse(text: str) -> tuple[Combination, list[int]]:
    """A schedule as it is printed: SCENE/VARIANT:OPERATION+OPERATION:STEPS."""
    place, names, *steps = text.split(":")
    operations = tuple(names.split("+"))
    if unknown_names := set(operations) - OPERATIONS.keys():
        raise ValueError(f"no such operation: {', '.join(sorted(unknown_names))}")
    return Combination(Scene(*place.split("/")), operations), [int(step) for step in "".join(steps)]


@dataclass(frozen=True)
class Finding:
    """A schedule that violates a rule. `steps` are its statements, each with its session."""

    combination: Combination
    schedule: Sequence[int]
    problems: list[str]
    steps: list[str]

    def __str__(self) -> str:
        """The schedule to replay, what is wrong, and its steps."""
        lines = [f"{self.combination}:{''.join(map(str, self.schedule))}", *(f"  {text}" for text in self.problems)]
        return "\n".join([*lines, *(f"    {step}" for step in self.steps)])


Outcome = tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]
"""The responses, and the rows by table."""


@dataclass
class Searched:
    """The result of searching one combination."""

    schedules: int = 0
    """Schedules that were started; some of them met an earlier one and were abandoned there."""
    completed: int = 0
    outcomes: int = 0
    """The allowed outcomes: those of whole transactions in every order."""
    reached: set[Outcome] = field(default_factory=set)
    """The outcomes of the interleaved schedules."""
    findings: list[Finding] = field(default_factory=list)


Choose = Callable[["Arena", list[int], int | None], int | None]
"""Chooses one of the ready sessions, given the one that ran last; None: abandon the schedule."""


class Arena:
    """Sessions on one database; it runs one schedule after the other."""

    def __init__(self, database: Explored, sessions: int = 3, *, every_stop: bool = False) -> None:
        """`every_stop`: sessions stop before each statement, even where it makes no difference."""
        self.database = database
        self._every_stop = every_stop
        self._reports: queue.SimpleQueue[Session] = queue.SimpleQueue()
        self.all = [Session(number, database.url, self._reports) for number in range(sessions)]
        for session in self.all:
            session.committed = self._committed
        self.footprints = Footprints(self)
        self.sessions: list[Session] = []
        self.commits: dict[str, list[int]] = {}
        """By table, the sessions that have committed to it, in order."""
        self.blocked: list[int] = []
        """The sessions that wait for a lock, in the order of their requests."""
        self.schedule: list[int] = []
        self.steps: list[str] = []
        self.taken: list[int] = []
        """The session of each statement, including statements before which no session stopped."""
        self._laid: Scene | None = None
        """The scene in the database, except for the tables that were written since."""
        self._dirty: set[str] = set()
        self._profiles: list[Profile] = []
        self.combination: Combination | None = None

    def close(self) -> None:
        for session in self.all:
            session.close()
        self.database.close()

    def run(self, combination: Combination, choose: Choose) -> bool:
        """Run one schedule from the scene; return whether it ran to its end."""
        self._profiles = profiles = self.footprints.of(combination)
        self.combination = combination
        self._lay(combination.scene)
        self.sessions = self.all[: len(combination.operations)]
        self.commits, self.blocked, self.schedule, self.steps, self.taken = {}, [], [], [], []
        for number, session in enumerate(self.sessions):
            session.reset()
            session.stops_everywhere = self._every_stop
            session.concerns = profiles[number].concerns
            session.taken = self.taken
            session.committing = self._note_commit
            if combination.scene.warm:
                bitfields = session.service.acks._bitfields
                bitfields.put(scenes.warm(combination.scene), bitfields.era)
                bitfields.journal([2] if combination.scene.journaled else [])
        for session, name in zip(self.sessions, combination.operations, strict=True):
            session.start(name, OPERATIONS[name])
            self._settle(session)
        last: int | None = None
        while (ready := self.ready()) or self._is_released_late():
            if not ready:
                continue
            try:
                number = choose(self, ready, last)
            except Diverged:
                self._abandon()
                raise
            if number is None or len(self.schedule) >= MOST_STEPS:
                self._observe()
                self._abandon()
                return False
            self._step(number)
            last = number
        self._observe()
        if any(session.status != DONE for session in self.sessions):
            waiting = [str(session.number) for session in self.sessions if session.status != DONE]
            self._abandon()
            raise Stuck(f"sessions {', '.join(waiting)} wait for each other, and the database reports no deadlock")
        return True

    def _is_released_late(self) -> bool:
        """Whether the server releases one of the sessions that seemed to wait for each other. It shows the last one as
        waiting for a moment before it resolves the deadlock, and on a busy machine that moment is long."""
        if all(session.status == DONE for session in self.sessions):
            return False
        try:
            session = self._reports.get(timeout=RESOLUTION)
        except queue.Empty:
            return False
        if session.number in self.blocked:
            self.blocked.remove(session.number)
        self._settle(session)
        return True

    def ready(self) -> list[int]:
        """The sessions that can take a step."""
        return [
            session.number
            for session in self.sessions
            if session.status == PAUSED
            and self.database.may_run(session, [other for other in self.sessions if other is not session])
        ]

    def _lay(self, scene: Scene) -> None:
        """Put the database in the scene's state."""
        tables = None if scene != self._laid else self._dirty
        if tables != set():
            self.database.execute([*scenes.empty(tables), *scenes.lay(scene, tables)])
        self._laid, self._dirty = scene, set()
        self.database.freeze()

    def will_wait(self, number: int) -> bool:
        """Whether the session, which holds no lock, could only wait for a row that another session holds until its last
        COMMIT."""
        session = self.sessions[number]
        if self._every_stop or session.held or session.due is None or not session.due.exclusive or session.written:
            return False
        first = session.due.rows[0]
        return any(
            first in other.held and other.parts >= self._profiles[other.number].parts
            for other in self.sessions
            if other is not session
        )

    def _step(self, number: int) -> None:
        session = self.sessions[number]
        self.schedule.append(number)
        self.steps.append(f"{number} {' '.join(session.next.split())[:200]}")
        session.releases = False
        session.go()
        self._settle(session)

    def _observe(self) -> None:
        for profile, session in zip(self._profiles, self.sessions, strict=True):
            profile.observed |= session.accesses
            profile.observed_parts = max(profile.observed_parts, session.parts)

    def _note_commit(self, number: int, tables: Collection[str]) -> None:
        """Called by a session before its COMMIT."""
        self._dirty.update(tables)
        for table in tables:
            self.commits.setdefault(table, []).append(number)

    def _settle(self, running_session: Session) -> None:
        """After one session has moved, wait until every session has stopped, finished, or waits for a lock."""
        rows = running_session.due.rows if running_session.due is not None and running_session.due.exclusive else ()
        waits = any(not other.held.isdisjoint(rows) for other in self.sessions if other is not running_session)
        elapsed, pause = 0.0, SUSPICION if waits else PATIENCE
        while running := [session for session in self.sessions if session.status in (RUNNING, BLOCKED)]:
            fresh = any(session.status == RUNNING for session in running)
            if not fresh and not running_session.releases:
                return
            try:
                session = self._reports.get(timeout=pause if fresh or elapsed else 0.0001)
                if session.number in self.blocked:
                    self.blocked.remove(session.number)
                continue
            except queue.Empty:
                elapsed += pause
            waiting = self.database.waiting(running)
            if not self._reports.empty():
                continue
            if len(waiting) == len(running):
                for session in running:
                    session.status = BLOCKED
                    if session.number not in self.blocked:
                        self.blocked.append(session.number)
                return
            if elapsed > SILENCE:
                raise Stuck(f"session {running[0].number} neither finishes nor waits for a lock")

    def _abandon(self) -> None:
        """Make every session roll back and finish."""
        for session in self.sessions:
            session.abandoned = True
        for session in self.sessions:
            if session.status == PAUSED:
                session.go()
        while any(session.status != DONE for session in self.sessions):
            self._reports.get(timeout=SILENCE)

    def outcome(self) -> tuple[Outcome, list[str]]:
        """The outcome of a schedule that ran to its end, and its unconditional errors."""
        rows, trouble = scenes.outcome(self.database.execute(scenes.QUERIES))
        for session in self.sessions:
            if session.error is not None:
                trouble.append(f"session {session.number} raised {session.error!r}")
        responses = tuple(shown(session.result) for session in self.sessions)
        return (responses, tuple((table, tuple(part)) for table, part in sorted(rows.items()))), trouble

    def verified(self) -> list[str]:
        """The faults that the service's own verification finds in the batches."""
        service = self.all[0].service
        problems = []
        for (batch,) in self.database.execute(["SELECT id FROM batches WHERE state <> 'deleting'"])[0]:
            problems += [f"verify, batch {batch}: {fault}" for fault in service.batches.verify(batch).faults]
        return problems

    def _committed(self) -> object:
        return tuple(sorted((table, tuple(order)) for table, order in self.commits.items()))

    def state(self) -> object:
        """A value that is equal for schedules that continue in the same way."""
        return (
            tuple(
                (session.seen, len(session.steps), session.status, session.in_transaction) for session in self.sessions
            ),
            self._committed(),
            tuple(self.blocked),
        )


class Stuck(Exception):
    """Raised for a schedule in which no session can continue."""


class Search:
    """All schedules of one combination with at most `bound` preemptions, or any number if it is None."""

    def __init__(self, arena: Arena, combination: Combination, preemptions: int | None) -> None:
        self._arena = arena
        self._combination = combination
        self._bound = preemptions
        self.found = Searched()

    def run(self) -> Searched:
        """Search up to the first finding."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                outcomes = self._allowed()
                self.found.outcomes = len(outcomes)
                while not self._finds(outcomes) and self._arena.footprints.grow(self._combination):
                    pass
                break
            except Diverged as error:
                if attempt == ATTEMPTS:
                    self._report(list(self._arena.taken), [str(error)])
        return self.found

    def _finds(self, outcomes: Collection[Outcome]) -> bool:
        for schedule in self._schedules(self._bound):
            self.found.completed += 1
            outcome, trouble = self._arena.outcome()
            trouble += self._arena.verified()
            self.found.reached.add(outcome)
            if outcome not in outcomes:
                trouble += _differences(outcome, outcomes)
            if trouble:
                self._report(schedule, trouble)
                return True
        return False

    def _allowed(self) -> set[Outcome]:
        """The outcomes of all orders of whole transactions."""
        outcomes = set()
        for schedule in self._schedules(None, serial=True):
            outcome, trouble = self._arena.outcome()
            if trouble:
                self._report(schedule, ["in serial order: " + problem for problem in trouble])
            outcomes.add(outcome)
        self._arena.footprints.grow(self._combination)
        return outcomes

    def _report(self, schedule: list[int], problems: list[str]) -> None:
        self.found.findings.append(Finding(self._combination, schedule, problems, list(self._arena.steps)))

    def _schedules(self, preemptions: int | None, *, serial: bool = False) -> Iterator[list[int]]:
        """Run the schedules, and yield each that ran to its end while the arena shows its outcome. With `serial`,
        transactions are not interleaved."""
        branches = Branches(preemptions, serial=serial)
        while branches.begin():
            self.found.schedules += 1
            try:
                result = self._arena.run(self._combination, branches.choose)
            except Stuck as error:
                self._report(list(self._arena.taken), [str(error)])
                continue
            if result:
                yield list(self._arena.taken)


class Branches:
    """The schedules that still have to be run, each given by its first steps."""

    def __init__(self, preemptions: int | None, *, serial: bool) -> None:
        self._bound = preemptions
        self._whole = serial
        self._open: list[tuple[list[int], int]] = [([], 0)]
        """The number of preemptions in those steps."""
        self._prefix: list[int] = []
        self._spent = 0
        self._visited: dict[object, int] = {}
        """For each state, the most preemptions that were left there."""

    def begin(self) -> bool:
        """Take the next schedule; False if none is left."""
        if not self._open:
            return False
        self._prefix, self._spent = self._open.pop()
        return True

    def choose(self, arena: Arena, ready: list[int], last: int | None) -> int | None:
        """Follow the steps, then continue the session that ran last, and note where another one could have
        continued."""
        if self._whole:
            ready = [number for number in ready if arena.sessions[number].in_transaction] or ready
        depth = len(arena.schedule)
        if depth < len(self._prefix):
            if self._prefix[depth] not in ready:
                steps = "".join(map(str, self._prefix[: depth + 1]))
                raise Diverged(f"{arena.combination}: after {steps[:-1]} session {steps[-1]} can't continue")
            return self._prefix[depth]
        going_on = last if last in ready else None
        if not self._whole:
            ready = [number for number in ready if number == going_on or not arena.will_wait(number)] or ready
        budget = 0 if self._bound is None else self._bound - self._spent
        state = arena.state(), None if self._bound is None else going_on
        if self._visited.get(state, -1) >= budget:
            return None
        self._visited[state] = budget
        default = ready[0] if going_on is None else going_on
        cost = self._spent if self._bound is None or going_on is None else self._spent + 1
        if self._bound is None or cost <= self._bound:
            self._open += [([*arena.schedule, other], cost) for other in ready if other != default]
        return default


class Diverged(Exception):
    """Raised when a schedule did not repeat: it depends on more than the database and the steps."""


def _differences(outcome: Outcome, expected_outcomes: Iterable[Outcome]) -> list[str]:
    """The parts of an outcome that no serial order has."""
    outcomes = list(expected_outcomes)
    responses, rows = outcome
    lines = [
        f"response of session {number}: {response}"
        for number, response in enumerate(responses)
        if all(response != other[0][number] for other in outcomes)
    ]
    lines += [
        f"{table}: {' | '.join(part)}"
        for table, part in rows
        if all(part != dict(other[1])[table] for other in outcomes)
    ]
    if not lines:
        lines = [f"response of session {number}: {response}" for number, response in enumerate(responses)]
        lines.append("each part results from some order of the transactions, but no order has all of them")
    return ["no order of the transactions has this outcome:", *lines]


def replay(arena: Arena, combination: Combination, schedule: Sequence[int]) -> Finding:
    """Run one schedule, in an arena whose sessions stop before every statement; after its steps each session runs to
    its end. Return the problems."""
    search = Search(arena, combination, None)
    outcomes = search._allowed()

    def choose(arena: Arena, ready: list[int], last: int | None) -> int:
        depth = len(arena.schedule)
        if depth < len(schedule):
            return schedule[depth]
        return last if last is not None and last in ready else ready[0]

    arena.run(combination, choose)
    outcome, trouble = arena.outcome()
    trouble += arena.verified()
    if outcome not in outcomes:
        trouble += _differences(outcome, outcomes)
    return Finding(combination, list(arena.taken), trouble, list(arena.steps))


# The combinations.


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
            self._arena.run(Combination(scene, (operation,)), lambda arena, ready, last: ready[0])
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

    def touches(self, scene: Scene, operation: str, table: str) -> bool:
        return any(access.table == table for access in self._of(scene, operation).accesses)

    def meet(self, scene: Scene, first: str, other: str) -> bool:
        """Whether one of the two operations writes or locks a row that the other touches."""
        first_accesses, other_accesses = self._of(scene, first).accesses, self._of(scene, other).accesses
        changed_by_first, changed_by_other = (
            {a.table for a in accesses if a.kind is not Kind.READ} for accesses in (first_accesses, other_accesses)
        )
        return any(a.table in changed_by_other for a in first_accesses) or any(
            a.table in changed_by_first for a in other_accesses
        )

    def connected(self, scene: Scene, operations: Sequence[str]) -> bool:
        """Whether the operations form one connected set, so that no part is independent of the others."""
        connected, remaining = {0}, set(range(1, len(operations)))
        while neighbours := {
            n for n in remaining if any(self.meet(scene, operations[n], operations[r]) for r in connected)
        }:
            connected |= neighbours
            remaining -= neighbours
        return not remaining


def combinations(
    arena: Arena, size: int, places: Sequence[Scene], *, in_one: bool = False, excluded_names: Collection[str] = ()
) -> Iterator[Combination]:
    """All combinations of `size` operations, including an operation with itself, in every scene; combinations that
    touch no item group, which is all that differs between scenes, only in the first one. With `in_one`, each
    combination in one scene only, and the next combination in the next scene. Operations in `excluded_names` are left
    out."""
    footprints = arena.footprints
    names = [name for name in OPERATIONS if name not in excluded_names]
    for number, operations in enumerate(itertools.combinations_with_replacement(names, size)):
        scenes = [places[number % len(places)]] if in_one else places
        if not any(footprints.touches(places[0], operation, "item_groups") for operation in operations):
            scenes = places[:1]
        for scene in scenes:
            if footprints.connected(scene, operations):
                yield Combination(scene, operations)
