"""Everything that Lastbit does to its tables, once: each verb, compared with the model where there is one, the jobs,
and all that operators read."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

from core import gauges, janitor
from core.acks import parents
from core.batches import descendants, nesting
from core.batches.batch import Opening
from core.batches.expiry import Policy
from core.batches.search import Filter
from core.commits.combiner import Inline
from core.dispatcher import Dispatcher
from core.service import Service
from core.storage import checks
from core.storage.database import Database
from core.webhooks.backoff import Backoff
from core.webhooks.replicas import Replica
from tests.guarantees.models.service import Model, assert_equal
from tests.guarantees.programs.dying import Written
from tests.guarantees.test_crashes import OF_CHILDREN, SCENARIOS, Ground
from tests.storage.test_round_trips import VERBS

AT_ONCE = timedelta(0)


def live(database: Database) -> None:
    """Use a database that has its tables, and leave it usable."""
    sender = Written(Path(os.devnull))
    service = Service(database, combiner=Inline, sender=sender)
    for scenario in (*SCENARIOS, *OF_CHILDREN):
        ground = Ground(service, Model())
        ground.do(scenario(ground))
        while descendants.sweep(database).left or database.read(nesting.debts):
            parents.sweep(database)
        assert_equal(service, ground.model)
    for prepare in VERBS.values():
        prepare(service)()
    _mend(service)
    _read(service)
    _deliver(database, sender)
    report = janitor.run_once(database, Policy(AT_ONCE, AT_ONCE, AT_ONCE, AT_ONCE))
    assert report.expired_open
    assert report.deleted
    assert janitor.expire_overdue(database) == []
    assert service.batches.open(Opening(items=3)).batch.items == 3


def _mend(service: Service) -> None:
    """Repair a batch, and delete it."""
    batch = service.batches.open(Opening(items=3)).batch.id
    service.database.write(lambda tx: tx.exec_driver_sql(f"UPDATE batches SET acked = 1 WHERE id = {batch}"))
    assert not service.batches.verify(batch).ok
    service.batches.repair(batch)
    assert service.batches.verify(batch).ok
    service.batches.delete(batch)


def _read(service: Service) -> None:
    for batch in service.batches.page(Filter(), with_history=True).batches:
        assert service.batches.verify(batch.id).ok
        service.batches.explain(batch.id)
        service.batches.progress(batch.id)
    assert list(service.database.snapshot(gauges.read))
    assert checks.check(service.database)


def _deliver(database: Database, sender: Written) -> None:
    """A round of one dispatcher among several, and all rounds of one alone."""
    for replica in (Replica(database), None):
        dispatcher = Dispatcher(database, sender, backoff=Backoff(), lease=timedelta(minutes=1), replica=replica)
        if replica is None:
            dispatcher.run_until_idle(threading.Event())
        else:
            dispatcher.run_once()
        dispatcher.stop()
