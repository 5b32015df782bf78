"""Each field of a batch is a column: it is inserted, read in two ways, and updated."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime

from core.batches import batch as batches
from core.batches.batch import Batch, Opening
from core.batches.lifecycle import Duty, State, Verb
from core.batches.tolerance import OnExceeded
from core.service import Service
from core.storage import tables

TIME = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)


def test_a_batch_has_all_columns_but_three() -> None:
    """Those are read by themselves."""
    names = {field.name for field in fields(Batch)} - {"key", "generation"} | {"batch_key", "repairs"}
    assert set(tables.batches.c.keys()) - names == {"open_key", "seen_updated_at", "history"}


def test_what_is_saved_is_read_in_both_ways(service: Service) -> None:
    opened = service.batches.open(
        Opening(key="ä'\\", labels={"ö": '"'}, items=9, deadline=datetime(2099, 1, 1, tzinfo=UTC))
    )
    other = replace(
        opened.batch,
        key="",
        labels={},
        group_size=64,
        items=2**40,
        state=State.EXPIRED,
        on_exceeded=OnExceeded.CANCEL,
        open_count=1,
        created_at=TIME,
        updated_at=TIME,
        acked=1,
        failed=2,
        skipped=3,
        full_prefix=3,
        parent_batch=4,
        parent_number=5,
        parent_group_size=64,
        parent_due=Verb.FAIL,
        seal_at=9,
        expires_in=6,
        deadline=None,
        tolerated_failures=0,
        tolerated_failure_percentage=100,
        exceeded=True,
        open_hash=b"\0" * 32,
        completed_by=b"\xff" * 32,
        succeeded_by=b"1" * 32,
        journal_next=7,
        no_journal=True,
        generation=8,
        children=9,
        children_due=Duty.END,
        children_told=10,
        sealed_at=TIME,
        ended_at=TIME,
        ended_by=11,
        reason="ä\0'",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        tracestate="a=b",
    )
    changed = {field.name for field in fields(Batch) if getattr(other, field.name) != getattr(opened.batch, field.name)}
    assert changed == {field.name for field in fields(Batch)} - {"id"}
    for before, after in ((opened.batch, other), (other, opened.batch)):
        service.database.write(lambda tx, pair=(before, after): batches.save(tx, *pair))  # type: ignore[misc]
        assert service.database.read(batches.get, after.id) == after
        assert service.database.read(batches.by_id, [after.id]) == {after.id: after}
