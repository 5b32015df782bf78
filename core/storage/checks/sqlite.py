"""Checks for SQLite. Among others, they check that the file system of its file locks, flushes and persists."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core.storage.checks import every
from core.storage.checks.findings import Finding, Verdict

SQLITE: Final = (3, 35)
NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "afs", "beegfs", "gpfs", "vboxsf"}
)
"""File systems whose locks, shared memory or fsync SQLite can't rely on."""
MEMORY: Final = frozenset({"tmpfs", "ramfs"})


def rules(tx: Connection, file: Path) -> Iterator[Finding]:
    yield Finding("database", Verdict.FINE, f"the file {file} can be read")
    number = ".".join(map(str, SQLITE))
    if sqlite3.sqlite_version_info >= SQLITE:
        yield Finding("version", Verdict.FINE, f"SQLite {sqlite3.sqlite_version}")
    else:
        problem = f"SQLite {sqlite3.sqlite_version} is older than {number}"
        yield Finding("version", Verdict.BROKEN, problem, f"use a Python with at least SQLite {number}")
    schema_found = every.database_schema(tx)
    yield schema_found
    if schema_found.verdict is Verdict.FINE:
        yield every.ids(tx)
    journal = str(tx.exec_driver_sql("PRAGMA journal_mode").scalar_one())
    if journal == "wal":
        yield Finding("journal", Verdict.FINE, "WAL")
    else:
        yield Finding(
            "journal",
            Verdict.UNSAFE,
            f"journal_mode stays {journal}, not WAL: readers block writers",
            "put the file on a local disk",
        )
    synchronous = int(tx.exec_driver_sql("PRAGMA synchronous").scalar_one())
    if synchronous >= 2:
        yield Finding("durability", Verdict.FINE, "synchronous is FULL: each commit is flushed")
    else:
        yield Finding(
            "durability",
            Verdict.UNSAFE,
            f"synchronous is {synchronous}, not FULL: acknowledged acks are lost if the machine fails",
            "use a build of SQLite that supports synchronous = FULL",
        )
    yield _file_system(file)
    tx.rollback()
    if schema_found.verdict is Verdict.FINE:
        yield _writes(tx, file)
    yield Finding("clock", Verdict.FINE, "the database uses this machine's clock")


def _writes(tx: Connection, file: Path) -> Finding:
    advice = f"let the service's account write to {file} and to its folder"
    try:
        writer = tx.execution_options(lastbit_begin="IMMEDIATE")
        with writer.begin() as transaction:
            finding = every.writes(writer)
            transaction.rollback()
    except DBAPIError as error:
        return Finding("writes", Verdict.BROKEN, f"the file can't be written to: {every.words(error)}", advice)
    return finding if finding.verdict is Verdict.FINE else Finding("writes", Verdict.BROKEN, finding.says, advice)


def _file_system(file: Path) -> Finding:
    try:
        kind = file_system(file.resolve(), Path("/proc/self/mountinfo").read_text())
    except OSError:
        kind = None
    if kind is None:
        return Finding("file_system", Verdict.FINE, "its type can't be determined; it must be a local disk")
    if kind in NETWORK or kind.startswith("fuse."):
        return Finding(
            "file_system",
            Verdict.UNSAFE,
            f"the file is on {kind}, whose locks and flushes are unreliable: the file can be damaged, and acks lost",
            "put the file on a local disk, or use MariaDB",
        )
    if kind in MEMORY:
        return Finding(
            "file_system",
            Verdict.UNSAFE,
            f"the file is on {kind}, in memory: it is lost when the machine or the container stops",
            "put the file on a local disk",
        )
    return Finding("file_system", Verdict.FINE, f"{kind}, a local disk")


def file_system(path: Path, mounts: str) -> str | None:
    """The type of the file system of `path`; None if it isn't known. `mounts`: the lines of /proc/self/mountinfo."""
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        mount, _, right = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) < 5 or not right:
            continue
        # Blanks and some other characters are octal escapes.
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        depth = len(point.parts)
        # A later mount at the same place hides the earlier one.
        if path.is_relative_to(point) and (best is None or depth >= best[0]):
            best = depth, right.split(" ", 1)[0]
    return best[1] if best else None


def path_of(name: str) -> Path:
    return Path(unquote(name.removeprefix("file:").partition("?")[0]) if name.startswith("file:") else name)
