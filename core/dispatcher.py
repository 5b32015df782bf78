"""The dispatcher: plans, claims, sends and records deliveries, in a bounded number of threads. It also fires timers.

`run_once` finds due work and starts a send for each free thread, without waiting. A thread that has recorded its
delivery claims the next one itself, so throughput depends on the receivers, not on the rounds. Each webhook may use
only its share of the threads, so a receiver that hangs doesn't delay others.

Any number of dispatchers may share one database (see `replicas`). If one is killed, nothing is lost (see `deliveries`).
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime, timedelta
from typing import Final

import structlog

from core import errors, metrics, tables
from core.acks import parents
from core.processes import timers
from core.storage.database import Database
from core.webhooks import deliveries, message
from core.webhooks.backoff import Backoff
from core.webhooks.deliveries import Claim
from core.webhooks.delivery_log import Progress
from core.webhooks.replicas import Replica
from core.webhooks.sender import Sender, SendResult

SWEEP: Final = 0.5
"""Seconds that a round spends on parents of ended batches. The remaining ones are left to the next round."""

log = structlog.get_logger(__name__)


class Dispatcher:
    """`lease` must be longer than any send. With a `replica`, the dispatcher claims that replica's share, otherwise all
    due deliveries."""

    def __init__(
        self,
        database: Database,
        sender: Sender,
        *,
        backoff: Backoff,
        lease: timedelta,
        threads: int = 16,
        replica: Replica | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._database = database
        self._sender = sender
        self._backoff = backoff
        self._lease = lease
        self._replica = replica
        self._chance = chance
        self._threads = threads
        self._share = max(1, threads // 4)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dispatcher")
        self._lock = threading.Lock()
        self._busy: Counter[int] = Counter()
        """The number of deliveries being sent, by webhook."""
        self._sending: set[Future[None]] = set()
        self._stopping = False
        self._stuck = parents.Stuck()
        self._last: datetime | None = None
        """The database's time in the last round."""

    def run_once(self) -> int:
        """Run one round. Return the number of sends that it started plus the number of parents that it updated. If the
        database is unavailable, the remaining work is left to the next round."""
        self._beat()
        try:
            self._look_at_the_clock()
            metrics.TIMERS_FIRED.inc(timers.fire(self._database))
            for webhook in self._database.read(deliveries.behind):
                self._database.write_in_chunks(deliveries.plan, webhook)
            due = self._database.read(deliveries.is_due, self._partitions)
            claims = self._claim(self._threads) if due else []
        except errors.CoreError as error:
            log.warning("dispatcher_waits", error=str(error))
            return 0
        for claim in claims:
            future = self._pool.submit(self._work, claim)
            self._sending.add(future)
            future.add_done_callback(self._sending.discard)
        return len(claims) + self._sweep()

    def _sweep(self) -> int:
        """Ack or fail parents' items, after the sends were started. The resulting events are sent in the next round."""
        try:
            return parents.sweep(self._database, stuck_parents=self._stuck, seconds=SWEEP)
        except errors.CoreError as error:
            log.warning("dispatcher_waits", error=str(error))
            return 0

    def _look_at_the_clock(self) -> None:
        """Move due times closer if the clock was set back, perhaps while no dispatcher was running."""
        now = self._database.read(tables.clock)
        if self._last is None or now < self._last:
            longest = timedelta(seconds=self._backoff.longest)
            self._database.write(deliveries.bring_closer, self._lease, longest, repeatable=True)
        self._last = now

    def settle(self) -> None:
        """Wait until nothing is being sent."""
        while sending := list(self._sending):
            wait(sending)

    def stop(self) -> None:
        """Start no more sends, finish those in progress, and leave the rest to the other replicas."""
        self._stopping = True
        if self._replica is not None:
            try:
                self._replica.leave()
            except errors.CoreError as error:  # its lease will expire
                log.warning("dispatcher_waits", error=str(error))
        self._pool.shutdown()

    def _beat(self) -> None:
        if self._replica is not None:
            try:
                self._replica.beat()
            except errors.CoreError as error:  # the round may succeed anyway
                log.warning("dispatcher_waits", error=str(error))

    @property
    def _partitions(self) -> frozenset[int] | None:
        return None if self._replica is None else self._replica.partitions

    def _claim(self, limit: int) -> list[Claim]:
        """Claim deliveries, under a lock so that no webhook exceeds its share."""
        with self._lock:
            free = min(limit, self._threads - self._busy.total())
            if free <= 0 or self._stopping:
                return []
            room = {webhook: self._share - count for webhook, count in self._busy.items()}
            while True:
                claims, dead_count = self._database.write(
                    deliveries.claim, self._lease, free, room, self._share, self._partitions
                )
                if claims or not dead_count:  # dead deliveries may have hidden others
                    break
            self._busy.update(claim.webhook for claim in claims)
            return claims

    def _work(self, claim: Claim | None) -> None:
        while claim is not None:
            try:
                self._deliver(claim)
            except errors.CoreError as error:
                log.warning("delivery_not_recorded", delivery=claim.delivery, error=str(error))
            except Exception:  # a bug: the claim expires, and this thread continues with others
                log.exception("delivery_failed", delivery=claim.delivery)
            finally:  # even if logging fails
                with self._lock:
                    self._busy[claim.webhook] -= 1
                    if not self._busy[claim.webhook]:
                        del self._busy[claim.webhook]
            try:
                claim = next(iter(self._claim(1)), None)
            except errors.CoreError:
                claim = None  # the next round logs the error

    def _deliver(self, claim: Claim) -> None:
        content = message.body(claim.event)
        headers = message.headers(claim.secret, claim.event.id, claim.at, content)
        try:
            answer = self._sender.send(claim.url, headers, content)
        except Exception:  # a bug of the sender: counted as an attempt, or it would be retried forever
            log.exception("sender_failed", delivery=claim.delivery)
            answer = SendResult(None, "the sender failed; its log has the error", 0)
        state = self._database.write(lambda tx: deliveries.record(tx, claim, answer, self._backoff, self._chance()))
        log.log(
            logging.INFO if state is Progress.DELIVERED else logging.WARNING,
            "delivery",
            webhook=claim.webhook,
            webhook_id=claim.event.id,
            position=claim.event.position,
            state=state,
            status=answer.status,
            error=answer.error,
            milliseconds=answer.milliseconds,
        )
