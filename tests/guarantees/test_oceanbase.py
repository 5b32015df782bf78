"""OceanBase: everything that Lastbit does, once; races; and time limits, which OceanBase has in settings of its own.

`make test-oceanbase` runs the suites of the other databases on it as well.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from core import errors
from core.acks.call import AckResult
from core.batches.batch import Opening
from core.batches.lifecycle import State
from core.commits.combiner import Inline
from core.errors import Fault
from core.service import Service
from core.storage import faults, statements
from core.storage.checks import Verdict, check
from core.storage.database import LOCK_WAIT, Database
from core.storage.dialects import oceanbase as dialect
from core.storage.lock_order import LOCK_HEAD
from tests.guarantees import test_tallies
from tests.guarantees.drivers.life import live
from tests.guarantees.drivers.rounds import GROUP, ack, completion_of, newly, prepare, race, recount
from tests.mutants import mutant
from tests.support import templates
from tests.support.oceanbase import OceanBase
from tests.support.waits import waits_for_a_lock

ROUNDS = 50
BATCH = "SELECT id FROM batches WHERE id = {} FOR UPDATE"
UPDATE = "UPDATE batches SET group_size = group_size + 8 WHERE id = {}"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("oceanbase")]


@pytest.fixture(scope="module")
def database(oceanbase: OceanBase) -> Iterator[Database]:
    """The tests of this module share it: OceanBase needs long to create tables."""
    with Database(oceanbase.new_database()) as database:
        templates.migrate(database)
        yield database


@pytest.fixture
def service(database: Database) -> Service:
    return Service(database, combiner=Inline)


@pytest.fixture
def batch(service: Service) -> int:
    return service.batches.open(Opening(items=3, group_size=64)).batch.id


def test_everything_that_lastbit_does_and_check_finds_nothing(oceanbase_url: str) -> None:
    with Database(oceanbase_url) as database:
        templates.migrate(database)
        live(database)
        findings = {finding.about: finding for finding in check(database)}
    assert [finding for finding in findings.values() if finding.verdict is not Verdict.FINE] == []
    assert findings["version"].says.startswith("OceanBase 4.3.5")
    assert {"mode", "durability", "session", "isolation", "writes"} <= findings.keys()


@pytest.mark.parametrize("second", [(1, 0), (0, GROUP - 1)])
def test_one_of_two_last_acks_completes_the_batch(oceanbase_url: str, second: tuple[int, int]) -> None:
    """Of two in different groups, one without a row, and of two of the same item."""
    with Database(oceanbase_url) as database:
        templates.migrate(database)
        _race(Service(database, combiner=Inline), second)


def _race(service: Service, second: tuple[int, int]) -> None:
    first = (0, GROUP - 1)
    items = GROUP + second[0]
    ids = prepare(service.database, ROUNDS, lambda number: (items, {0: GROUP - 1}))

    def check_round(number: int, *answers: AckResult) -> None:
        assert [newly(answer, ids[number]) for answer in answers].count(True) == 1
        assert sum(answer.applied for answer in answers) == (1 if second == first else 2)
        if second == first:
            assert all(completion_of(answer, ids[number]) is not None for answer in answers)

    race(
        service.database,
        ROUNDS,
        lambda worker, number: ack(worker, (ids[number], *first)),
        lambda worker, number: ack(worker, (ids[number], *second)),
        check=check_round,
    )
    assert {row.state for row in recount(service.database).values()} == {State.COMPLETE}


@mutant(
    "a-lock-wait-on-oceanbase-does-not-rest",
    "core.storage.dialects.mariadb:MariaDB.run",
    "oceanbase.packets(texts)",
    "[texts] if texts else []",
)
def test_an_ack_waits_for_a_lock_in_a_queue(service: Service, batch: int) -> None:
    """Instead of being tried again without a pause, as among other statements of a packet."""
    with ThreadPoolExecutor(1) as pool:
        with row_locked(service.database, BATCH.format(batch)):
            answer = pool.submit(ack, service, (batch, 0, 0))
            assert waits_for_a_lock(service.database, answer)
        assert answer.result(60).applied == 1


@mutant(
    "sums-on-oceanbase-take-no-turns",
    "core.storage.dialects.mariadb:MariaDB.sum_locked",
    "[oceanbase.LOCK_SUMS, query]",
    '[f"{query} FOR UPDATE"]',
)
def test_two_concurrent_calls_bring_no_total_over_the_limit(database: Database) -> None:
    """A locking read doesn't wait for a row that another transaction has just inserted."""
    test_tallies.test_two_concurrent_calls_bring_no_total_over_the_limit(database)


@contextlib.contextmanager
def row_locked(database: Database, text: str) -> Iterator[None]:
    with database.engine.connect() as holder, holder.begin():
        holder.exec_driver_sql(text)
        yield


@pytest.mark.parametrize(
    ("text", "limit", "seconds", "fault"),
    [
        (BATCH, None, LOCK_WAIT, Fault.LOCK_WAIT),
        (BATCH, 0.25, 0.25, Fault.LOCK_WAIT),
        (UPDATE, None, LOCK_WAIT, Fault.LOCK_WAIT),
        (LOCK_HEAD, 0.25, LOCK_WAIT, Fault.HEAD_WAIT),
    ],
)
def test_a_lock_wait_ends_in_time(
    service: Service, batch: int, text: str, limit: float | None, seconds: float, fault: Fault
) -> None:
    """However short it must be; but that for the feed's head has the session's time."""

    def wait(tx: sa.Connection) -> None:
        start = time.monotonic()
        try:
            statements.run(tx, text.format(batch))
        except DBAPIError as error:
            durations.append(time.monotonic() - start)
            kinds.append(faults.classify(error))
            raise

    durations: list[float] = []
    kinds: list[Fault | None] = []
    lock = LOCK_HEAD if fault is Fault.HEAD_WAIT else BATCH
    error_type = errors.LockTimeout if fault is Fault.LOCK_WAIT else errors.Unavailable
    with row_locked(service.database, lock.format(batch)), pytest.raises(error_type):
        service.database.write(wait, lock_waits=0, lock_wait=limit)
    assert set(kinds) == {fault}
    assert seconds - 0.1 < min(durations) < seconds + 1.5


def test_a_statement_that_takes_too_long_is_an_outage(database: Database) -> None:
    with database.engine.connect() as connection:
        connection.exec_driver_sql(dialect.statements_end_after(1))
        with pytest.raises(DBAPIError) as failure:
            connection.exec_driver_sql("SELECT SLEEP(3)")
        connection.invalidate()
    assert faults.classify(failure.value) is Fault.OUTAGE


@pytest.mark.parametrize(
    ("code", "fault"), [(6002, Fault.CONFLICT), (6225, Fault.OUTAGE), (4038, Fault.OUTAGE), (1054, None)]
)
def test_codes_count_only_if_oceanbase_sent_them(code: int, fault: Fault | None) -> None:
    """On MariaDB, some of them are errors of a statement."""
    for of_oceanbase in (True, False):
        error = pymysql.err.OperationalError(code, "")
        error.of_oceanbase = of_oceanbase
        kind = faults.classify(DBAPIError.instance("COMMIT", None, error, pymysql.MySQLError))
        assert kind is (fault if of_oceanbase else None)


def test_a_session_that_reads_old_data_is_named(database: Database) -> None:
    """As if a proxy had changed it."""

    @sa.event.listens_for(database.engine, "connect")
    def change(connection: Any, _: object) -> None:
        connection.query("SET SESSION ob_read_consistency = WEAK")

    findings = {finding.about: finding for finding in check(database) if finding.verdict is Verdict.BROKEN}
    assert "ob_read_consistency is WEAK, not STRONG" in findings["session"].says
