"""Checks for OceanBase: its version, its mode, and the copies of its log. It also has MySQL's settings of durability,
which mean nothing there, so their checks don't run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core import errors
from core.storage import faults
from core.storage.checks.findings import Finding, Verdict

OLDEST: Final = (4, 3, 5)
"""The engine of the seekdb that the tests use."""


def is_one(variables: Mapping[str, str]) -> bool:
    """`variables`: the server's global variables."""
    return "ob_trx_lock_timeout" in variables


def version(tx: Connection) -> Finding:
    number = str(tx.exec_driver_sql("SELECT OB_VERSION()").scalar_one())
    if tuple(int(part) for part in number.split(".") if part.isdigit()) >= OLDEST:
        return Finding("version", Verdict.FINE, f"OceanBase {number}")
    oldest = ".".join(map(str, OLDEST))
    return Finding(
        "version", Verdict.UNSAFE, f"OceanBase {number} is older than {oldest}", f"upgrade to at least {oldest}"
    )


def rules(tx: Connection, variables: Mapping[str, str]) -> Iterator[Finding]:
    mode = variables.get("ob_compatibility_mode", "MYSQL")
    if mode == "MYSQL":
        yield Finding("mode", Verdict.FINE, "the tenant is compatible with MySQL")
    else:
        advice = "create a tenant with ob_compatibility_mode = 'mysql'"
        yield Finding("mode", Verdict.BROKEN, f"the tenant is compatible with {mode}, not with MySQL", advice)
    yield _durability(tx)


def _durability(tx: Connection) -> Finding:
    try:
        rows = tx.exec_driver_sql(
            "SELECT MIN(copies) FROM (SELECT COUNT(*) AS copies FROM oceanbase.DBA_OB_LS_LOCATIONS"
            " WHERE replica_type = 'FULL' GROUP BY ls_id) streams"
        )
        copies = rows.scalar()
    except DBAPIError as error:
        if faults.classify(error) is errors.Fault.OUTAGE:
            raise
        copies = None  # seekdb has one server and no such view; an account may not be allowed to read it
    if copies is None:
        says = "the server writes its log at each commit; how many copies there are, the account can't see"
        return Finding("durability", Verdict.FINE, says)
    if copies >= 3:
        return Finding("durability", Verdict.FINE, f"a majority of {copies} copies of the log has each commit")
    return Finding(
        "durability",
        Verdict.UNSAFE,
        f"a log stream has {copies} {'copy' if copies == 1 else 'copies'}: acknowledged acks are lost with one disk, "
        "or the tenant stops with one server",
        "give the tenant replicas in three zones",
    )
