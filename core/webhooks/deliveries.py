"""Deliveries: events of the feed are sent to the receivers, at least once each.

A delivery has three steps, each in a separate transaction. No transaction is open while something is sent:

* *plan*: the events after a webhook's position become its deliveries, and the position advances, in one transaction
  under the webhook's row lock. Positions of the feed have no gaps, so a page is a range of positions. (webhook,
  position) is also unique.
* *claim*: many due deliveries are locked by one statement, in the order of their ids, and get a token and a lease, by
  setting `due_at` in the future. The lock checks again that they are due, so when two dispatchers select the
  same delivery, only the first claims it. A delivery that is locked is left to a later claim. Time is the database's.
* *record*: the results of many sends share a transaction. It locks their deliveries by one statement, in the same
  order, logs the attempts, and changes the state of each delivery that still has its claim's token.

When the database's clock is set back, no delivery waits until the clock has caught up (see `due_times`).

If a dispatcher is killed between sending and recording, its claim expires and the event is sent again with the same
webhook-id. That is why delivery is "at least once", and receivers must recognize repeats by the id.

An event that must still be planned or sent for a webhook is not trimmed (`needed`). `needed` reads the webhooks'
positions before their pending deliveries, so it can't miss an event that is planned in between.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import feed
from core.commits.operation import Operation
from core.storage import dialects, tables
from core.storage.database import Database
from core.storage.statements import LIST, Pipeline, chunks, inserts
from core.webhooks import callbacks, rotation, subscriptions
from core.webhooks.backoff import Backoff
from core.webhooks.delivery_log import Progress
from core.webhooks.sender import SendResult
from core.webhooks.subscriptions import State

PAGE: Final = 500
"""Maximum positions of the feed that one transaction plans."""
AHEAD: Final = 10_000
"""Nothing more is planned for a webhook while a delivery so many positions back was never tried. Each claim reads past
all due deliveries of a webhook whose receiver hangs."""
POSTPONED: Final = timedelta(minutes=2)
"""The pause of deliveries that wait behind many others to a slow host (see `postpone`)."""
CANDIDATES: Final = 64
"""A claim chooses at random among this many more due deliveries than it needs, so that dispatchers seldom choose the
same ones."""
LOOK: Final = 320
"""Maximum due deliveries that one query of a claim reads."""
LOOKS: Final = 4
"""Maximum queries with which one claim looks for due deliveries of webhooks that have room."""
PARTITIONS: Final = 64
"""Deliveries are partitioned by id, so that dispatchers can share them (see `replicas`)."""
OVERDUE: Final = timedelta(seconds=5)
"""A delivery that has been due for longer may be claimed by any dispatcher."""
LEASE_BYTES: Final = 4
"""The last bytes of a claim's token are its lease, in milliseconds."""
TOKEN_BYTES: Final = 15
UNKNOWN_LEASE: Final = timedelta(seconds=105)
"""The longest lease of earlier releases. Their tokens are longer and don't contain it."""
GONE: Final = 410
PATIENT: Final = (429, 503)
"""Statuses whose Retry-After is respected."""

_webhooks = tables.webhooks.c
_deliveries = tables.deliveries.c
_feed = tables.feed.c
_head = tables.feed_head.c


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed delivery. `at` is the database's time of the claim."""

    delivery: int
    token: bytes = field(repr=False)
    webhook: int
    url: str
    secrets: tuple[str, ...] = field(repr=False)
    """The secrets that were valid when the delivery was claimed, the newest first."""
    event: feed.Event
    at: datetime
    lane: int
    """The webhook, or a negative number that the callbacks to one host share."""


def behind(tx: Connection) -> list[int]:
    """The ids of the webhooks that have events to plan; `callbacks` plans those of the callbacks."""
    head = sa.select(_head.position).scalar_subquery()
    return list(
        tx.scalars(
            sa.select(_webhooks.id)
            .where(_webhooks.batch_id.is_(None), _webhooks.state == State.ACTIVE, _webhooks.position < head)
            .order_by("id")
        )
    )


def plan(tx: Connection, webhook: int) -> bool:
    """Plan a page of the feed. Return whether there may be more. If the webhook's row is locked, another dispatcher
    plans, or somebody holds it, which must not delay other webhooks: then nothing is done. Nor is it while the
    webhook's receiver is too far behind (`AHEAD`)."""
    query = sa.select(tables.webhooks).where(_webhooks.id == webhook)
    row = tx.execute(query.with_for_update(skip_locked=True)).first()
    if row is None or row.state != State.ACTIVE or _is_ahead(tx, webhook, row.position):
        return False
    head = feed.head(tx)
    last = min(head, row.position + PAGE)
    types = subscriptions.types_of(row)
    events = sa.select(
        sa.literal(webhook), _feed.position, sa.literal(str(Progress.PENDING)), sa.literal(0), tables.utc_now()
    ).where(_feed.position > row.position, _feed.position <= last)
    if types is not None:
        events = events.where(_feed.type.in_(types))
    tx.execute(
        sa.insert(tables.deliveries).from_select(["webhook_id", "position", "state", "attempts", "due_at"], events)
    )
    tx.execute(sa.update(tables.webhooks).where(_webhooks.id == webhook).values(position=last))
    return bool(last < head)


def _is_ahead(tx: Connection, webhook: int, position: int) -> bool:
    """Whether the webhook's delivery `AHEAD` positions back was never tried. Deliveries are claimed about in the order
    of their positions, so about as many others were not tried either."""
    ours = tables.deliveries.alias().c
    back = sa.select(sa.func.max(ours.position)).where(ours.webhook_id == webhook, ours.position <= position - AHEAD)
    query = sa.select(_deliveries.state, _deliveries.attempts, _deliveries.token).where(
        _deliveries.webhook_id == webhook, _deliveries.position == back.scalar_subquery()
    )
    row = tx.execute(query).first()
    return row is not None and row.state == Progress.PENDING and not row.attempts and row.token is None


def is_due(tx: Connection, partitions: Collection[int] | None = None) -> bool:
    """Whether there is a due delivery that `claim` could claim with the same `partitions`."""
    query = sa.select(_deliveries.id).where(*_due(), *_shared(tx, partitions))
    return tx.execute(query.limit(1)).first() is not None


def _due() -> tuple[sa.ColumnElement[bool], ...]:
    return _deliveries.state == Progress.PENDING, _deliveries.due_at <= tables.utc_now()


def _shared(tx: Connection, partitions: Collection[int] | None) -> tuple[sa.ColumnElement[bool], ...]:
    if partitions is None or len(partitions) == PARTITIONS:
        return ()
    ours = (_deliveries.id % PARTITIONS).in_(sorted(partitions))
    return (sa.or_(ours, _deliveries.due_at <= tables.clock(tx) - OVERDUE),)


def claim(
    tx: Connection,
    lease: timedelta,
    limit: int,
    room: Mapping[int, int],
    share: int,
    partitions: Collection[int] | None = None,
) -> tuple[list[Claim], int]:
    """Claim at most `limit` due deliveries, and of each lane at most its `room` (default: `share`). With
    `partitions`, claim only deliveries in these partitions, and overdue ones.

    Returns the claims, and the number of due deliveries of disabled or deleted webhooks, which became dead.
    """
    chosen, dead = _choose(tx, limit, room, share, partitions)
    if not chosen and not dead:
        return [], 0
    is_due = f"state = '{Progress.PENDING}' AND due_at <= {dialects.of(tx).now}"
    locked, now = _lock(tx, chosen | dead, is_due, skip_locked=True)
    if now is None:
        return [], 0
    token = _token(lease)
    claimed, died = sorted(chosen & locked.keys()), sorted(dead & locked.keys())
    claims: list[Claim] = []
    for part in chunks(claimed, LIST):
        rows = (
            sa.select(
                *(_deliveries.id, _deliveries.webhook_id),
                *(_webhooks.url, _webhooks.secret, _webhooks.rotation, _webhooks.lane),
                tables.feed,
            )
            .join_from(tables.deliveries, tables.webhooks, _webhooks.id == _deliveries.webhook_id)
            .join(tables.feed, _feed.position == _deliveries.position)
            .where(_deliveries.id.in_(part))
        )
        claims += [
            Claim(
                row.id,
                token,
                row.webhook_id,
                row.url,
                rotation.valid(row.secret, row.rotation, now),
                feed.event(row),
                now,
                row.lane or row.webhook_id,
            )
            for row in tx.execute(rows)
        ]
    pipeline, literal = Pipeline(tx), dialects.of(tx).literal
    pipeline.later(
        *_updates(claimed, f"token = {literal(token)}, due_at = {literal(now + lease)}"),
        *_updates(died, f"state = '{Progress.DEAD}', due_at = NULL, token = NULL"),
    )
    pipeline.finish()
    return claims, len(died)


def postpone(tx: Connection, lane: int, kept: int) -> bool:
    """Postpone a page of the due deliveries of the callbacks to one host, but not the first `kept`. Return whether
    there may be more. Each claim reads past all due deliveries to a host that hangs. Callbacks share one position, so
    their events can't wait in the feed, as those of other webhooks do (see `AHEAD`)."""
    query = (
        sa.select(_deliveries.id)
        .join_from(tables.deliveries, tables.webhooks, _webhooks.id == _deliveries.webhook_id)
        .where(*_due(), _deliveries.token.is_(None), _webhooks.lane == lane)
        .order_by(_deliveries.due_at)
        .offset(kept)
        .limit(PAGE)
    )
    ids = list(tx.scalars(query))
    is_due = f"state = '{Progress.PENDING}' AND token IS NULL AND due_at <= {dialects.of(tx).now}"
    locked, now = _lock(tx, ids, is_due, skip_locked=True)
    if now is not None:
        pipeline = Pipeline(tx)
        pipeline.later(*_updates(sorted(locked), f"due_at = {dialects.of(tx).literal(now + POSTPONED)}"))
        pipeline.finish()
    return len(ids) == PAGE


def _token(lease: timedelta) -> bytes:
    milliseconds = lease // timedelta(milliseconds=1)
    return secrets.token_bytes(TOKEN_BYTES - LEASE_BYTES) + milliseconds.to_bytes(LEASE_BYTES)


def lease_of(token: bytes) -> timedelta:
    """The lease of the claim with this token. Dispatchers may have different ones."""
    if len(token) != TOKEN_BYTES:
        return UNKNOWN_LEASE
    return timedelta(milliseconds=int.from_bytes(token[-LEASE_BYTES:]))


def _choose(
    tx: Connection, limit: int, room: Mapping[int, int], share: int, partitions: Collection[int] | None
) -> tuple[set[int], set[int]]:
    """The ids of due deliveries to claim, and of those that must become dead. Nothing is locked yet."""
    chosen: set[int] = set()
    dead: set[int] = set()
    places = dict(room)
    full = {lane for lane, left in room.items() if left <= 0}
    conditions = (*_due(), *_shared(tx, partitions))
    size = min(LOOK, CANDIDATES + limit)
    for _ in range(LOOKS):
        query = (
            sa.select(_deliveries.id, _deliveries.webhook_id, _webhooks.state, _webhooks.lane)
            .join_from(tables.deliveries, tables.webhooks, _webhooks.id == _deliveries.webhook_id, isouter=True)
            .where(*conditions)
            .order_by(_deliveries.due_at)
            .limit(size)
        )
        full_webhooks, full_hosts = (sorted(lane for lane in full if (lane < 0) is shared) for shared in (False, True))
        if full_webhooks:
            query = query.where(_deliveries.webhook_id.not_in(full_webhooks))
        if full_hosts:
            query = query.where(sa.or_(_webhooks.lane.is_(None), _webhooks.lane.not_in(full_hosts)))
        candidates = list(tx.execute(query))
        random.shuffle(candidates)
        before = len(full)
        for row in candidates:
            lane = row.lane or row.webhook_id
            if row.state != State.ACTIVE:
                dead.add(row.id)
                full.add(row.webhook_id)
            elif row.id not in chosen and len(chosen) < limit and places.setdefault(lane, share) > 0:
                chosen.add(row.id)
                places[lane] -= 1
                if not places[lane]:
                    full.add(lane)
        # The deliveries of a lane without room may have hidden those of others.
        if len(chosen) == limit or len(full) == before or len(candidates) < size:
            break
    return chosen, dead


def _lock(
    tx: Connection, ids: Collection[int], condition: str = "TRUE", *, skip_locked: bool = False
) -> tuple[dict[int, tuple[bytes | None, int]], datetime | None]:
    """Lock the deliveries that exist and fulfil the condition, in the order of their ids; with `skip_locked`, without
    those that are locked now. Returns (token, attempts) of each, and the database's time; None if there are none."""
    dialect = dialects.of(tx)
    skip = " SKIP LOCKED" if skip_locked and dialect.locks_rows else ""
    answer = Pipeline(tx).query_keys(
        ids,
        lambda part: (
            f"SELECT id, token, attempts, {dialect.now} FROM {dialect.by_primary_key('deliveries')} "  # noqa: S608
            f"WHERE id IN ({','.join(map(str, part))}) AND {condition} ORDER BY id{dialect.for_update()}{skip}"
        ),
    )
    rows = answer.rows()
    # From a server the time is a datetime, from SQLite a text.
    now = datetime.fromisoformat(str(rows[-1][3])).replace(tzinfo=UTC) if rows else None
    return {row[0]: (row[1], row[2]) for row in rows}, now


def _updates(ids: list[int], values: str) -> list[str]:
    """Statements that change these locked deliveries."""
    return [
        f"UPDATE deliveries SET {values} WHERE id IN ({','.join(map(str, part))})"  # noqa: S608
        for part in chunks(ids, LIST)
    ]


@dataclass(slots=True, eq=False, kw_only=True)
class Record(Operation):
    """Record the result of a send: log the attempt and update the delivery. Without an `answer` nothing was sent, and
    the claim is given back. `chance` is for `Backoff`. The result is the delivery's new state, or None if another
    dispatcher has claimed the delivery since, or if it was removed."""

    claim: Claim
    answer: SendResult | None
    chance: float


def record(tx: Connection, records: Sequence[Record], backoff: Backoff) -> list[Progress | None]:
    """Apply the records, and return their results."""
    locked, now = _lock(tx, {entry.claim.delivery for entry in records})
    if now is None:
        return [None] * len(records)
    results: list[Progress | None] = []
    attempts: list[str] = []
    updates: dict[str, list[int]] = {}
    """The deliveries that get the same values."""
    gone: set[int] = set()
    for entry in records:
        claim, answer = entry.claim, entry.answer
        if claim.delivery not in locked:
            results.append(None)
            continue
        if answer is not None:
            status = "NULL" if answer.status is None else answer.status
            at, error = dialects.of(tx).literal(claim.at), dialects.of(tx).literal(answer.error)
            attempts.append(f"({claim.delivery},{at},{status},{error},{answer.milliseconds})")
        token, failures = locked[claim.delivery]
        if token != claim.token:
            results.append(None)
            continue
        locked[claim.delivery] = None, failures
        state, due_at = (Progress.PENDING, now) if answer is None else _next(entry, failures + 1, backoff, now)
        results.append(state)
        if answer is not None and answer.status == GONE:
            gone.add(claim.webhook)
        count = "attempts" if answer is None else "attempts + 1"
        values = f"state = '{state}', attempts = {count}, due_at = {dialects.of(tx).literal(due_at)}, token = NULL"
        updates.setdefault(values, []).append(claim.delivery)
    pipeline = Pipeline(tx)
    pipeline.later(*inserts("delivery_attempts", "delivery_id, attempted_at, status, error, milliseconds", attempts))
    for values, ids in updates.items():
        pipeline.later(*_updates(sorted(ids), values))
    if gone:
        webhooks = ",".join(map(str, sorted(gone)))
        pipeline.later(f"UPDATE webhooks SET state = '{State.DISABLED}' WHERE id IN ({webhooks})")  # noqa: S608
    pipeline.finish()
    return results


def _next(entry: Record, failures: int, backoff: Backoff, now: datetime) -> tuple[Progress, datetime | None]:
    """The state of a delivery after the attempt, and when it is due again."""
    answer = entry.answer
    assert answer is not None
    if answer.delivered:
        return Progress.DELIVERED, None
    if answer.status == GONE:
        return Progress.DEAD, None
    pause = backoff.pause(failures, entry.chance, answer.retry_after if answer.status in PATIENT else None)
    return (Progress.DEAD, None) if pause is None else (Progress.PENDING, now + timedelta(seconds=pause))


def needed(tx: Connection, below: int | None) -> int | None:
    """The lowest position that must still be planned or sent for a webhook; None if there is none. The order of the two
    reads matters (see the module). See `core.feed.Needed`."""
    position: int | None = tx.scalar(
        sa.select(sa.func.min(_webhooks.position)).where(_webhooks.batch_id.is_(None), _webhooks.state == State.ACTIVE)
    )
    of_callbacks = callbacks.needed(tx)
    planned = (
        sa.select(_deliveries.position)
        .join_from(tables.deliveries, tables.webhooks, _webhooks.id == _deliveries.webhook_id)
        .where(_deliveries.state == Progress.PENDING, _webhooks.state == State.ACTIVE)
        .order_by(_deliveries.position)
        .limit(1)
    )
    pending: int | None = tx.scalar(planned if below is None else planned.where(_deliveries.position < below))
    lowest = (None if position is None else position + 1, of_callbacks, pending)
    return min((place for place in lowest if place is not None), default=None)


def trim(database: Database) -> None:
    """Remove the deliveries of trimmed events."""
    trimmed = database.read(lambda tx: tx.execute(sa.select(_head.trimmed)).scalar_one())
    database.write_in_chunks(subscriptions.remove, _deliveries.position <= trimmed)
