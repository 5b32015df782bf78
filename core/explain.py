"""Why is this batch not done? The first thing that a person on call asks for, answered as reasons: each a stable code,
one plain sentence, and the facts it was made of.

It must be as quick for a billion items as for ten, so each rule reads a bounded number of rows, from the first pending
item on, and says where it did not see all. What is looked at is one snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import tables
from core.batches import batch as batches
from core.batches import ranges
from core.batches.batch import Batch
from core.batches.lifecycle import LIVE, State, Verb
from core.bits import journal
from core.webhooks import subscriptions
from lastbit.ids import item_id

SHOWN: Final = 5
"""Ranges, and reasons of failures, that are named one by one."""
COUNTED: Final = 1000
"""Ranges that are counted."""
CHILDREN: Final = 20
SCAN: Final = 4096
"""Rows of groups, children or failures that a rule looks at."""


@dataclass(frozen=True, slots=True)
class Reason:
    """`text` is a sentence for people; `facts` are what it says, for programs."""

    code: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explanation:
    batch: Batch
    reasons: list[Reason]


@dataclass(frozen=True, slots=True)
class _Look:
    """The batch, when that was, and its first pending ranges. `first` is the lowest number that may be pending."""

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
    look = _Look(batch, now, pending)
    return Explanation(batch, [reason for rule in _RULES for reason in rule(snapshot, look)])


def _complete(_: Connection, look: _Look) -> Iterator[Reason]:
    batch = look.batch
    if batch.succeeded and batch.ended_at is not None:
        yield Reason(
            "complete",
            f"Nothing is wrong: all {_count(batch.items, 'item')} are acked, and the batch was complete at "
            f"{_moment(batch.ended_at)}.",
            {"ended_at": batch.ended_at},
        )


def _ended(_: Connection, look: _Look) -> Iterator[Reason]:
    batch = look.batch
    if batch.state in (State.EXPIRED, State.CANCELLED) and batch.ended_at is not None:
        how = "expired, as nothing happened to it for too long," if batch.state is State.EXPIRED else "was cancelled"
        yield Reason(
            "ended",
            f"The batch {how} at {_moment(batch.ended_at)} with {_count(batch.pending, 'item')} pending; "
            "it takes no more acks.",
            {"ended_at": batch.ended_at, "pending": batch.pending},
        )


def _failed(tx: Connection, look: _Look) -> Iterator[Reason]:
    batch = look.batch
    if not batch.complete or not batch.failed:
        return
    known = tables.failures.c
    seen = sa.select(known.reason).where(known.batch_id == batch.id).order_by(known.number).limit(SCAN).subquery()
    times = sa.func.count().label("times")
    rows = tx.execute(
        sa.select(seen.c.reason, times).group_by(seen.c.reason).order_by(times.desc(), seen.c.reason).limit(SHOWN)
    ).all()
    most = f"; the most frequent reason is {_shortened(rows[0].reason)!r}" if rows else ""
    yield Reason(
        "failed",
        f"The batch is complete, but {batch.failed:,} of its {_count(batch.items, 'item')} failed{most}. "
        "It succeeds once they are acked after all.",
        {
            "failed": batch.failed,
            "reasons": [{"reason": row.reason, "count": row.times} for row in rows],
            # Of so many failures at the most, those with the lowest numbers.
            "looked_at": min(batch.failed, SCAN),
        },
    )


def _not_sealed(_: Connection, look: _Look) -> Iterator[Reason]:
    if look.batch.state is not State.OPEN:
        return
    idle, facts = _idle(look)
    yield Reason("not_sealed", f"The batch is not sealed, so more items may come; {idle}.", facts)


def _pending(_: Connection, look: _Look) -> Iterator[Reason]:
    batch = look.batch
    if batch.state not in LIVE or not batch.pending:
        return
    found = look.pending.ranges
    named = [
        {"first": look.name(each.start), "last": look.name(each.end - 1), "count": each.end - each.start}
        for each in found[:SHOWN]
    ]
    more, all_counted = len(found) - len(named), look.pending.next is None
    where = ""
    if named:
        where = ": " + ", ".join(
            str(each["first"]) if each["count"] == 1 else f"{each['first']} to {each['last']}" for each in named
        )
    if more:
        where += f" and {'' if all_counted else 'at least '}{_count(more, 'more range')}"
    idle, facts = _idle(look)
    facts = {"pending": batch.pending, "ranges": named, "more_ranges": more, "all_counted": all_counted, **facts}
    of = f"{batch.pending:,} of {_count(batch.items, 'item')}"
    # Of one that isn't sealed it was said already.
    since = "" if batch.state is State.OPEN else f" ({idle})"
    yield Reason("pending", f"{of} {'is' if batch.pending == 1 else 'are'} pending{where}{since}.", facts)


def _oldest_untouched_group(tx: Connection, look: _Look) -> Iterator[Reason]:
    batch, size = look.batch, look.batch.group_size
    if batch.state not in LIVE or not batch.pending:
        return
    known = tables.item_groups.c
    first = look.first // size
    query = sa.select(known.group_no).where(known.batch_id == batch.id, known.group_no >= first)
    touched = set(journal.recent(tx, batch.id, size)) if batch.journal_next else set()
    rows = tx.scalars(query.order_by(known.group_no).limit(SCAN)).all()
    touched.update(rows)
    group = first
    while group in touched:
        group += 1
    if group * size >= batch.items or (len(rows) == SCAN and group > rows[-1]):
        return  # there is none, or none among those that were looked at
    start, end = group * size, min((group + 1) * size, batch.items)
    first_pending = look.name(look.first) if look.pending.ranges else None
    ahead = f"; the first pending item of all is {first_pending}" if first_pending and look.first != start else ""
    yield Reason(
        "oldest_untouched_group",
        f"Group {group} ({look.name(start)} to {look.name(end - 1)}) is the first of which nothing is resolved{ahead}.",
        {"group": group, "first": look.name(start), "last": look.name(end - 1), "first_pending": first_pending},
    )


def _waiting_for_children(tx: Connection, look: _Look) -> Iterator[Reason]:
    batch = look.batch
    if batch.state not in LIVE or not batch.pending:
        return
    known = tables.batches.c
    columns = ("id", "batch_key", "state", "items", "acked", "failed", "parent_number", "parent_due")
    # Those below the first pending item hold up nothing. Of a parent with very many children, the first are looked at.
    children = (
        sa.select(*(known[name] for name in columns))
        .where(known.parent_batch == batch.id, known.parent_number >= look.first, known.state != State.DELETING)
        .order_by(known.parent_number)
        .limit(SCAN)
        .subquery()
    )
    held_up = sa.select(children).where(sa.or_(children.c.state.in_(LIVE), children.c.parent_due.is_not(None)))
    rows = tx.execute(held_up.order_by(children.c.parent_number).limit(CHILDREN + 1)).all()
    if not rows:
        return
    found = [
        {
            "batch": row.id,
            "key": row.batch_key,
            "item": look.name(row.parent_number),
            "state": row.state,
            "pending": row.items - row.acked - row.failed,
            "parent_due": row.parent_due,
        }
        for row in rows[:CHILDREN]
    ]
    named = ", ".join(
        f"{each['batch']} ({each['state']}, {each['pending']:,} pending"
        f"{'; it ended, and this batch has not been told yet' if each['parent_due'] else ''})"
        for each in found[:SHOWN]
    )
    more = " and others" if len(rows) > SHOWN else ""
    yield Reason(
        "waiting_for_children",
        f"Items of it are batches themselves: it waits for batch{'' if len(rows) == 1 else 'es'} {named}{more}.",
        {"children": found, "more_children": len(rows) > CHILDREN},
    )


def _parent_not_told(_: Connection, look: _Look) -> Iterator[Reason]:
    batch = look.batch
    if batch.parent_due is not None:
        verb = "acked" if batch.parent_due == Verb.ACK else "failed"
        yield Reason(
            "parent_not_told",
            f"The batch is item {batch.parent} of another one, and that is still to be {verb}; "
            "the janitor's next run does it.",
            {"parent": batch.parent, "parent_due": batch.parent_due},
        )


def _webhook_not_delivered(snapshot: Connection, look: _Look) -> Iterator[Reason]:
    late: dict[int, subscriptions.Delivery] = {}
    for delivery in subscriptions.undelivered(snapshot, look.batch.id):
        late.setdefault(delivery.webhook, delivery)  # the newest of each
    for webhook, delivery in sorted(late.items())[:SHOWN]:
        last = delivery.last
        answer = "it was not tried yet" if last is None else f"the last answer was {last.error or last.status}"
        if delivery.state is subscriptions.Progress.DEAD or delivery.next_attempt_at is None:
            when = "it is given up: redeliver it"
        else:
            when = f"the next try is due at {_moment(delivery.next_attempt_at)}"
        yield Reason(
            "webhook_not_delivered",
            f"Webhook {webhook} has not been told of {delivery.event}: {answer}; {when}.",
            {
                "webhook": webhook,
                "event": delivery.event,
                "position": delivery.position,
                "delivery": delivery.state,
                "attempts": delivery.attempts,
                "last_status": None if last is None else last.status,
                "last_error": None if last is None else last.error,
                "next_attempt_at": delivery.next_attempt_at,
            },
        )


_RULES: Final[tuple[Callable[[Connection, _Look], Iterator[Reason]], ...]] = (
    _complete,
    _ended,
    _failed,
    _not_sealed,
    _pending,
    _oldest_untouched_group,
    _waiting_for_children,
    _parent_not_told,
    _webhook_not_delivered,
)
"""In the order in which they are told. Another reason is another rule."""


def _idle(look: _Look) -> tuple[str, dict[str, Any]]:
    """Since when nothing has changed, and until when that may go on; as words and as facts."""
    batch = look.batch
    since = batch.updated_at
    facts: dict[str, Any] = {"idle_since": since, "idle_seconds": max(0, int((look.now - since).total_seconds()))}
    text = f"nothing has changed since {_moment(since)}, {_duration(look.now - since)} ago"
    if batch.expires_in is not None:
        until = since + timedelta(seconds=batch.expires_in)
        left = until - look.now
        facts |= {"expires_at": until, "expires_after_seconds": max(0, int(left.total_seconds()))}
        text += f", and it expires in {_duration(left)}" if left > timedelta(0) else ", and it is about to expire"
    return text, facts


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _moment(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def _duration(span: timedelta) -> str:
    """The two units that matter: `3 d 4 h`, `12 min 5 s`."""
    seconds = max(0, int(span.total_seconds()))
    parts = [(seconds // 86400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s")]
    first = next((place for place, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count) or "0 s"


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else text[:99] + "…"
