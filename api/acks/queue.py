"""The queue of acks as the event loop sees it: calls are parsed and queued without a thread, and answered together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from api.acks.bodies import Check, parse
from api.limits import Limits, sizes
from api.limits.rates import Rates
from api.metrics import ACK_REQUESTS, ACKS, RESULTS
from api.server.wakeups import Wakeups
from core.acks.call import HELD, AckResult, Call
from core.batches.lifecycle import Verb
from core.commits.pending import Pending, Receiver
from core.service import Service
from lastbit.tokens import Token


class AckQueue:
    """Queues acks, failures and skips. One per event loop."""

    def __init__(self, service: Service, limits: Limits, rates: Rates, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._limits = limits
        self._rates = rates
        self.finished = Wakeups(loop, _count)

    def is_full(self) -> bool:
        """Whether the next call must be refused: more acks arrive than can be committed, or parsed."""
        return self._service.acks.is_full() or self._limits.parse_budget.is_full()

    def parse(
        self, verb: Verb, idempotency_key: bytes | None, content: bytes, caller: Token
    ) -> tuple[Call, Check | None]:
        """As `bodies.parse`, and also charges the items to the caller's rate. Writes responses first where parsing
        would delay them (see `ParseBudget.has_large_calls`)."""
        if len(content) > sizes.IN_LOOP:
            self._rates.require_items(caller)
        budget = self._limits.parse_budget
        if not self.finished.is_empty and budget.has_large_calls():
            self.finished.empty()
        start = budget.begin()
        try:
            call, check = parse(verb, idempotency_key, content, caller, self._service)
        finally:
            budget.end(start)
        if caller.items is not None:
            self._rates.charge_items(caller, call.items)
        return call, check

    def submit(self, call: Call, receiver: Receiver[AckResult]) -> None:
        """Queue the call. `receiver` is called in the event loop when it is finished. Raises `errors.Overloaded`."""
        self._service.acks.submit(call, receiver, self.finished)

    def refuse_later(self, refuse: Callable[[], object]) -> None:
        """Call `refuse` after a delay. Writes the responses of finished calls now, not after all ready sockets were
        read."""
        self._limits.pause.before(refuse)
        self.finished.empty()


def _count(finished: Sequence[Pending[Any]]) -> None:
    """Count calls and their items, once for all calls of a commit."""
    counts: dict[tuple[Verb, str], int] = {}
    calls = dict.fromkeys(Verb, 0)
    for pending in finished:
        if pending.error is None:
            answer, verb = pending.answer, pending.call.verb
            calls[verb] += 1
            held = rejected = 0
            for rejection in answer.rejected:
                if rejection.reason == HELD:
                    held += rejection.count
                else:
                    rejected += rejection.count
            for result, count in zip(RESULTS, (answer.applied, answer.repeated, held, rejected), strict=True):
                if count:
                    counts[verb, result] = counts.get((verb, result), 0) + count
    for verb, count in calls.items():
        ACK_REQUESTS.labels(verb.value, "200").inc(count)
    for (verb, result), count in counts.items():
        ACKS.labels(verb.value, result).inc(count)
