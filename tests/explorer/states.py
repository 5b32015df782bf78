"""States between the steps of a schedule, and the memory that predicts the state after a step.

Nine of ten schedules end in a state that an earlier one has reached, and all repeat steps that were executed before. So
each step is executed once for everything that it depends on, and predicted from then on: the search walks from state to
state, and the database runs only what isn't known yet.

A step depends on the session's own state, which follows from the results of its statements so far; on what was
committed to the tables that it touches; and, if it locks or writes there, on the locks of the others. If sessions wait
for locks, the step may release them, and depends on the same for them. Where a digest of all of these is equal, the
result is equal too. This is the assumption by which the search also skips states that it has visited.

A prediction can't go unnoticed if it is wrong: whenever the database has to run a schedule, every state on the way must
be the predicted one, or the combination is searched again (`Diverged`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.explorer import scene as scenes
from tests.explorer.arena import Arena, Outcome
from tests.explorer.combinations import Combination
from tests.explorer.operations import shown
from tests.explorer.sessions import DONE, EVERY_TABLE, LOSS, Stop


class Diverged(Exception):
    """Raised when a schedule did not repeat: it depends on more than the database and the steps."""


@dataclass(eq=False)
class State:
    """The state after the steps of a schedule."""

    stops: tuple[Stop, ...]
    commits: Mapping[str, tuple[int, ...]]
    """By table, the sessions that have committed to it, in order."""
    versions: Mapping[str, bytes]
    """By table, a digest of everything that was committed to it."""
    blocked: tuple[int, ...]
    """The sessions that wait for a lock, in the order of their requests."""
    previous: State | None = None
    step: int = -1
    """The step that was taken from `previous`: see `Arena.step`."""
    depth: int = 0

    @property
    def is_over(self) -> bool:
        return all(stop.status == DONE for stop in self.stops)

    @property
    def key(self) -> object:
        """A value that is equal for states that continue in the same way."""
        return (
            tuple((stop.seen, stop.statements, stop.status, stop.in_transaction, stop.snapshot) for stop in self.stops),
            tuple(sorted(self.commits.items())),
            self.blocked,
        )

    def path(self) -> list[State]:
        """All states from the first one to this one."""
        states = [self]
        while (previous := states[-1].previous) is not None:
            states.append(previous)
        return states[::-1]

    def schedule(self) -> str:
        return "".join(str(state.step) for state in self.path()[1:])

    def equals(self, other: State) -> bool:
        return (self.stops, self.versions, self.blocked) == (other.stops, other.versions, other.blocked)

    def context(self, touched: Mapping[str, bool], movers: Collection[int]) -> Context:
        """What a step that touches these tables depends on, except for the states of the sessions that it moves."""
        others = [(number, stop) for number, stop in enumerate(self.stops) if number not in movers]
        values: list[object] = []
        for table, locks in touched.items():
            if table == EVERY_TABLE:
                values += [tuple(sorted(self.versions.items())), others]
            else:
                values.append(self.versions.get(table))
                values.append([(number, stop.locks.get(table)) for number, stop in others] if locks else None)
        return values


Context = list[object]


@dataclass
class _Transition:
    """A step that was executed."""

    touched: Mapping[str, bool]
    context: Context
    moved: Mapping[int, Stop]
    blocked: tuple[int, ...]
    committed: Mapping[str, Sequence[int]]
    versions: Mapping[str, bytes]


@dataclass
class _Facts:
    """A value that depends on the contents of tables."""

    entries: list[tuple[Mapping[str, bytes | None], list[str]]] = field(default_factory=list)

    def find(self, versions: Mapping[str, bytes]) -> list[str] | None:
        for tables, value in self.entries:
            if all(versions.get(table) == version for table, version in tables.items()):
                return value
        return None

    def add(self, tables: Collection[str], versions: Mapping[str, bytes], value: list[str]) -> None:
        self.entries.append(({table: versions.get(table) for table in tables}, value))


class Memory:
    """The states and outcomes of one combination. It executes what it can't predict."""

    def __init__(self, arena: Arena, combination: Combination, *, predicts: bool = True) -> None:
        self._arena = arena
        self._combination = combination
        self._predicts = predicts
        self._stops: dict[object, Stop] = {}
        self._transitions: dict[object, list[_Transition]] = {}
        self._current: State | None = None
        """The state in which the arena is."""
        self._rows: dict[tuple[str, bytes | None], tuple[str, ...]] = {}
        self._bits: dict[object, tuple[tuple[str, ...], list[str]]] = {}
        self._faults = _Facts()
        self.first = self._begin()

    def after(self, state: State, step: int) -> State:
        """The state after a step. Raises `Stuck` and `Diverged`."""
        movers = (step % LOSS, *state.blocked)
        moved = tuple((mover, state.stops[mover]) for mover in movers)
        transitions = self._transitions.setdefault((step, moved), [])
        for transition in transitions if self._predicts else ():
            if state.context(transition.touched, movers) == transition.context:
                return _predicted(state, step, transition)
        self.go_to(state)
        return self._execute(state, step, transitions)

    def go_to(self, state: State) -> None:
        """Bring the arena to a state: from an earlier state of the same schedule, or from the start."""
        path = state.path()
        current = self._current
        if current is None or current.depth > state.depth or path[current.depth] is not current:
            current = self._begin()
            if not current.equals(path[0]):
                raise Diverged(f"{self._combination}: its first state did not repeat")
        for expected in path[current.depth + 1 :]:
            self._current = None
            if expected.step % LOSS not in self._arena.ready():
                raise Diverged(f"{self._combination}: {expected.schedule()} did not repeat: its last step is late")
            self._arena.step(expected.step)
            if not self._captured(expected.previous, expected.step).equals(expected):
                raise Diverged(f"{self._combination}: the state after {expected.schedule()} did not repeat")
            self._current = expected

    def outcome(self, state: State) -> tuple[Outcome, list[str]]:
        """The outcome of a schedule that ran to its end, and its unconditional errors."""
        trouble = [
            f"session {number} raised {stop.error!r}"
            for number, stop in enumerate(state.stops)
            if stop.error is not None
        ]
        known = self._known(state) if self._predicts else None
        if known is None:
            self.go_to(state)
            self._read(state)
            known = self._known(state)
            assert known is not None
        rows, errors = known
        return (tuple(stop.result for stop in state.stops), rows), trouble + errors

    def _known(self, state: State) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], list[str]] | None:
        bits = self._bits.get(_versions(state, scenes.BITS))
        faults = self._faults.find(state.versions)
        if bits is None or faults is None:
            return None
        rows = {"bits": bits[0]}
        for table in scenes.COMPARED:
            part = self._rows.get((table.name, state.versions.get(table.name)))
            if part is None:
                return None
            rows[table.name] = part
        return tuple(sorted(rows.items())), bits[1] + faults

    def _read(self, state: State) -> None:
        rows, trouble = scenes.outcome(self._arena.database.execute(scenes.QUERIES))
        for table in scenes.COMPARED:
            self._rows[table.name, state.versions.get(table.name)] = tuple(rows[table.name])
        self._bits[_versions(state, scenes.BITS)] = tuple(rows["bits"]), trouble
        tables, faults = self._arena.verified()
        self._faults.add(tables, state.versions, faults)

    def _begin(self) -> State:
        self._current = None
        self._arena.begin(self._combination)
        self._current = self._captured(None, -1)
        return self._current

    def _execute(self, state: State, step: int, transitions: list[_Transition]) -> State:
        """Take the step in the arena, which is in this state, and remember it."""
        movers = (step % LOSS, *state.blocked)
        sessions = self._arena.sessions
        for session in sessions:
            session.touched.clear()
        for waiting in state.blocked:
            due = state.stops[waiting].due
            sessions[waiting].touched.update(dict.fromkeys(due.tables if due and due.tables else (EVERY_TABLE,), True))
        self._current = None
        self._arena.step(step)
        after = self._current = self._captured(state, step)
        if any(after.stops[other] is not stop for other, stop in enumerate(state.stops) if other not in movers):
            raise Diverged(f"{self._combination}: {after.schedule()} has moved a session that had stopped")
        touched: dict[str, bool] = {}
        for mover in movers:
            for table, locks in sessions[mover].touched.items():
                touched[table] = locks or touched.get(table, False)
        transitions.append(
            _Transition(
                touched=touched,
                context=state.context(touched, movers),
                moved={mover: after.stops[mover] for mover in movers},
                blocked=after.blocked,
                committed={
                    table: order[len(state.commits.get(table, ())) :]
                    for table, order in after.commits.items()
                    if order != state.commits.get(table)
                },
                versions={
                    table: version for table, version in after.versions.items() if version != state.versions.get(table)
                },
            )
        )
        return after

    def _captured(self, previous: State | None, step: int) -> State:
        """The state in which the arena is."""
        stops = []
        for session in self._arena.sessions:
            stop = session.stop()
            locks = tuple(sorted(stop.locks.items()))
            place = (
                session.number,
                stop.status,
                stop.snapshot,
                stop.seen,
                stop.statements,
                stop.parts,
                stop.in_transaction,
                locks,
            )
            if place not in self._stops and stop.status == DONE:
                stop = replace(stop, result=shown(stop.result))
            stops.append(self._stops.setdefault(place, stop))
        return State(
            tuple(stops),
            dict(self._arena.commits),
            dict(self._arena.versions),
            tuple(self._arena.blocked),
            previous,
            step,
            0 if previous is None else previous.depth + 1,
        )


def _predicted(state: State, step: int, transition: _Transition) -> State:
    commits, versions = state.commits, state.versions
    if transition.committed:
        tails = transition.committed.items()
        commits = {**commits, **{table: (*commits.get(table, ()), *tail) for table, tail in tails}}
        versions = {**versions, **transition.versions}
    stops = tuple(transition.moved.get(other, stop) for other, stop in enumerate(state.stops))
    return State(stops, commits, versions, transition.blocked, state, step, state.depth + 1)


def _versions(state: State, tables: Collection[str]) -> tuple[bytes | None, ...]:
    return tuple(map(state.versions.get, tables))
