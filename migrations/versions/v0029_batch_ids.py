"""Which numbers are ids of batches, chosen when the database was new. The previous release uses all.

Revision ID: 0029
Revises: 0028
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    # A new database has the column from the start (see `core.storage.schema`).
    columns = sa.inspect(op.get_bind()).get_columns("schema_support")
    if all(column["name"] != "batch_ids" for column in columns):
        op.add_column("schema_support", sa.Column("batch_ids", sa.String(16)))


def downgrade() -> None:
    op.drop_column("schema_support", "batch_ids")
