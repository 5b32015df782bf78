"""The search: which session continues at each step, and which outcomes are right.

*Which outcomes are right.* First the operations run in every order of their whole transactions. Those outcomes are
allowed; any other schedule must have one of them. Operations of several transactions, like a deletion in chunks, may be
interleaved between these, so the unit is the transaction and not the operation. Three operations of dozens of
transactions have far too many orders; so the orders with few switches between operations are run first, and those with
more only for an outcome that none of these has.

*Lost answers.* The server executes a COMMIT, and the connection breaks before the session learns of it. The outcome
must be one that the orders have in which each answer arrived.

*Enumeration.* A schedule is the sequence of sessions that take a step. The search goes depth first: it follows a
schedule to its end, and at each step notes the other sessions that could have continued instead, within the bound on
preemptions. Each of those is another schedule. Most steps are predicted (`states`); to execute one, the database runs
the schedule from the scene up to it.

*Reductions.* Three kinds of schedules are left out, and none of them can hide an outcome:

- Two schedules meet where every session has seen the same results and each table was committed to in the same order;
  from there on they are equal, and one of them is enough.
- A session stops only before statements whose order relative to the others' makes a difference (`accesses`). The
  accesses of an operation are found by running it alone, and then in every schedule of the combination. When a schedule
  shows more accesses than were assumed, the search of the combination starts again with them.
- A session that holds no locks is not made to wait for a row that another one holds until its last COMMIT: the other
  one would continue at once, and afterwards the session can be chosen with no more preemptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.explorer.arena import Arena, Outcome, Stuck
from tests.explorer.combinations import Combination
from tests.explorer.sessions import LOSS, PAUSED, Stop
from tests.explorer.states import Diverged, Memory, State

MOST_STEPS: Final = 2000
"""A schedule with more steps is assumed never to end."""
SWITCHES: Final = (2, 4, 8, None)
"""How often an order of the transactions may leave an operation before its end, if preemptions are limited: if no order
has an outcome, those of the next number are run, and finally all."""
ATTEMPTS: Final = 5
"""How many times a combination is searched before schedules that don't repeat are reported as a finding."""
IMPATIENT: Final = 2
"""How many of these times are spared the wait for the server's work in the background, a tenth of a second for each
schedule. On a busy machine that work may interfere."""


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


@dataclass
class Searched:
    """The result of searching one combination."""

    schedules: int = 0
    """Schedules that were started; most of them met an earlier one and ended there."""
    executed: int = 0
    """How many times the database ran a schedule, or the part of it that could not be predicted."""
    completed: int = 0
    outcomes: int = 0
    """The allowed outcomes that were run: those of whole transactions in every order, or in those with few switches."""
    reached: set[Outcome] = field(default_factory=set)
    """The outcomes of the interleaved schedules."""
    findings: list[Finding] = field(default_factory=list)


class Search:
    """All schedules of one combination with at most `preemptions` preemptions, or any number if it is None. With
    `loses`, also those in which the answer to one COMMIT is lost."""

    def __init__(
        self,
        arena: Arena,
        combination: Combination,
        preemptions: int | None,
        *,
        loses: bool = False,
        predicts: bool = True,
    ) -> None:
        """Without `predicts`, the database runs every step of every schedule."""
        self._arena = arena
        self._combination = combination
        self._bound = preemptions
        self._loses = loses and not arena.all[0].database.is_embedded
        self._predicts = predicts
        self._memory: Memory | None = None
        self._allowed: set[Outcome] = set()
        self._switches: list[int | None] = []
        """The numbers of switches that weren't tried yet."""
        self.found = Searched()

    def run(self) -> Searched:
        """Search up to the first finding."""
        before = self._arena.runs
        for attempt in range(1, ATTEMPTS + 1):
            self._arena.is_patient = attempt > IMPATIENT
            try:
                self.begin()
                self._search()
                break
            except Diverged as error:
                self._memory, self.found = None, Searched()
                if attempt == ATTEMPTS:
                    self._report([str(error)])
        self.found.outcomes = len(self._allowed)
        self.found.executed = self._arena.runs - before
        return self.found

    def begin(self) -> None:
        """Run whole transactions, in the orders with the fewest switches. The stops of the search depend on what they
        touch."""
        self._allowed = set()
        self._await_orders()
        self._run_whole_transactions()
        self._grows()

    def _await_orders(self) -> None:
        """Run the orders of whole transactions again when an outcome needs them."""
        self._switches = list(SWITCHES[-1:] if self._bound is None else SWITCHES)

    def _search(self) -> None:
        while True:
            finds = self._finds()
            if not self._grows():
                return
            if finds:
                # The orders stopped at too few places, so one with this outcome may have been missed.
                self.found.findings.clear()
                self._allowed.clear()

    def allows(self, outcome: Outcome) -> bool:
        """Whether an order of whole transactions has this outcome."""
        while outcome not in self._allowed and self._switches:
            self._run_whole_transactions()
        return outcome in self._allowed

    def differences(self, outcome: Outcome) -> list[str]:
        """The parts of an outcome that no order of the transactions has."""
        return [] if self.allows(outcome) else _differences(outcome, self._allowed)

    def _run_whole_transactions(self) -> None:
        for state in self._ends(self._switches.pop(0), serial=True):
            outcome, trouble = self._outcome(state)
            if trouble and outcome not in self._allowed:
                self._confirm(state, outcome)
                self._report(["in serial order: " + problem for problem in trouble])
            self._allowed.add(outcome)

    def _finds(self) -> bool:
        for state in self._ends(self._bound):
            self.found.completed += 1
            outcome, trouble = self._outcome(state)
            self.found.reached.add(outcome)
            trouble += self.differences(outcome)
            if trouble:
                self._confirm(state, outcome)
                self._report(trouble)
                return True
        return False

    def _confirm(self, state: State, outcome: Outcome) -> None:
        """Run the schedule of a finding, whose outcome may have been predicted."""
        assert self._memory is not None
        self._memory.go_to(state)
        if self._arena.outcome()[0] != outcome:
            raise Diverged(f"{self._combination}: the outcome of {state.schedule()} was predicted wrongly")

    def _grows(self) -> bool:
        """Whether the operations have touched more than was assumed. Then they stop at more places."""
        grows = self._arena.footprints.grow(self._combination)
        if grows:
            self._memory = None
            self._await_orders()
        return grows

    def _outcome(self, state: State) -> tuple[Outcome, list[str]]:
        assert self._memory is not None
        return self._memory.outcome(state)

    def _report(self, problems: list[str]) -> None:
        arena = self._arena
        self.found.findings.append(Finding(self._combination, list(arena.taken), problems, list(arena.steps)))

    def _ends(self, preemptions: int | None, *, serial: bool = False) -> Iterator[State]:
        """Search depth first, and yield each state in which a schedule ends. With `serial`, transactions are not
        interleaved."""
        if self._memory is None:
            self._memory = Memory(self._arena, self._combination, predicts=self._predicts)
        memory = self._memory
        visited: dict[object, int] = {}
        """For each state, the most preemptions that were left there."""
        branches = [_Branch(memory.first, None, 0, may_lose=self._loses and not serial)]
        while branches:
            branch = branches.pop()
            state, last, spent, may_lose = branch.state, branch.step, branch.spent, branch.may_lose
            self.found.schedules += 1
            try:
                if last is not None:
                    state, last = memory.after(state, last), last % LOSS
                while not state.is_over and state.depth < MOST_STEPS:
                    going_on, ready = self._choices(state, last, serial=serial)
                    budget = 0 if preemptions is None else preemptions - spent
                    key = state.key, None if preemptions is None else going_on, may_lose
                    if visited.get(key, -1) >= budget:
                        break
                    visited[key] = budget
                    default = ready[0] if going_on is None else going_on
                    cost = spent if preemptions is None or going_on is None else spent + 1
                    costs = {number: spent if number == default else cost for number in ready}
                    for number in ready:
                        if preemptions is not None and costs[number] > preemptions:
                            continue
                        if number != default:
                            branches.append(_Branch(state, number, costs[number], may_lose))
                        stop = state.stops[number]
                        if may_lose and stop.next == "COMMIT" and stop.has_written:
                            branches.append(_Branch(state, number + LOSS, costs[number], may_lose=False))
                    state, last = memory.after(state, default), default
            except Stuck as error:
                self._report([str(error)])
                continue
            if state.is_over:
                yield state

    def _choices(self, state: State, last: int | None, *, serial: bool) -> tuple[int | None, list[int]]:
        """The session that ran last, if it can continue, and all sessions worth continuing."""
        stops = state.stops
        ready = [
            number
            for number, stop in enumerate(stops)
            if stop.status == PAUSED
            and self._arena.database.may_run(stop, [other for other in stops if other is not stop])
        ]
        if serial:
            ready = [number for number in ready if stops[number].in_transaction] or ready
            return (last if last in ready else None), ready
        going_on = last if last in ready else None
        return going_on, [n for n in ready if n == going_on or not self._will_wait(stops, n)] or ready

    def _will_wait(self, stops: Sequence[Stop], number: int) -> bool:
        """Whether the session, which holds no lock, could only wait for a row that another session holds until its last
        COMMIT."""
        stop = stops[number]
        if self._arena.every_stop or stop.held or stop.due is None or not stop.due.exclusive or stop.has_written:
            return False
        first = stop.due.rows[0]
        return any(
            first in other.held and other.parts >= self._arena.profiles[place].parts
            for place, other in enumerate(stops)
            if place != number
        )


@dataclass
class _Branch:
    """A schedule that still has to be searched: this step is the next one in this state (see `Arena.step`)."""

    state: State
    step: int | None
    spent: int
    """The number of preemptions so far."""
    may_lose: bool
    """Whether an answer may still be lost."""


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
    search.begin()
    steps, last = iter(schedule), -1

    def choose(ready: list[int]) -> int:
        nonlocal last
        step = next(steps, last if last in ready else ready[0])
        last = step % LOSS
        return step

    arena.run(combination, choose)
    outcome, trouble = arena.outcome()
    taken, executed = list(arena.taken), list(arena.steps)
    return Finding(combination, taken, trouble + search.differences(outcome), executed)
