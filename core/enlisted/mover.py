"""The mover: counts what transactions of callers have left in the outboxes, and appends their events to the feed.

A pass locks the rows of some batches, as each transaction does that counts, and takes what waits for them. So it needs
no order among movers: a service, a dispatcher, a janitor and any number of embedded clients may move at a time, and
each row is counted once. So does a flush where what waits may decide (see `core.acks.completion`). A batch completes
in the transaction that counts its last item, never before.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog
from sqlalchemy.engine import Connection

from core import errors, feed, writes
from core.acks import completion, outbox
from core.acks.call import Call, Unit
from core.batches.lifecycle import State, Verb
from core.batches.writing import BatchWrites, Seal
from core.commits import apart
from core.storage import dialects
from core.storage.database import Database
from core.storage.statements import LAST, Pipeline

PAGE: Final = 64
"""Maximum batches of one pass of a sweep."""
LOCK_WAIT: Final = 0.25
"""Seconds that a pass of a sweep waits for a lock."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Moved:
    """`batches` had something that waited; `owing` are those that owe their parent's item an ack or a failure."""

    batches: set[int] = field(default_factory=set)
    owing: list[int] = field(default_factory=list)
    has_more: bool = False
    """More may wait for them than one transaction takes."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a call claims that waits for a pass. If the batch succeeds then, it made it succeed; if the batch completes,
    it completed it, unless it only redrove items. `fingerprint` identifies the call."""

    fingerprint: bytes
    resolves: bool

    @property
    def completer(self) -> bytes | None:
        return self.fingerprint if self.resolves else None


def move(tx: Connection, batches: Collection[int], claims: Mapping[int, Claim] | None = None) -> Moved:
    """Move what waits for these batches, at most a page. `claims`: by batch, that of the call that waits for this pass.
    The caller commits."""
    claims = claims or {}
    pipeline = Pipeline(tx)
    batch_rows = completion.ask(pipeline, batches, dialects.of(tx).for_update("id"))
    counts = outbox.ask(pipeline, batches)
    events = pipeline.query_keys(
        batches,
        lambda part: f"SELECT DISTINCT batch_id FROM event_outbox WHERE batch_id IN ({','.join(map(str, part))})",  # noqa: S608
    )
    rows = {id: row for id, row in completion.rows(batch_rows).items() if row.state != State.DELETING}
    waiting = outbox.take(pipeline, counts)
    unannounced_batches = {batch for (batch,) in events.rows()}
    result = Moved(waiting.keys() | unannounced_batches, has_more=len(counts.rows()) == outbox.PAGE)
    deltas = {batch: entry.delta for batch, entry in waiting.items() if entry.has_counts and batch in rows}
    for batch, claim in claims.items():
        if batch in deltas:
            deltas[batch].last_changer = unit = _unit(batch, claim.fingerprint)
            deltas[batch].last_resolver = unit if claim.resolves else None
    verdicts = completion.write(pipeline, deltas, (), rows, {})
    owing = {batch for batch, verdict in verdicts.items() if verdict.owes}
    unannounced_batches -= {batch for batch, verdict in verdicts.items() if verdict.transition.events()}
    batches_to_seal = [batch for batch, entry in waiting.items() if entry.seals and batch in rows]
    if batches_to_seal:
        pipeline.flush()
        completers = {batch: claim.completer for batch, claim in claims.items()}
        seals = [Seal(batch=batch, fingerprint=completers.get(batch)) for batch in sorted(batches_to_seal)]
        for outcome in writes.flush(tx, seals, [BatchWrites]):
            if outcome.error is None and outcome.value.batch.parent_due is not None:
                owing.add(outcome.value.batch.id)
        tx.info.pop(LAST).flush()
    if unannounced_batches:
        feed.write(pipeline, lambda _: [], batches=unannounced_batches)
    pipeline.finish()
    result.owing = sorted(owing)
    return result


def _unit(batch: int, fingerprint: bytes) -> Unit:
    return Unit(Call(Verb.ACK, _fingerprint=fingerprint), batch)


def sweep(database: Database, *, seconds: float | None = None) -> Moved:
    """Move what waits for any batch, for about `seconds` at most. Batches that are locked, or broken, are left to the
    next sweep. Raises `errors.Unavailable`."""
    until = None if seconds is None else time.monotonic() + seconds
    result = Moved()
    after = 0
    while page := database.read(outbox.batches, after, PAGE):
        after = page[-1]
        result_of_page = move_apart(database, page)
        result.batches |= result_of_page.batches
        result.owing += result_of_page.owing
        if until is not None and time.monotonic() >= until:
            break
    return result


def move_apart(database: Database, batches: Collection[int]) -> Moved:
    """Move what waits for these batches, in one transaction, or apart from those that are locked or broken. Raises
    `errors.Unavailable`."""
    result = Moved()
    if not batches:
        return result

    def attempt(merged_batches: Collection[int]) -> Exception | None:
        transaction = Moved(has_more=True)
        while transaction.has_more:
            try:
                transaction = database.write(move, merged_batches, lock_waits=0, lock_wait=LOCK_WAIT)
            except errors.CoreError as error:
                return error
            result.batches |= transaction.batches
            result.owing += transaction.owing
        return None

    for waiting_batches, error in apart.attempt(attempt, sorted(batches), lambda batch: batch):
        if errors.is_outage(error):
            raise error
        log.warning("counts_wait", batches=sorted(waiting_batches)[:10], error=str(error))
    return result
