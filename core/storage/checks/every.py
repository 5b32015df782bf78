"""Checks for every database: its schema, its clock, and whether the account can write to it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core import errors
from core.storage import dialects, schema, tables
from core.storage.checks.findings import Finding, Verdict

CLOCKS: Final = 2.0
"""The allowed difference, in seconds, between the database's clock and this machine's. The service uses only the
database's clock, for example to sign webhooks, and receivers reject timestamps that are minutes off. A difference
suggests that the database's clock is wrong."""
MAY_WRITE: Final = Finding("writes", Verdict.FINE, "the account may write to each table")


def database_schema(tx: Connection) -> Finding:
    try:
        schema.check(tx)
    except errors.Misconfigured as error:
        says, _, advice = str(error).partition(": ")
        return Finding("schema", Verdict.BROKEN, says, advice)
    return Finding("schema", Verdict.FINE, f"revision {schema.current(tx)}, which this release can work with")


def ids(tx: Connection) -> Finding:
    numbering = dialects.of(tx).numbering(tx)
    if numbering is None:
        return Finding("ids", Verdict.FINE, "batches get all numbers as ids")
    says = f"batches get the ids that leave {numbering.remainder} when they are divided by {numbering.divisor}"
    return Finding("ids", Verdict.FINE, f"{says} ({numbering})")


def clock_ahead(tx: Connection) -> float:
    """The seconds by which the database's clock is at least ahead of this machine's; negative if it is behind."""
    before = datetime.now(UTC)
    database_time: datetime = tx.execute(sa.select(tables.utc_now())).scalar_one()
    after = datetime.now(UTC)
    # The query ran at some time between the two, so only the difference beyond them is certain.
    return (
        (database_time - after).total_seconds()
        if database_time > after
        else min(0.0, (database_time - before).total_seconds())
    )


def clock(tx: Connection) -> Finding:
    difference = clock_ahead(tx)
    if abs(difference) <= CLOCKS:
        return Finding("clock", Verdict.FINE, "the database's clock agrees with this machine's")
    return Finding(
        "clock",
        Verdict.UNSAFE,
        f"the database's clock is {abs(difference):,.0f} s {'ahead of' if difference > 0 else 'behind'} this machine's",
        "synchronize both clocks (NTP); the expiry of batches and the signatures of webhooks use the database's clock",
    )


def writes(tx: Connection) -> Finding:
    """Execute statements that change no row but need the right to. A read-only server or account refuses them."""
    for table, statement in schema.empty_writes():
        try:
            tx.execute(statement)
        except DBAPIError as error:
            verb = str(statement).split(" ", 1)[0]
            return Finding(
                "writes",
                Verdict.BROKEN,
                f"{verb} on {table.name} is refused: {words(error)}",
                "GRANT SELECT, INSERT, UPDATE, DELETE to the account, on a server that accepts writes",
            )
    return MAY_WRITE


def words(error: DBAPIError) -> str:
    args = getattr(error.orig, "args", ())
    return str(args[-1]) if args else type(error.orig).__name__
