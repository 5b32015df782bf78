"""The number of repairs of a batch.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("batches", sa.Column("repairs", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("batches", "repairs")
