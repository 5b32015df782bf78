"""The arena: sessions on one database, and one schedule at a time in it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection
from typing import Final

from tests.explorer import scene as scenes
from tests.explorer.combinations import Combination, Footprints, Profile
from tests.explorer.databases import Explored
from tests.explorer.operations import OPERATIONS, shown
from tests.explorer.scene import Scene
from tests.explorer.sessions import BLOCKED, DONE, LOSS, PAUSED, RUNNING, Session, chained

Outcome = tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]
"""The responses, and the rows by table."""

PATIENCE: Final = 0.005
"""Seconds until the server is asked whether a session waits for a lock."""
SUSPICION: Final = 0.0003
"""The same, if another session has locked one of its rows."""
RESOLUTION: Final = 10.0
"""Seconds after which sessions that wait for each other are a finding."""
SILENCE: Final = 60.0
"""Seconds after which a session that neither reports nor waits for a lock is a finding."""


class Stuck(Exception):
    """Raised for a schedule in which no session can continue."""


class Arena:
    """Sessions on one database; it runs one schedule after the other."""

    def __init__(self, database: Explored, sessions: int = 3, *, every_stop: bool = False) -> None:
        """`every_stop`: sessions stop before each statement, even where it makes no difference."""
        self.database = database
        self.every_stop = every_stop
        self._reports: queue.SimpleQueue[Session] = queue.SimpleQueue()
        self.all = [Session(number, database.url, self._reports) for number in range(sessions)]
        self.footprints = Footprints(self)
        self.sessions: list[Session] = []
        self.commits: dict[str, tuple[int, ...]] = {}
        """By table, the sessions that have committed to it, in order."""
        self.versions: dict[str, bytes] = {}
        """By table, a digest of everything that was committed to it."""
        self.blocked: list[int] = []
        """The sessions that wait for a lock, in the order of their requests."""
        self.steps: list[str] = []
        self.taken: list[int] = []
        """The session of each statement, including statements before which no session stopped."""
        self.runs = 0
        """How many schedules were begun."""
        self.is_patient = False
        """Whether the server finishes its work in the background before each schedule."""
        self._laid: Scene | None = None
        """The scene in the database, except for the tables that were written since."""
        self._dirty: set[str] = set()
        self.profiles: list[Profile] = []

    def close(self) -> None:
        self.abandon()  # one that waits for a lock of another would wait until the server ends that one
        for session in self.all:
            session.close()
        self.database.close()

    def run(self, combination: Combination, choose: Callable[[list[int]], int]) -> None:
        """Run one schedule from the scene to its end. `choose` returns one of the sessions that are ready."""
        self.begin(combination)
        while ready := self.ready():
            self.step(choose(ready))

    def begin(self, combination: Combination) -> None:
        """Start the operations in the scene; each runs up to its first stop."""
        self.abandon()
        self.profiles = profiles = self.footprints.of(combination)
        self._lay(combination.scene)
        self.runs += 1
        self.sessions = self.all[: len(combination.operations)]
        self.commits, self.versions, self.blocked, self.steps, self.taken = {}, {}, [], [], []
        for number, session in enumerate(self.sessions):
            self._reset(session, profiles[number])
            if combination.scene.warm:
                bitfields = session.service.acks._bitfields
                bitfields.put(scenes.warm(combination.scene), bitfields.era)
                bitfields.journal([2] if combination.scene.journaled else [])
            if combination.scene.variant == scenes.MIXED and session is not self.sessions[-1]:
                session.service.acks._bitfields.journal([2])
        for session, name in zip(self.sessions, combination.operations, strict=True):
            session.start(name, OPERATIONS[name])
            self._settle(session)
        self._observe()

    def begin_again(self, combination: Combination) -> None:
        """The process of the only session dies. Another one, which knows nothing, begins the same operation."""
        (name,) = combination.operations
        self.abandon()
        (session,) = self.sessions
        lives = session.lives + 1
        self._reset(session, self.profiles[0])
        session.lives = lives
        session.start(name, OPERATIONS[name])
        self._settle(session)

    def _reset(self, session: Session, profile: Profile) -> None:
        session.reset()
        session.stops_everywhere = self.every_stop
        session.concerns = profile.concerns
        session.taken = self.taken
        session.versions = self.versions
        session.committing = self._note_commit

    def step(self, step: int) -> None:
        """Let a session that is ready continue to its next stop. The step is its number; `LOSS` more, if it stands
        before a COMMIT whose answer is lost."""
        is_lost, number = step >= LOSS, step % LOSS
        session = self.sessions[number]
        self.steps.append(f"{number} {' '.join(session.next.split())[:200]}{', the answer is lost' if is_lost else ''}")
        session.releases = False
        for moved in (number, *self.blocked):
            self.sessions[moved].others_wait = bool(self.blocked)
        session.go(loses=is_lost)
        self._settle(session)
        while not self.ready() and self._is_released_late():
            pass
        # A session that was released may have stopped before its report was read.
        self.blocked = [number for number in self.blocked if self.sessions[number].status == BLOCKED]
        self._observe()
        if not self.ready() and not self.is_over:
            waiting = [str(session.number) for session in self.sessions if session.status != DONE]
            raise Stuck(f"sessions {', '.join(waiting)} wait for each other, and the database reports no deadlock")

    @property
    def is_over(self) -> bool:
        return all(session.status == DONE for session in self.sessions)

    def abandon(self) -> None:
        """End the schedule: every session rolls back and finishes."""
        for session in self.sessions:
            session.abandoned = True
        for session in self.sessions:
            if session.status == PAUSED:
                session.go()
        while not self.is_over:
            self._reports.get(timeout=SILENCE)

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
        self.database.freeze(is_patient=self.is_patient)

    def _observe(self) -> None:
        for profile, session in zip(self.profiles, self.sessions, strict=True):
            profile.observed |= session.accesses
            profile.observed_parts = max(profile.observed_parts, session.parts)

    def _note_commit(self, number: int, tables: Collection[str]) -> None:
        """Called by a session before its COMMIT."""
        self._dirty.update(tables)
        locks = self.sessions[number].locks
        for table in tables:
            self.commits[table] = (*self.commits.get(table, ()), number)
            self.versions[table] = chained(self.versions.get(table), number, locks.get(table))

    def _is_released_late(self) -> bool:
        """Whether the server releases one of the sessions that seemed to wait for each other. It shows the last one as
        waiting for a moment before it resolves the deadlock, and on a busy machine that moment is long."""
        if self.is_over:
            return False
        try:
            session = self._reports.get(timeout=RESOLUTION)
        except queue.Empty:
            return False
        if session.number in self.blocked:
            self.blocked.remove(session.number)
        self._settle(session)
        return True

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

    def outcome(self) -> tuple[Outcome, list[str]]:
        """The outcome of a schedule that ran to its end, and its errors."""
        rows, trouble = scenes.outcome(self.database.execute(scenes.QUERIES))
        trouble += [f"session {one.number} raised {one.error!r}" for one in self.sessions if one.error is not None]
        trouble += [f"session {one.number}: {problem}" for one in self.sessions for problem in one.disorder]
        responses = tuple(shown(session.result) for session in self.sessions)
        return (
            responses,
            tuple((table, tuple(part)) for table, part in sorted(rows.items())),
        ), trouble + self.verified()[1]

    def verified(self) -> tuple[set[str], list[str]]:
        """The faults that the service's own verification finds in the batches, and the tables that it has read."""
        session = self.all[0]
        session.touched.clear()
        problems = []
        for (batch,) in self.database.execute(["SELECT id FROM batches WHERE state <> 'deleting'"])[0]:
            faults = session.service.batches.verify(batch).faults
            problems += [f"verify, batch {batch}: {fault}" for fault in faults]
        return {"batches", *session.touched}, problems
