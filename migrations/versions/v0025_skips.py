"""Skipped items: their bits, counts and reasons. Without any, the columns are NULL.

Revision ID: 0025
Revises: 0024
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from core.storage.tables import MYSQL_OPTIONS, Timestamp

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.add_column("batches", sa.Column("skipped", sa.BigInteger()))
    op.add_column("item_groups", sa.Column("skipped", sa.LargeBinary()))
    op.add_column("item_groups", sa.Column("skipped_count", sa.Integer()))
    op.create_table(
        "skips",
        sa.Column("batch_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("skipped_at", Timestamp, nullable=False),
        **MYSQL_OPTIONS,
    )


def downgrade() -> None:
    # An earlier release takes items that are resolved and not failed for acked ones.
    batches = sa.table("batches", *map(sa.column, ("acked", "skipped")))
    op.execute(sa.update(batches).where(batches.c.skipped > 0).values(acked=batches.c.acked + batches.c.skipped))
    op.drop_table("skips")
    op.drop_column("item_groups", "skipped_count")
    op.drop_column("item_groups", "skipped")
    op.drop_column("batches", "skipped")
