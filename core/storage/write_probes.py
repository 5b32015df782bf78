"""Writes that show whether the database takes writes. They leave nothing that anybody reads, and wait for no row."""

from __future__ import annotations

import secrets
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.storage import commit_marks, tables

ROWS: Final = 2000
"""Rows of the large write. Each has about 600 bytes."""


def small(tx: Connection) -> None:
    """Write as little as a transaction can."""
    commit_marks.touch(tx)


def large(tx: Connection) -> None:
    """Write about a mebibyte, and delete it. When its disk is full, a database server still takes small changes for a
    while, in the space that it has, but none that needs more."""
    tally = secrets.token_hex()
    numbers = {"partition_no": 0, "generation": 0, "high_offset": 0, "high_child": 0, "value": 0}
    rows = [
        {"tally": tally, "tally_key": secrets.token_hex(127), "topic": secrets.token_hex(127), **numbers}
        for _ in range(ROWS)
    ]
    tx.execute(sa.insert(tables.tallies), rows)
    tx.execute(sa.delete(tables.tallies).where(tables.tallies.c.tally == tally))
