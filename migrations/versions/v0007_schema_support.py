"""The releases that the schema supports, in one row. This release and later ones read it first; earlier ones do not.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from core.storage.tables import MYSQL_OPTIONS

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    support = op.create_table(
        "schema_support",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("oldest", sa.String(32), nullable=False),
        **MYSQL_OPTIONS,
    )
    assert support is not None
    op.bulk_insert(support, [{"id": 1, "oldest": "0002"}])  # batches completed by 0001 make no events


def downgrade() -> None:
    op.drop_table("schema_support")
