"""Additional checks for Galera nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from sqlalchemy.engine import Connection

from core.storage.checks.findings import Finding, Verdict
from core.storage.dialects.galera import SYNC_WAIT

MEMBERS: Final = 3
"""In a cluster with fewer members, losing one leaves the rest without a majority."""
SYNCED: Final = "4"


def rules(tx: Connection, variables: Mapping[str, str]) -> Iterator[Finding]:
    """All checks of a node; none if the server isn't one. `variables`: the server's global variables."""
    if variables.get("wsrep_on") != "ON":
        return
    rows = tx.exec_driver_sql(
        "SHOW GLOBAL STATUS WHERE Variable_name IN ('wsrep_ready', 'wsrep_cluster_status', 'wsrep_cluster_size', "
        "'wsrep_local_state', 'wsrep_local_state_comment')"
    )
    status = {str(name).lower(): str(value) for name, value in rows}
    yield _membership(status)
    yield _size(status)
    yield _reads(tx, variables)
    yield _majority(variables)
    yield _rows(variables)
    yield _keys(tx)


def _membership(status: Mapping[str, str]) -> Finding:
    state = status.get("wsrep_local_state_comment", "")
    if status.get("wsrep_ready") != "ON" or status.get("wsrep_cluster_status") != "Primary":
        return Finding(
            "cluster",
            Verdict.BROKEN,
            f"the node is not part of its cluster ({state}), so it refuses all statements",
            "see the runbook: a node that is out of its cluster",
        )
    if status.get("wsrep_local_state") != SYNCED:
        return Finding(
            "cluster",
            Verdict.UNSAFE,
            f"the node is {state}, not Synced: reads wait until it has caught up",
            "configure the load balancer to use only nodes that are Synced",
        )
    return Finding("cluster", Verdict.FINE, "a node of a Galera cluster, Synced")


def _size(status: Mapping[str, str]) -> Finding:
    size = int(status.get("wsrep_cluster_size") or 0)
    if size >= MEMBERS:
        return Finding("cluster_size", Verdict.FINE, f"the cluster has {size} members")
    return Finding(
        "cluster_size",
        Verdict.UNSAFE,
        f"the cluster has {size} {'member' if size == 1 else 'members'} now: if it loses another one, it stops",
        "start the other nodes again; a cluster needs three nodes, or two and an arbitrator",
    )


def _reads(tx: Connection, variables: Mapping[str, str]) -> Finding:
    session = dict(
        tuple(row)
        for row in tx.exec_driver_sql(
            "SHOW SESSION VARIABLES WHERE Variable_name IN ('wsrep_sync_wait', 'wsrep_dirty_reads')"
        )
    )
    if variables.get("wsrep_dirty_reads") == "ON" or session.get("wsrep_dirty_reads") == "ON":
        return Finding(
            "cluster_reads",
            Verdict.BROKEN,
            "wsrep_dirty_reads is on: a node that is disconnected from its cluster returns old data",
            "SET GLOBAL wsrep_dirty_reads = OFF, and in the server's configuration",
        )
    if session.get("wsrep_sync_wait") != str(SYNC_WAIT):
        return Finding(
            "cluster_reads",
            Verdict.BROKEN,
            f"wsrep_sync_wait is {session.get('wsrep_sync_wait')} in the service's session, not {SYNC_WAIT}: changes "
            "that were committed on one node may be invisible on another",
            "something between the service and the server, such as a proxy, changes sessions: connect without it",
        )
    return Finding("cluster_reads", Verdict.FINE, "the service's sessions wait for commits of other nodes")


def _majority(variables: Mapping[str, str]) -> Finding:
    options = variables.get("wsrep_provider_options", "")
    options_on = [
        name for name in ("pc.ignore_sb", "pc.ignore_quorum") if re.search(rf"{name}\s*=\s*(true|yes|1)\b", options)
    ]
    if not options_on:
        return Finding("cluster_majority", Verdict.FINE, "a part of the cluster without a majority stops")
    return Finding(
        "cluster_majority",
        Verdict.BROKEN,
        f"{' and '.join(options_on)} is on: separated parts of the cluster would both continue, and diverge",
        "remove it from wsrep_provider_options",
    )


def _rows(variables: Mapping[str, str]) -> Finding:
    expected = {"binlog_format": "ROW", "innodb_autoinc_lock_mode": "2"}
    wrong = [
        f"{name} is {variables.get(name)}, not {value}"
        for name, value in expected.items()
        if variables.get(name) != value
    ]
    if not wrong:
        return Finding("cluster_format", Verdict.FINE, "rows are replicated, and nodes assign different ids")
    return Finding(
        "cluster_format", Verdict.BROKEN, "; ".join(wrong), "set both in the configuration of each node, and restart it"
    )


def _keys(tx: Connection) -> Finding:
    tables = tx.exec_driver_sql(
        "SELECT t.table_name FROM information_schema.tables t LEFT JOIN information_schema.table_constraints c "
        "ON c.table_schema = t.table_schema AND c.table_name = t.table_name AND c.constraint_type = 'PRIMARY KEY' "
        "WHERE t.table_schema = DATABASE() AND t.table_type = 'BASE TABLE' AND c.table_name IS NULL "
        "ORDER BY t.table_name"
    ).all()
    if not tables:
        return Finding("cluster_keys", Verdict.FINE, "each table has a primary key, so all writes are certified by row")
    names = ", ".join(str(row[0]) for row in tables)
    return Finding(
        "cluster_keys",
        Verdict.UNSAFE,
        f"without a primary key: {names}",
        "these tables are not the service's own; add primary keys, or move them to another database",
    )
