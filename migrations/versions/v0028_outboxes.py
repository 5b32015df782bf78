"""Acks and opens in transactions of callers: what they leave to be moved later, and the batches that they work on.

Revision ID: 0028
Revises: 0027
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from core.storage.tables import MYSQL_OPTIONS

revision = "0028"
down_revision = "0027"

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
BIG = sa.BigInteger()
TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    op.add_column("batches", sa.Column("no_journal", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "count_outbox",
        sa.Column("id", ID, sa.Identity(), primary_key=True, autoincrement=True),
        sa.Column("batch_id", BIG, nullable=False),
        sa.Column("acked", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("skipped", sa.Integer, nullable=False),
        sa.Column("filled", sa.Integer, nullable=False),
        sa.Column("seals", sa.Integer, nullable=False),
        sa.Index("count_outbox_batch", "batch_id"),
        sqlite_autoincrement=True,
        **MYSQL_OPTIONS,
    )
    op.create_table(
        "event_outbox",
        sa.Column("id", ID, sa.Identity(), primary_key=True, autoincrement=True),
        sa.Column("batch_id", BIG, nullable=False),
        sa.Column("events", TEXT, nullable=False),
        sa.Index("event_outbox_batch", "batch_id"),
        sqlite_autoincrement=True,
        **MYSQL_OPTIONS,
    )


def downgrade() -> None:
    op.drop_table("event_outbox")
    op.drop_table("count_outbox")
    op.drop_column("batches", "no_journal")
