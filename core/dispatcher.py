"""The dispatcher: plans, claims, sends and records deliveries, in a bounded number of threads. It also fires timers.

`run_once` finds due work, claims it and starts sends, without waiting. Many deliveries are claimed by one transaction,
and wait here until a thread is free. The results of sends that end during a transaction share the next one: recording
uses a combiner, as acks do. A record that frees room claims more, so throughput depends on the receivers, not on the
rounds.

How much a webhook gets (`_Lane`) depends on its receiver. Each has a *share*: a quarter of the threads, and as many
claims. After a quick success its *room* for claims grows by one; after a failure or a slow answer it has only its share
again, and claims beyond it are given back. Growing by one for each success doubles the room in each round trip, so a
fast receiver has all that it can use after a few; a receiver that begins to fail holds little. These bounds protect the
others:

* Places beyond the share are used only while more than half of the threads are free. So a fast receiver that suddenly
  hangs holds at most half of them, until its requests time out.
* Receivers that have not answered within `STEADY` last time, or not at all yet, use at most half of the threads
  together. So a tenant whose callbacks go to any number of hosts that hang, or to names that nobody resolves, delays
  only them.
* One webhook has at most `ROOM` claims for each thread, and all together four times as many. So memory is bounded,
  webhooks with a backlog leave room for others, and a dispatcher that is killed delays few deliveries by a lease.
* Callbacks to a host that is slow (`SLOW`) are postponed, except for those that its share needs, so claims for others
  don't read past thousands of them.
* A claim that has waited for `PATIENCE` seconds is given back and not sent, as its lease might end during the send.

A round claims only if there are threads to send and to record, and they last. So it doesn't matter when the system
allows no more threads: until a first one of each kind has started, rounds fail and claim nothing; after that, there are
fewer sends at a time.

Any number of dispatchers may share one database (see `replicas`). If one is killed, nothing is lost (see `deliveries`).
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias

import structlog

from core import errors, metrics, threads, traces
from core.acks import parents
from core.batches import descendants
from core.commits.combiner import Combiner
from core.commits.operation import Done
from core.commits.pending import Mailbox, Pending, call_receiver
from core.enlisted import mover
from core.processes import timers
from core.storage.database import Database
from core.storage.job_runs import JobRuns
from core.webhooks import callbacks, deliveries, message
from core.webhooks.backoff import Backoff
from core.webhooks.deliveries import Claim, Record
from core.webhooks.delivery_log import Progress
from core.webhooks.due_times import DueTimes
from core.webhooks.replicas import Replica
from core.webhooks.sender import Sender, SendResult

CORRECT: Final = 0.5
"""Seconds that a round looks through due times after the database's clock was set back."""
CLAIM: Final = 0.5
"""Seconds after which a round leaves the rest of a disabled webhook's backlog to the next one."""
PREPARE: Final = 0.5
"""Seconds that a round spends on timers and on planning, and at least a page of each."""
SWEEP: Final = 0.5
"""Seconds that a round spends on the children of ended batches, and as many on their parents. The remaining ones are
left to the next round."""

POSTPONE: Final = 0.5
"""Seconds that a round spends on postponing deliveries to slow hosts, and at least a page of each host."""
SLOW: Final = 10.0
"""Seconds without a quick success after which a host without room is slow."""

ROOM: Final = 16
"""Maximum claims of one webhook, for each thread."""
QUICK: Final = 500
"""The maximum duration of a quick answer, in milliseconds."""
STEADY: Final = 2_000
"""The maximum duration of a success, in milliseconds, by which a receiver shows that it works."""
REMEMBERED: Final = 10_000
"""Maximum receivers of which a dispatcher remembers that they work."""
PATIENCE: Final = 10.0
"""Seconds after which a claim is too old to be sent."""
LOCK_WAIT: Final = 0.25
"""Seconds that a transaction with several records waits for a lock."""

log = structlog.get_logger(__name__)

_Jobs: TypeAlias = queue.SimpleQueue[Callable[[], object] | None]
"""What the threads of one kind do next. None ends one of them."""


class _Lane:
    """The claims of one webhook, or of all callbacks to one host. A round removes it if it has none, so what it shows
    of the receiver is recent."""

    def __init__(self, room: int) -> None:
        self.room = room
        """The number of deliveries that may be claimed."""
        self.claimed = 0
        """The number of deliveries that are claimed and not yet recorded."""
        self.sending = 0
        self.last_quick = time.monotonic()
        """The last quick success, or the beginning."""
        self.waiting: deque[tuple[Claim, float]] = deque()
        """Claims that nobody sends yet, and since when they were claimed."""


class Dispatcher:
    """`lease` must be longer than any send by more than `PATIENCE`. With a `replica`, the dispatcher claims that
    replica's share, otherwise all due deliveries."""

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
        self._room = ROOM * threads
        self._sends: _Jobs = queue.SimpleQueue()
        self._senders: list[threading.Thread] = []
        self._claims: _Jobs = queue.SimpleQueue()
        self._claimer: threading.Thread | None = None
        self._records = Combiner(self._commit, what="deliveries")
        self._recorded = _Recorded(self._free)
        self._claiming = threading.Lock()
        """Held during a claim, so that no webhook exceeds its room."""
        self._lock = threading.Lock()
        """Protects the lanes and the numbers below."""
        self._changed = threading.Condition(self._lock)
        self._lanes: dict[int, _Lane] = {}
        self._working: dict[int, None] = {}
        """The lanes whose last send was a success within `STEADY`, oldest first. Also those without claims."""
        self._sending = 0
        self._refills = 0
        """Claims that were requested, and are not finished."""
        self._stopping = False
        self._stuck = parents.Stuck()
        self._runs = JobRuns(database, "dispatcher")
        self._due_times = DueTimes(database, timedelta(seconds=backoff.longest))

    def run_once(self) -> int:
        """Run one round. Return the number of sends that it started plus the number of batches that it updated; at
        least 1 if something is left to plan or to claim. If the database is unavailable, the remaining work is left to
        the next round. Raises `errors.Unavailable` if the system doesn't allow the threads."""
        self._start_threads()
        self._beat()
        try:
            count = self._round()
        except errors.CoreError as error:
            log.warning("dispatcher_waits", error=str(error))
            return 0
        self._runs.succeeded()
        return count

    def run_until_idle(self, stop: threading.Event) -> None:
        """Run rounds, each after the sends of the one before, until nothing is due or `stop` is set. Raises the error
        that ends a round."""
        self._start_threads()
        while self._round() and not stop.is_set():
            self.settle()
        self._runs.succeeded()

    def _round(self) -> int:
        self._due_times.correct(CORRECT)
        is_behind = self._prepare()
        with self._lock:
            self._lanes = {name: lane for name, lane in self._lanes.items() if lane.claimed}
        self._postpone()
        due = self._database.read(deliveries.is_due, self._partitions)
        claims = self._claim() if due else 0
        # After the sends were started. The resulting events are sent in the next round.
        moved = mover.sweep(self._database, seconds=SWEEP).batches
        ended = descendants.sweep(self._database, seconds=SWEEP).ended
        resolved = parents.sweep(self._database, stuck_parents=self._stuck, seconds=SWEEP)
        return claims + len(moved) + ended + resolved + is_behind

    def _start_threads(self) -> None:
        """Start a thread of each kind, unless it is running. Raises `errors.Unavailable`."""
        self._records.start()
        with self._lock:
            if self._claimer is None and not self._stopping:
                self._claimer = threads.start(_run, self._claims, name="dispatcher-claims")
            if not self._senders and not self._stopping:
                self._start_sender()

    def _start_sender(self) -> None:
        """Called under the lock. Raises `errors.Unavailable`."""
        self._senders.append(threads.start(_run, self._sends, name=f"dispatcher-{len(self._senders)}"))

    def _prepare(self) -> bool:
        """Fire timers and plan deliveries, a page of each webhook in turn. After `PREPARE` seconds, the rest of a long
        backlog is left to the next round, so that it delays neither sends nor the lease. Return whether something is
        left."""
        until = time.monotonic() + PREPARE
        fired = timers.fire(self._database, until)
        metrics.TIMERS_FIRED.inc(fired)
        plans = [partial(deliveries.plan, webhook=webhook) for webhook in self._database.read(deliveries.behind)]
        if self._database.read(callbacks.behind):
            plans.append(partial(callbacks.plan))
        while plans:
            plans = [plan for plan in plans if self._database.write(plan)]
            if time.monotonic() >= until:
                break
        return bool(plans) or fired >= timers.PAGE

    def _postpone(self) -> None:
        """Postpone deliveries of callbacks to slow hosts, so that claims don't read past all of them. Those that are
        kept suffice for the share, unless answers become quick, until the others are due again."""
        start = time.monotonic()
        kept = round(self._share * deliveries.POSTPONED.total_seconds() * 1000 / QUICK)
        with self._lock:
            slow = [
                name
                for name, lane in self._lanes.items()
                if name < 0 and lane.claimed >= lane.room and start - lane.last_quick >= SLOW
            ]
        while slow:
            slow = [lane for lane in slow if self._database.write(deliveries.postpone, lane, kept)]
            if time.monotonic() - start >= POSTPONE:
                break

    def settle(self) -> None:
        """Wait until nothing is claimed by this dispatcher."""
        with self._changed:
            self._changed.wait_for(lambda: not self._refills and not any(lane.claimed for lane in self._lanes.values()))

    def stop(self) -> None:
        """Start no more sends, finish those in progress, and leave the rest to the other replicas."""
        with self._lock:
            self._stopping = True
        if self._replica is not None:
            try:
                self._replica.leave()
            except errors.CoreError as error:  # its lease will expire
                log.warning("dispatcher_waits", error=str(error))
        self._claims.put(None)
        if self._claimer is not None:
            self._claimer.join()
        with self._claiming, self._lock:
            surplus = [claim for lane in self._lanes.values() for claim in self._withdraw(lane, 0)]
        self._give_back(surplus)
        for _ in self._senders:
            self._sends.put(None)
        for sender in self._senders:
            sender.join()
        self._records.stop()

    def _beat(self) -> None:
        if self._replica is not None:
            try:
                self._replica.beat()
            except errors.CoreError as error:  # the round may succeed anyway
                log.warning("dispatcher_waits", error=str(error))

    @property
    def _partitions(self) -> frozenset[int] | None:
        return None if self._replica is None else self._replica.partitions

    def _claim(self) -> int:
        """Claim deliveries as far as there is room, and start sends. Returns the number of claims; at least 1 if
        there may be more to claim."""
        count = 0
        until = time.monotonic() + CLAIM
        with self._claiming:
            while True:
                with self._lock:
                    room = {name: lane.room - lane.claimed for name, lane in self._lanes.items()}
                    limit = 4 * self._room - sum(lane.claimed for lane in self._lanes.values())
                if limit <= 0 or self._stopping:
                    return count
                start = time.monotonic()
                claims, dead_count = self._database.write(
                    deliveries.claim, self._lease, limit, room, self._share, self._partitions
                )
                count += len(claims)
                with self._lock:
                    for claim in claims:
                        lane = self._lanes.setdefault(claim.lane, _Lane(self._share))
                        lane.claimed += 1
                        lane.waiting.append((claim, start))
                    late = self._start()
                self._give_back(late)
                if not dead_count:  # dead deliveries may have hidden others
                    return count
                if time.monotonic() >= until:
                    return max(count, 1)

    def _refill(self) -> None:
        try:
            self._claim()
        except errors.CoreError:
            pass  # the next round logs the error
        except Exception:  # a bug: the next round tries again
            log.exception("claim_failed")
        finally:
            with self._changed:
                self._refills -= 1
                self._changed.notify_all()

    def _start(self) -> list[Claim]:
        """Start sends for all free threads, under the lock. Returns claims to give back, as they are too old."""
        late: list[Claim] = []
        while (claim := self._take(late)) is not None:
            self._sends.put(partial(self._work, claim))
        return late

    def _take(self, late: list[Claim]) -> Claim | None:
        """Remove and return the next claim to send, of the webhook with the fewest sends. Adds to `late` what is too
        old. Called under the lock."""
        while not self._stopping:
            free = self._threads - self._sending
            has_spare = free > self._threads // 2
            others = sum(lane.sending for name, lane in self._lanes.items() if name not in self._working)
            has_spare_for_others = others < max(1, self._threads // 2)
            lanes = [
                lane
                for name, lane in self._lanes.items()
                if lane.waiting
                and (has_spare_for_others or name in self._working)
                and (lane.sending < self._share or (has_spare and lane.room > self._share))
            ]
            if free <= 0 or not lanes:
                return None
            if self._sending >= len(self._senders):
                try:
                    self._start_sender()
                except errors.Unavailable:  # a thread that ends its send takes the next claim
                    return None
            lane = min(lanes, key=lambda lane: lane.sending)
            claim, since = lane.waiting.popleft()
            if time.monotonic() - since < PATIENCE:
                lane.sending += 1
                self._sending += 1
                return claim
            late.append(claim)
        return None

    def _withdraw(self, lane: _Lane, room: int) -> list[Claim]:
        """Remove and return the waiting claims that exceed the room. Called under the lock."""
        surplus = min(len(lane.waiting), max(0, lane.claimed - room))
        return [lane.waiting.pop()[0] for _ in range(surplus)]

    def _work(self, claim: Claim | None) -> None:
        while claim is not None:
            answer: SendResult | None = None
            try:
                answer = self._send(claim)
            except Exception:  # a bug: the claim expires, and this thread continues with others
                log.exception("delivery_failed", delivery=claim.delivery)
            sent, late = claim, []
            with self._lock:
                lane = self._lanes[sent.lane]
                lane.sending -= 1
                self._sending -= 1
                self._remember(sent.lane, answer)
                if answer is not None and answer.delivered and answer.milliseconds <= QUICK:
                    lane.room = min(self._room, lane.room + 1)
                    lane.last_quick = time.monotonic()
                else:
                    lane.room = self._share
                    is_gone = answer is not None and answer.status == deliveries.GONE
                    late = self._withdraw(lane, 0 if is_gone else lane.room)
                claim = self._take(late)
                late += self._start()
            if answer is None:
                self._free([sent])
            else:
                self._record(sent, answer)
            self._give_back(late)

    def _remember(self, lane: int, answer: SendResult | None) -> None:
        """Whether its receiver works. Called under the lock."""
        self._working.pop(lane, None)
        if answer is not None and answer.delivered and answer.milliseconds <= STEADY:
            self._working[lane] = None
            if len(self._working) > REMEMBERED:
                del self._working[next(iter(self._working))]

    def _send(self, claim: Claim) -> SendResult:
        content = message.body(claim.event)
        headers = message.headers(claim.secrets, claim.event.id, claim.at, content)
        with traces.delivering(message.happening(claim.event), claim.webhook) as delivery:
            try:
                result = self._sender.send(claim.url, headers | delivery.headers, content)
            except Exception:  # a bug of the sender: counted as an attempt, or it would be retried forever
                log.exception("sender_failed", delivery=claim.delivery)
                result = SendResult(None, "the sender failed; its log has the error", 0)
            delivery.end(result.status, result.error)
            return result

    def _record(self, claim: Claim, answer: SendResult | None) -> None:
        record = Record(batch=claim.delivery, claim=claim, answer=answer, chance=self._chance())
        try:
            self._records.submit(record, _log, self._recorded)
        except Exception as error:  # noqa: BLE001  # the claim expires; without this, it would count forever
            log.warning("delivery_not_recorded", delivery=claim.delivery, error=str(error))
            self._free([claim])

    def _give_back(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._record(claim, None)

    def _commit(self, records: Sequence[Record], *, lock_waits: int) -> list[Done]:
        results = self._database.write(
            deliveries.record,
            records,
            self._backoff,
            lock_waits=max(0, lock_waits - 1),
            lock_wait=None if lock_waits else LOCK_WAIT,
        )
        return [Done(result) for result in results]

    def _free(self, claims: Sequence[Claim]) -> None:
        """End these claims, and claim more if there is room."""
        with self._changed:
            has_room = False
            for claim in claims:
                lane = self._lanes[claim.lane]
                lane.claimed -= 1
                # Few large claims are cheaper than many small ones, but no thread should wait for one.
                has_room = has_room or not lane.waiting or 2 * lane.claimed <= lane.room
            # At most one waits while another runs.
            if has_room and self._refills < 2 and not self._stopping:
                self._refills += 1
                self._claims.put(self._refill)
            self._changed.notify_all()


def _run(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()


class _Recorded(Mailbox):
    """Ends the claims of finished records together, and then calls their receivers."""

    def __init__(self, free: Callable[[Sequence[Claim]], None]) -> None:
        self._free = free

    def put(self, finished: Sequence[Pending[Any]]) -> None:
        call_receiver(self._free, [pending.call.claim for pending in finished], len(finished))
        super().put(finished)


def _log(pending: Pending[Progress | None]) -> None:
    record: Record = pending.call
    claim, answer, state = record.claim, record.answer, pending.answer
    if pending.error is not None:  # the claim expires
        log.warning("delivery_not_recorded", delivery=claim.delivery, error=str(pending.error))
        return
    if answer is None:
        return
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
