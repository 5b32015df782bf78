"""The events that issued the commands of processes.

Revision ID: 0019
Revises: 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from core.storage.tables.types import ByteText

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.add_column("outbox", sa.Column("event_id", ByteText(255)))


def downgrade() -> None:
    op.drop_column("outbox", "event_id")
