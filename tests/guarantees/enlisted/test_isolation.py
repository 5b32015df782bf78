"""Isolation levels at which a transaction of a caller could miss what another one has just resolved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy.engine import Connection

from core import errors
from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.commits.combiner import Inline
from core.service import Service
from core.service.batches import opening_of
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.guarantees.enlisted.callers import engine_of, over

pytestmark = [pytest.mark.mariadb]

VERBS: dict[str, Callable[[Service, Connection, int], object]] = {
    "ack": lambda service, connection, batch: service.enlisted.resolve(
        over(connection), Call.of(Verb.ACK, [ItemId(batch, 0, 0)])
    ),
    "open": lambda service, connection, _: service.enlisted.open(over(connection), opening_of(Opening())),
    "seal": lambda service, connection, batch: service.enlisted.seal(over(connection), batch),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_it_is_refused(server_database: Database, level: str, verb: str) -> None:
    service = Service(server_database, combiner=Inline)
    batch = service.batches.open(Opening(items=2)).batch.id
    engine = engine_of(server_database, isolation_level=level)
    with (
        engine.connect() as connection,
        pytest.raises(errors.Misconfigured, match=f"your transaction is {level}.*use READ COMMITTED"),
    ):
        VERBS[verb](service, connection, batch)
    engine.dispose()
    service.stop()
