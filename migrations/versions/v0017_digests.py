"""The digests of extends.

Revision ID: 0017
Revises: 0016
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from core.storage.tables.types import ByteText

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column("extends", sa.Column("digest", ByteText(64, ascii_only=True)))


def downgrade() -> None:
    op.drop_column("extends", "digest")
