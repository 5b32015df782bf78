"""How each batch got on, as points in its row.

Revision ID: 0022
Revises: 0021
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from core.storage.tables import Blob

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.add_column("batches", sa.Column("history", Blob(600)))


def downgrade() -> None:
    op.drop_column("batches", "history")
