"""The deadline of a batch, and an index to find the overdue ones.

Revision ID: 0014
Revises: 0013
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from core.storage.tables import Timestamp

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("batches", sa.Column("deadline", Timestamp))
    op.create_index("batches_deadline", "batches", ["state", "deadline"])


def downgrade() -> None:
    op.drop_index("batches_deadline", "batches")
    op.drop_column("batches", "deadline")
