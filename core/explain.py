"""Explains why a batch is not done. Each reason has a stable code, one sentence, and its data.

An explanation must be as fast for a billion items as for ten. So each rule reads a limited number of rows from one
snapshot, starting at the first pending item, and reports if there may be more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.batches import batch as batches
from core.batches import ranges
from core.batches.batch import Batch
from core.batches.lifecycle import LIVE, Duty, State, Verb, is_overdue
from core.batches.tolerance import NONE
from core.bits import journal
from core.consumer_groups import details
from core.processes import definitions
from core.storage import tables
from core.webhooks import delivery_log, subscriptions
from lastbit import endings
from lastbit.ids import item_id

SHOWN: Final = 5
"""Maximum number of ranges, and of reasons of failures, that are listed."""
COUNTED: Final = 1000
"""Maximum number of ranges that are counted."""
CHILDREN: Final = 20
"""Maximum number of children that are listed."""
SCAN: Final = 4096
"""Maximum rows of groups, children or failures that a rule reads."""


@dataclass(frozen=True, slots=True)
class Reason:
    """`text` is a sentence for people; `facts` has its data for programs."""

    code: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explanation:
    batch: Batch
    reasons: list[Reason]


@dataclass(frozen=True, slots=True)
class _Subject:
    """The batch, the time it was read, and its first pending ranges. `first` is the lowest number that may be
    pending."""

    batch: Batch
    now: datetime
    pending: ranges.RangePage

    @property
    def first(self) -> int:
        if self.pending.ranges:
            return self.pending.ranges[0].start
        return self.batch.items if self.pending.next is None else self.pending.next

    def name(self, number: int) -> str:
        return item_id(self.batch.id, number, self.batch.group_size)


def explain(snapshot: Connection, batch_id: int) -> Explanation:
    """Raises `errors.BatchNotFound`."""
    batch = batches.get(snapshot, batch_id)
    now = snapshot.scalar(sa.select(tables.utc_now()))
    assert now is not None
    pending = ranges.page(snapshot, batch, "pending", 0, COUNTED) if batch.pending else ranges.RangePage([], None)
    subject = _Subject(batch, now, pending)
    return Explanation(batch, [reason for rule in _RULES for reason in rule(snapshot, subject)])


def _complete(_: Connection, subject: _Subject) -> Iterator[Reason]:
    batch = subject.batch
    if batch.succeeded and batch.ended_at is not None:
        yield Reason(
            "complete",
            f"{_success(batch)}. It was completed at {_moment(batch.ended_at)}.",
            {"ended_at": batch.ended_at},
        )


def _success(batch: Batch) -> str:
    if batch.failed:
        return f"The batch succeeded within its tolerance: {batch.failed:,} of its {_count(batch.items, 'item')} failed"
    if batch.skipped:
        return (
            f"The batch is complete: {batch.acked:,} of its {_count(batch.items, 'item')} "
            f"{'is' if batch.acked == 1 else 'are'} acked, and {batch.skipped:,} skipped"
        )
    if batch.items <= 1:
        return f"The batch is complete: {'its only item is acked' if batch.items else 'it has no items'}"
    return f"The batch is complete: all {batch.items:,} items are acked"


def _ended(tx: Connection, subject: _Subject) -> Iterator[Reason]:
    batch = subject.batch
    if batch.state in (State.EXPIRED, State.CANCELLED) and batch.ended_at is not None:
        if batch.state is State.CANCELLED:
            ending = "was cancelled"
        elif is_overdue(State.OPEN, batch.deadline, now=batch.ended_at):
            ending = "reached its deadline and expired"
        else:
            ending = "was idle for too long and expired"
        cause = (
            "" if batch.ended_by is None else f", because batch {batch.ended_by} above it {_past(tx, batch.ended_by)}"
        )
        cause += "" if batch.reason is None else f": {_shortened(batch.reason)!r}"
        yield Reason(
            "ended",
            f"The batch {ending} at {_moment(batch.ended_at)} with {_count(batch.pending, 'item')} pending{cause}; "
            "it accepts no more acks.",
            {
                "ended_at": batch.ended_at,
                "pending": batch.pending,
                "ended_by": batch.ended_by,
                "reason": batch.reason,
            },
        )


def _past(tx: Connection, batch_id: int) -> str:
    """What has happened to the batch, whose end ended others."""
    batch = batches.by_id(tx, [batch_id]).get(batch_id)
    if batch is None:
        return "ended, which is deleted since"
    return {State.CANCELLED: "was cancelled", State.EXPIRED: "expired"}.get(batch.state, "ended")


def _failed(tx: Connection, subject: _Subject) -> Iterator[Reason]:
    batch = subject.batch
    if not batch.complete or not batch.failed:
        return
    causes, facts = _why(tx, batch)
    remedy = "when these items are acked" if batch.tolerance == NONE else "when enough of these items are acked"
    if batch.succeeded:
        remedy = "nonetheless, as they are within its tolerance"
    yield Reason(
        "failed",
        f"The batch is complete, but {batch.failed:,} of its {_count(batch.items, 'item')} failed{causes}. "
        f"It succeeds {remedy}.",
        facts,
    )


def _failed_incomplete(tx: Connection, subject: _Subject) -> Iterator[Reason]:
    batch = subject.batch
    if batch.complete or not batch.failed:
        return
    causes, facts = _why(tx, batch)
    verb = "has" if batch.failed == 1 else "have"
    so_far = " so far" if batch.state in LIVE else ""
    yield Reason("failed", f"{_count(batch.failed, 'item')} {verb} failed{so_far}{causes}.", facts)


def _why(tx: Connection, batch: Batch) -> tuple[str, dict[str, Any]]:
    """The reasons of the failures, as text and as data."""
    columns = tables.failures.c
    reasons = (
        sa.select(columns.reason).where(columns.batch_id == batch.id).order_by(columns.number).limit(SCAN).subquery()
    )
    times = sa.func.count().label("times")
    rows = tx.execute(
        sa.select(reasons.c.reason, times)
        .group_by(reasons.c.reason)
        .order_by(times.desc(), reasons.c.reason)
        .limit(SHOWN)
    ).all()
    text = ""
    if rows:
        is_shared = rows[0].times == batch.failed
        text = f"{':' if is_shared else '; the most frequent reason is'} {_shortened(rows[0].reason)!r}"
    return text, {
        "failed": batch.failed,
        "reasons": [{"reason": row.reason, "count": row.times} for row in rows],
        # Only the failures with the lowest numbers were read.
        "looked_at": min(batch.failed, SCAN),
    }


def _failures_exceeded(_: Connection, subject: _Subject) -> Iterator[Reason]:
    batch = subject.batch
    if not batch.exceeded or batch.succeeded:
        return
    limits = [] if batch.tolerated_failures is None else [_count(batch.tolerated_failures, "failure")]
    limits += [] if batch.tolerated_failure_percentage is None else [f"{batch.tolerated_failure_percentage} %"]
    if batch.passes_tolerance:
        past = f"The failures exceeded the batch's tolerance of {' and '.join(limits)}"
    else:  # an update has raised or removed it, or failed items were acked
        past = f"The failures had exceeded the batch's tolerance, which is {' and '.join(limits) or 'removed'} now"
    yield Reason(
        "failures_exceeded",
        f"{past}; {batch.failed:,} of {_count(batch.items, 'item')} {'has' if batch.failed == 1 else 'have'} failed.",
        {
            "failed": batch.failed,
            "tolerated_failures": batch.tolerated_failures,
            "tolerated_failure_percentage": batch.tolerated_failure_percentage,
            "on_exceeded": batch.on_exceeded,
        },
    )


def _not_sealed(_: Connection, subject: _Subject) -> Iterator[Reason]:
    if subject.batch.state is not State.OPEN:
        return
    batch = subject.batch
    idle, facts = _idle(subject)
    if batch.seal_at is None:
        text = "The batch is not sealed, so more items may be added"
    else:
        missing = batch.seal_at - batch.items
        facts |= {"seal_at": batch.seal_at, "missing": missing}
        text = f"The batch seals itself at {_count(batch.seal_at, 'item')}: {_count(missing, 'more item')} to issue"
    yield Reason("not_sealed", f"{text}; {idle}.", facts)


def _pending(_: Connection, subject: _Subject) -> Iterator[Reason]:
    batch = subject.batch
    if batch.state not in LIVE or not batch.pending:
        return
    pending_ranges = subject.pending.ranges
    lines = [
        {"first": subject.name(part.start), "last": subject.name(part.end - 1), "count": part.end - part.start}
        for part in pending_ranges[:SHOWN]
    ]
    more_count, all_counted = len(pending_ranges) - len(lines), subject.pending.next is None
    places = ""
    if lines:
        places = ": " + ", ".join(
            str(part["first"]) if part["count"] == 1 else f"{part['first']} to {part['last']}" for part in lines
        )
    if more_count:
        places += f" and {'' if all_counted else 'at least '}{_count(more_count, 'more range')}"
    idle, facts = _idle(subject)
    facts = {"pending": batch.pending, "ranges": lines, "more_ranges": more_count, "all_counted": all_counted, **facts}
    amount = f"{batch.pending:,} of {_count(batch.items, 'item')}"
    # For an open batch, `_not_sealed` reports the idle time.
    since = "" if batch.state is State.OPEN else f" ({idle})"
    yield Reason("pending", f"{amount} {'is' if batch.pending == 1 else 'are'} pending{places}{since}.", facts)


def _oldest_untouched_group(tx: Connection, subject: _Subject) -> Iterator[Reason]:
    batch, size = subject.batch, subject.batch.group_size
    if batch.state not in LIVE or not batch.pending:
        return
    columns = tables.item_groups.c
    first = subject.first // size
    query = sa.select(columns.group_no).where(columns.batch_id == batch.id, columns.group_no >= first)
    groups = set(journal.recent(tx, batch.id, size)) if batch.journal_next else set()
    rows = tx.scalars(query.order_by(columns.group_no).limit(SCAN)).all()
    groups.update(rows)
    group = first
    while group in groups:
        group += 1
    if group * size >= batch.items or (len(rows) == SCAN and group > rows[-1]):
        return  # there is no such group, or none among the rows that were read
    start, end = group * size, min((group + 1) * size, batch.items)
    first_pending = subject.name(subject.first) if subject.pending.ranges else None
    note = f"; the first pending item is {first_pending}" if first_pending and subject.first != start else ""
    yield Reason(
        "oldest_untouched_group",
        f"Group {group} ({subject.name(start)} to {subject.name(end - 1)}) is the first group without a resolved item"
        f"{note}.",
        {"group": group, "first": subject.name(start), "last": subject.name(end - 1), "first_pending": first_pending},
    )


def _waiting_for_children(tx: Connection, subject: _Subject) -> Iterator[Reason]:
    batch = subject.batch
    if batch.state not in LIVE or not batch.pending:
        return
    table = tables.batches.c
    columns = ("id", "batch_key", "state", "items", "acked", "failed", "skipped", "parent_number", "parent_due")
    # Children below the first pending item delay nothing. Only the first `SCAN` children are read.
    children = (
        sa.select(*(table[name] for name in columns))
        .where(table.parent_batch == batch.id, table.parent_number >= subject.first, table.state != State.DELETING)
        .order_by(table.parent_number)
        .limit(SCAN)
        .subquery()
    )
    held_up = sa.select(children).where(sa.or_(children.c.state.in_(LIVE), children.c.parent_due.is_not(None)))
    rows = tx.execute(held_up.order_by(children.c.parent_number).limit(CHILDREN + 1)).all()
    if not rows:
        return
    children_facts = [
        {
            "batch": row.id,
            "key": row.batch_key,
            "item": subject.name(row.parent_number),
            "state": row.state,
            "pending": row.items - row.acked - row.failed - (row.skipped or 0),
            "parent_due": row.parent_due,
        }
        for row in rows[:CHILDREN]
    ]
    names = ", ".join(
        f"{child['batch']} ({child['state']}, {child['pending']:,} pending"
        f"{'; it ended, but its item is not updated yet' if child['parent_due'] else ''})"
        for child in children_facts[:SHOWN]
    )
    suffix = " and others" if len(rows) > SHOWN else ""
    yield Reason(
        "waiting_for_children",
        f"Some items are nested batches: this batch waits for batch{'' if len(rows) == 1 else 'es'} {names}{suffix}.",
        {"children": children_facts, "more_children": len(rows) > CHILDREN},
    )


def _parent_not_told(_: Connection, subject: _Subject) -> Iterator[Reason]:
    batch = subject.batch
    if batch.parent_due is not None:
        verb = "acked" if batch.parent_due == Verb.ACK else "failed"
        yield Reason(
            "parent_not_told",
            f"The batch stands for item {batch.parent} of another batch, which is not {verb} yet; "
            "the janitor's next run does that.",
            {"parent": batch.parent, "parent_due": batch.parent_due},
        )


def _children_not_told(_: Connection, subject: _Subject) -> Iterator[Reason]:
    batch = subject.batch
    if batch.children_due is not None:
        rest = "end its live nested batches" if batch.children_due is Duty.END else "bring back its nested batches"
        yield Reason(
            "children_not_told",
            f"The batch must still {rest}; the dispatcher's next round does that.",
            {"children_due": batch.children_due},
        )


def _webhook_not_delivered(snapshot: Connection, subject: _Subject) -> Iterator[Reason]:
    late: dict[int, delivery_log.Delivery] = {}
    for delivery in delivery_log.undelivered(snapshot, subject.batch.id):
        late.setdefault(delivery.webhook, delivery)  # the newest of each webhook
    shown = sorted(late.items())[:SHOWN]
    disabled = subscriptions.disabled(snapshot, [webhook for webhook, _ in shown])
    for webhook, delivery in shown:
        last = delivery.last
        answer = "there was no attempt yet" if last is None else f"the last result was {last.error or last.status}"
        if webhook in disabled:
            next_step = "the webhook is disabled, so no further attempt will be made: create another one"
        elif delivery.state is delivery_log.Progress.DEAD or delivery.next_attempt_at is None:
            next_step = "no further attempt will be made: redeliver it"
        else:
            next_step = f"the next attempt is due at {_moment(delivery.next_attempt_at)}"
        yield Reason(
            "webhook_not_delivered",
            f"The event {delivery.event} was not delivered to webhook {webhook}: {answer}; {next_step}.",
            {
                "webhook": webhook,
                "disabled": webhook in disabled,
                "event": delivery.event,
                "position": delivery.position,
                "delivery": delivery.state,
                "attempts": delivery.attempts,
                "last_status": None if last is None else last.status,
                "last_error": None if last is None else last.error,
                "next_attempt_at": delivery.next_attempt_at,
            },
        )


def _ending_without_worker(tx: Connection, subject: _Subject) -> Iterator[Reason]:
    """A message is to be published at the batch's end, or was, and no worker of the app does it."""
    batch = subject.batch
    types = [type for type, label in endings.LABELS.items() if label in batch.labels]
    app = batch.labels.get(endings.APP)
    if app is None or not types:
        return
    process = endings.process_name(app)
    if details.has_live_worker(tx, definitions.group_of(process)):
        return
    event: str | None = None
    if batch.state not in LIVE:
        event = _unhandled_event(tx, batch.id, process, types)
        if event is None:
            return
    message = "When the batch ends, its message is not published" if event is None else f"{event} is not published yet"
    yield Reason(
        "ending_without_worker",
        f"{message}: the process {process} has no worker. Start a worker of the app.",
        {"process": process, "event": event},
    )


def _unhandled_event(tx: Connection, batch_id: int, process: str, types: Sequence[str]) -> str | None:
    """The first event of these types that the process has not handled. A process that was deleted handles none."""
    try:
        floor = definitions.floor(tx, definitions.get(tx, process))
    except errors.ProcessNotFound:
        return None
    columns = tables.feed.c
    conditions = columns.batch_id == batch_id, columns.position > floor, columns.type.in_(types)
    return tx.scalar(sa.select(columns.event_id).where(*conditions).order_by(columns.position).limit(1))


_RULES: Final[tuple[Callable[[Connection, _Subject], Iterator[Reason]], ...]] = (
    _complete,
    _ended,
    _failed,
    _waiting_for_children,
    _not_sealed,
    _pending,
    _oldest_untouched_group,
    _failures_exceeded,
    _failed_incomplete,
    _parent_not_told,
    _children_not_told,
    _webhook_not_delivered,
    _ending_without_worker,
)
"""The rules, in the order of their reasons in the explanation: first what holds the batch up. Add a rule for a new
reason."""


def _idle(subject: _Subject) -> tuple[str, dict[str, Any]]:
    """How long the batch has been idle, and when it expires, as text and as data."""
    batch = subject.batch
    since = batch.updated_at
    facts: dict[str, Any] = {"idle_since": since, "idle_seconds": max(0, int((subject.now - since).total_seconds()))}
    text = f"nothing has changed since {_moment(since)}, {_duration(subject.now - since)} ago"
    if batch.expires_in is not None:
        until = since + timedelta(seconds=batch.expires_in)
        remaining = until - subject.now
        facts |= {"expires_at": until, "expires_after_seconds": max(0, int(remaining.total_seconds()))}
        text += (
            f", and it expires in {_duration(remaining)}" if remaining > timedelta(0) else ", and it is about to expire"
        )
    if batch.deadline is not None:
        facts["deadline"] = batch.deadline
        text += f"; its deadline is {_moment(batch.deadline)}"
    return text, facts


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _moment(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _duration(span: timedelta) -> str:
    """The duration in its two largest units: `3 d 4 h`, `12 min 5 s`."""
    seconds = max(0, int(span.total_seconds()))
    parts = [(seconds // 86400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s")]
    first = next((place for place, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count) or "0 s"


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else text[:99] + "…"
