"""Indexes to search batches by the time of their open, and to count those of a key's prefix by state.

Revision ID: 0012
Revises: 0011
"""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_index("batches_created", "batches", ["created_at", "state"])
    op.create_index("batches_key_state", "batches", ["batch_key", "state"])
    op.drop_index("batches_key", "batches")


def downgrade() -> None:
    op.create_index("batches_key", "batches", ["batch_key"])
    op.drop_index("batches_key_state", "batches")
    op.drop_index("batches_created", "batches")
