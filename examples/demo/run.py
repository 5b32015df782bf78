"""The course of the demo: it starts and kills the processes, and detects the end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from examples.demo import proof
from examples.demo.broker import Publisher
from examples.demo.consumer import AT_ONCE
from examples.demo.files import standard_library, uneven_chunks
from examples.demo.proof import Ledger
from examples.demo.show import Show
from examples.processes import Failed, Process, Processes, start_service
from lastbit import BatchHandle, Client

CONSUMERS = 3
KILL_CONSUMER_AT = 0.35
"""The share of resolved files at which a consumer is killed."""
TICK = 0.2
"""Seconds between two reads of the batch."""


class Demo:
    def __init__(self, show: Show, processes: Processes, folder: Path) -> None:
        self._show = show
        self._processes = processes
        self._folder = folder
        self._database = folder / "lastbit.db"
        files = standard_library()
        self._chunks = uneven_chunks(files)
        self.ledger = Ledger(len(files))
        self._kill_producer_at = random.randrange(len(self._chunks) // 2, len(self._chunks))  # noqa: S311
        self._sealed = False
        self._ended: set[Process] = set()

    def run(self) -> None:
        """Run to the end. Raises `Failed`."""
        ledger, show = self.ledger, self._show
        show.say(f"the items: {ledger.files:,} Python files, the standard library of this interpreter")
        self._service, self.url = start_service(self._processes, self._database, seconds=60)
        show.say(f"the service: {self.url}, on SQLite")
        address = self._start_broker()
        with Client(self.url) as client, Publisher(address) as queue:
            self._queue = queue
            self._consumers = [
                self._processes.start(
                    f"consumer {number}",
                    "examples.demo.consumer",
                    *("--url", self.url, "--broker", address, "--name", f"consumer {number}"),
                )
                for number in range(1, CONSUMERS + 1)
            ]
            self._producing = [
                *("examples.demo.producer", "--url", self.url, "--broker", address),
                *("--progress-file", str(self._folder / "published"), "--seal-when-left", str(2 * CONSUMERS)),
            ]
            self._producer = self._processes.start("producer", *self._producing)
            show.say(f"{CONSUMERS} consumers and a producer; the queue duplicates one message in ten, and shuffles")
            batch = self._until_opened(client)
            while not batch.refresh().ended:
                self._look(batch)
                self._hear()
            self._finish(client, batch)

    def _start_broker(self) -> str:
        broker = self._processes.start("broker", "examples.demo.broker")
        report = self._processes.hear(30)
        if report is None or report.facts is None:
            raise Failed(f"the queue did not start:\n{broker.last_words()}")
        return str(report.facts["address"])

    def _until_opened(self, client: Client) -> BatchHandle:
        while True:
            report = self._processes.hear(60)
            if report is None:
                raise Failed(f"the producer did not open the batch:\n{self._producer.last_words()}")
            if report.facts is None:
                self._process_ended(report.process)
            elif "opened" in report.facts:
                self._show.say(f"producer: opened batch {report.facts['opened']}")
                return client.batch(report.facts["opened"])

    def _look(self, batch: BatchHandle) -> None:
        now = batch.info
        self._show.progress(now.resolved, now.items, self.ledger.files)
        self.ledger.most_bits = max(self.ledger.most_bits, proof.storage(self._database, batch.id).bits)
        if not self.ledger.held_by_the_killed and now.resolved >= KILL_CONSUMER_AT * self.ledger.files:
            self._kill_consumer()

    def _kill_consumer(self) -> None:
        """Kill a consumer that has messages. It is paused first, so that the queue's count is still right at the
        kill."""
        victim = self._consumers[1]
        victim.pause()
        messages = self._queue.statistics().held.get(victim.name, 0)
        if messages < AT_ONCE // 2:
            victim.resume()  # it has just finished most of its messages; try again at the next read
            return
        victim.kill()
        self.ledger.held_by_the_killed = messages
        self._show.say(
            f"[red]{victim.name} killed[/] (SIGKILL) with {messages} messages, which the queue gives to the others"
        )

    def _hear(self) -> None:
        """Handle the reports of the processes."""
        report = self._processes.hear(TICK)
        while report is not None:
            if report.facts is None:
                self._process_ended(report.process)
            else:
                self._take(report.process.name, report.facts)
            report = self._processes.hear(0)

    def _take(self, name: str, facts: dict[str, Any]) -> None:
        ledger = self.ledger
        if "error" in facts:
            ledger.errors.append(f"{name}: {facts['error']}")
        elif "completed" in facts:
            self._told(name, facts["newly"])
        elif "opened" in facts:
            ledger.resumed = facts["replayed"]
        elif "extended" in facts:
            self._extended(facts)
        elif "sealed" in facts:
            self._sealed = True
            self._show.say(f"producer: sealed the batch while {facts['pending']:,} of its items were pending")
            if facts["newly"]:
                self._told("the producer's seal", newly=True)

    def _told(self, name: str, newly: bool) -> None:
        if newly:
            self.ledger.completed_by.append(name if name.startswith("the ") else f"an ack of {name}")
        else:
            self.ledger.told_again += 1

    def _extended(self, facts: dict[str, Any]) -> None:
        ledger, number = self.ledger, facts["extended"]
        ids = (facts["first"], facts["last"])
        if number == self._kill_producer_at and ledger.producer_killed_at is None:
            self._producer.kill()
            ledger.producer_killed_at = number
            ledger.promised[number] = ids
            self._show.say(
                f"[red]producer killed[/] (SIGKILL) between extend and publish: it got {ids[0]} … {ids[1]} and "
                "published none of them"
            )
            self._producer = self._processes.start("producer", *self._producing)
            return
        if number in ledger.promised:
            if ledger.promised[number] != ids:
                ledger.reissued.append(number)
            else:
                self._show.say(f"producer restarted: the same keys, so the same ids, {ids[0]} … {ids[1]}")
        ledger.promised[number] = ids
        self._producer.tell()

    def _process_ended(self, process: Process) -> None:
        if process.was_killed:
            return
        status = process.wait()
        if status:
            raise Failed(f"{process.name} ended with exit status {status}:\n{process.last_words()}")
        self._ended.add(process)

    def _finish(self, client: Client, batch: BatchHandle) -> None:
        """The batch has ended. Duplicates may still be in progress, so the queue is emptied before the checks."""
        ledger = self.ledger
        now = batch.info
        self._show.progress(now.resolved, now.items, ledger.files)
        self._show.say(f"the batch is [green]{now.state}[/]; the last duplicates are processed")
        self._queue.drain()
        survivors = {process for process in (*self._consumers, self._producer) if not process.was_killed}
        while self._ended < survivors:
            self._hear()
        ledger.queue = self._queue.statistics()
        ledger.verification = batch.verify()
        ledger.metrics = proof.metrics(self.url)
        ledger.storage = proof.storage(self._database, batch.id)
        ledger.once_more = client.ack(f"{batch.id}:0:0")
        for completion in ledger.once_more.completed:
            self._told("the demo", completion.newly)
        ledger.batch = batch.refresh()
