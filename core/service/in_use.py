"""Which kinds of things there are in the database, apart from batches. The page shows only their sections."""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.storage import tables


class InUse(NamedTuple):
    """Whether there is at least one of each kind."""

    processes: bool
    commands: bool
    consumer_groups: bool
    tallies: bool


def read(tx: Connection) -> InUse:
    """Each kind ends at the first row that is found."""
    live_processes = tables.process_definitions.c.deleted_at.is_(None)
    live_groups = tables.consumer_groups.c.deleted_at.is_(None)
    kinds = (
        sa.select(tables.process_definitions.c.name).where(live_processes),
        sa.select(tables.outbox.c.position),
        sa.select(tables.consumer_groups.c.name).where(live_groups),
        sa.select(tables.tallies.c.tally),
    )
    found = tx.execute(sa.select(*(kind.exists() for kind in kinds))).one()
    return InUse(*map(bool, found))
