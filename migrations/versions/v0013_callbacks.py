"""Callbacks: webhooks that belong to a batch, and the position up to which their deliveries were planned.

Revision ID: 0013
Revises: 0012
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from core.storage.tables import MYSQL_OPTIONS

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("webhooks", sa.Column("batch_id", sa.BigInteger()))
    op.add_column("webhooks", sa.Column("lane", sa.BigInteger()))
    op.create_index("webhooks_batch", "webhooks", ["batch_id"], unique=True)
    op.create_table(
        "callback_cursor",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        **MYSQL_OPTIONS,
    )
    # A callback that is made from now on gets no event from before.
    op.execute("INSERT INTO callback_cursor (id, position) SELECT 1, position FROM feed_head")


def downgrade() -> None:
    op.drop_table("callback_cursor")
    op.drop_index("webhooks_batch", "webhooks")
    op.drop_column("webhooks", "lane")
    op.drop_column("webhooks", "batch_id")
