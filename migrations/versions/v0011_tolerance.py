"""The tolerance of a batch: how many failures it may have and still succeed, and whether they have passed it.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("batches", sa.Column("tolerated_failures", sa.BigInteger()))
    op.add_column("batches", sa.Column("tolerated_failure_percentage", sa.Integer()))
    op.add_column("batches", sa.Column("on_exceeded", sa.String(8), nullable=False, server_default="continue"))
    op.add_column("batches", sa.Column("exceeded", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    for column in ("exceeded", "on_exceeded", "tolerated_failure_percentage", "tolerated_failures"):
        op.drop_column("batches", column)
