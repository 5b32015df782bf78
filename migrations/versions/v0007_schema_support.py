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
    # A new database has the table from the start (see `core.storage.schema`).
    if not sa.inspect(op.get_bind()).has_table("schema_support"):
        op.create_table(
            "schema_support",
            sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("oldest", sa.String(32), nullable=False),
            **MYSQL_OPTIONS,
        )
    # Batches completed by 0001 make no events.
    op.execute(
        "INSERT INTO schema_support (id, oldest) "
        "SELECT 1, '0002' FROM (SELECT COUNT(*) AS present FROM schema_support) AS existing WHERE present = 0"
    )


def downgrade() -> None:
    op.drop_table("schema_support")
