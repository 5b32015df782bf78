"""The feed, and debts of child batches to their parents. The previous release has neither, and appends no events.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from core.storage.tables import MYSQL_OPTIONS

revision = "0002"
down_revision = "0001"

BIG = sa.BigInteger()
TIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
TEXT = (
    sa.String(255)
    .with_variant(mysql.VARBINARY(1020), "mysql", "mariadb")
    .with_variant(sa.String(510, "C"), "postgresql")
)


def upgrade() -> None:
    op.add_column("batches", sa.Column("parent_group_size", sa.Integer))
    op.add_column("batches", sa.Column("parent_due", sa.String(4)))
    op.create_index("batches_parent_due", "batches", ["parent_due"])
    head = op.create_table(
        "feed_head",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("position", BIG, nullable=False),
        sa.Column("trimmed", BIG, nullable=False),
        **MYSQL_OPTIONS,
    )
    op.bulk_insert(head, [{"id": 1, "position": 0, "trimmed": 0}])
    op.create_table(
        "feed",
        sa.Column("position", BIG.with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=False),
        sa.Column("event_id", TEXT, nullable=False),
        sa.Column("type", TEXT, nullable=False),
        sa.Column("batch_id", BIG),
        sa.Column("event_key", TEXT),
        sa.Column("data", sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")),
        sa.Column("appended_at", TIME, nullable=False),
        sa.UniqueConstraint("event_id", name="feed_event_id"),
        sa.Index("feed_batch", "batch_id", "position"),
        **MYSQL_OPTIONS,
    )


def downgrade() -> None:
    op.drop_table("feed")
    op.drop_table("feed_head")
    op.drop_index("batches_parent_due", "batches")
    op.drop_column("batches", "parent_due")
    op.drop_column("batches", "parent_group_size")
