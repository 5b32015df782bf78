"""Since when no write gets through, and how it is found out on an idle service."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final

import pytest
from sqlalchemy.engine import Connection

from core import errors
from core.storage.database import Database
from tests.mutants import mutant
from tests.support.exposition import Change

TOUCH: Final = "UPDATE callback_cursor SET position = position + 1"


def write(tx: Connection) -> None:
    tx.exec_driver_sql(TOUCH)


def write_nothing(tx: Connection) -> None:
    tx.exec_driver_sql(f"{TOUCH} WHERE id = 7")


def fail(error: Exception) -> Callable[[Connection], None]:
    def work(tx: Connection) -> None:
        write(tx)
        raise error

    return work


OUTAGE: Final = errors.Unavailable("the disk is full")


@mutant(
    "a-refused-write-is-a-stall",
    "core.storage.write_watch:WriteWatch.__exit__",
    "errors.is_outage(error)",
    "True",
)
@mutant("a-failure-is-forgotten", "core.storage.write_watch:WriteWatch.__exit__", "self.failed_at is None", "True")
@mutant("a-commit-ends-no-stall", "core.storage.write_watch:WriteWatch.committed", "self.failed_at = None", "")
@mutant(
    "what-wrote-nothing-counts-as-a-commit",
    "core.storage.database:Database._transaction",
    "self._written(tx) != written_before",
    "True",
    only="sqlite",
)
@pytest.mark.parametrize(
    ("works", "is_stalled"),
    [
        ([write], False),
        ([fail(OUTAGE)], True),
        ([fail(OUTAGE), write], False),
        ([fail(OUTAGE), write_nothing], True),
        ([write, fail(OUTAGE)], True),
        ([fail(errors.BatchNotFound(7))], False),
        ([fail(errors.LockTimeout("locked"))], False),
        ([fail(OUTAGE), fail(errors.BatchNotFound(7))], True),
    ],
    ids=[
        "committed",
        "failed",
        "failed, then committed",
        "failed, then nothing written",
        "committed, then failed",
        "refused",
        "locked",
        "failed, then refused",
    ],
)
def test_a_stall_lasts_from_a_failure_to_a_commit(
    database: Database, works: list[Callable[[Connection], None]], is_stalled: bool
) -> None:
    if not database.is_embedded and write_nothing in works:
        pytest.skip("a server's transaction with such a statement writes its mark")
    for work in works:
        with contextlib.suppress(errors.CoreError):
            database.write(work)
    assert (database.write_watch.stall() > 0) is is_stalled


@mutant("a-write-that-waits-is-no-stall", "core.storage.write_watch:WriteWatch.__enter__", "self._running += 1", "")
def test_a_write_that_waits_is_a_stall_until_another_is_committed(server_database: Database) -> None:
    began, may_end = threading.Event(), threading.Event()

    def hang(tx: Connection) -> None:
        began.set()
        assert may_end.wait(60)

    thread = threading.Thread(target=server_database.write, args=(hang,))
    thread.start()
    assert began.wait(60)
    before = server_database.write_watch.stall()
    assert before > 0
    server_database.write(write)
    assert 0 < server_database.write_watch.stall() < before
    may_end.set()
    thread.join()
    assert server_database.write_watch.stall() == 0


@mutant("a-fresh-commit-shows-nothing", "core.storage.database:Database.check_writes", "watch.is_fresh()", "False")
@mutant(
    "a-check-after-a-failure-is-small",
    "core.storage.database:Database.check_writes",
    "write_probes.small if failed_at is None else write_probes.large",
    "write_probes.small",
)
@mutant(
    "a-check-hides-a-failure",
    "core.storage.database:Database.check_writes",
    "time.monotonic() - failed_at < FAILING",
    "False",
)
def test_a_check_writes_only_if_nothing_else_did(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = Change("lastbit_transaction_seconds_count", outcome="committed")
    sizes: list[str] = []

    def note(size: str) -> Callable[[Connection], None]:
        def work(tx: Connection) -> None:
            sizes.append(size)
            write(tx)

        return work

    monkeypatch.setattr("core.storage.write_probes.small", note("small"))
    monkeypatch.setattr("core.storage.write_probes.large", note("large"))
    database.check_writes()
    database.check_writes()
    assert (commits(), sizes) == (1, ["small"])
    with pytest.raises(errors.Unavailable):
        database.write(fail(OUTAGE))
    with pytest.raises(errors.Unavailable, match="a write has just failed"):
        database.check_writes()
    monkeypatch.setattr("core.storage.database.FAILING", 0.0)
    database.check_writes()
    assert sizes == ["small", "large"]
    assert database.write_watch.stall() == 0


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_probe_leaves_no_row(database: Database, size: str) -> None:
    """Except the mark of its connection, or on SQLite a row of no writer."""
    if size == "large":
        database.write_watch.failed_at = float("-inf")
    database.check_writes()
    rows = {
        table: database.read(lambda tx, table=table: tx.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())  # type: ignore[misc]
        for table in ("tallies", "commit_marks")
    }
    assert rows["tallies"] == 0
    assert rows["commit_marks"] <= 1
    assert database.write_watch.is_fresh()
