"""Consumers with effects in their own transactions, consumers of a service, the service and the database are killed at
random, while all work on the same batches. Then each item has one effect at most, and each batch has completed once.

KILLED_ITEMS sets the items of each batch: 2,000 take minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from core.batches.batch import Opening
from core.enlisted import mover
from core.service import Service
from core.storage import schema, statements
from core.storage.database import Database
from tests.conftest import Server
from tests.guarantees.enlisted.callers import DRIVERS
from tests.guarantees.programs.killed_consumer import EFFECTS
from tests.support.servers import ROOT, ServiceProcess

PROGRAM = "tests.guarantees.programs.killed_consumer"
ITEMS = int(os.environ.get("KILLED_ITEMS", "200"))
BATCHES = 20
GROUP = 64
EMBEDDED, HTTP = 4, 2
EVERY = 3.0
"""Seconds between two kills, on average."""
LONGEST = 3000
RESTARTS = 2
"""Kills of the database: after a third of the items, and after two thirds."""


class Consumers:
    """Processes that are started again whenever they were killed. Each ends by itself when all batches are complete."""

    def __init__(self, folder: Path, urls: dict[str, str], batches: list[int]) -> None:
        self.records = {kind: folder / f"{kind}.jsonl" for kind in urls}
        self._log = folder / "consumers.log"
        self._commands = [
            [sys.executable, "-m", PROGRAM, kind, urls[kind], str(self.records[kind]), *map(str, batches)]
            for kind, count in (("embedded", EMBEDDED), ("http", HTTP))
            for _ in range(count)
        ]
        self._processes = [self._start(command) for command in self._commands]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=log)

    @property
    def ended(self) -> bool:
        codes = [process.poll() for process in self._processes]
        assert not any(codes), self._log.read_text()[-3000:]
        return codes.count(0) == len(codes)

    def kill_one(self, dice: random.Random) -> str:
        number = dice.randrange(len(self._processes))
        if self._processes[number].poll() is None:
            self._processes[number].kill()
            self._processes[number].wait()
            self._processes[number] = self._start(self._commands[number])
        return self._commands[number][3]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def results(self, kind: str) -> list[dict[str, Any]]:
        """What was answered; a line that was cut by a kill is not."""
        results = []
        for line in self.records[kind].read_text().splitlines():
            try:
                results.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return results


@contextmanager
def _running(server: Server, folder: Path) -> Iterator[tuple[Database, ServiceProcess, Consumers, list[int]]]:
    with Database(server.new_database()) as database:
        schema.migrate(database)
        EFFECTS.create(database.engine)
        service = Service(database)
        batches = [
            service.batches.open(Opening(items=ITEMS, group_size=GROUP, sealed=True)).batch.id for _ in range(BATCHES)
        ]
        service.stop()
        url = database.url.render_as_string(hide_password=False)
        api = ServiceProcess(url, workers=2, log=folder / "service.log").start()
        users = database.url.set(drivername=DRIVERS[database.url.get_backend_name()])
        urls = {"embedded": users.render_as_string(hide_password=False), "http": api.url}
        consumers = Consumers(folder, urls, batches)
        try:
            yield database, api, consumers, batches
        finally:
            consumers.stop()
            api.stop(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.mariadb
@pytest.mark.timeout(LONGEST + 300)
def test_each_item_has_one_effect_though_everything_is_killed(mortal_server: Server, tmp_path: Path) -> None:
    dice = random.Random()
    killed: Counter[str] = Counter()
    pause = threading.Event()
    start = time.monotonic()
    with _running(mortal_server, tmp_path) as (database, api, consumers, batches):
        while not consumers.ended:
            assert time.monotonic() < start + LONGEST, killed
            pause.wait(dice.expovariate(1 / EVERY))
            if killed["database"] < RESTARTS and _resolved(database) > (killed["database"] + 1) / 3 * BATCHES * ITEMS:
                mortal_server.stop(signal.SIGKILL)
                mortal_server.start()
                database.engine.dispose()
                killed["database"] += 1
                _assert_effects_are_acked(database)
            elif dice.random() < 0.1:
                api.stop(signal.SIGKILL)
                api.start()
                killed["service"] += 1
            else:
                killed[consumers.kill_one(dice)] += 1
        seconds = time.monotonic() - start
        consumers.stop()
        api.stop(signal.SIGKILL)
        mover.sweep(database)
        _assert_effects_are_acked(database)
        effects = _assert_one_effect(database, consumers)
        _assert_each_batch_completed_once(database, batches)
        told = Counter(
            batch for kind in consumers.records for each in consumers.results(kind) for batch in each["newly"]
        )
    assert effects
    assert killed["database"] == RESTARTS
    assert set(told) <= set(batches)
    assert max(told.values()) == 1, told
    print(
        f"{seconds:.0f} s, {BATCHES * ITEMS} items, {effects} effects, killed {dict(killed)}, {len(told)} of {BATCHES} "
        "completions were told"
    )


def _rows(database: Database, text: str, connection: Any = None) -> list[tuple[Any, ...]]:
    if connection is not None:
        return [tuple(row) for row in connection.execute(sa.text(text))]
    with database.engine.connect() as tx:
        return _rows(database, text, tx)


def _resolved(database: Database) -> int:
    [(count,)] = _rows(database, "SELECT SUM(resolved_count) FROM item_groups")
    return int(count or 0)


def _assert_effects_are_acked(database: Database) -> None:
    """In one snapshot: the bit of each item with an effect is set, and none of a failure or skip."""
    with database.engine.connect().execution_options(isolation_level="REPEATABLE READ") as tx:
        items = [str(item) for (item,) in _rows(database, "SELECT item FROM effects", tx)]
        groups = {
            (batch, group): (1 << count) - 1 if resolved is None else int.from_bytes(resolved, "little")
            for batch, group, count, resolved in _rows(
                database, "SELECT batch_id, group_no, resolved_count, resolved FROM item_groups", tx
            )
        }
    for item in items:
        batch, group, index = map(int, item.split(":"))
        assert groups[batch, group] >> index & 1, f"{item} has an effect, but no ack"


def _assert_one_effect(database: Database, consumers: Consumers) -> int:
    effects = Counter(str(item) for (item,) in _rows(database, "SELECT item FROM effects"))
    assert [item for item, count in effects.items() if count > 1] == []
    applied = {
        kind: [item for each in consumers.results(kind) for item in each["applied"]] for kind in consumers.records
    }
    assert [item for item in applied["embedded"] if effects[item] != 1] == []
    assert [item for item in applied["http"] if effects[item]] == []
    everywhere = Counter(applied["embedded"] + applied["http"])
    assert [item for item, count in everywhere.items() if count > 1] == [], "applied twice"
    return len(effects)


def _assert_each_batch_completed_once(database: Database, batches: list[int]) -> None:
    for outbox in ("count_outbox", "event_outbox"):
        assert _rows(database, f"SELECT COUNT(*) FROM {outbox}") == [(0,)]
    rows = _rows(database, "SELECT id, state, items, acked, failed, COALESCE(skipped, 0) FROM batches ORDER BY id")
    assert rows == [(batch, "complete", ITEMS, ITEMS, 0, 0) for batch in batches]
    counted = _rows(
        database,
        "SELECT batch_id, SUM(resolved_count), SUM(failed_count) FROM item_groups GROUP BY batch_id ORDER BY batch_id",
    )
    assert [tuple(map(int, row)) for row in counted] == [(batch, ITEMS, 0) for batch in batches]
    events = _rows(database, "SELECT position, batch_id, type FROM feed ORDER BY position")
    assert [position for position, _, _ in events] == list(range(1, len(events) + 1))
    types = [f"batch.{name}" for name in ("opened", "sealed", "completed", "succeeded")]
    for batch in batches:
        assert [statements.as_text(type) for _, owner, type in events if owner == batch] == types
    service = Service(database)
    assert [batch for batch in batches if not service.batches.verify(batch).ok] == []
    service.stop()
