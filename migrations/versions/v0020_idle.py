"""An index of the live batches by their idleness, so that the janitor reads only those that may be idle.

Revision ID: 0020
Revises: 0019
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from core.storage.tables import Timestamp

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    # The default is long ago: the janitor looks once at each batch that an earlier release has opened.
    long_ago = "1970-01-01 00:00:00.000000"
    op.add_column("batches", sa.Column("seen_updated_at", Timestamp, nullable=False, server_default=long_ago))
    op.create_index("batches_idle", "batches", ["state", "expires_in", "seen_updated_at", "id"])


def downgrade() -> None:
    op.drop_index("batches_idle", "batches")
    op.drop_column("batches", "seen_updated_at")
