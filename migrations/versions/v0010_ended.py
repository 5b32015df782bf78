"""An index on the end times of batches, so that the janitor reads only batches that ended long ago.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_index("batches_ended", "batches", ["ended_at"])


def downgrade() -> None:
    op.drop_index("batches_ended", "batches")
