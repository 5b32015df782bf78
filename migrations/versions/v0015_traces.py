"""The trace context of a batch's open.

Revision ID: 0015
Revises: 0014
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from core.storage.tables.types import ByteText

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("batches", sa.Column("traceparent", ByteText(55, ascii_only=True)))
    op.add_column("batches", sa.Column("tracestate", ByteText(512, ascii_only=True)))


def downgrade() -> None:
    op.drop_column("batches", "tracestate")
    op.drop_column("batches", "traceparent")
