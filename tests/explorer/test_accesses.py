"""Which statements commute in the explorer's judgement."""

from __future__ import annotations

import pytest

from tests.explorer.accesses import Access, Kind, analyzed, clashes

BATCH_2 = ("batches", ("2",))
LOCKS_BATCH_2 = "SELECT id, state\nFROM batches\nWHERE batches.id = 2 FOR UPDATE"


@pytest.mark.parametrize(
    ("text", "kind", "rows", "exclusive"),
    [
        (LOCKS_BATCH_2, Kind.LOCK, [BATCH_2], True),
        ("SELECT id FROM batches WHERE id IN (2) FOR UPDATE SKIP LOCKED", Kind.LOCK, [BATCH_2], False),
        ("SELECT id FROM batches WHERE batches.id = 2", Kind.READ, [BATCH_2], False),
        ("SELECT id FROM batches WHERE batches.id = 2 OR batches.id = 3", Kind.READ, [], False),
        ("SELECT id FROM batches WHERE batches.parent_batch = 2 FOR UPDATE", Kind.LOCK, [], False),
        ("SELECT id FROM batches WHERE batches.id = 10000007 FOR UPDATE", Kind.LOCK, [], False),
        (
            "SELECT 1 FROM item_groups WHERE (batch_id IN (2) AND group_no IN (10,9)) FOR UPDATE",
            Kind.LOCK,
            [("item_groups", ("2", "9")), ("item_groups", ("2", "10"))],
            True,
        ),
        (
            "INSERT INTO item_groups (batch_id, group_no, resolved) VALUES (2,0,x'00'),(2,1,NULL)"
            " ON DUPLICATE KEY UPDATE resolved = VALUES(resolved)",
            Kind.WRITE,
            [("item_groups", ("2", "0")), ("item_groups", ("2", "1"))],
            True,
        ),
        (
            "INSERT INTO item_groups (batch_id, group_no, resolved) VALUES (2,0,'\\x00'::bytea)"
            " ON CONFLICT (batch_id, group_no) DO UPDATE SET resolved = excluded.resolved",
            Kind.WRITE,
            [("item_groups", ("2", "0"))],
            True,
        ),
        ("SELECT id FROM batches WHERE batches.id = 2::BIGINT FOR UPDATE", Kind.LOCK, [BATCH_2], True),
        (
            "SELECT 1 FROM extends WHERE (batch_id = 2 AND idempotency_key = E'more') FOR UPDATE",
            Kind.LOCK,
            [("extends", ("2", "'more'"))],
            True,
        ),
        (
            "SELECT 1 FROM extends WHERE (batch_id = 2 AND idempotency_key = x'6d6f7265') FOR UPDATE",
            Kind.LOCK,
            [("extends", ("2", "'more'"))],
            True,
        ),
        # Escaped, a value may be written in several ways.
        ("SELECT 1 FROM extends WHERE (batch_id = 2 AND idempotency_key = E'\\x27') FOR UPDATE", Kind.LOCK, [], False),
        ("SELECT pg_advisory_xact_lock(-7)", Kind.LOCK, [("advisory", ("-7",))], True),
        # The event's id is unique too: the position alone doesn't determine the rows that the statement may touch.
        ("INSERT INTO feed (position, event_id) VALUES (4, 'e')", Kind.WRITE, [], False),
    ],
)
def test_a_statement_names_the_rows_that_it_locks(
    text: str, kind: Kind, rows: list[tuple[str, tuple[str, ...]]], exclusive: bool
) -> None:
    statement = analyzed(text)
    assert (statement.kind, list(statement.rows), statement.exclusive) == (kind, rows, exclusive)


def test_rows_locked_by_the_own_transaction_are_out_of_reach_for_others() -> None:
    update = analyzed("UPDATE batches SET items = 3 WHERE batches.id = 2")
    assert update.is_covered(frozenset({BATCH_2}))
    assert not update.is_covered(frozenset())
    # Other sessions can still read the write after its COMMIT, so it stays among the accesses.
    assert [access.kind for access in update.accesses(frozenset({BATCH_2}))] == [Kind.WRITE]


@pytest.mark.parametrize(
    ("due", "second", "clash"),
    [
        (Kind.READ, Kind.READ, False),
        (Kind.READ, Kind.LOCK, False),
        (Kind.READ, Kind.WRITE, True),
        (Kind.LOCK, Kind.READ, False),
        (Kind.LOCK, Kind.LOCK, True),
        (Kind.WRITE, Kind.READ, False),  # not before its COMMIT
        (Kind.WRITE, Kind.WRITE, True),
        (Kind.PUBLISH, Kind.READ, True),
        (Kind.PUBLISH, Kind.LOCK, True),
    ],
)
def test_kinds_of_statements_commute_or_clash(due: Kind, second: Kind, clash: bool) -> None:
    assert clashes(Access("batches", None, due), [Access("batches", None, second)]) is clash
    assert not clashes(Access("batches", None, due), [Access("feed", None, second)])


def test_different_rows_commute_and_so_do_statements_under_a_common_lock() -> None:
    row_2, three = (frozenset({"2"}),), (frozenset({"3"}),)
    assert not clashes(Access("batches", row_2, Kind.WRITE), [Access("batches", three, Kind.WRITE)])
    assert clashes(Access("batches", row_2, Kind.WRITE), [Access("batches", None, Kind.WRITE)])
    accesses = [Access("failures", None, Kind.WRITE, frozenset({BATCH_2}))]
    assert not clashes(Access("failures", None, Kind.WRITE, frozenset({BATCH_2})), accesses)
    assert clashes(Access("failures", None, Kind.WRITE), accesses)
    # A COMMIT releases the lock that protected the rows.
    assert clashes(Access("failures", None, Kind.PUBLISH, frozenset({BATCH_2})), accesses)
