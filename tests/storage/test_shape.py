"""The size of the storage: nothing for untouched items, nothing for items acked in order, otherwise one bit an item."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.service import Service
from tests.support import plans

HUGE = 10**9


def rows(service: Service, table: str = "item_groups") -> list[sa.Row]:
    with service.database.engine.connect() as connection:
        return list(connection.execute(sa.text(f"SELECT * FROM {table}")))


def test_a_billion_items_are_one_row(service: Service) -> None:
    """Open, extend and seal write the batch's row and nothing else; reading it reads no group."""
    batch = service.batches.open(Opening()).batch.id
    service.batches.extend(batch, HUGE)
    service.batches.seal(batch)
    assert len(rows(service, "batches")) == 1
    assert rows(service) == []
    assert service.batches.get(batch).pending == HUGE
    assert [(r.start, r.end) for r in service.batches.ranges(batch, "pending", 0, 100)[1].ranges] == [(0, HUGE)]
    assert service.batches.watermark(batch)[1] == 0


@pytest.mark.parametrize("kind", ["get", "pending", "watermark", "extend", "seal"])
def test_a_billion_items_cost_as_many_statements_as_a_thousand(service: Service, kind: str) -> None:
    """The size of a batch is a number in its row, not work."""

    def statements(items: int) -> int:
        batch = service.batches.open(Opening(items=items)).batch.id
        service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 5), (batch, (items - 1) // 8192, 0)])).result()
        with plans.executions(service.database) as executions:
            {
                "get": lambda: service.batches.get(batch),
                "pending": lambda: service.batches.ranges(batch, "pending", 0, 100),
                "watermark": lambda: service.batches.watermark(batch),
                "extend": lambda: service.batches.extend(batch, items),
                "seal": lambda: service.batches.seal(batch),
            }[kind]()
        return len(executions)

    assert statements(HUGE) == statements(1000)


def test_items_acked_in_order_leave_no_blob(service: Service) -> None:
    """At every step: a prefix is stored as a count."""
    batch = service.batches.open(Opening(group_size=64, items=100)).batch.id
    for number in range(100):
        service.acks.ack(Call.of(Verb.ACK, [(batch, number // 64, number % 64)])).result()
        assert all(row.resolved is None and row.failed is None for row in rows(service))


def test_a_group_loses_its_blob_once_it_is_a_prefix(service: Service) -> None:
    """Acked in any order: a full group is a prefix too, including a last group that is partly issued."""
    batch = service.batches.open(Opening(group_size=64, items=100)).batch.id
    for number in range(99, 64, -1):
        service.acks.ack(Call.of(Verb.ACK, [(batch, 1, number % 64)])).result()
    assert rows(service)[0].resolved is not None
    service.acks.ack(Call.of(Verb.ACK, [(batch, 1, 0)])).result()
    assert (rows(service)[0].resolved, rows(service)[0].resolved_count) == (None, 36)


def test_a_blob_is_as_wide_as_the_issued_items(service: Service) -> None:
    """Ten items don't store 8,192 bits; the blob grows with the batch."""
    batch = service.batches.open(Opening(items=10)).batch.id
    service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 7)])).result()
    assert len(rows(service)[0].resolved) == 2
    service.batches.extend(batch, 90)
    service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 99)])).result()
    assert (len(rows(service)[0].resolved), len(rows(service)[0].failed)) == (13, 13)
    assert service.batches.verify(batch).ok


def test_repeats_write_nothing(service: Service) -> None:
    """Neither a row nor the time of the last change: a redelivery does not keep an abandoned batch alive."""
    batch = service.batches.open(Opening(items=10)).batch.id
    call = [(batch, 0, 7)]
    service.acks.ack(Call.of(Verb.ACK, call)).result()
    before = service.batches.get(batch)
    with plans.executions(service.database) as executions:
        assert service.acks.ack(Call.of(Verb.ACK, call)).result().repeated == 1
        assert service.acks.ack(Call.of(Verb.FAIL, call, reason="late")).result().repeated == 1
    assert not {"INSERT", "UPDATE", "DELETE"} & {text.split(maxsplit=1)[0] for text, _ in executions}
    assert service.batches.get(batch) == before
