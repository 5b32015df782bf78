"""One run: start the system, disturb it while it works, let it finish undisturbed, and check the result."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from core.acks import parents
from core.storage import schema, tables
from core.storage.database import Database
from lastbit import Client, Retry
from lastbit.errors import ServiceUnreachable, Unavailable
from tests.chaos import evidence
from tests.chaos.broker import Broker, Lane
from tests.chaos.checks import Checks
from tests.chaos.embedded import EFFECTS
from tests.chaos.evidence import Evidence, Stored
from tests.chaos.holding import Holder
from tests.chaos.keeper import Keeper, Kept
from tests.chaos.plans import drawn, growing, nested, racing, shared
from tests.chaos.post import Post
from tests.chaos.report import Report
from tests.chaos.trouble import Troublemaker
from tests.chaos.worlds import Trouble, World
from tests.guarantees.drivers.rounds import recount
from tests.support.servers import ROOT, free_port

GROWING = ("growing-producer", "growing-sync", "growing-async", "growing-bulk", "growing-masks", "racing", "verifier")
ACTORS = (
    *("producer-sync", "producer-async", "producer-cli"),
    *("consumer-sync", "consumer-async", "consumer-acker", "consumer-cli", "consumer-masks", "reader"),
    *("shared-producer", "shared-sync", "shared-masks", "shared-embedded", "shared-embedded-2"),
    *GROWING,
)
SETTINGS = {
    "LASTBIT_LOG_LEVEL": "warning",
    "LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true",
    "LASTBIT_WEBHOOKS_TRIES": "100",
    "LASTBIT_WEBHOOKS_FIRST_DELAY": "0.05",
    "LASTBIT_WEBHOOKS_LONGEST_DELAY": "2",
    "LASTBIT_WEBHOOKS_TIMEOUT": "3",
}
EVERY = 3.0
"""Seconds between two disturbances of processes, on average."""
HELD_EVERY = 0.1
"""Seconds between two locks held on a group's row, on average."""
LONGER = 12
"""The run takes at most this many times as long as planned, while a kind of disturbance or some of BATCHES are
missing."""
BATCHES = 30
PROGRESS_EVERY = 30
"""Seconds between two lines of progress."""
PEACE = 300
"""Seconds in which all work must finish once the disturbances have stopped."""


class Run:
    """`go` executes the run on a world that is started; the folder keeps the record and the logs. `backlog` is the
    number of items that may wait, `pace` a factor for the frequency of disturbances, and `batches` the least number of
    batches to open. With `harmless`, the only disturbance is held rows.

    With `lose`, the answer to one of that many COMMITs is lost, and nothing else happens to the database, its rows and
    the service; with `harmless`, nothing at all. No sweep pays for nested batches, so each of these must have paid its
    parent when it is answered."""

    def __init__(
        self,
        world: World,
        folder: Path,
        *,
        seconds: float,
        seed: int,
        actors: tuple[str, ...] = ACTORS,
        backlog: int = 4_000,
        pace: float = 1,
        harmless: bool = False,
        lose: int | None = None,
        batches: int = BATCHES,
        say: Callable[[str], None] = print,
    ) -> None:
        self._world = world
        self._folder = folder
        self._seconds = seconds
        self._seed = seed
        self._lose = lose
        self._batches = batches
        self._say = say
        self._pause = threading.Event()
        (folder / "record").mkdir(parents=True)
        (folder / "logs").mkdir()
        dice = random.Random(seed)
        lanes = {
            "usual": Lane(drawn(seed), backlog),
            "growing": Lane(growing(seed), backlog // 2, lost_share=0.05, fresh=True),
            "shared": Lane(shared(seed), backlog // 2, lost_share=0.05),
            "racing": Lane(racing(), backlog),
            "nesting": Lane(nested(seed), backlog),
        }
        self._broker = Broker(lanes, random.Random(dice.random()))
        self._post = Post()
        self._url = f"http://127.0.0.1:{free_port()}"
        self._service = self._kept(
            "service",
            "tests.chaos.service",
            *("--workers", "3", "--port", self._url.rpartition(":")[2]),
            environment={"LASTBIT_CHAOS_ALL_LARGE": "1"} if harmless and not lose else {},
        )
        dispatcher = "tests.chaos.dispatcher" if lose else "jobs.dispatcher"
        self._dispatchers = [self._kept(f"dispatcher-{n}", dispatcher, "--every", "0.1") for n in (1, 2)]
        places = {"broker": str(self._broker.port), "url": self._url, "database": world.direct}
        actor_arguments = [f"--{name}={place}" for name, place in {**places, "record": str(folder / "record")}.items()]
        self._actors = [self._kept(name, "tests.chaos.actors", name, *actor_arguments) for name in actors]
        kinds: list[tuple[Mapping[str, Trouble], float]] = []
        if not lose:
            kinds.append(({"a group's row held": self._hold}, HELD_EVERY))
        if not harmless and not lose:
            kinds += [(world.troubles(), world.every / pace), (self._troubles(), EVERY / pace)]
        if not harmless and lose:
            kinds.append((self._troubles_around(), EVERY / pace))
        self._makers = [
            Troublemaker(
                troubles,
                seconds,
                random.Random(dice.random()),
                lambda: self._broker.counts["done"],
                folder / "logs" / "troubles.log",
            )
            for troubles, seconds in kinds
        ]

    def go(self) -> Report:
        with Database(self._world.direct) as database:
            schema.migrate(database)
            EFFECTS.create(database.engine)
        start = time.monotonic()
        keeper = Keeper([self._service])
        try:
            with keeper, Client(self._url, retry=Retry(attempts=10_000, deadline=PEACE, cap=0.2)) as client:
                self._wait_for_the_service()
                webhook = client.webhooks.create(self._post.url)
                self._post.know(webhook.secret)
                keeper.kept += [*self._dispatchers, *self._actors]
                self._harm(start)
                unfinished = self._let_it_end()
                keeper.leave()
                waiting = self._moved()
                owing = self._pay_parents()
                self._send_what_is_due(webhook.id)
                verification = self._verified()
                # After this, no request of a client that gave up is still being executed.
                self._service.kill(signal.SIGTERM)
                self._service.wait(60)
            with Database(self._world.direct) as database:
                collected = Evidence(
                    evidence.asks(self._folder / "record"),
                    Stored.read(database),
                    [part for plan in self._broker.taken for part in plan.whole],
                    self._post.got,
                    webhook.position,
                    verification,
                    unfinished,
                    owing,
                    evidence.left_to_the_sweep(self._service.log),
                    _effects(database),
                    waiting,
                    _recounted(database),
                    self._world.differences(),
                    self._crashed(),
                )
        finally:
            self._broker.close()
            self._post.close()
        troubles = sum((maker.made for maker in self._makers), Counter[str]())
        return Report(
            self._seed,
            time.monotonic() - start,
            self._world.facts(),
            troubles,
            self._broker.counts,
            Counter({program.name: program.begun for program in keeper.kept}),
            collected,
            Checks(collected),
        )

    def _wait_for_the_service(self) -> None:
        with Client(self._url, retry=Retry(attempts=2)) as client:
            for _ in range(PEACE * 5):
                with contextlib.suppress(ServiceUnreachable, Unavailable):
                    client.events(after=0)
                    return
                assert not self._service.ended, self._service.log.read_text()
                self._pause.wait(0.2)
        raise AssertionError("the service did not start")

    # Trouble.

    def _harm(self, start: float) -> None:
        if self._lose:
            self._world.lose(self._lose)
        for maker in self._makers:
            maker.begin()
        start_of_round = last_report = time.monotonic()
        while not any(maker.failure for maker in self._makers):
            now = time.monotonic()
            is_enough = all(maker.played for maker in self._makers) and len(self._broker.taken) >= self._batches
            if now > start_of_round + self._seconds * (1 if is_enough else LONGER):
                break
            if now > last_report + PROGRESS_EVERY:
                last_report = now
                self._tell(now - start)
            self._pause.wait(0.1)
        self._tell(time.monotonic() - start)
        for maker in self._makers:
            maker.stop()
        for maker in self._makers:
            if maker.failure is not None:
                raise maker.failure
        self._post.mend()
        self._world.settle()

    def _tell(self, seconds: float) -> None:
        troubles = sum(maker.made.total() for maker in self._makers)
        self._say(
            f"{seconds:5.0f} s: {len(self._broker.taken)} batches begun, {self._broker.counts['done']:,} deliveries "
            f"done, {self._broker.left:,} waiting, {troubles} troubles, {len(self._post.got):,} webhooks"
        )

    def _troubles(self) -> Mapping[str, Trouble]:
        return {
            "service killed": lambda _: self._service.kill(),
            "service stopped": lambda _: self._service.kill(signal.SIGTERM),
            "worker killed": self._kill_a_worker,
            "other worker killed": self._kill_a_worker,
            **self._troubles_around(),
        }

    def _troubles_around(self) -> Mapping[str, Trouble]:
        """Around the service, which goes on."""
        return {
            "dispatcher killed": lambda dice: dice.choice(self._dispatchers).kill(),
            "dispatcher stopped": lambda dice: dice.choice(self._dispatchers).kill(signal.SIGTERM),
            **{f"{program.name} killed": functools.partial(_kill, program) for program in self._actors},
            **self._post.troubles(),
        }

    def _hold(self, dice: random.Random) -> None:
        Holder(self._world.direct).hold(dice)

    def _kill_a_worker(self, dice: random.Random) -> None:
        if workers := self._service.workers():
            with contextlib.suppress(ProcessLookupError):  # it was ending
                os.kill(dice.choice(workers), signal.SIGKILL)

    # The end.

    def _let_it_end(self) -> int:
        """Wait until all plans and deliveries are done; return the number of unfinished ones."""
        self._say("no more disturbances: the remaining work is finished undisturbed")
        self._broker.calm()
        self._broker.drained(PEACE)
        unfinished = self._broker.left
        self._broker.stop()
        return unfinished

    def _moved(self) -> int:
        """Wait until the service and the dispatchers have moved what embedded consumers left, and what those left that
        were killed. Returns the number of rows of the outboxes that still wait."""
        until = time.monotonic() + PEACE
        counts = [sa.select(sa.func.count()).select_from(box) for box in (tables.count_outbox, tables.event_outbox)]
        while True:
            with Database(self._world.direct) as database, database.engine.connect() as tx:
                waiting = sum(tx.scalar(count) or 0 for count in counts)
            if not waiting or time.monotonic() > until:
                return waiting
            self._pause.wait(0.2)

    def _pay_parents(self) -> list[int]:
        """Pay the debts of nested batches that are left. Returns these batches, without those that have paid and were
        locked when their debts were to be removed."""
        with Database(self._world.direct) as database:
            stored = Stored.read(database)
            parents.sweep(database)
        return [
            row.id
            for row in stored.batches.values()
            if row.parent_due is not None and stored.state(row.parent_batch, row.parent_number) == "pending"
        ]

    def _send_what_is_due(self, webhook: int) -> None:
        """Make all deliveries due, since the leases of killed dispatchers last a minute."""
        for dispatcher in self._dispatchers:
            dispatcher.kill()
            dispatcher.wait(60)
        columns = tables.deliveries.c
        with Database(self._world.direct) as database, database.engine.begin() as tx:
            tx.execute(sa.update(tables.deliveries).where(columns.state == "pending").values(due_at=tables.utc_now()))
        self._dispatchers[0].start()
        with Client(self._url) as client:
            last = client.events(limit=1).last
            until = time.monotonic() + PEACE
            while time.monotonic() < until and not (
                client.webhooks.get(webhook).position == last
                and not any(client.webhooks.deliveries(webhook, state="pending"))
            ):
                self._pause.wait(0.2)
        self._dispatchers[0].kill(signal.SIGTERM)
        self._dispatchers[0].wait(60)

    def _verified(self) -> Any:
        process = subprocess.run(
            [sys.executable, "-m", "lastbit", "--json", "--url", self._url, "verify", "--all"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode in (0, 3), process.stderr
        return json.loads(process.stdout)

    def _crashed(self) -> list[str]:
        """Actors that ended without being killed. The service and the dispatchers may end if they start while the
        database is unreachable."""
        return [
            f"{program.name} ended by itself: {dict(program.ended)}\n{program.log.read_text()[-2000:]}"
            for program in self._actors
            if any(program.ended)  # 0 is the code of an actor that was stopped
        ]

    def _kept(self, name: str, module: str, *arguments: str, environment: Mapping[str, str] = {}) -> Kept:
        variables = {"LASTBIT_DATABASE_URL": self._world.url, "TMPDIR": str(self._folder)}
        log = self._folder / "logs" / f"{name}.log"
        return Kept(name, module, *arguments, log=log, environment={**SETTINGS, **environment, **variables})


def _kill(program: Kept, _: random.Random) -> None:
    program.kill()


def _effects(database: Database) -> list[tuple[str, str]]:
    with database.engine.connect() as tx:
        return [(row.item, row.attempt) for row in tx.execute(sa.select(EFFECTS))]


def _recounted(database: Database) -> str | None:
    try:
        recount(database)
    except AssertionError as error:
        return str(error)
    return None
