"""Holds a group's row locked while its batch grows, like an operator's open transaction.

This disturbance finds a flush that reads its batch too early: it waits for the group, meanwhile others ack new items at
the end of the batch, and then it writes that end as it was before.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core import errors
from core.batches.lifecycle import State
from core.storage import tables
from core.storage.database import Database
from tests.chaos.plans import GROWING_SIZE
from tests.support import waits

_batches = tables.batches.c
_groups = tables.item_groups.c


class Holder:
    """Holds groups of the database at this URL."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pause = threading.Event()

    def hold(self, dice: random.Random) -> None:
        """Hold a group until a flush waits for it and other flushes have then widened the end of its batch. Flushes
        wait for two seconds, so the lock is released earlier once one waits."""
        with (
            contextlib.suppress(errors.CoreError, DBAPIError),  # the database may be away
            Database(self._url) as database,
            database.connection() as holding,
            database.connection() as watching,
        ):
            if growing := _growing(holding):
                batch, group = dice.choice(growing)
                row = (_groups.batch_id == batch, _groups.group_no == group)
                holding.execute(sa.select(_groups.group_no).where(*row).with_for_update())
                if not self._see(watching, sa.text(waits.WAITING[waits.server(watching)]), 3.0):
                    return
                items = watching.scalar(sa.select(_batches["items"]).where(_batches.id == batch)) or 0
                last, issued = divmod(items, GROWING_SIZE)
                end = (_groups.batch_id == batch, _groups.group_no == last)
                wider = sa.func.length(_groups.resolved) > (issued + 7) // 8
                self._see(watching, sa.select(sa.exists(sa.select(_groups.group_no).where(*end, wider))), 1.4)
            holding.rollback()

    def _see(self, watching: Connection, query: Any, seconds: float) -> bool:
        """Whether the first value of the query's result is true within this time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            watching.rollback()
            if watching.scalar(query):
                return True
            self._pause.wait(0.12)  # the server caches its list of lock waits for 0.1 s
        return False


def _growing(tx: Connection) -> Sequence[tuple[int, int]]:
    """Growing batches without a journal, each with the fullest unfinished group before its last one. Few flushes need
    that group, so the others continue."""
    live = (_batches.state == State.OPEN, _batches.group_size == GROWING_SIZE, _batches.journal_next == 0)
    newest = sa.select(_batches.id, _batches["items"]).where(*live).order_by(_batches.id.desc()).limit(8)
    candidates = []
    for batch, items in tx.execute(newest).all():
        before = (_groups.batch_id == batch, _groups.group_no < items // GROWING_SIZE)
        groups = sa.select(_groups.group_no).where(*before, _groups.resolved_count < GROWING_SIZE)
        group = tx.scalar(groups.order_by(_groups.resolved_count.desc()).limit(1))
        if group is not None:
            candidates.append((batch, group))
    return candidates
