"""The marks of transactions whose answer may be lost.

Revision ID: 0018
Revises: 0017
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from core.storage.tables import MYSQL_OPTIONS, Timestamp

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.create_table(
        "commit_marks",
        sa.Column("writer", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("mark", sa.BigInteger(), nullable=False),
        sa.Column("marked_at", Timestamp, nullable=False),
        postgresql_with={"fillfactor": 20},
        **MYSQL_OPTIONS,
    )


def downgrade() -> None:
    op.drop_table("commit_marks")
