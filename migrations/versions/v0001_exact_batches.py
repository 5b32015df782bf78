"""Exact batches: batches, item_groups, extends, failures.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from core.storage.tables import MYSQL_OPTIONS

revision = "0001"
down_revision = None

BIG = sa.BigInteger()
BATCH_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
HASH = sa.LargeBinary().with_variant(mysql.VARBINARY(32), "mysql", "mariadb")
REQUEST_KEY = (
    sa.String(255)
    .with_variant(mysql.VARBINARY(255), "mysql", "mariadb")
    .with_variant(sa.String(255, "C"), "postgresql")
)

# PostgreSQL writes a new version of a row for each update. With free space it stays on the same page, and no index
# changes. Bitfields stay in the row, up to the size of a page, and are not compressed, which takes longer than writing
# them.
IN_PLACE = {"fillfactor": 40, "toast_tuple_target": 8160}


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("id", BATCH_ID, sa.Identity(), primary_key=True, autoincrement=True),
        sa.Column(
            "batch_key",
            sa.String(255)
            .with_variant(mysql.VARBINARY(1020), "mysql", "mariadb")
            .with_variant(sa.String(510, "C"), "postgresql"),
        ),
        sa.Column("labels", sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb"), nullable=False),
        sa.Column("group_size", sa.Integer, nullable=False),
        sa.Column("items", BIG, nullable=False),
        sa.Column("acked", BIG, nullable=False),
        sa.Column("failed", BIG, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("full_prefix", BIG, nullable=False),
        sa.Column("parent_batch", BIG),
        sa.Column("parent_number", BIG),
        sa.Column("expires_in", BIG),
        sa.Column("open_key", REQUEST_KEY),
        sa.Column("open_hash", HASH),
        sa.Column("open_count", BIG, nullable=False),
        sa.Column("completed_by", HASH),
        sa.Column("succeeded_by", HASH),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.Column("sealed_at", TIME),
        sa.Column("ended_at", TIME),
        sa.UniqueConstraint("open_key", name="batches_open_key"),
        sa.UniqueConstraint("parent_batch", "parent_number", name="batches_parent"),
        sa.Index("batches_state", "state", "id"),
        sa.Index("batches_key", "batch_key"),
        sqlite_autoincrement=True,
        postgresql_with={"fillfactor": 60},
        **MYSQL_OPTIONS,
    )
    op.create_table(
        "item_groups",
        sa.Column("batch_id", BIG, primary_key=True, autoincrement=False),
        sa.Column("group_no", BIG, primary_key=True, autoincrement=False),
        sa.Column("resolved", sa.LargeBinary),
        sa.Column("failed", sa.LargeBinary),
        sa.Column("resolved_count", sa.Integer, nullable=False),
        sa.Column("failed_count", sa.Integer, nullable=False),
        postgresql_with=IN_PLACE,
        **MYSQL_OPTIONS,
    )
    op.create_table(
        "extends",
        sa.Column("batch_id", BIG, primary_key=True, autoincrement=False),
        sa.Column("idempotency_key", REQUEST_KEY, primary_key=True),
        sa.Column("start", BIG, nullable=False),
        sa.Column("count", BIG, nullable=False),
        **MYSQL_OPTIONS,
    )
    op.create_table(
        "failures",
        sa.Column("batch_id", BIG, primary_key=True, autoincrement=False),
        sa.Column("number", BIG, primary_key=True, autoincrement=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("failed_at", TIME, nullable=False),
        **MYSQL_OPTIONS,
    )
    if op.get_bind().dialect.name == "postgresql":
        for bitfield in ("resolved", "failed"):
            op.execute(f"ALTER TABLE item_groups ALTER COLUMN {bitfield} SET STORAGE EXTERNAL")


def downgrade() -> None:
    for table in ("failures", "extends", "item_groups", "batches"):
        op.drop_table(table)
