"""The tables, for MariaDB/MySQL, PostgreSQL and SQLite. The names in `batches` and `item_groups` are part of the
contract: operators query them. Migrations are written by hand; `alembic check` compares them with this file.

There are no foreign keys: each insert of a group's row would acquire a shared lock on its batch's row, which is the
most contended row. Instead, the state `deleting` makes deletion safe (see `purge`).
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from core.storage.tables.types import Blob, ByteText, LongText, Timestamp, begins, clock, holds, utc_now, without_index

__all__ = ["MYSQL_OPTIONS", "Blob", "Timestamp", "begins", "clock", "holds", "metadata", "utc_now", "without_index"]

MYSQL_OPTIONS: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mysql_row_format": "DYNAMIC",
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
    "mariadb_row_format": "DYNAMIC",
}

metadata = sa.MetaData()

_BIGINT = sa.BigInteger()
# Numbered by the database. On PostgreSQL, `Identity` lets accounts insert without a privilege on a sequence.
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
PROCESS_NAME = 200
"""Maximum characters of a process's name and of a command's type. With a prefix, both become types of events."""

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("id", _ID, sa.Identity(), primary_key=True, autoincrement=True),
    sa.Column("batch_key", ByteText(255)),
    sa.Column("labels", LongText(), nullable=False),
    sa.Column("group_size", sa.Integer, nullable=False),
    sa.Column("items", _BIGINT, nullable=False),
    sa.Column("acked", _BIGINT, nullable=False),
    sa.Column("failed", _BIGINT, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("full_prefix", _BIGINT, nullable=False),
    sa.Column("parent_batch", _BIGINT),
    sa.Column("parent_number", _BIGINT),
    sa.Column("expires_in", _BIGINT),
    sa.Column("open_key", ByteText(255, ascii_only=True)),
    sa.Column("open_hash", Blob(32)),
    sa.Column("open_count", _BIGINT, nullable=False),
    sa.Column("completed_by", Blob(32)),
    sa.Column("succeeded_by", Blob(32)),
    sa.Column("created_at", Timestamp, nullable=False),
    sa.Column("updated_at", Timestamp, nullable=False),
    sa.Column("sealed_at", Timestamp),
    sa.Column("ended_at", Timestamp),
    # Added later, in this order, as in a database that was upgraded.
    sa.Column("parent_group_size", sa.Integer),
    sa.Column("parent_due", sa.String(4)),
    sa.Column("journal_next", _BIGINT, nullable=False, server_default="0"),
    sa.Column("repairs", _BIGINT, nullable=False, server_default="0"),
    sa.Column("tolerated_failures", _BIGINT),
    sa.Column("tolerated_failure_percentage", sa.Integer),
    sa.Column("on_exceeded", sa.String(8), nullable=False, server_default="continue"),
    sa.Column("exceeded", sa.Integer, nullable=False, server_default="0"),
    sa.Column("deadline", Timestamp),
    sa.Column("traceparent", ByteText(55, ascii_only=True)),
    sa.Column("tracestate", ByteText(512, ascii_only=True)),
    sa.Column("seen_updated_at", Timestamp, nullable=False, server_default="1970-01-01 00:00:00.000000"),
    sa.Column("children", _BIGINT, nullable=False, server_default="0"),
    sa.Column("history", Blob(600)),
    sa.Column("children_due", sa.String(8)),
    sa.Column("children_told", _BIGINT, nullable=False, server_default="0"),
    sa.Column("ended_by", _BIGINT),
    sa.Column("reason", sa.Text),
    sa.Column("seal_at", _BIGINT),
    sa.Column("skipped", _BIGINT),
    sa.Column("no_journal", sa.Integer, nullable=False, server_default="0"),
    sa.UniqueConstraint("open_key", name="batches_open_key"),
    sa.UniqueConstraint("parent_batch", "parent_number", name="batches_parent"),
    sa.Index("batches_state", "state", "id"),
    sa.Index("batches_key_state", "batch_key", "state"),
    sa.Index("batches_created", "created_at", "state"),
    sa.Index("batches_parent_due", "parent_due"),
    sa.Index("batches_children_due", "children_due"),
    sa.Index("batches_ended", "ended_at"),
    sa.Index("batches_deadline", "state", "deadline"),
    sa.Index("batches_idle", "state", "expires_in", "seen_updated_at", "id"),
    sqlite_autoincrement=True,  # ids of deleted batches are never reused
    postgresql_with={"fillfactor": 60},
    **MYSQL_OPTIONS,
)
"""`seen_updated_at` is an earlier or the present value of `updated_at`: the one at the open, or the last one that the
janitor saw. It has an index (see `expiry`); `updated_at` has none, as each ack would change it."""

item_groups = sa.Table(
    "item_groups",
    metadata,
    sa.Column("batch_id", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("group_no", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("resolved", sa.LargeBinary),
    sa.Column("failed", sa.LargeBinary),
    sa.Column("resolved_count", sa.Integer, nullable=False),
    sa.Column("failed_count", sa.Integer, nullable=False),
    sa.Column("skipped", sa.LargeBinary),
    sa.Column("skipped_count", sa.Integer),
    # PostgreSQL writes a new version of a row for each update. With free space it stays on the same page, and no index
    # changes.
    postgresql_with={"fillfactor": 40, "toast_tuple_target": 8160},
    **MYSQL_OPTIONS,
)

ack_journal = sa.Table(
    "ack_journal",
    metadata,
    sa.Column("batch_id", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("entry_no", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("numbers", sa.LargeBinary, nullable=False),
    postgresql_with={"toast_tuple_target": 8160},
    **MYSQL_OPTIONS,
)

count_outbox = sa.Table(
    "count_outbox",
    metadata,
    sa.Column("id", _ID, sa.Identity(), primary_key=True, autoincrement=True),
    sa.Column("batch_id", _BIGINT, nullable=False),
    sa.Column("acked", sa.Integer, nullable=False),
    sa.Column("failed", sa.Integer, nullable=False),
    sa.Column("skipped", sa.Integer, nullable=False),
    sa.Column("filled", sa.Integer, nullable=False),
    sa.Column("seals", sa.Integer, nullable=False),
    sa.Index("count_outbox_batch", "batch_id"),
    sqlite_autoincrement=True,
    **MYSQL_OPTIONS,
)
"""What transactions of callers have changed, and their batches don't count yet (see `core.enlisted`). `filled`: the
groups that became full. `seals`: the batch is to be sealed."""

event_outbox = sa.Table(
    "event_outbox",
    metadata,
    sa.Column("id", _ID, sa.Identity(), primary_key=True, autoincrement=True),
    sa.Column("batch_id", _BIGINT, nullable=False),
    sa.Column("events", LongText(), nullable=False),
    sa.Index("event_outbox_batch", "batch_id"),
    sqlite_autoincrement=True,
    **MYSQL_OPTIONS,
)
"""Events of batches, in JSON, that transactions of callers have made, and the feed doesn't have yet (see
`core.feed`)."""

extends = sa.Table(
    "extends",
    metadata,
    sa.Column("batch_id", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("idempotency_key", ByteText(255, ascii_only=True), primary_key=True),
    sa.Column("start", _BIGINT, nullable=False),
    sa.Column("count", _BIGINT, nullable=False),
    sa.Column("digest", ByteText(64, ascii_only=True)),
    **MYSQL_OPTIONS,
)

failures = sa.Table(
    "failures",
    metadata,
    sa.Column("batch_id", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("number", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("failed_at", Timestamp, nullable=False),
    **MYSQL_OPTIONS,
)

skips = sa.Table(
    "skips",
    metadata,
    sa.Column("batch_id", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("number", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("skipped_at", Timestamp, nullable=False),
    **MYSQL_OPTIONS,
)

feed_head = sa.Table(
    "feed_head",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("position", _BIGINT, nullable=False),
    sa.Column("trimmed", _BIGINT, nullable=False),
    **MYSQL_OPTIONS,
)
"""One row: the position of the last event, and the position up to which events were removed."""

feed = sa.Table(
    "feed",
    metadata,
    sa.Column("position", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=False),
    sa.Column("event_id", ByteText(255), nullable=False),
    sa.Column("type", ByteText(255), nullable=False),
    sa.Column("batch_id", _BIGINT),
    sa.Column("event_key", ByteText(255)),
    sa.Column("data", LongText()),
    sa.Column("appended_at", Timestamp, nullable=False),
    sa.UniqueConstraint("event_id", name="feed_event_id"),
    sa.Index("feed_batch", "batch_id", "position"),
    **MYSQL_OPTIONS,
)

webhooks = sa.Table(
    "webhooks",
    metadata,
    sa.Column("id", _ID, sa.Identity(), primary_key=True, autoincrement=True),
    sa.Column("url", ByteText(2048, ascii_only=True), nullable=False),
    sa.Column("types", LongText()),
    sa.Column("label", ByteText(255)),
    sa.Column("secret", ByteText(255, ascii_only=True), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("position", _BIGINT, nullable=False),
    sa.Column("created_at", Timestamp, nullable=False),
    sa.Column("batch_id", _BIGINT),
    sa.Column("lane", _BIGINT),
    sa.Column("rotation", LongText()),
    sa.Index("webhooks_batch", "batch_id", unique=True),
    sqlite_autoincrement=True,
    **MYSQL_OPTIONS,
)
"""A row with a `batch_id` is the callback of that batch. Its `position` is unused: all callbacks share that of
`callback_cursor`. `lane` is negative, and the same for callbacks to one host; the deliveries to it share a lane of the
dispatcher. NULL: a lane of its own. `rotation` is JSON (see `core.webhooks.rotation`). NULL: the secret was never
rotated."""

callback_cursor = sa.Table(
    "callback_cursor",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("position", _BIGINT, nullable=False),
    **MYSQL_OPTIONS,
)
"""One row: the position in the feed up to which the deliveries of callbacks were planned."""

deliveries = sa.Table(
    "deliveries",
    metadata,
    sa.Column("id", _ID, sa.Identity(), primary_key=True, autoincrement=True),
    sa.Column("webhook_id", _BIGINT, nullable=False),
    sa.Column("position", _BIGINT, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("due_at", Timestamp),
    sa.Column("token", Blob(16)),
    sa.UniqueConstraint("webhook_id", "position", name="deliveries_webhook"),
    sa.Index("deliveries_due", "state", "due_at", "webhook_id"),
    sa.Index("deliveries_state", "state", "position"),
    sa.Index("deliveries_position", "position"),
    sqlite_autoincrement=True,
    **MYSQL_OPTIONS,
)
"""`due_at` is when a pending delivery must be sent. With a `token` it is claimed, and `due_at` is the end of the
claim."""

delivery_attempts = sa.Table(
    "delivery_attempts",
    metadata,
    sa.Column("id", _ID, sa.Identity(), primary_key=True, autoincrement=True),
    sa.Column("delivery_id", _BIGINT, nullable=False),
    sa.Column("attempted_at", Timestamp, nullable=False),
    sa.Column("status", sa.Integer),
    sa.Column("error", sa.String(255)),
    sa.Column("milliseconds", sa.Integer, nullable=False),
    sa.Index("delivery_attempts_delivery", "delivery_id", "id"),
    sqlite_autoincrement=True,
    **MYSQL_OPTIONS,
)

consumer_groups = sa.Table(
    "consumer_groups",
    metadata,
    sa.Column("name", ByteText(255), primary_key=True),
    sa.Column("partitions", sa.Integer, nullable=False),
    sa.Column("partition_of", sa.String(16), nullable=False),
    sa.Column("ttl_ms", _BIGINT, nullable=False),
    sa.Column("release_ms", _BIGINT, nullable=False),
    sa.Column("first_epoch", _BIGINT, nullable=False),
    sa.Column("created_at", Timestamp, nullable=False),
    sa.Column("deleted_at", Timestamp),
    **MYSQL_OPTIONS,
)
"""The row of a deleted consumer group stays, without partitions. If the name is used again, its epochs continue above
`first_epoch`, so that the epochs of old workers are never valid again."""

consumers = sa.Table(
    "consumers",
    metadata,
    sa.Column("group_name", ByteText(255), primary_key=True),
    sa.Column("worker", ByteText(255), primary_key=True),
    sa.Column("session", ByteText(64, ascii_only=True), nullable=False),
    sa.Column("replaced", ByteText(640, ascii_only=True), nullable=False),
    sa.Column("capacity", sa.Integer),
    sa.Column("started_at", Timestamp, nullable=False),
    sa.Column("last_seen", Timestamp, nullable=False),
    sa.Column("lease_until", Timestamp, nullable=False),
    postgresql_with={"fillfactor": 60},
    **MYSQL_OPTIONS,
)
"""`replaced` has the worker's earlier sessions, the latest first."""

positions = sa.Table(
    "positions",
    metadata,
    sa.Column("group_name", ByteText(255), primary_key=True),
    sa.Column("partition_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("owner", ByteText(255)),
    sa.Column("epoch", _BIGINT, nullable=False),
    sa.Column("owned_since", Timestamp),
    sa.Column("release_by", Timestamp),
    sa.Column("floor", _BIGINT),
    sa.Column("high", _BIGINT),
    sa.Column("head", _BIGINT),
    sa.Column("outstanding", sa.LargeBinary),
    sa.Column("outstanding_count", sa.Integer),
    sa.Column("token", sa.Text),
    sa.Column("updated_at", Timestamp),
    postgresql_with={"fillfactor": 60},
    **MYSQL_OPTIONS,
)
"""`outstanding` is a snapshot of the window (see `lastbit.streams`); its floor and high are also columns."""

tallies = sa.Table(
    "tallies",
    metadata,
    # Keys of InnoDB have at most 3,072 bytes. A tally's name is ASCII, so that its keys and topics can be any text.
    sa.Column("tally", ByteText(255, ascii_only=True), primary_key=True),
    sa.Column("tally_key", ByteText(255), primary_key=True),
    sa.Column("topic", ByteText(255), primary_key=True),
    sa.Column("partition_no", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("generation", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("high_offset", _BIGINT, nullable=False),
    sa.Column("high_child", _BIGINT, nullable=False),
    sa.Column("value", _BIGINT, nullable=False),
    postgresql_with={"fillfactor": 60},
    **MYSQL_OPTIONS,
)
"""A row for each sub-counter: the sum that one source has added to one key, up to and including (high_offset,
high_child); of a source that has ranges, up to its position in `tally_sources`."""

tally_sources = sa.Table(
    "tally_sources",
    metadata,
    sa.Column("tally", ByteText(255, ascii_only=True), primary_key=True),
    sa.Column("topic", ByteText(255), primary_key=True),
    sa.Column("partition_no", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("generation", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("position", Blob(128), nullable=False),
    postgresql_with={"fillfactor": 60},
    **MYSQL_OPTIONS,
)
"""A row for each source that has ranges: the position up to which it was counted, in UTF-8."""

process_definitions = sa.Table(
    "process_definitions",
    metadata,
    sa.Column("name", ByteText(PROCESS_NAME, ascii_only=True), primary_key=True),
    sa.Column("pruned", _BIGINT, nullable=False),
    sa.Column("created_at", Timestamp, nullable=False),
    sa.Column("deleted_at", Timestamp),
    # A release before revision 0026 inserts rows without them.
    sa.Column("unnamed", _BIGINT, nullable=False, server_default="0"),
    sa.Column("unnamed_upto", _BIGINT, nullable=False, server_default="0"),
    **MYSQL_OPTIONS,
)
"""`pruned`: an event at or below this position that is not in the inbox was handled, or belongs to no instance of the
process. `unnamed`: the number of events up to the position `unnamed_upto` that named no instance."""

processes = sa.Table(
    "processes",
    metadata,
    # Keys of InnoDB have at most 3,072 bytes. A process's name is ASCII, so that its instances' names can be any text.
    sa.Column("name", ByteText(PROCESS_NAME, ascii_only=True), primary_key=True),
    sa.Column("instance", ByteText(255), primary_key=True),
    sa.Column("state", LongText()),
    sa.Column("version", _BIGINT, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("created_at", Timestamp, nullable=False),
    sa.Column("updated_at", Timestamp, nullable=False),
    sa.Column("finished_at", Timestamp),
    sa.Index("processes_status", "name", "status", "instance"),
    **MYSQL_OPTIONS,
)

inbox = sa.Table(
    "inbox",
    metadata,
    sa.Column("name", ByteText(PROCESS_NAME, ascii_only=True), primary_key=True),
    sa.Column("instance", ByteText(255), primary_key=True),
    sa.Column("event_id", ByteText(255), primary_key=True),
    sa.Column("position", _BIGINT, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("event", LongText()),
    sa.Column("handled_at", Timestamp, nullable=False),
    sa.Index("inbox_position", "name", "status", "position"),
    **MYSQL_OPTIONS,
)
"""`event` is a copy for parked events, because the feed's may be trimmed."""

outbox = sa.Table(
    "outbox",
    metadata,
    sa.Column("command_id", ByteText(36, ascii_only=True), primary_key=True),
    sa.Column("position", _BIGINT, nullable=False),
    sa.Column("name", ByteText(PROCESS_NAME, ascii_only=True), nullable=False),
    sa.Column("instance", ByteText(255), nullable=False),
    sa.Column("step", ByteText(255), nullable=False),
    sa.Column("type", ByteText(PROCESS_NAME, ascii_only=True), nullable=False),
    sa.Column("data", LongText()),
    sa.Column("created_at", Timestamp, nullable=False),
    sa.Column("event_id", ByteText(255)),
    sa.UniqueConstraint("position", name="outbox_position"),
    sa.Index("outbox_instance", "name", "instance"),
    **MYSQL_OPTIONS,
)
"""`event_id`: the event that issued the command; null in rows of releases before revision 0019."""

timers = sa.Table(
    "timers",
    metadata,
    sa.Column("name", ByteText(PROCESS_NAME, ascii_only=True), primary_key=True),
    sa.Column("instance", ByteText(255), primary_key=True),
    sa.Column("timer", ByteText(255), primary_key=True),
    sa.Column("token", ByteText(36, ascii_only=True), nullable=False),
    sa.Column("due_at", Timestamp, nullable=False),
    sa.Column("data", LongText()),
    sa.Index("timers_due", "due_at"),
    **MYSQL_OPTIONS,
)
"""`token` is random and new each time the timer is set. It becomes part of the event's id."""

commit_marks = sa.Table(
    "commit_marks",
    metadata,
    sa.Column("writer", _BIGINT, primary_key=True, autoincrement=False),
    sa.Column("mark", _BIGINT, nullable=False),
    sa.Column("marked_at", Timestamp, nullable=False),
    postgresql_with={"fillfactor": 20},
    **MYSQL_OPTIONS,
)
"""See `commit_marks`. The row of a connection changes with each of its commits, so a page on PostgreSQL has room for
several versions."""

schema_support = sa.Table(
    "schema_support",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("oldest", sa.String(32), nullable=False),
    sa.Column("batch_ids", sa.String(16)),
    **MYSQL_OPTIONS,
)
"""One row. `oldest` is the newest revision known to the oldest release that this schema supports. `batch_ids`: a
`Numbering` such as `3/16`; NULL: all numbers are ids of batches."""
