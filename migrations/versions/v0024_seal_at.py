"""The number of items at which a batch seals itself.

Revision ID: 0024
Revises: 0023
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.add_column("batches", sa.Column("seal_at", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("batches", "seal_at")
