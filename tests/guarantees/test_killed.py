"""The database and the service are killed while batches complete: each completion has one event, and none is missing.
A process that is only frozen delays others for a limited time."""

from __future__ import annotations

import functools
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from core import errors
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.commits.combiner import Combiner, Inline
from core.service import Service
from core.storage import schema
from core.storage.database import Database
from lastbit import Client, Retry
from tests.conftest import Server
from tests.guarantees.drivers.rounds import ack
from tests.guarantees.models.service import events_of
from tests.support import packets
from tests.support.servers import ROOT, ServiceProcess

T = TypeVar("T")
WORKERS = 3
KILLS = 3
BETWEEN = 40
"""Batches that complete between two kills."""


class Progress:
    """Counts the completed batches, and wakes threads that wait for a number of them."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.trouble: list[BaseException] = []
        self._changed = threading.Condition()

    def add(self, batch: int) -> None:
        with self._changed:
            self.done.append(batch)
            self._changed.notify_all()

    def reaches(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.done) >= count or bool(self.trouble), 120)

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.trouble.append(error)
            self._changed.notify_all()


def _until_answered(call: Callable[[], T]) -> T:
    while True:
        try:
            return call()
        except errors.Unavailable:
            continue


def _work(progress: Progress, complete: Callable[[str], int], stop: threading.Event, name: int) -> None:
    try:
        for number in itertools.count():
            if stop.is_set():
                return
            progress.add(complete(f"{name}-{number}"))
    except BaseException as error:  # noqa: BLE001  # raised again in the test's own thread
        progress.fail(error)


def _kill_now_and_then(complete: Callable[[str], int], kill: Callable[[], None]) -> list[int]:
    """Let workers complete batches while something is killed; return the batches that they completed."""
    progress, stop = Progress(), threading.Event()
    workers = [threading.Thread(target=_work, args=(progress, complete, stop, name)) for name in range(WORKERS)]
    for worker in workers:
        worker.start()
    try:
        for number in range(1, KILLS + 1):
            assert progress.reaches(number * BETWEEN)
            kill()
        assert progress.reaches((KILLS + 1) * BETWEEN)
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert not progress.trouble, progress.trouble
    return progress.done


def _assert_each_completed_once(service: Service, completed: list[int]) -> None:
    for batch in completed:
        assert service.batches.get(batch).succeeded
        assert events_of(service, batch) == ["opened", "sealed", "completed", "succeeded"]
        assert service.batches.verify(batch).ok
    after = 0
    while page := service.feed.read(after, 1000).events:
        assert [event.position for event in page] == list(range(after + 1, after + 1 + len(page)))
        after = page[-1].position


@pytest.mark.mariadb
@pytest.mark.timeout(600)
def test_a_database_that_is_killed_while_batches_complete_has_one_event_for_each(mortal_server: Server) -> None:
    """Answered acks are stored when the server is back, and unanswered ones are sent again; each batch completes
    exactly once."""
    with Database(mortal_server.new_database()) as database:
        schema.migrate(database)
        service = Service(database, combiner=Combiner)

        def complete(name: str) -> int:
            opening = Opening(items=2, sealed=True)
            batch = _until_answered(lambda: service.batches.open(opening, name)).batch.id
            for index, verb in enumerate((Verb.SKIP, Verb.ACK)):
                _until_answered(lambda index=index, verb=verb: ack(service, (batch, 0, index), key=name, verb=verb))  # type: ignore[misc]
            return batch

        def kill() -> None:
            mortal_server.stop(signal.SIGKILL)
            mortal_server.start()

        _assert_each_completed_once(service, _kill_now_and_then(complete, kill))
        service.stop()


@pytest.mark.slow
@pytest.mark.mariadb
@pytest.mark.timeout(600)
def test_a_service_that_is_killed_while_batches_complete_has_one_event_for_each(server_url: str) -> None:
    """Real processes, two workers, killed under load; clients send unanswered requests again."""
    with Database(server_url) as database:
        schema.migrate(database)
        running = ServiceProcess(server_url, workers=2).start()
        clients = [Client(running.url, retry=Retry(attempts=1000, cap=0.2)) for _ in range(WORKERS)]
        try:

            def complete(name: str) -> int:
                client = clients[int(name.partition("-")[0])]
                batch = client.open(items=2, sealed=True, idempotency_key=name)
                client.ack(f"{batch.id}:0:0")
                client.skip(f"{batch.id}:0:1", reason="not needed")
                return batch.id

            def kill() -> None:
                running.stop(signal.SIGKILL)
                running.start()

            _assert_each_completed_once(Service(database), _kill_now_and_then(complete, kill))
        finally:
            for client in clients:
                client.close()
            running.stop()


class Strike:
    """Kills the database at one point of this thread's work, before or after a statement or a COMMIT, and restarts
    it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._left: int | None = None
        self._where = ""

    def is_next(self) -> bool:
        return self._left == 0

    def passed(self, place: str) -> None:
        if self._left is None:
            return
        if self._left:
            self._left -= 1
            return
        self._left, self._where = None, place
        self._server.stop(signal.SIGKILL)
        self._server.start()

    def at(self, point: int, call: Callable[[], T]) -> tuple[T, str]:
        """Return the call's result, and the point where the database was killed; "" if the call has no such point."""
        self._left, self._where = point, ""
        result = call()
        self._left = None
        return result, self._where


@pytest.mark.mariadb
@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", [Verb.ACK, Verb.SKIP])
def test_a_database_that_is_killed_at_any_statement_of_a_completion_completes_it_once(
    mortal_server: Server, monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    """The service repeats the call internally and answers as usual; a retry gets the same answer, and each batch has
    one event of each kind."""
    with Database(mortal_server.new_database()) as database:
        schema.migrate(database)
        service = Service(database, combiner=Inline)
        strike = Strike(mortal_server)
        packets.watch(strike, database, monkeypatch)
        places: list[str] = []
        while not places or places[-1]:
            batch = service.batches.open(Opening(items=2, sealed=True)).batch.id
            ack(service, (batch, 0, 0))
            reason = "not needed" if verb is Verb.SKIP else None
            last = functools.partial(ack, service, (batch, 0, 1), key="last", verb=verb, reason=reason)
            answer, place = strike.at(len(places), last)
            places.append(place)
            for reply in (answer, last()):
                assert reply.completed[batch].newly, place
                assert reply.completed[batch].newly_succeeded, place
            assert answer.applied + answer.repeated == 1
            _assert_each_completed_once(service, [batch])
        assert len(places) > 5, places
        assert {packets.BEFORE, packets.AFTER} <= set(places)


def test_a_frozen_process_loses_its_locks_and_goes_on(server_database: Database) -> None:
    """Others wait no longer than the server waits for its next statement. Once it wakes, it begins again."""
    service = Service(server_database, combiner=Inline)
    url = server_database.url.render_as_string(hide_password=False)
    command = [sys.executable, "-m", "tests.guarantees.programs.freezing", url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "frozen\n"
            assert service.batches.open(Opening(items=1)).batch.id == 1
        finally:
            process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0
    assert [event.id for event in service.feed.read(0, 10).events] == ["batch:1:opened", "late"]
