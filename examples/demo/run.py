"""The course of the demo: who is started, who is killed and when, and when it is over."""

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
"""Of the files."""
TICK = 0.2
"""Seconds between two looks at the batch."""


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
        """To the end, or to a `Failed`."""
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
        heard = self._processes.hear(30)
        if heard is None or heard.facts is None:
            raise Failed(f"the queue did not start:\n{broker.last_words()}")
        return str(heard.facts["address"])

    def _until_opened(self, client: Client) -> BatchHandle:
        while True:
            heard = self._processes.hear(60)
            if heard is None:
                raise Failed(f"the producer did not open the batch:\n{self._producer.last_words()}")
            if heard.facts is None:
                self._process_ended(heard.process)
            elif "opened" in heard.facts:
                self._show.say(f"producer: opened batch {heard.facts['opened']}")
                return client.batch(heard.facts["opened"])

    def _look(self, batch: BatchHandle) -> None:
        now = batch.info
        self._show.progress(now.resolved, now.items, self.ledger.files)
        self.ledger.most_bits = max(self.ledger.most_bits, proof.storage(self._database, batch.id).bits)
        if not self.ledger.held_by_the_killed and now.resolved >= KILL_CONSUMER_AT * self.ledger.files:
            self._kill_consumer()

    def _kill_consumer(self) -> None:
        """While it holds messages: stopped first, so that the queue's word on that is still true when it is killed."""
        victim = self._consumers[1]
        victim.pause()
        held = self._queue.statistics().held.get(victim.name, 0)
        if held < AT_ONCE // 2:
            victim.resume()  # it has just finished a good deal; the next look will do
            return
        victim.kill()
        self.ledger.held_by_the_killed = held
        self._show.say(
            f"[red]{victim.name} killed[/] (SIGKILL) while it held {held} messages; the queue hands them to the others"
        )

    def _hear(self) -> None:
        """Take in what the processes said."""
        heard = self._processes.hear(TICK)
        while heard is not None:
            if heard.facts is None:
                self._process_ended(heard.process)
            else:
                self._take(heard.process.name, heard.facts)
            heard = self._processes.hear(0)

    def _take(self, name: str, said: dict[str, Any]) -> None:
        ledger = self.ledger
        if "error" in said:
            ledger.errors.append(f"{name}: {said['error']}")
        elif "completed" in said:
            self._told(name, said["newly"])
        elif "opened" in said:
            ledger.resumed = said["replayed"]
        elif "extended" in said:
            self._extended(said)
        elif "sealed" in said:
            self._sealed = True
            self._show.say(f"producer: sealed the batch while {said['pending']:,} of its items were pending")
            if said["newly"]:
                self._told("the producer's seal", newly=True)

    def _told(self, name: str, newly: bool) -> None:
        if newly:
            self.ledger.completed_by.append(name if name.startswith("the ") else f"an ack of {name}")
        else:
            self.ledger.told_again += 1

    def _extended(self, said: dict[str, Any]) -> None:
        ledger, number = self.ledger, said["extended"]
        ids = (said["first"], said["last"])
        if number == self._kill_producer_at and ledger.producer_killed_at is None:
            self._producer.kill()
            ledger.producer_killed_at = number
            ledger.promised[number] = ids
            self._show.say(
                f"[red]producer killed[/] (SIGKILL) between extend and publish: it was given {ids[0]} … {ids[1]} and "
                "published none of them"
            )
            self._producer = self._processes.start("producer", *self._producing)
            return
        if number in ledger.promised:
            if ledger.promised[number] != ids:
                ledger.reissued.append(number)
            else:
                self._show.say(f"producer started again: the same keys, so the same ids, {ids[0]} … {ids[1]}")
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
        """The batch has ended. Duplicates may still be on their way, so the queue is emptied before it is judged."""
        ledger = self.ledger
        now = batch.info
        self._show.progress(now.resolved, now.items, ledger.files)
        self._show.say(f"the batch is [green]{now.state}[/]; the last duplicates run out")
        self._queue.drain()
        everybody = {process for process in (*self._consumers, self._producer) if not process.was_killed}
        while self._ended < everybody:
            self._hear()
        ledger.queue = self._queue.statistics()
        ledger.verification = batch.verify()
        ledger.metrics = proof.metrics(self.url)
        ledger.storage = proof.storage(self._database, batch.id)
        ledger.once_more = client.ack(f"{batch.id}:0:0")
        for done in ledger.once_more.completed:
            self._told("the demo", done.newly)
        ledger.batch = batch.refresh()
