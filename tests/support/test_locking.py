"""The checker of the lock order: which transactions it accepts."""

from __future__ import annotations

import pytest

from tests.support.locking import LockOrder

GROUPS = "SELECT batch_id FROM item_groups WHERE (batch_id IN (1,2) AND group_no IN (0)) FOR UPDATE"
BATCHES = "SELECT id FROM batches WHERE id IN (1,2) FOR UPDATE"
HEAD = "SELECT position, trimmed FROM feed_head WHERE id = 1 FOR UPDATE"
NEW_GROUP = (
    "INSERT INTO item_groups (batch_id, group_no, resolved, failed, resolved_count, failed_count) "
    "VALUES (1,5,NULL,NULL,1,0)"
)
OLD_GROUPS = (
    NEW_GROUP.replace("(1,5,", "(2,0,NULL,NULL,1,0),(1,0,") + " ON DUPLICATE KEY UPDATE resolved = VALUES(resolved)"
)
POSITIONS = "SELECT epoch FROM positions WHERE (group_name = x'67' AND partition_no IN (1)) FOR UPDATE"
PROCESSES = "SELECT state FROM processes WHERE (name = x'70' AND instance IN (x'6f')) FOR UPDATE"
RELEASED = "UPDATE inbox SET status = 'retrying' WHERE (name = x'70' AND instance = x'6f' AND event_id IN (x'65'))"
HANDLED = RELEASED.replace("retrying", "handled")


@pytest.mark.parametrize(
    "statements",
    [
        [GROUPS, BATCHES, HEAD, "INSERT INTO feed (position, event_id) VALUES (1,x'6d')"],
        [GROUPS, OLD_GROUPS, BATCHES, NEW_GROUP, "UPDATE batches SET acked = 1 WHERE id IN (1, 2)"],
        [GROUPS, BATCHES, OLD_GROUPS],
        [BATCHES, "SELECT entry_no FROM ack_journal WHERE (batch_id = 1) OR (batch_id = 2)", OLD_GROUPS],
        ["SELECT id FROM batches WHERE id = 2 FOR UPDATE", "SELECT id FROM batches WHERE id = 3 FOR UPDATE"],
        [HEAD, "SELECT id FROM webhooks WHERE id = 1 FOR UPDATE SKIP LOCKED"],
        [HEAD, "INSERT INTO webhooks (url) VALUES ('http')"],
        [POSITIONS, PROCESSES, RELEASED],
        [BATCHES, "SELECT state FROM item_groups WHERE batch_id = 1"],
        [
            "DELETE FROM item_groups WHERE batch_id = 1",
            "DELETE FROM webhooks WHERE id = 4",
            "DELETE FROM batches WHERE id = 1",
        ],
    ],
)
def test_a_transaction_in_order_is_accepted(statements: list[str]) -> None:
    order = LockOrder()
    assert [order.check(text) for text in statements] == [None] * len(statements)


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        ([BATCHES, GROUPS], "a row of item_groups is locked after one of batches"),
        ([PROCESSES, RELEASED], "a row of inbox is locked after one of processes"),
        ([POSITIONS, PROCESSES, HANDLED], "a row of inbox is locked after one of processes"),
        ([HEAD, BATCHES], "a row of batches is locked after one of feed_head"),
        ([BATCHES, OLD_GROUPS], "a row of item_groups is locked after one of batches"),
        ([GROUPS, NEW_GROUP], "a row of item_groups is inserted without a lock of batches"),
        (
            ["SELECT id FROM batches WHERE id = 2 FOR UPDATE", "SELECT id FROM batches WHERE id = 1 FOR UPDATE"],
            "the rows of batches are not locked in the order of their keys",
        ),
        (
            ["SELECT id FROM batches WHERE id = 9 FOR UPDATE SKIP LOCKED", "UPDATE batches SET acked = 1 WHERE id = 8"],
            "the rows of batches are not locked in the order of their keys",
        ),
        ([HEAD, "UPDATE webhooks SET state = 1 WHERE id = 1"], "a row of webhooks is locked after one of feed_head"),
    ],
)
def test_a_transaction_out_of_order_is_found(statements: list[str], problem: str) -> None:
    order = LockOrder()
    *earlier, last = [order.check(text) for text in statements]
    assert earlier == [None] * len(earlier)
    assert last is not None
    assert last.splitlines() == [f"{problem}, in this transaction:", *statements]
