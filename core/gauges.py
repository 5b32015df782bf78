"""Gauges from the database: the amount of waiting work, and its age. They are read at each scrape.

Every process of the service reports the same values, because all processes read the same database. So don't sum them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import sqlalchemy as sa
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from sqlalchemy.engine import Connection

from core import feed
from core.batches.lifecycle import State
from core.processes import inbox
from core.storage import checks, job_runs, tables
from core.webhooks import callbacks
from core.webhooks.delivery_log import Progress
from core.webhooks.subscriptions import State as WebhookState

_table: Final = tables.batches.c
OVERDUE: Final = timedelta(seconds=30)
"""A timer that has been due for longer is overdue. Each timer waits for the dispatcher's next round, which may take
seconds, so on a busy service some timers are due at any time."""

IDLE: Final = timedelta(days=1)
"""A live batch that has not changed for longer is idle."""
MOST: Final = 20_000
"""Rows that one gauge looks at: the oldest batches in a state, and the oldest pending deliveries."""
SHOWN: Final = 20
"""Webhooks that have a series of their own: those whose oldest pending event is the oldest."""
LATE: Final = timedelta(minutes=5)
"""A receiver that an older event waits for is overdue."""


def read(tx: Connection) -> Sequence[Metric]:
    """All gauges at one point in time; `tx` must be a snapshot. Add a new gauge here and in docs/metrics.md."""
    return [
        *_clock(tx),
        *_jobs(tx),
        *_live_batches(tx),
        *_idle_batches(tx),
        *_feed(tx),
        *_webhooks(tx),
        *_receivers(tx),
        *_groups(tx),
        *_processes(tx),
    ]


def _jobs(tx: Connection) -> Sequence[Metric]:
    family = GaugeMetricFamily(
        "lastbit_job_age_seconds", "Since the last success of a job; infinite without any", labels=["name"]
    )
    for job, age in job_runs.ages(tx).items():
        family.add_metric([job], age)
    return [family]


def _clock(tx: Connection) -> Sequence[Metric]:
    return [
        GaugeMetricFamily(
            "lastbit_database_clock_ahead_seconds",
            "By how much the database's clock is at least ahead of this machine's; negative if it is behind",
            checks.clock_ahead(tx),
        )
    ]


def _live_batches(tx: Connection) -> Sequence[Metric]:
    # Reads only the index on (state, id). Ids are assigned in the order of opening, so the smallest is the oldest.
    counted = tx.execute(
        sa.select(_table.state, sa.func.count(), sa.func.min(_table.id))
        .where(_table.state.in_([State.OPEN, State.SEALED]))
        .group_by(_table.state)
    ).all()
    counts = {state: count for state, count, _ in counted}
    oldest_batches = tx.execute(
        sa.select(_table.state, _table.created_at, tables.utc_now().label("now")).where(
            _table.id.in_([oldest for _, _, oldest in counted])
        )
    ).all()
    ages = {row.state: max(0.0, (row.now - row.created_at).total_seconds()) for row in oldest_batches}
    return [
        GaugeMetricFamily(name, documentation, values.get(state, 0))
        for name, documentation, state, values in (
            ("lastbit_open_batches", "Batches that are open: more items may be added", State.OPEN, counts),
            ("lastbit_sealed_batches", "Batches that are sealed and have pending items", State.SEALED, counts),
            (
                "lastbit_oldest_unsealed_age_seconds",
                "Since the oldest batch that is not sealed yet was opened; 0 where there is none",
                State.OPEN,
                ages,
            ),
            (
                "lastbit_oldest_pending_age_seconds",
                "Since the oldest sealed batch that has pending items was opened; 0 where there is none",
                State.SEALED,
                ages,
            ),
        )
    ]


def _idle_batches(tx: Connection) -> Sequence[Metric]:
    family = GaugeMetricFamily(
        "lastbit_idle_batches", f"Live batches that have not changed for {IDLE.days} day", labels=["state"]
    )
    latest = tables.clock(tx) - IDLE
    for state in (State.OPEN, State.SEALED):
        # No index has `updated_at`, as each ack would change it.
        oldest = sa.select(_table.updated_at).where(_table.state == state).order_by(_table.id).limit(MOST).subquery().c
        count = tx.scalar(sa.select(sa.func.count()).where(oldest.updated_at <= latest))
        family.add_metric([str(state)], count or 0)
    return [family]


def _feed(tx: Connection) -> Sequence[Metric]:
    return [GaugeMetricFamily("lastbit_feed_position", "Position of the feed's last event", feed.head(tx))]


def _webhooks(tx: Connection) -> Sequence[Metric]:
    webhooks, columns, events = tables.webhooks.c, tables.deliveries.c, tables.feed.c
    counted = tx.execute(
        sa.select(columns.state, sa.func.count(), sa.func.min(columns.position))
        .where(columns.state.in_([Progress.PENDING, Progress.DEAD]))
        .group_by(columns.state)
    ).all()
    counts = {state: count for state, count, _ in counted}
    # Events that aren't planned yet are waiting too.
    position = tx.scalar(
        sa.select(sa.func.min(webhooks.position)).where(
            webhooks.batch_id.is_(None), webhooks.state == WebhookState.ACTIVE
        )
    )
    waiting = [oldest for state, _, oldest in counted if state == Progress.PENDING]
    waiting += [] if position is None else [position + 1]
    of_callbacks = callbacks.needed(tx)
    waiting += [] if of_callbacks is None else [of_callbacks]
    lag = 0.0
    if waiting:
        oldest = tx.execute(
            sa.select(events.appended_at, tables.utc_now().label("now"))
            .where(events.position >= min(waiting))
            .order_by(events.position)
            .limit(1)
        ).first()
        lag = 0.0 if oldest is None else max(0.0, (oldest.now - oldest.appended_at).total_seconds())
    deliveries = GaugeMetricFamily(
        "lastbit_webhook_deliveries", "Deliveries that are pending or dead", labels=["state"]
    )
    for state in (Progress.PENDING, Progress.DEAD):
        deliveries.add_metric([str(state)], counts.get(state, 0))
    return [
        GaugeMetricFamily(
            "lastbit_webhook_lag_seconds",
            "Age of the oldest event that must still be delivered to a webhook; 0 if there is none",
            lag,
        ),
        deliveries,
    ]


def _receivers(tx: Connection) -> Sequence[Metric]:
    webhooks, columns, events = tables.webhooks.c, tables.deliveries.c, tables.feed.c
    pending = sa.select(columns.webhook_id, columns.position).where(columns.state == Progress.PENDING)
    oldest_pending = pending.order_by(columns.position).limit(MOST).subquery().c
    # Callbacks to one host share a negative lane.
    receiver = sa.func.coalesce(webhooks.lane, webhooks.id)
    waiting = (
        sa.select(receiver.label("receiver"), sa.func.min(oldest_pending.position).label("position"))
        .where(webhooks.id == oldest_pending.webhook_id, webhooks.state == WebhookState.ACTIVE)
        .group_by(receiver)
        .subquery()
        .c
    )
    query = (
        sa.select(waiting.receiver, events.appended_at, tables.utc_now().label("now"))
        .where(events.position == waiting.position)
        .order_by(waiting.position)
    )
    lags = [(row.receiver, max(0.0, (row.now - row.appended_at).total_seconds())) for row in tx.execute(query)]
    family = GaugeMetricFamily(
        "lastbit_receiver_lag_seconds",
        "Age of the oldest event whose delivery to a webhook is pending, of those with the largest",
        labels=["webhook"],
    )
    family.add_metric(["callbacks"], max((lag for receiver, lag in lags if receiver < 0), default=0.0))
    for webhook, lag in [(receiver, lag) for receiver, lag in lags if receiver > 0][:SHOWN]:
        family.add_metric([str(webhook)], lag)
    overdue = sum(lag > LATE.total_seconds() for _, lag in lags)
    return [
        family,
        GaugeMetricFamily(
            "lastbit_receivers_overdue", f"Receivers whose lag is more than {LATE.seconds} seconds", overdue
        ),
    ]


def _groups(tx: Connection) -> Sequence[Metric]:
    groups, workers, positions = tables.consumer_groups.c, tables.consumers.c, tables.positions.c
    live = dict.fromkeys(tx.scalars(sa.select(groups.name).where(groups.deleted_at.is_(None))), 0)
    counted = (
        sa.select(workers.group_name, sa.func.count())
        .where(workers.lease_until >= tables.utc_now())
        .group_by(workers.group_name)
    )
    live |= {row[0]: row[1] for row in tx.execute(counted)}
    higher = sa.case((positions.head > positions.high, positions.head), else_=positions.high)
    read = sa.select(
        positions.group_name,
        sa.func.count(positions.owner),
        sa.func.count(),
        # As floating point: offsets may reach 2^63, and an integer sum would overflow on SQLite.
        sa.func.sum(higher * 1.0 - positions.floor),
    ).group_by(positions.group_name)
    members = GaugeMetricFamily("lastbit_group_workers", "Live workers of a consumer group", labels=["group"])
    partitions = GaugeMetricFamily(
        "lastbit_group_partitions", "Partitions of a consumer group, with an owner or free", labels=["group", "state"]
    )
    lag = GaugeMetricFamily(
        "lastbit_group_lag", "Known offsets above the floors of a group's partitions", labels=["group"]
    )
    for name, count in live.items():
        members.add_metric([name], count)
    for name, owned, count, offsets in tx.execute(read):
        partitions.add_metric([name, "owned"], owned)
        partitions.add_metric([name, "free"], count - owned)
        lag.add_metric([name], float(offsets or 0))
    return [members, partitions, lag]


def _processes(tx: Connection) -> Sequence[Metric]:
    definitions, timers = tables.process_definitions.c, tables.timers.c
    names = tx.scalars(sa.select(definitions.name).where(definitions.deleted_at.is_(None))).all()
    parked = GaugeMetricFamily(
        "lastbit_process_events_parked", "Events of a process whose handler failed", labels=["process"]
    )
    for name, count in inbox.parked_by_process(tx, names).items():
        parked.add_metric([name], count)
    now = tx.execute(sa.select(tables.utc_now())).scalar_one()
    overdue = tx.execute(sa.select(sa.func.count()).where(timers.due_at <= now - OVERDUE)).scalar_one()
    documentation = f"Timers that have been due for {OVERDUE.seconds} seconds and did not fire yet"
    return [parked, GaugeMetricFamily("lastbit_timers_overdue", documentation, overdue)]
