"""What a transaction of a caller could miss: at other isolation levels what another one has just resolved, and at READ
COMMITTED what changes between two of its reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.engine import Connection

from core import errors
from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.commits.combiner import Inline
from core.enlisted import acks
from core.service import Service
from core.service.batches import opening_of
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.guarantees.enlisted.callers import engine_of, over
from tests.mutants import mutant

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


@mutant("a-batch-that-ended-is-read-once", "core.enlisted.acks:_withhold", "latest_look.has_ended", "False")
def test_an_item_whose_child_ended_with_the_batch_is_not_acked(
    server_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is read, ends with its children, and then the children are read, which hold no item any more."""
    service = Service(server_database, combiner=Inline)
    parent = service.batches.open(Opening(items=8, sealed=True)).batch.id
    service.batches.open(Opening(items=1, parent=ItemId(parent, 0, 5)))
    holders = acks.nesting.holders

    def end_before(*arguments: Any) -> Any:
        monkeypatch.undo()
        service.batches.cancel(parent, children=True)
        return holders(*arguments)

    monkeypatch.setattr(acks.nesting, "holders", end_before)
    engine = engine_of(server_database)
    call = Call.of(Verb.ACK, [ItemId(parent, 0, 5)])
    with engine.begin() as connection:
        resolved = service.enlisted.resolve(over(connection), call)
    assert [rejection.reason for rejection in resolved.answer.rejected] == ["cancelled"]
    assert service.batches.verify(parent).ok
    assert service.batches.get(parent).acked == 0
    engine.dispose()
    service.stop()
